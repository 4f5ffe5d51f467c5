"""Findings, and checks of the machine, its packages and device libraries, based only on collected facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from megatron_dapo.config.process_limits import ProcessLimits
from megatron_dapo.rounding import GIB

Verdict = Literal["ok", "warning", "conflict"]


@dataclass(frozen=True)
class Finding:
    """Result of one check. A conflict stops a run or makes it wrong; a warning may. Both have a fix."""

    name: str
    verdict: Verdict
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.verdict == "ok" or self.fix, f"{self.name}: a {self.verdict} without a fix"


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warning(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "warning", detail, fix)


def conflict(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "conflict", detail, fix)


def conflict_or_ok(name: str, problem: str, fix: str, detail: str) -> Finding:
    """Return a conflict for `problem`; if that is "", a passed check with `detail`."""
    return conflict(name, problem, fix) if problem else ok(name, detail)


def first_conflict(findings: Iterable[Finding]) -> Finding | None:
    """Return the first conflict in the order of the checks."""
    # Later ones may be its consequences.
    return next((finding for finding in findings if finding.verdict == "conflict"), None)


# ---- the machine

# Below this share of free memory another process uses the device; the driver takes less.
FREE_SHARE = 0.9
# Oldest driver branch of a CUDA major version (CUDA Toolkit release notes, table "minor version compatibility").
OLDEST_DRIVERS = {"12": 525, "13": 580}
BFLOAT16_CAPABILITY = (8, 0)  # Ampere; older GPUs emulate it slowly, or not at all
# A site's default of one core a task makes a rank, its server's tokenizer and the verifiers take turns.
MIN_CORES = 2
MIN_MEMORY = 16 * GIB
TE_PACKAGE = "transformer-engine[pytorch]"


@dataclass(frozen=True)
class Device:
    """One GPU as torch sees it. Memory in bytes."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class TorchFacts:
    """torch's build and the devices it sees."""

    error: str = ""  # reason it cannot be imported, or cannot use the devices
    version: str = ""
    cuda: str | None = None  # toolkit torch was built with; None: a CPU build
    devices: tuple[Device, ...] = ()
    nccl: str | None = None
    driver: str | None = None  # version of NVIDIA's kernel driver; "": unknown


@dataclass(frozen=True)
class Support:
    """Transformer Engine's answer on whether a feature is available here."""

    available: bool
    reason: str


@dataclass(frozen=True)
class TransformerEngineFacts:
    """Transformer Engine of this environment. Support is known with a GPU only."""

    version: str | None = None  # None: not installed
    error: str = ""  # reason it cannot be imported
    fp8: Support | None = None
    fp8_block_scaling: Support | None = None
    flash_attention: Support | None = None  # FlashAttention 3


@dataclass(frozen=True)
class ApexFacts:
    """The package named apex: NVIDIA's, or the web toolkit of the same name."""

    found: bool = False
    is_nvidia: bool = False
    fused: bool = False  # has the CUDA extensions (amp_C)
    version: str | None = None


def cores_finding(limits: ProcessLimits) -> Finding:
    """Warn if affinity or a quota leaves this process few of the machine's cores."""
    detail = f"{limits.cores} of the machine's {limits.machine_cores} cores for this process"
    if limits.cores < min(MIN_CORES, limits.machine_cores):
        fix = "start with --cpus-per-task (sbatch --exclusive) and srun --cpu-bind=none, or a wider taskset or --cpus"
        words = f"{detail}; a rank, its share of servers and verifiers need {MIN_CORES}{_of_job(limits)}"
        return warning("cores", words, fix)
    return ok("cores", detail)


def memory_finding(limits: ProcessLimits) -> Finding:
    """Warn if a limit leaves this process little of the machine's memory."""
    if limits.memory is None or limits.memory >= limits.machine_memory:
        return ok("host memory", f"{limits.machine_memory / GIB:.0f} GiB, no limit")
    detail = f"limited to {limits.memory / GIB:.1f} of the machine's {limits.machine_memory / GIB:.0f} GiB"
    if limits.memory < min(MIN_MEMORY, limits.machine_memory / 2):
        fix = "ask for all of it with --mem=0 (Slurm), or raise the container's --memory"
        words = f"{detail}; loading and offloading need {MIN_MEMORY // GIB} GiB{_of_job(limits)}"
        return warning("host memory", words, fix)
    return ok("host memory", detail)


def _of_job(limits: ProcessLimits) -> str:
    return f" ({limits.job})" if limits.job else ""


def torch_finding(facts: TorchFacts) -> Finding:
    """Check that torch can be imported."""
    problem = f"it cannot be imported: {facts.error}" if facts.error and not facts.version else ""
    fix = "install torch again: pip install torch with the build for this machine (README, Install by hand)"
    return conflict_or_ok(
        "torch", problem, fix, f"{facts.version}, {f'CUDA {facts.cuda}' if facts.cuda else 'a CPU build'}"
    )


def gpu_finding(facts: TorchFacts) -> Finding:
    """Check that torch sees the driver's GPUs, and that they are equal and free."""
    if facts.devices:
        return _devices_finding(facts)
    if facts.driver is None:
        if facts.cuda is None:
            return ok("gpus", "none: everything runs on the CPU, over gloo")
        fix = "run on a machine with a GPU, or install the CPU lock"
        return warning("gpus", f"none, although torch is built for CUDA {facts.cuda}", fix)
    driver = f"driver {facts.driver or 'of unknown version'}"
    if facts.cuda is None:
        return conflict("gpus", f"{driver} is there, but torch is a CPU build", "install the CUDA build of torch")
    oldest = OLDEST_DRIVERS.get(facts.cuda.partition(".")[0])
    if oldest and facts.driver and int(facts.driver.partition(".")[0]) < oldest:
        fix = f"install driver {oldest} or newer, or the build of torch for an older CUDA"
        return conflict("gpus", f"{driver} is older than {oldest}, which CUDA {facts.cuda} needs", fix)
    fix = "check CUDA_VISIBLE_DEVICES and nvidia-smi"
    return conflict("gpus", f"{driver} is there, but torch sees no device: {facts.error or 'none visible'}", fix)


def _devices_finding(facts: TorchFacts) -> Finding:
    devices = facts.devices
    names = sorted({device.name for device in devices})
    detail = (
        f"{len(devices)} x {' and '.join(names)}, {min(d.memory for d in devices) / GIB:.0f} GiB, "
        f"driver {facts.driver or 'unknown'}, CUDA {facts.cuda}"
    )
    if len(names) > 1:
        fix = "choose equal ones by CUDA_VISIBLE_DEVICES: the slowest decides the speed of all"
        return warning("gpus", detail, fix)
    full = [index for index, d in enumerate(devices) if d.free < FREE_SHARE * d.memory]
    if full:
        left = ", ".join(f"GPU {index}: {devices[index].free / GIB:.0f} GiB free" for index in full)
        return warning("gpus", f"{detail}; {left}", "end what holds their memory (nvidia-smi)")
    return ok("gpus", detail)


def nccl_finding(facts: TorchFacts) -> Finding:
    """Check for NCCL, over which ranks on GPUs communicate."""
    is_missing = facts.nccl is None and facts.devices
    problem = "this torch has none, so ranks on GPUs cannot communicate" if is_missing else ""
    return conflict_or_ok("nccl", problem, "install the CUDA build of torch", facts.nccl or "not needed without a GPU")


def bfloat16_finding(devices: Sequence[Device], dtype: str) -> Finding:
    """Check that every device has the units for the model's type."""
    old = [device for device in devices if device.capability < BFLOAT16_CAPABILITY]
    if dtype == "bfloat16" and old:
        major, minor = old[0].capability
        detail = f"{old[0].name} (sm_{major}{minor}) has no bfloat16 units; sm_80 is the first that has"
        return conflict("precision", detail, 'set model.dtype = "float32", or use newer GPUs')
    return ok("precision", dtype)


def linear_products_finding(answer: Mapping[str, str], num_bf16_layers: int) -> Finding:
    """Check that the recipe of precision can be computed here, and by what."""
    name = "linear products"
    if answer.get("problem"):
        fix = 'set precision.recipe = "" (products in model.dtype), or remove the obstacle that is named'
        return conflict(name, answer["problem"], fix)
    kept = f", {num_bf16_layers} layers in model.dtype" if num_bf16_layers else ""
    detail = f"{answer['recipe']}{kept}, by {answer['name']} ({answer['reason']})"
    if answer["recipe"].startswith("fp8") and answer["name"] != "Transformer Engine":
        fix = 'set precision.recipe = "" unless this is a test: emulation costs time and saves none'
        return warning(name, detail, fix)
    return ok(name, detail)


def transformer_engine_findings(facts: TransformerEngineFacts, has_gpu: bool, locked: str | None) -> list[Finding]:
    """Check that Transformer Engine works, and its answer on FP8. `locked`: the lock's version."""
    pin = f"=={locked}" if locked else ""
    name, install = "transformer engine", f"pip install --no-build-isolation '{TE_PACKAGE}{pin}'"
    if facts.version is None:
        if has_gpu:
            return [warning(name, "not installed: the package's own layers run, without FP8", install)]
        return [ok(name, "not installed; of no use without a GPU")]
    if facts.error:
        fix = f"{install}, built for this torch, or pip uninstall transformer-engine"
        return [conflict(name, f"{facts.version} is installed but broken: {facts.error}", fix)]
    if not has_gpu:
        return [ok(name, f"{facts.version}; its layers are not used without a GPU")]
    asked = (("fp8", facts.fp8), ("fp8 block scaling", facts.fp8_block_scaling))
    findings = [ok(name, facts.version), *(_support_finding(title, support) for title, support in asked if support)]
    if facts.flash_attention is not None:
        # cuDNN's attention is the default and was the faster one, so its absence is no warning.
        findings.append(ok("flash attention", facts.flash_attention.reason))
    return findings


def _support_finding(title: str, support: Support) -> Finding:
    if support.available:
        return ok(title, "available")
    fix = "train in bfloat16 here, or use a device and CUDA that the reason names"
    return warning(title, f"not available; Transformer Engine's reason: {support.reason or 'none given'}", fix)


def apex_finding(facts: ApexFacts, has_gpu: bool) -> Finding:
    """Check that a package named apex is NVIDIA's, not the web toolkit of that name on the package index."""
    version = f" {facts.version}" if facts.version else ""
    if not facts.found:
        return ok("apex", "not installed (optional: Transformer Engine has the same kernels)")
    if not facts.is_nvidia:
        detail = f"apex{version} is the package index's toolkit for web applications, not NVIDIA's"
        return warning("apex", detail, "pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex")
    if has_gpu and not facts.fused:
        fix = "build it with --cpp_ext --cuda_ext, or pip uninstall apex"
        return warning("apex", f"NVIDIA's{version} without CUDA extensions (amp_C)", fix)
    return ok("apex", f"NVIDIA's{version}{', with CUDA extensions' if facts.fused else ''}")


def triton_finding(version: str | None, has_gpu: bool) -> Finding:
    """Check for triton, which compiles kernels for GPUs and comes with CUDA builds of torch."""
    if version is not None:
        return ok("triton", version)
    if not has_gpu:
        return ok("triton", "not installed; of no use without a GPU")
    return warning("triton", "not installed: neither our kernels nor those of torch.compile run", "pip install triton")


def psutil_finding(version: str | None) -> Finding:
    """Check for psutil: without it a worker of megatron-core's checkpoint save fails and the save never returns."""
    problem = "" if version else "not installed: saving a megatron-core checkpoint hangs"
    return conflict_or_ok("psutil", problem, "pip install psutil", version or "")


# ---- packages

# The bounds of requires-python in pyproject.toml.
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 12)
_FILE = re.compile(r"(cpu|cuda)-py(\d)(\d+)\.txt")


@dataclass(frozen=True)
class Lock:
    """Versions that were tested together."""

    name: str  # file name
    device: str  # cpu or cuda
    python: tuple[int, int]
    pins: Mapping[str, str]  # canonical package name -> version


def parse_lock(name: str, text: str) -> Lock | None:
    """Parse a requirements file; None if its name is not that of a lock of the trainer."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    requirements = [Requirement(line) for line in lines if line]
    pins: dict[str, str] = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}
    return Lock(name, match[1], (int(match[2]), int(match[3])), pins)


def choose_lock(locks: Sequence[Lock], device: str, python: tuple[int, int]) -> Lock | None:
    """Choose the lock for this kind of device: the one for this Python, else the newest."""
    fitting = [lock for lock in locks if lock.device == device]
    return max(fitting, key=lambda lock: (lock.python == python, lock.python), default=None)


def python_finding(version: tuple[int, int, int], lock: Lock | None) -> Finding:
    """Check that the interpreter is supported, and the lock's."""
    text, supported = _text(version), f"{_text(OLDEST_PYTHON)} to {_text(NEWEST_PYTHON)}"
    if not OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        fix = f"make the environment with Python {_text(lock.python if lock else NEWEST_PYTHON)}"
        return conflict("python", f"{text}; supported are {supported}", fix)
    if lock is not None and version[:2] != lock.python:
        return warning("python", f"{text}; {lock.name} was tested with {_text(lock.python)}", "use that Python")
    return ok("python", f"{text}; supported are {supported}")


def package_findings(
    lock: Lock | None, installed: Mapping[str, str], required: Mapping[str, Requirement]
) -> list[Finding]:
    """Check each package against lock and requirements, required ones first. Keys are canonical names."""
    first = warning("lock", "no tested lock lies next to this installation", "install from the repository")
    pins: Mapping[str, str] = {}
    if lock is not None:
        first, pins = ok("lock", f"{lock.name}: {len(lock.pins)} packages"), lock.pins
    names = dict.fromkeys((*required, *pins))
    return [first, *(_package(name, installed.get(name), pins.get(name), required.get(name)) for name in names)]


def _package(name: str, installed: str | None, locked: str | None, required: Requirement | None) -> Finding:
    label = f"package {name}"
    words = f"installed {installed or 'not'}, locked {locked or 'not'}"
    install = f"pip install '{name}=={locked}'" if locked else f"pip install '{required}'"
    # Pre-releases count: vendors' images carry torch builds such as 2.11.0a0.
    fits = required is None or installed is not None and required.specifier.contains(installed, prereleases=True)
    if not fits:
        return conflict(label, f"{words}, needed {required}", install)
    if locked is not None and _public(installed) != _public(locked):
        return warning(label, words, install)
    return ok(label, words)


def _public(version: str | None) -> str | None:
    """Strip the local part that names a build, as in 2.13.0+cpu."""
    try:
        return Version(version).public if version else None
    except InvalidVersion:
        return version


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
