"""Facts about this machine, for the checks. Nothing is judged here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_dapo.bridge.protocol.nccl_settings import agreed_settings, difference, take_defaults_of_sglang
from megatron_dapo.config.loader import read_toml
from megatron_dapo.config.schema import Config
from megatron_dapo.doctor.machine import (
    ApexFacts,
    Device,
    Lock,
    Support,
    TorchFacts,
    TransformerEngineFacts,
    parse_lock,
)
from megatron_dapo.doctor.probes import MARK
from megatron_dapo.doctor.recipe import AttentionResult, SglangFacts
from megatron_dapo.launch.environment import DRIVER_DEVICE
from megatron_dapo.models.config_json import read_architecture

ROOT = Path(__file__).resolve().parents[2]
_PROBES = "megatron_dapo.doctor.probes"
TIMEOUT_S = 300.0  # The first import of torch from a network file system can take minutes.
DISTRIBUTION = "megatron-dapo"
TRANSFORMER_ENGINE = "transformer-engine"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_EXTRA = re.compile(r"\bextra\s*==")  # metadata also lists the requirements of extras, with this marker
# Transformer Engine's switches that enable a single back-end.
_ENGINE_SWITCHES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
_SGLANG_CODE = """
import importlib.metadata, json, os
try:
    distribution = importlib.metadata.distribution("sglang")
    version, record = distribution.version, [str(distribution.locate_file(""))]
    for file in distribution.files or ():
        if file.name == "RECORD":
            found = os.stat(distribution.locate_file(file))
            record = [str(distribution.locate_file(file)), found.st_mtime_ns, found.st_size]
except importlib.metadata.PackageNotFoundError:
    version = record = None
nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
print(json.dumps([version, record, nccl]))
"""


# ---- other processes


class ProbeFailure(RuntimeError):
    """A probe that crashed, timed out or raised; the text is the cause in one line."""


def ask(name: str, environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
    """Run probe `name` in a process with `environment` added and return its answer. ProbeFailure if there is none."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    command = [sys.executable, "-m", _PROBES, name, json.dumps(arguments)]
    output = run(command, {"PYTHONPATH": os.pathsep.join(paths), **(environment or {})}, timeout_s)
    # Libraries write to standard output, too, before the answer and after it.
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        raise ProbeFailure("it ended without an answer")
    return json.loads(lines[-1].removeprefix(MARK))


def run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """Return the standard output of a command. ProbeFailure for any exit code but 0, a timeout, a missing command."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailure(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ProbeFailure(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise ProbeFailure(_cause(done.returncode, done.stderr))
    return done.stdout


def _cause(code: int, errors: str) -> str:
    # subprocess gives a process that a signal ended the signal's number, negated.
    if code < 0:
        return f"the process crashed ({signal.Signals(-code).name})"
    # A Python traceback ends with the exception.
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {code}"


# ---- packages


def locks(directory: Path | None = None) -> list[Lock]:
    """Return the trainer's locks: those that a wheel holds, or those of the checkout that this package lies in."""
    if directory is None:
        inside = ROOT / "megatron_dapo/requirements"
        directory = inside if inside.is_dir() else ROOT / "requirements"
    locks = (parse_lock(file.name, file.read_text(encoding="utf-8")) for file in sorted(directory.glob("*.txt")))
    return [lock for lock in locks if lock is not None]


def installed_versions() -> dict[str, str]:
    """Return canonical name -> version of every package of this environment."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            # The first on the path counts, as for imports.
            versions.setdefault(canonicalize_name(name), distribution.version)
    return versions


def required_packages() -> dict[str, Requirement]:
    """Return the base requirements of this package from its metadata, or from pyproject.toml if it is not installed."""
    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        texts = _project_requirements(ROOT / "pyproject.toml")
    requirements = [Requirement(text) for text in texts if not _EXTRA.search(text)]
    return {canonicalize_name(r.name): r for r in requirements if r.marker is None or r.marker.evaluate()}


def _project_requirements(file: Path) -> list[str]:
    return read_toml(file)["project"]["dependencies"] if file.is_file() else []


# ---- devices and their libraries


def torch_facts() -> TorchFacts:
    """Ask torch in another process for its build and devices."""
    driver = _driver()
    try:
        answer = ask("torch")
    except ProbeFailure as failure:
        return TorchFacts(error=str(failure), driver=driver)
    devices = tuple(
        Device(**{**device, "capability": tuple(device["capability"])}) for device in answer.pop("devices", ())
    )
    return TorchFacts(**answer, devices=devices, driver=driver)


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, "" if it cannot be read, None if there is no driver."""
    # The kernel's file first: containers often lack nvidia-smi.
    if _DRIVER_FILE.is_file():
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER_FILE.read_text(encoding="utf-8"))
        if match:
            return match[1]
    if not DRIVER_DEVICE.exists():
        return None
    command = shutil.which("nvidia-smi")
    try:
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"] if command else []
        return run(query, {}, timeout_s=30).splitlines()[0].strip() if query else ""
    except (ProbeFailure, IndexError):
        return ""


def transformer_engine_facts(installed: dict[str, str]) -> TransformerEngineFacts:
    """Ask Transformer Engine in another process whether FP8 is available."""
    # The trainer looks for the module, not for the distribution: so does this.
    if importlib.util.find_spec("transformer_engine") is None:
        return TransformerEngineFacts()
    version = installed.get(TRANSFORMER_ENGINE, "of unknown version")
    try:
        answer = ask("transformer_engine")
    except ProbeFailure as failure:
        return TransformerEngineFacts(version, error=str(failure))
    support: dict[str, Any] = {name: Support(*value) for name, value in answer.items()}
    return TransformerEngineFacts(version, **support)


def apex_facts(installed: dict[str, str]) -> ApexFacts:
    """Tell NVIDIA's apex, which has optimizers, from the web toolkit of the same name, without importing either."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return ApexFacts()
    paths = [Path(path) for path in spec.submodule_search_locations or ()]
    is_nvidia = any((path / "optimizers").is_dir() for path in paths)
    fused = is_nvidia and importlib.util.find_spec("amp_C") is not None
    return ApexFacts(True, is_nvidia, fused, installed.get("apex"))


# ---- implementations


def implementation_rows(config: Config | None) -> list[dict[str, str]]:
    """Return the implementation of each operation by the trainer's rules, for a small decoder if no model is given.
    ProbeFailure if the actor cannot be built."""
    if config is None:
        return ask("implementations", model=None, dtype="float32", precision={})
    rows = ask(
        "implementations",
        model=str(config.model.path) if (config.model.path / "config.json").is_file() else None,
        dtype=config.model.dtype,
        precision=config.precision.model_dump(),
        head=config.model.logprob_implementation,
    )
    rows.append({"op": "rollout engine", "name": _rollout_engine(config), "reason": "the recipe"})
    return rows


def precision_answer(config: Config) -> dict[str, str]:
    """Return what computes linear layers here by the trainer's rule, or the "problem"."""
    try:
        return ask("precision", dtype=config.model.dtype, precision=config.precision.model_dump())
    except ProbeFailure as failure:
        return {"problem": str(failure)}


def _rollout_engine(config: Config) -> str:
    if config.rollout.engine == "embedded":
        return "transformers inside the trainer's processes"
    servers = len(config.sglang.urls) or config.sglang.places
    return f"SGLang servers ({servers}, {config.sglang.placement}, weights by {config.sglang.weight_sync_transport})"


# ---- a recipe


def attention_shape(config: Config) -> tuple[int, int, int]:
    """Return (head_dim, query heads, key-value heads) of a tensor-parallel rank."""
    architecture = read_architecture(config.model.path)
    tensor = max(1, config.parallel.tp_size)
    # At least 1 each: a layout that does not fit is reported by its own rules.
    groups = max(1, architecture.num_key_value_heads // tensor)
    heads = groups * max(1, architecture.num_attention_heads // tensor // groups)
    return architecture.head_dim, heads, groups


def attention_results(shape: tuple[int, int, int], dtype: str, by_transformer_engine: bool) -> list[AttentionResult]:
    """Try every attention back-end on this machine's device."""
    # Transformer Engine reads its switches when it is imported: one process a back-end.
    head_dim, num_heads, num_groups = shape
    arguments = {"head_dim": head_dim, "num_heads": num_heads, "num_groups": num_groups, "dtype": dtype}
    results = _try_attention("default", {}, arguments)
    for name in _ENGINE_SWITCHES if by_transformer_engine else ():
        only = {switch: str(int(other == name)) for other, switch in _ENGINE_SWITCHES.items()}
        results += _try_attention(name, only, {**arguments, "back_end": name})
    return results


def _try_attention(name: str, environment: dict[str, str], arguments: dict[str, Any]) -> list[AttentionResult]:
    try:
        return [AttentionResult(**result) for result in ask("attention", environment, **arguments)]
    except ProbeFailure as failure:
        return [AttentionResult(name, "all", failure=str(failure))]


def sglang_facts(config: Config) -> SglangFacts:
    """Ask the engines' interpreter for SGLang's version and NCCL's settings."""
    python = Path(config.sglang.python or sys.executable).absolute()
    if not python.is_file():
        return SglangFacts(python, error="no such file")
    inherited = dict(os.environ)
    take_defaults_of_sglang(inherited)
    try:
        # The trainer's PYTHONPATH would show the trainer's packages in place of the engines'.
        answer = run([str(python), "-c", _SGLANG_CODE], {**inherited, "PYTHONPATH": ""}, 120)
        version, record, nccl = json.loads(answer)
    except (ProbeFailure, ValueError) as failure:  # ValueError: it printed something else, so it is no Python
        return SglangFacts(python, error=str(failure))
    own = agreed_settings(inherited) if config.sglang.weight_sync_transport == "p2p" else {}
    return SglangFacts(
        python,
        version=version,
        record=tuple(record or ()),
        nccl_difference=difference(own, nccl, "in the trainer", f"for {python}"),
    )
