"""Turn a trained Hugging Face directory into a quantized one that has passed its checks, or leave nothing.

check (format, device, shapes, prompts)
-> the model samples responses to the run's prompts, and scores those held for the check
-> ModelOpt calibrates and writes a temporary directory next to the target
-> the directory is read back and scores the same responses, by transformers with dequantized weights and rounded
   inputs, or by the engine that serves it
-> within tolerance, the directory is renamed to the target; otherwise it is removed and the error gives both numbers
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dapo.checkpoints.atomic_directory import atomic_directory, refuse_existing
from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint, dtype_name
from megatron_dapo.checkpoints.formats.huggingface_writer import copy_side_files
from megatron_dapo.data.dataset import load_prompts
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.quantization import calibrate
from megatron_dapo.quantization.engine_check import engine_logprobs
from megatron_dapo.quantization.experts import separate_experts
from megatron_dapo.quantization.formats import Format, Tolerance, check_device, check_shapes
from megatron_dapo.quantization.probe import LogprobDifference, Sample, compare, logprobs_of, sample_responses
from megatron_dapo.quantization.prompts import Prompts
from megatron_dapo.quantization.stored import load_dequantized
from megatron_dapo.untrusted import read_json

logger = logging.getLogger(__name__)

REPORT_FILE = "quantization.json"
@dataclass(frozen=True)
class Result:
    path: Path
    format: str
    scored_by: str  # "transformers" or "sglang", whichever loaded the directory
    bytes_before: int
    bytes_after: int
    difference: LogprobDifference
    tolerance: Tolerance
    seconds: float
    modelopt: str

    def record(self) -> dict[str, Any]:
        return {
            **{key: value for key, value in vars(self).items() if key not in ("difference", "tolerance")},
            "path": str(self.path),
            "difference": self.difference.record(),
            "tolerance": asdict(self.tolerance),
        }


class QuantizationRefused(ValueError):
    """The quantized model is out of tolerance, and nothing was left behind."""


def quantize(
    source: Path,
    target: Path,
    entry: Format,
    prompts: Prompts,
    *,
    device: torch.device,
    tolerance: Tolerance | None = None,
    engine_python: Path | None = None,
) -> Result:
    """Quantize `source` and write `target`, checked by transformers, or by the SGLang of interpreter `engine_python`.

    Raises ValueError if `source` cannot be quantized, and QuantizationRefused if the result is out of tolerance.
    Neither leaves anything behind.
    """
    started = time.monotonic()
    refuse_existing(target)
    check_device(entry, device)
    num_bytes = _check_source(source, entry)
    if engine_python is not None and not entry.engine:
        raise ValueError(
            f"format {entry.name}: SGLang cannot read it; leave the engine out, then transformers checks it"
        )
    version = calibrate.modelopt_version()
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    model = model.to(device).eval()
    calibration, checks = _samples(model, source, prompts)
    before = [logprobs_of(model, sample) for sample in checks]
    separate_experts(model)
    dtype = model.dtype
    with atomic_directory(target) as directory:
        _write(model, entry, calibration, source, directory)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if engine_python:
            after = engine_logprobs(directory, checks, engine_python, device.type, dtype_name(dtype))
        else:
            loaded = load_dequantized(directory, entry.name, dtype, device)
            after = [logprobs_of(loaded, sample) for sample in checks]
        difference = compare(before, after)
        limits = tolerance or entry.tolerance
        result = Result(
            path=target,
            format=entry.name,
            scored_by="sglang" if engine_python else "transformers",
            bytes_before=num_bytes,
            bytes_after=_stored_bytes(directory),
            difference=difference,
            tolerance=limits,
            seconds=time.monotonic() - started,
            modelopt=version,
        )
        _accept_or_raise(result)
        (directory / REPORT_FILE).write_text(json.dumps(result.record(), indent=2) + "\n", encoding="utf-8")
    return result


def _accept_or_raise(result: Result) -> None:
    violations = result.difference.violations(result.tolerance)
    if violations:
        raise QuantizationRefused(
            f"{result.format}: out of tolerance on {result.difference.num_tokens} tokens as {result.scored_by} loads it: "
            f"{'; '.join(violations)}. Nothing was written; choose a finer format, calibrate with more prompts, or "
            "allow more if the use can bear it"
        )


def _check_source(source: Path, entry: Format) -> int:
    """Return the bytes of the source's tensors. Raises ValueError if it is not a model or does not fit the format."""
    if not source.is_dir():
        raise ValueError(f"{source} is not a directory; give the Hugging Face directory that a run has written")
    architecture = read_architecture(source)
    with HFCheckpoint(source) as directory:
        directory.check(architecture)
        num_bytes = directory.num_bytes
    check_shapes(entry, {name: shape for name, shape in architecture.shapes().items() if name.endswith("_proj.weight")})
    return num_bytes


def _samples(model: Any, source: Path, prompts: Prompts) -> tuple[list[Sample], list[Sample]]:
    """Return the samples for calibration and those for the check, which share no prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source, local_files_only=True)
    dataset = load_prompts([prompts.path], tokenizer, prompts.max_prompt_tokens, prompts.template)
    needed = prompts.num_calibration + prompts.num_check
    if min(prompts.num_calibration, prompts.num_check) < 1 or len(dataset) < needed:
        raise ValueError(
            f"{prompts.path}: {prompts.num_calibration} prompts to calibrate with and {prompts.num_check} others to "
            f"check with are requested (each at least 1), and it has {len(dataset)}"
        )
    token_ids = [list(prompt.token_ids) for prompt in dataset.prompts[:needed]]
    samples = sample_responses(model, token_ids, prompts.response_tokens, prompts.seed)
    return samples[: prompts.num_calibration], samples[prompts.num_calibration :]


def _write(model: Any, entry: Format, calibration: Sequence[Sample], source: Path, directory: Path) -> None:
    calibrate.quantize_model(model, entry, [sample.token_ids for sample in calibration])
    calibrate.export(model, entry, directory)
    # ModelOpt rewrites the config; keep the source's and add only the quantization_config.
    quantized = read_json(directory / "config.json")["quantization_config"]
    copy_side_files(source, directory)
    config = read_json(source / "config.json") | {"quantization_config": quantized}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _stored_bytes(directory: Path) -> int:
    with HFCheckpoint(directory) as stored:
        return stored.num_bytes
