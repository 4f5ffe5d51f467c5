"""Quantize a trained Hugging Face directory with NVIDIA ModelOpt and check the result.

    python -m tools.quantize runs/quickstart/huggingface runs/quickstart/fp8 --format fp8 \\
        --prompts examples/quickstart/train.jsonl [--json]

Calibration uses the run's own prompts with responses that the model samples. The result is accepted only if the written
directory, loaded back, gives the log-probs of other prompts and responses within the format's tolerance; a refused one
leaves nothing behind. Exit code 0: written. 1: it cannot be done. 3: out of tolerance.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.quantization.formats import FORMATS, Format, Tolerance, format_of
from tools.quantization.pipeline import Prompts, QuantizationRefused, Result, quantize

OK, FAILED, REFUSED = 0, 1, 3


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = "; ".join(f"{entry.name}: {entry.scheme}" for entry in FORMATS.values())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Hugging Face directory")
    parser.add_argument("target", type=Path, help="directory to write; must not exist")
    parser.add_argument("--format", required=True, help=names)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL or parquet in the schema of the run's data")
    parser.add_argument("--template", default=Prompts.template, help="chat or plain, as in the run")
    parser.add_argument("--max-prompt-tokens", type=int, default=Prompts.max_prompt_tokens)
    parser.add_argument(
        "--num-calibration", type=int, default=Prompts.num_calibration, help="prompts to calibrate with"
    )
    parser.add_argument("--num-check", type=int, default=Prompts.num_check, help="further prompts to check with")
    parser.add_argument(
        "--response-tokens", type=int, default=Prompts.response_tokens, help="sampled after each prompt"
    )
    parser.add_argument("--seed", type=int, default=Prompts.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine-python", type=Path, help="interpreter of an SGLang that loads and scores the result")
    parser.add_argument("--max-mean", type=float, help="allowed mean |log-prob difference| in nats")
    parser.add_argument("--max-token", type=float, help="allowed largest |log-prob difference| in nats")
    parser.add_argument("--max-perplexity", type=float, help="allowed change of the perplexity, as a share of it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def tolerance_of(entry: Format, arguments: argparse.Namespace) -> Tolerance:
    """Return the format's tolerance with the given values in its place."""
    given = (arguments.max_mean, arguments.max_token, arguments.max_perplexity)
    usual = (entry.tolerance.mean_abs, entry.tolerance.max_abs, entry.tolerance.perplexity)
    return Tolerance(
        *(usual_value if value is None else value for value, usual_value in zip(given, usual, strict=True))
    )


def run(arguments: argparse.Namespace) -> Result:
    entry = format_of(arguments.format)
    prompts = Prompts(
        path=arguments.prompts,
        template=arguments.template,
        max_prompt_tokens=arguments.max_prompt_tokens,
        num_calibration=arguments.num_calibration,
        num_check=arguments.num_check,
        response_tokens=arguments.response_tokens,
        seed=arguments.seed,
    )
    return quantize(
        arguments.source,
        arguments.target,
        entry,
        prompts,
        device=torch.device(arguments.device),
        tolerance=tolerance_of(entry, arguments),
        engine_python=arguments.engine_python,
    )


def describe(result: Result) -> str:
    found, limits = result.difference, result.tolerance
    return (
        f"{result.path}: {result.format}, {result.bytes_before:,} -> {result.bytes_after:,} bytes in "
        f"{result.seconds:.1f} s\n"
        f"as {result.scored_by} loads it, {found.num_tokens} tokens of {found.num_sequences} responses:\n"
        f"  |log-prob difference| mean {found.mean_abs:.4f} (allowed {limits.mean_abs:g}), "
        f"largest {found.max_abs:.4f} (allowed {limits.max_abs:g})\n"
        f"  perplexity {found.perplexity_before:.4f} -> {found.perplexity_after:.4f}, "
        f"{100 * found.perplexity_change:+.2f} % (allowed {100 * limits.perplexity:g} %)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        result = run(options)
    except QuantizationRefused as error:
        print(f"quantize: refused: {error}", file=sys.stderr)
        return REFUSED
    except (ValueError, OSError, RuntimeError) as error:
        print(f"quantize: {error}", file=sys.stderr)
        return FAILED
    print(json.dumps(result.record()) if options.json else describe(result))
    return OK


if __name__ == "__main__":
    sys.exit(main())
