"""Checks of the machine against a recipe, based only on collected facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.checkpoints.disk_space import CheckpointSpace, size
from megatron_dapo.config.rules import Violation
from megatron_dapo.config.sglang_schema import SglangConfig, UpdatePause
from megatron_dapo.doctor.engine_probe import EngineLibraries
from megatron_dapo.doctor.machine import Finding, TorchFacts, conflict, ok, warning
from megatron_dapo.engines.sglang.versions import api_version_of, newest, require_labels, supported_range
from megatron_dapo.rounding import MIB

# Largest relative error of an output or gradient. Rounding stays several times below; a wrong mask or order of heads is off
# by about 1.
ATTENTION_TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 2e-2}
_NO_FIX = "set it to another value"  # default, if a problem's text names no fix


@dataclass(frozen=True)
class SglangFacts:
    """The engines' environment."""

    python: Path
    error: str = ""  # reason its interpreter does not run
    version: str | None = None  # None: SGLang is not installed
    record: tuple[object, ...] = ()  # path, modification time and size of the installation's RECORD
    libraries: EngineLibraries | None = None  # None: not tried
    nccl_difference: str = ""  # difference of the NCCLs of trainer and servers, if weights travel by p2p


@dataclass(frozen=True)
class AttentionResult:
    """Result of one attention back-end."""

    back_end: str
    packing: str
    error: float | None = None  # relative to fp32
    failure: str = ""  # reason it does not run


def violation_findings(
    violations: Iterable[Violation], name: str = "recipe", detail: str = "every rule holds"
) -> list[Finding]:
    """Report each violation as a conflict. Without one, `detail` says what was checked."""
    findings = [conflict(f"{name} {one.path}", one.detail, one.suggestion or _NO_FIX) for one in violations]
    return findings or [ok(name, detail)]


def processes_finding(needed: int, num_devices: int) -> Finding:
    """Check that each of the run's processes has a device on this machine."""
    if num_devices == 0 or needed <= num_devices:
        return ok("processes", f"{needed} of the trainer, {num_devices or 'no'} GPUs here")
    fix = f"use a layout for {num_devices} processes, or start it on several nodes (examples/launch)"
    return warning("processes", f"{needed} of the trainer, {num_devices} GPUs here", fix)


def sglang_findings(
    facts: SglangFacts, update_pause: UpdatePause = "abort", is_restricted: bool = False
) -> list[Finding]:
    """Check that the engines' environment can start the recipe's servers."""
    name = "sglang"
    if facts.error:
        fix = "set sglang.python to the interpreter of the environment SGLang is in (make .venv-sglang makes one)"
        return [conflict(name, f"sglang.python {facts.python} does not run: {facts.error}", fix)]
    install = f"{facts.python} -m pip install sglang=={newest()}"
    if facts.version is None:
        return [conflict(name, f"not installed for {facts.python}", install)]
    try:
        api_version = api_version_of(facts.version)
    except ValueError as error:
        return [conflict(name, str(error), install)]
    if facts.libraries and facts.libraries.error:
        fix = f"repair that environment: {facts.python} -m pip check, then {install}"
        return [conflict(name, f"{facts.version} for {facts.python}: {facts.libraries.error}", fix)]
    detail = f"{facts.version} for {facts.python}; tested are {supported_range()}"
    is_tested = api_version.is_tested
    findings = [ok(name, detail) if is_tested else warning(name, f"{detail}: servers are probed at start-up", install)]
    try:
        require_labels(api_version, update_pause)
    except ValueError as error:
        findings.append(conflict("sglang.update_pause", str(error), install))
    if is_restricted and not api_version.says_supports:
        problem = f"SGLang {facts.version} does not say what tokens are drawn from, and 0.5.21 and newer do"
        findings.append(conflict("rollout.top_k", problem, f"{install}, or set rollout.top_p = 1.0 and rollout.top_k = 0"))
    if facts.nccl_difference:
        fix = "p2p joins both in one communicator: export the same before the run starts, and nothing in sglang.python's script"
        findings.append(conflict("sglang nccl", facts.nccl_difference, fix))
    return findings


def engine_library_findings(
    libraries: EngineLibraries | None, settings: SglangConfig, trainer: TorchFacts | None
) -> list[Finding]:
    """Check the libraries that the recipe's servers need on a GPU, and those that must agree with the trainer's.

    `trainer` None: the versions are not compared.
    """
    if libraries is None or libraries.error:
        return []
    lock = "install requirements/sglang-cuda-py312.txt for sglang.python (make .venv-sglang DEVICE=cuda)"
    findings = []
    if trainer is not None and trainer.devices and libraries.cuda is None:
        return [conflict("engine torch", f"{libraries.torch} is a CPU build; this machine has GPUs", lock)]
    for module, setting in _needed_modules(settings).items():
        if module in libraries.failures:
            findings.append(conflict(f"engine {module}", f"{setting} needs it: {libraries.failures[module]}", lock))
    if libraries.has_gpu and "flashinfer" in _needed_modules(settings) and not libraries.has_compiler:
        detail = "FlashInfer compiles its kernels at their first use, and there is no nvcc on PATH or in CUDA_HOME/bin"
        findings.append(warning("engine nvcc", detail, "install the CUDA toolkit, or flashinfer-jit-cache"))
    if trainer is not None and trainer.devices:
        findings += _shared_versions(libraries, trainer, settings.weight_sync_transport == "p2p")
    return findings


def _needed_modules(settings: SglangConfig) -> dict[str, str]:
    needed = {"sgl_kernel": "every server on a GPU"}
    if settings.placement == "colocated":
        needed["torch_memory_saver"] = 'sglang.placement = "colocated"'
    if settings.attention_backend == "fa3":
        needed["sgl_kernel.flash_attn"] = 'sglang.attention_backend = "fa3"'
    if "flashinfer" in (settings.attention_backend, settings.sampling_backend):
        is_attention = settings.attention_backend == "flashinfer"
        needed["flashinfer"] = f'sglang.{"attention" if is_attention else "sampling"}_backend = "flashinfer"'
    return needed


def _shared_versions(libraries: EngineLibraries, trainer: TorchFacts, in_one_group: bool) -> Iterable[Finding]:
    nccl = f"trainer {trainer.nccl or 'none'}, engines {libraries.nccl or 'none'}"
    if trainer.nccl == libraries.nccl:
        yield ok("engine nccl", nccl)
    elif in_one_group:
        fix = "install the same torch in both environments: p2p joins their ranks in one NCCL communicator"
        yield conflict("engine nccl", nccl, fix)
    else:
        yield warning("engine nccl", nccl, "install the same torch in both environments, as the CUDA locks do")
    torch = f"trainer {trainer.version}, engines {libraries.torch}"
    if trainer.version == libraries.torch:
        yield ok("engine torch", torch)
    else:
        yield warning("engine torch", torch, "install the same torch in both environments, as the CUDA locks do")


def checkpoint_storage(space: CheckpointSpace) -> Finding:
    """Check the space of a run's checkpoints."""
    fix = "free space, set checkpoint.output_dir to a larger disk, or lower checkpoint.keep"
    return _storage("checkpoint disk", space.directory, space.free, space.needed, space.formula, fix)


def export_storage(path: Path, free: int, num_parameters: int, weight_bytes: int, of_checkpoints: int) -> Finding:
    """Check the space for exports in addition to `of_checkpoints` bytes of checkpoints on the same disk."""
    # Two exports: the new one is written completely before it replaces the old one.
    needed = 2 * num_parameters * weight_bytes + of_checkpoints
    formula = f"2 exports of {num_parameters:.4g} parameters x {weight_bytes} bytes"
    formula += f" + {size(of_checkpoints)} of checkpoints" if of_checkpoints else ""
    fix = "free space, or set run.output_dir to a larger disk, or checkpoint.export_huggingface = false"
    return _storage("run disk", path, free, needed, formula, fix)


def shared_memory_storage(
    path: Path, free: int, num_engine_ranks: int, bucket_mb: int, model_bytes: int | None
) -> Finding:
    """Check the space of shared memory through which servers on a CPU receive their weights. `model_bytes` None: the
    model cannot be read."""
    # A bucket never holds more than the model.
    bucket, words = bucket_mb * MIB, f"{bucket_mb} MiB (sglang.weight_sync_bucket_mb)"
    if model_bytes is not None and model_bytes < bucket:
        bucket, words = model_bytes, f"{size(model_bytes)} (the whole model)"
    formula = f"{num_engine_ranks} engine ranks here x 2 buckets x {words}"
    fix = f"lower sglang.weight_sync_bucket_mb, or give {path} more (docker run --shm-size)"
    return _storage("shared memory", path, free, num_engine_ranks * 2 * bucket, formula, fix)


def _storage(name: str, path: Path, free: int, needed: int, formula: str, fix: str) -> Finding:
    """Compare the bytes of a file system. `formula`: of `needed`, with its numbers."""
    detail = f"{path}: {size(free)} free, needed {size(needed)} = {formula}"
    return conflict(name, detail, fix) if free < needed else ok(name, detail)


def attention_findings(results: Sequence[AttentionResult], dtype: str, shape: str) -> list[Finding]:
    """Check each back-end against fp32. A wrong default is a conflict, since the run uses it; others are warnings."""
    by_back_end: dict[str, list[AttentionResult]] = {}
    for result in results:
        by_back_end.setdefault(result.back_end, []).append(result)
    return [_attention(name, tries, dtype, shape) for name, tries in by_back_end.items()]


def _attention(back_end: str, tries: Sequence[AttentionResult], dtype: str, shape: str) -> Finding:
    name, tolerance = f"attention {back_end}", ATTENTION_TOLERANCE[dtype]
    wrong = [t for t in tries if t.failure or t.error is None or not t.error <= tolerance]
    words = "; ".join(f"{t.packing}: {t.failure or f'{t.error:.1e}'}" for t in (wrong or tries))
    if not wrong:
        return ok(name, f"{shape}, error relative to float32 at most {tolerance:g}: {words}")
    if all(t.failure for t in wrong) and len({t.failure for t in wrong}) == 1:
        words = wrong[0].failure
    if back_end == "default":
        fix = "use another model.dtype, or other versions of torch and Transformer Engine (the lock's)"
        return conflict(name, f"{shape}, allowed {tolerance:g}: {words}", fix)
    if all(t.failure for t in wrong):
        return ok(name, f"{shape}: not usable here: {words}")
    return warning(name, f"{shape}, allowed {tolerance:g}: {words}", "leave the choice to the default")
