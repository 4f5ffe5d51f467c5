"""The command `megatron-dapo quantize`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_dapo.cli.options import JsonOption, refuse
from megatron_dapo.quantization.prompts import Prompts

if TYPE_CHECKING:
    from megatron_dapo.quantization.formats import Format, Tolerance
    from megatron_dapo.quantization.pipeline import Result

OUT_OF_TOLERANCE = 1


def quantize(
    source: Annotated[Path, typer.Argument(help="Hugging Face directory")],
    target: Annotated[Path, typer.Argument(help="directory to write; must not exist")],
    form: Annotated[str, typer.Option("--format", help="fp8, fp8_blockwise, int4_awq or nvfp4 (docs/quantization.md)")],
    prompts: Annotated[Path, typer.Option(help="file with prompts, in the schema of the run's data")],
    template: Annotated[str, typer.Option(help="chat or plain, as in the run")] = Prompts.template,
    max_prompt_tokens: Annotated[int, typer.Option(help="longer prompts are left out")] = Prompts.max_prompt_tokens,
    num_calibration: Annotated[int, typer.Option(help="prompts to calibrate with")] = Prompts.num_calibration,
    num_check: Annotated[int, typer.Option(help="further prompts to check with")] = Prompts.num_check,
    response_tokens: Annotated[int, typer.Option(help="tokens sampled after each prompt")] = Prompts.response_tokens,
    seed: Annotated[int, typer.Option(help="of the sampled responses")] = Prompts.seed,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if there is a GPU")] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="interpreter of an SGLang that loads and scores the result")
    ] = None,
    max_mean: Annotated[float | None, typer.Option(help="allowed mean |log-prob difference| in nats")] = None,
    max_token: Annotated[float | None, typer.Option(help="allowed largest |log-prob difference| in nats")] = None,
    max_perplexity: Annotated[
        float | None, typer.Option(help="allowed change of the perplexity, as a share of it")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Quantize a trained Hugging Face directory with NVIDIA ModelOpt; the result is kept only if its log-probs agree.

    Calibration uses the run's prompts with responses that the model samples. The written directory is loaded back and has to
    give the log-probs of other prompts and responses within the format's tolerance.

    Exit code: 0 written, 1 out of tolerance, 2 it cannot be done; the last two leave no files.
    """
    import torch

    from megatron_dapo.quantization import pipeline
    from megatron_dapo.quantization.formats import format_of

    chosen = Prompts(
        path=prompts,
        template=template,
        max_prompt_tokens=max_prompt_tokens,
        num_calibration=num_calibration,
        num_check=num_check,
        response_tokens=response_tokens,
        seed=seed,
    )
    try:
        entry = format_of(form)
        result = pipeline.quantize(
            source,
            target,
            entry,
            chosen,
            device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
            tolerance=_tolerance(entry, max_mean, max_token, max_perplexity),
            engine_python=engine_python,
        )
    except pipeline.QuantizationRefused as error:
        typer.echo(f"error: quantize: {error}", err=True)
        raise typer.Exit(OUT_OF_TOLERANCE) from None
    except (ValueError, OSError, RuntimeError) as error:
        refuse(f"quantize: {error}")
    typer.echo(json.dumps(result.record()) if json_output else _describe(result))


def _tolerance(entry: Format, mean_abs: float | None, max_abs: float | None, perplexity: float | None) -> Tolerance:
    """Return the format's tolerance with the given values in its place."""
    given = {"mean_abs": mean_abs, "max_abs": max_abs, "perplexity": perplexity}
    return dataclasses.replace(entry.tolerance, **{name: value for name, value in given.items() if value is not None})


def _describe(result: Result) -> str:
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
