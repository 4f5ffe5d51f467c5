"""Judgements of the machine and of the libraries that use its devices, from facts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dapo.doctor.finding import Finding, conflict, ok, warning

GIB = 1 << 30
# A device that another process fills is noticed; what the driver itself takes is not.
FREE_SHARE = 0.9
BFLOAT16_CAPABILITY = (8, 0)
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
    """torch and what it sees. `error`: why it cannot be imported, or cannot use the devices; "" where it can."""

    error: str = ""
    version: str = ""
    cuda: str | None = None  # toolkit torch was built with; None: a CPU build
    devices: tuple[Device, ...] = ()
    nccl: str | None = None
    driver: str | None = None  # version of NVIDIA's kernel driver; "" where there is one that does not tell it


@dataclass(frozen=True)
class Support:
    """Transformer Engine's own word on whether it can do something here."""

    available: bool
    reason: str


@dataclass(frozen=True)
class TransformerEngineFacts:
    """`version` None: not installed. `error`: why it cannot be imported. The rest is known with a GPU only."""

    version: str | None = None
    error: str = ""
    fp8: Support | None = None
    fp8_block_scaling: Support | None = None


@dataclass(frozen=True)
class ApexFacts:
    """What the name apex stands for here. `fused`: NVIDIA's CUDA extensions (amp_C) are there."""

    found: bool = False
    is_nvidia: bool = False
    fused: bool = False
    version: str | None = None


@dataclass(frozen=True)
class ProcessLimits:
    """Cores and host memory that this process may use, and that the machine has. `job`: the scheduler's, "" for none."""

    cores: int
    machine_cores: int
    memory: int | None  # bytes; None: no limit
    machine_memory: int
    job: str = ""


def cores_finding(limits: ProcessLimits) -> Finding:
    """Warn where affinity or a quota leaves this process few of the machine's cores."""
    detail = f"{limits.cores} of the machine's {limits.machine_cores} cores for this process"
    if limits.cores < min(MIN_CORES, limits.machine_cores):
        fix = "start with --cpus-per-task (sbatch --exclusive) and srun --cpu-bind=none, or a wider taskset or --cpus"
        words = f"{detail}; a rank, its share of servers and verifiers need {MIN_CORES}{_of_job(limits)}"
        return warning("cores", words, fix)
    return ok("cores", detail)


def memory_finding(limits: ProcessLimits) -> Finding:
    """Warn where a limit leaves this process little of the machine's memory."""
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
    """Whether torch can be imported, and its build."""
    if facts.error and not facts.version:
        fix = "install torch again: pip install torch with the build for this machine (README, Install by hand)"
        return conflict("torch", f"it cannot be imported: {facts.error}", fix)
    return ok("torch", f"{facts.version}, {f'CUDA {facts.cuda}' if facts.cuda else 'a CPU build'}")


def gpu_finding(facts: TorchFacts) -> Finding:
    """Which GPUs there are, and whether torch can use those that the driver has."""
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
    fix = f"check CUDA_VISIBLE_DEVICES and that the driver is new enough for CUDA {facts.cuda} (nvidia-smi)"
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
    """NCCL is what ranks on GPUs talk over."""
    if facts.nccl is not None:
        return ok("nccl", facts.nccl)
    if not facts.devices:
        return ok("nccl", "not needed without a GPU")
    return conflict("nccl", "this torch has none, so ranks on GPUs cannot talk", "install the CUDA build of torch")


def bfloat16_finding(devices: Sequence[Device], dtype: str) -> Finding:
    """Whether every device computes in the run's precision."""
    old = [device for device in devices if device.capability < BFLOAT16_CAPABILITY]
    if dtype == "bfloat16" and old:
        major, minor = old[0].capability
        detail = f"{old[0].name} (sm_{major}{minor}) has no bfloat16 units; sm_80 is the first that has"
        return conflict("precision", detail, 'set model.dtype = "float32", or use newer GPUs')
    return ok("precision", dtype)


def linear_products_finding(answer: Mapping[str, str], num_bf16_layers: int) -> Finding:
    """What multiplies in linear layers by the run's recipe of precision, or why it cannot."""
    name = "linear products"
    if answer.get("problem"):
        fix = 'set precision.recipe = "" (products in model.dtype), or do what the reason asks for'
        return conflict(name, answer["problem"], fix)
    kept = f", {num_bf16_layers} layers in model.dtype" if num_bf16_layers else ""
    detail = f"{answer['recipe']}{kept}, by {answer['name']} ({answer['reason']})"
    if answer["recipe"].startswith("fp8") and answer["name"] != "Transformer Engine":
        fix = 'set precision.recipe = "" unless this is a test: emulation costs time and saves none'
        return warning(name, detail, fix)
    return ok(name, detail)


def transformer_engine_findings(facts: TransformerEngineFacts, has_gpu: bool, locked: str | None) -> list[Finding]:
    """Whether Transformer Engine is there and works, and its word on FP8. `locked`: version the lock names."""
    name, install = "transformer engine", f"pip install --no-build-isolation '{TE_PACKAGE}{_pin(locked)}'"
    if facts.version is None:
        if has_gpu:
            return [warning(name, "not installed: layers are the own ones, without FP8", install)]
        return [ok(name, "not installed; of no use without a GPU")]
    if facts.error:
        fix = f"{install}, built for this torch, or pip uninstall transformer-engine"
        return [conflict(name, f"{facts.version} is installed but broken: {facts.error}", fix)]
    if not has_gpu:
        return [ok(name, f"{facts.version}; its layers are not used without a GPU")]
    findings = [ok(name, facts.version)]
    for title, support in (("fp8", facts.fp8), ("fp8 block scaling", facts.fp8_block_scaling)):
        if support is not None:
            findings.append(_support_finding(title, support))
    return findings


def _support_finding(title: str, support: Support) -> Finding:
    if support.available:
        return ok(title, "available")
    fix = "train in bfloat16 here, or use what the reason asks for"
    return warning(title, f"not available; Transformer Engine's reason: {support.reason or 'none given'}", fix)


def apex_finding(facts: ApexFacts, has_gpu: bool) -> Finding:
    """NVIDIA's apex, the web toolkit that has the same name on the package index, or neither."""
    version = f" {facts.version}" if facts.version else ""
    if not facts.found:
        return ok("apex", "not installed (never needed)")
    if not facts.is_nvidia:
        detail = f"apex{version} is the package index's toolkit for web applications, not NVIDIA's"
        return warning("apex", detail, "pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex")
    if has_gpu and not facts.fused:
        fix = "build it with --cpp_ext --cuda_ext, or pip uninstall apex"
        return warning("apex", f"NVIDIA's{version} without CUDA extensions (amp_C)", fix)
    return ok("apex", f"NVIDIA's{version}{', with CUDA extensions' if facts.fused else ''}")


def triton_finding(version: str | None, has_gpu: bool) -> Finding:
    """triton compiles kernels for GPUs; CUDA builds of torch bring it."""
    if version is not None:
        return ok("triton", version)
    if not has_gpu:
        return ok("triton", "not installed; of no use without a GPU")
    return warning("triton", "not installed: no kernels of ours or of torch.compile", "pip install triton")


def psutil_finding(version: str | None) -> Finding:
    """megatron-core's checkpoint save asks psutil for memory in a worker; without it the save waits for ever."""
    if version is None:
        return conflict("psutil", "not installed: saving a megatron-core checkpoint hangs", "pip install psutil")
    return ok("psutil", version)


def _pin(version: str | None) -> str:
    return f"=={version}" if version else ""
