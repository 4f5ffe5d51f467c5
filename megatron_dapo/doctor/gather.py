"""Collects the facts that the checks judge. Nothing is judged here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_dapo.config.schema import Config
from megatron_dapo.doctor.ask import ProbeFailure, ask, run
from megatron_dapo.doctor.machine import ApexFacts, Device, ProcessLimits, Support, TorchFacts, TransformerEngineFacts
from megatron_dapo.doctor.packages import Lock, parse_lock
from megatron_dapo.doctor.recipe import AttentionResult, CheckpointSize, SglangFacts

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "megatron-dapo"
TRANSFORMER_ENGINE = "transformer-engine"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_DEVICE = Path("/dev/nvidiactl")
_EXTRA = re.compile(r"\bextra\s*==")
# Transformer Engine's switches: each back-end alone.
_ENGINE_SWITCHES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_SGLANG_CODE = """
import importlib.metadata, importlib.util, json
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps([version, importlib.util.find_spec("sglang_router") is not None]))
"""


# ---- packages


def locks(folder: Path = ROOT / "requirements") -> list[Lock]:
    """The trainer's locks that lie beside this installation."""
    found = (parse_lock(file.name, file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.txt")))
    return [lock for lock in found if lock is not None]


def installed_versions() -> dict[str, str]:
    """Canonical name -> version of every package of this environment; the first on the path counts, as for imports."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(canonicalize_name(name), distribution.version)
    return versions


def required_packages() -> dict[str, Requirement]:
    """What this package needs in every environment, by its metadata, or by setup.py where it is not installed."""
    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        texts = _setup_requirements(ROOT / "setup.py")
    requirements = [Requirement(text) for text in texts if not _EXTRA.search(text)]
    return {canonicalize_name(r.name): r for r in requirements if r.marker is None or r.marker.evaluate()}


def _setup_requirements(file: Path) -> list[str]:
    import ast

    if not file.is_file():
        return []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BASE":
            return ast.literal_eval(node.value)
    return []


# ---- devices and their libraries


def torch_facts() -> TorchFacts:
    """torch and the devices it sees, asked for in another process."""
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
    """Version of NVIDIA's driver, "" where it does not tell it, None where there is none."""
    if _DRIVER_FILE.is_file():
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER_FILE.read_text(encoding="utf-8"))
        if match:
            return match[1]
    if not _DRIVER_DEVICE.exists():
        return None
    command = shutil.which("nvidia-smi")
    try:
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"] if command else []
        return run(query, {}, timeout_s=30).splitlines()[0].strip() if query else ""
    except (ProbeFailure, IndexError):
        return ""


def transformer_engine_facts(installed: dict[str, str]) -> TransformerEngineFacts:
    """Transformer Engine and its word on FP8. Installed is what can be found by the trainer's own rule (its module)."""
    if importlib.util.find_spec("transformer_engine") is None:
        return TransformerEngineFacts()
    version = installed.get(TRANSFORMER_ENGINE, "of unknown version")
    try:
        answer = ask("transformer_engine")
    except ProbeFailure as failure:
        return TransformerEngineFacts(version, error=str(failure))
    return TransformerEngineFacts(version, **{name: Support(*value) for name, value in answer.items()})


def apex_facts(installed: dict[str, str]) -> ApexFacts:
    """Which apex is here. Nothing of it is imported: NVIDIA's has optimizers, the web toolkit has none."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return ApexFacts()
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    is_nvidia = any((folder / "optimizers").is_dir() for folder in folders)
    fused = is_nvidia and importlib.util.find_spec("amp_C") is not None
    return ApexFacts(True, is_nvidia, fused, installed.get("apex"))


def process_limits(root: Path = Path("/")) -> ProcessLimits:
    """Return cores and memory left to this process by its affinity and its control groups, version 1 or 2."""
    found = [value for file in _cgroup_files(root) if (value := _limit(file)) is not None]
    memory = min((value for kind, value in found if kind == "memory"), default=None)
    quota = min((value for kind, value in found if kind == "cpu"), default=math.inf)
    job = os.environ.get("SLURM_JOB_ID", "")
    return ProcessLimits(
        cores=min(len(os.sched_getaffinity(0)), max(1, math.ceil(quota)) if quota < math.inf else sys.maxsize),
        machine_cores=os.cpu_count() or 1,
        memory=None if memory is None else int(memory),
        machine_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        job=f"Slurm job {job}" if job else "",
    )


def _cgroup_files(root: Path) -> Iterator[Path]:
    """Yield the limits of this process's control groups and of those above them: the lowest one holds."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        # Inside a container the path may be the host's, which is not mounted: the mount itself is then the group.
        for folder in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents):
            yield from (
                folder / name for name in ("memory.max", "memory.limit_in_bytes", "cpu.max", "cpu.cfs_quota_us")
            )
            if folder == top:
                break


def _limit(file: Path) -> tuple[str, float] | None:
    """("memory", bytes) or ("cpu", cores) of a control group's file; None where it sets no limit or is not there."""
    try:
        words = file.read_text(encoding="utf-8").split()
        if file.name == "cpu.cfs_quota_us":
            words.append((file.parent / "cpu.cfs_period_us").read_text(encoding="utf-8").strip())
    except OSError:
        return None
    # "max" and -1 stand for none; version 1 writes no memory limit as a number near 2^63.
    if words[0] in ("max", "-1") or float(words[0]) > 2**60:
        return None
    return ("memory", float(words[0])) if len(words) == 1 else ("cpu", float(words[0]) / float(words[1]))


# ---- implementations


def implementation_rows(config: Config | None) -> list[dict[str, str]]:
    """Which implementation each operation uses, as the trainer chooses it; without a model's shape, those of a small
    decoder. ProbeFailure where the actor cannot be put together."""
    if config is None:
        return ask("implementations", model=None, dtype="float32", precision={})
    rows = ask(
        "implementations",
        model=str(config.model.path) if (config.model.path / "config.json").is_file() else None,
        dtype=config.model.dtype,
        precision=config.precision.model_dump(),
        head=config.model.logprob_implementation,
    )
    rows.append({"op": "rollout engine", "name": _ROLLOUT[config.rollout.engine](config), "reason": "the recipe"})
    return rows


def precision_answer(config: Config) -> dict[str, str]:
    """What would multiply in linear layers here, or the "problem" of it, by the trainer's own rule."""
    try:
        return ask("precision", dtype=config.model.dtype, precision=config.precision.model_dump())
    except ProbeFailure as failure:
        return {"problem": str(failure)}


def _sglang_engine(config: Config) -> str:
    servers = len(config.sglang.urls) or f"{config.sglang.servers_per_node} a node"
    return f"SGLang servers ({servers}, {config.sglang.placement}, weights by {config.sglang.weight_sync_transport})"


_ROLLOUT = {"embedded": lambda config: "transformers inside the trainer's processes", "sglang": _sglang_engine}


# ---- a recipe


def attention_shape(config: Config) -> tuple[int, int, int]:
    """(head_dim, query heads, key-value heads) of a tensor-parallel rank."""
    from megatron_dapo.checkpoints.architecture import ModelArchitecture

    architecture = ModelArchitecture.from_directory(config.model.path)
    tensor = max(1, config.parallel.tp_size)
    groups = max(1, architecture.num_key_value_heads // tensor)
    heads = groups * max(1, architecture.num_attention_heads // tensor // groups)
    return architecture.head_dim, heads, groups


def attention_results(shape: tuple[int, int, int], dtype: str, by_transformer_engine: bool) -> list[AttentionResult]:
    """Every back-end tried on this machine's device. Transformer Engine's are switched by its environment."""
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


def model_problem(config: Config) -> tuple[str, str]:
    """(why the model folder cannot be read or "", what it holds). Headers of weights are read, tensors are not."""
    from megatron_dapo.checkpoints.architecture import ModelArchitecture
    from megatron_dapo.checkpoints.huggingface import HFCheckpoint

    folder = config.model.path
    try:
        architecture = ModelArchitecture.from_directory(folder)
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            return f"{folder}: no tokenizer files there", ""
        detail = f"{architecture.model_type}, {architecture.num_parameters:.4g} parameters"
        if config.model.allow_random_init and not any(folder.glob("*.safetensors")):
            return "", f"{detail}, no weights (model.allow_random_init)"
        with HFCheckpoint(folder) as weights:
            weights.check(architecture)
            return "", f"{detail}, {len(weights.specs)} tensors"
    except (ValueError, OSError) as error:
        return str(error), ""


def sglang_facts(config: Config) -> SglangFacts:
    """The engines' environment, asked by its own interpreter."""
    import json

    python = Path(config.sglang.python or sys.executable).absolute()
    if not python.is_file():
        return SglangFacts(python, error="no such file")
    try:
        # Its own environment: what PYTHONPATH adds to the trainer's must not stand for it.
        version, has_router = json.loads(run([str(python), "-c", _SGLANG_CODE], {"PYTHONPATH": ""}, 120))
    except ProbeFailure as failure:
        return SglangFacts(python, error=str(failure))
    return SglangFacts(python, version=version, has_router=has_router)


def model_bytes(config: Config) -> int:
    """Of the served weights."""
    from megatron_dapo.checkpoints.architecture import DTYPES, ModelArchitecture

    return ModelArchitecture.from_directory(config.model.path).num_parameters * DTYPES[config.model.dtype].itemsize


def key_problem(path: str) -> str:
    """Why the key file cannot be used, "" where it can."""
    from megatron_dapo.engines.sglang.keys import read_key

    try:
        read_key(Path(path))
    except ValueError as error:
        return str(error)
    return ""


def checkpoint_sizes(config: Config) -> list[CheckpointSize]:
    """Of the policy on the run's layout, and of the critic where there is one. ValueError where a model does not fit its
    layout."""
    from megatron_dapo.checkpoints.architecture import DTYPES, ModelArchitecture
    from megatron_dapo.trainer.topology import critic_layout, parallel_layout

    architecture, dtype = ModelArchitecture.from_directory(config.model.path), DTYPES[config.model.dtype]
    models = [("policy", architecture, parallel_layout(config, config.num_processes))]
    if config.has_critic:
        models.append(("critic", architecture.with_value_head(), critic_layout(config, config.num_processes)))
    is_cut = config.parallel.use_distributed_optimizer
    return [_checkpoint_size(name, model, layout, dtype, is_cut) for name, model, layout in models]


def _checkpoint_size(name: str, architecture: Any, parallel: Any, dtype: Any, is_cut: bool) -> CheckpointSize:
    from megatron_dapo.checkpoints.megatron_layout import megatron_layout

    layout = megatron_layout(architecture, parallel, dtype)
    weights = sum(spec.num_bytes for rank in range(layout.num_ranks) for spec in layout.local_specs(rank).values())
    copies = 1 if is_cut else parallel.data * parallel.context
    return CheckpointSize(weights, architecture.num_parameters, copies, dtype.itemsize < 4, name)


def existing_parent(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_bytes(path: Path) -> int:
    """Free on the file system that `path` is on, or will be."""
    status = os.statvfs(existing_parent(path))
    return status.f_bavail * status.f_frsize


def same_disk(first: Path, second: Path) -> bool:
    return existing_parent(first).stat().st_dev == existing_parent(second).stat().st_dev


def used_bytes(folder: Path) -> int:
    """Of all files in a folder; 0 where there is none."""
    return sum(_file_bytes(file) for file in folder.rglob("*"))


def _file_bytes(file: Path) -> int:
    try:
        return file.lstat().st_size if file.is_file() else 0
    except FileNotFoundError:  # a run that works there deletes old checkpoints
        return 0


def shared_memory_folder() -> Path:
    """Where weights for servers on this machine pass through."""
    from megatron_dapo.bridge.transports.shared_memory import default_folder

    return default_folder()


def run_folder_problem(folder: Path) -> str:
    """Why a run cannot write into `folder`, "" where it can. Nothing is created."""
    from megatron_dapo.launch.lifetime import require_unused

    parent = existing_parent(folder)
    if not parent.is_dir():
        return f"{parent} is a file, not a folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written by user {os.geteuid()}"
    try:
        require_unused(folder)
    except (RuntimeError, OSError) as error:
        return str(error)
    return ""


def ports_problem(host: str, count: int) -> str:
    """Why `count` ports cannot be had on `host` at once, "" where they can. They are given back."""
    from megatron_dapo.bridge.protocol.peer_group import LOOPBACK
    from megatron_dapo.engines.sglang.ports import listen_address, reserve_port

    host = listen_address(host, LOOPBACK).bind
    with ExitStack() as stack:
        try:
            for _ in range(count):
                stack.callback(reserve_port(host).release)
        except (ValueError, RuntimeError) as error:
            return str(error)
    return ""
