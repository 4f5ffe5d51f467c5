"""From a trained Hugging Face folder to a quantized one that has proven itself, or to none.

check (format, device, shapes, prompts)
-> sample responses to the run's prompts; log-probs of those to check with, as the model is
-> ModelOpt calibrates and writes a folder beside the target
-> the folder is read back and scores the same responses: as transformers with the stored numbers multiplied out
   and inputs rounded, or as the engine that serves it
-> within tolerance: the folder gets its name; else it is removed and the error says both numbers
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.checkpoints.atomic_directory import atomic_directory, refuse_existing
from megatron_dapo.checkpoints.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.huggingface_writer import copy_side_files
from megatron_dapo.data.dataset import load_prompts
from tools.quantization import calibrate
from tools.quantization.engine_check import engine_logprobs
from tools.quantization.experts import separate_experts
from tools.quantization.formats import Format, Tolerance, check_device, check_shapes
from tools.quantization.probe import Difference, Sample, compare, logprobs_of, sample_responses
from tools.quantization.stored import load_dequantized, read_json

logger = logging.getLogger(__name__)

REPORT_FILE = "quantization.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Prompts:
    """What the checkpoint is calibrated on and, with prompts that calibration never saw, judged by."""

    path: Path
    template: str = "chat"
    max_prompt_tokens: int = 2048
    num_calibration: int = 64
    num_check: int = 32
    response_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """`judge` is what loaded the folder: "transformers" or "sglang"."""

    path: Path
    format: str
    judge: str
    bytes_before: int
    bytes_after: int
    difference: Difference
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
    """The quantized model is out of tolerance; no folder was left behind."""


# Folder -> log-probs of the responses to check with.
Judge = Callable[[Path], list[list[float]]]


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
    """Writes `target`. ValueError for what cannot be done, QuantizationRefused for what was done and is not good
    enough; there is no folder then. `engine_python`: the interpreter of an SGLang whose word counts, instead of
    transformers'."""
    started = time.monotonic()
    refuse_existing(target)
    check_device(entry, device)
    num_bytes = _check_source(source, entry)
    if engine_python is not None and not entry.engine:
        raise ValueError(f"format {entry.name}: SGLang has no reader of it; leave the engine out, transformers judges")
    version = calibrate.modelopt_version()
    model = _load(source, device)
    calibration, checks = _samples(model, source, prompts)
    before = [logprobs_of(model, sample) for sample in checks]
    separate_experts(model)
    dtype = model.dtype
    with atomic_directory(target) as folder:
        _write(model, entry, calibration, source, folder)
        del model
        _free(device)
        judge = _engine_judge(checks, engine_python, device, dtype) if engine_python else None
        after = (judge or _transformers_judge(checks, entry, device, dtype))(folder)
        difference = compare(before, after)
        limits = tolerance or entry.tolerance
        result = Result(
            path=target,
            format=entry.name,
            judge="sglang" if judge else "transformers",
            bytes_before=num_bytes,
            bytes_after=_stored_bytes(folder),
            difference=difference,
            tolerance=limits,
            seconds=time.monotonic() - started,
            modelopt=version,
        )
        _accept_or_raise(result)
        (folder / REPORT_FILE).write_text(json.dumps(result.record(), indent=2) + "\n", encoding="utf-8")
    return result


def _accept_or_raise(result: Result) -> None:
    violations = result.difference.violations(result.tolerance)
    if violations:
        raise QuantizationRefused(
            f"{result.format}: out of tolerance on {result.difference.num_tokens} tokens as {result.judge} loads it: "
            f"{'; '.join(violations)}. Nothing was written; choose a finer format, calibrate with more prompts, or "
            "allow more if the use can bear it"
        )


def _check_source(source: Path, entry: Format) -> int:
    """Bytes of the source's tensors. ValueError where it is no model, or none that fits the format."""
    if not source.is_dir():
        raise ValueError(f"{source} is no folder; give the Hugging Face folder that a run has written")
    architecture = ModelArchitecture.from_directory(source)
    with HFCheckpoint(source) as folder:
        folder.check(architecture)
        num_bytes = folder.num_bytes
    check_shapes(entry, {name: shape for name, shape in architecture.shapes().items() if name.endswith("_proj.weight")})
    return num_bytes


def _load(source: Path, device: torch.device) -> Any:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    return model.to(device).eval()


def _samples(model: Any, source: Path, prompts: Prompts) -> tuple[list[Sample], list[Sample]]:
    """Of calibration and of the check; no prompt is in both."""
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    dataset = load_prompts([prompts.path], tokenizer, prompts.max_prompt_tokens, prompts.template)
    needed = prompts.num_calibration + prompts.num_check
    if min(prompts.num_calibration, prompts.num_check) < 1 or len(dataset) < needed:
        raise ValueError(
            f"{prompts.path}: {prompts.num_calibration} prompts to calibrate with and {prompts.num_check} others to "
            f"check with are asked for (each at least 1), and {len(dataset)} are there"
        )
    token_ids = [list(prompt.token_ids) for prompt in dataset.prompts[:needed]]
    samples = sample_responses(model, token_ids, prompts.response_tokens, prompts.seed)
    return samples[: prompts.num_calibration], samples[prompts.num_calibration :]


def _write(model: Any, entry: Format, calibration: Sequence[Sample], source: Path, folder: Path) -> None:
    calibrate.quantize_model(model, entry, [sample.token_ids for sample in calibration])
    calibrate.export(model, entry, folder)
    # Everything but the weights is the source's, as it was; only that the model is quantized is added.
    quantized = read_json(folder / "config.json")["quantization_config"]
    copy_side_files(source, folder)
    config = read_json(source / "config.json") | {"quantization_config": quantized}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _transformers_judge(checks: Sequence[Sample], entry: Format, device: torch.device, dtype: torch.dtype) -> Judge:
    def judge(folder: Path) -> list[list[float]]:
        model = load_dequantized(folder, entry.name, dtype, device)
        return [logprobs_of(model, sample) for sample in checks]

    return judge


def _engine_judge(checks: Sequence[Sample], python: Path, device: torch.device, dtype: torch.dtype) -> Judge:
    names = {value: name for name, value in DTYPES.items()}
    return lambda folder: engine_logprobs(folder, checks, python, device.type, names[dtype])


def _stored_bytes(folder: Path) -> int:
    with HFCheckpoint(folder) as stored:
        return stored.num_bytes


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
