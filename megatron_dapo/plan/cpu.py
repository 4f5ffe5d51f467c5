"""Time and memory of a run on CPUs, estimated before it starts, and the refusal of one that would take days.

Rates are those of a core, measured with SmolLM2-135M on cores with AVX512-BF16: 235 to 386 tokens/s in the embedded engine and
130 to 170 in training (examples/smollm2). A core without it multiplies bfloat16 as float32 (ops/bf16_products.py). Estimates are within
a factor of 2 to 3: enough to tell minutes from days.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_dapo.config.rules import UnusableInput, Violation
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import SLOWEST
from megatron_dapo.plan.memory import RunMemory, num_parameters, run_memory
from megatron_dapo.plan.memory.batch import step_responses
from megatron_dapo.plan.rollout import KEPT_SHARE, MEAN_PROMPT_SHARE, MEAN_SHARE
from megatron_dapo.plan.step import StepPlan, plan_step
from megatron_dapo.rounding import GIB

# FLOP/s of a core by the model's dtype. A forward pass costs 2 FLOPs a parameter and token, training 6.
GENERATION_FLOPS = {"bfloat16": 75e9, "float32": 25e9}
TRAINING_FLOPS = {"bfloat16": 110e9, "float32": 45e9}
TOKEN_SECONDS = 1e-4  # core seconds of a generated token besides its products
PROCESS_BYTES = int(0.8 * GIB)  # a trainer process without its tensors
VERIFIER_BYTES = int(0.1 * GIB)
SHORT_TOKENS = 64  # a limit up to which most responses reach it
MOST_HOURS = 24
SERVER_BYTES = int(1.0 * GIB)  # a rank of a server without its weights and cache
_NOT_ON_CPUS = ("context", "communication")  # CUDA's and NCCL's
# A server is a separate process, and keeps its memory while the trainer works.
_SERVER_PARTS = ("engine_weights", "kv_tokens", "states", "graphs_and_prefill", "engine_context", "engine_asleep")
_OVERRIDE = "or set run.ignore_estimates = true"


@dataclass(frozen=True)
class CpuEstimate:
    """Estimated seconds of a run on CPUs."""

    phases: Mapping[str, float]  # seconds in a train step; rewards and the driver's own work are not counted
    run: float  # seconds, evaluations included

    @property
    def step(self) -> float:
        """Seconds of a train step."""
        return sum(self.phases.values())


def estimate(
    config: Config, architecture: ModelArchitecture, cores: int, has_bf16: bool, num_problems: int = 0
) -> CpuEstimate:
    """Return the time of a run on `cores`. num_problems: held-out ones of an evaluation."""
    dtype = config.model.dtype if has_bf16 else "float32"
    rollout, evaluation = config.rollout, config.evaluation
    weights = 2 * num_parameters(architecture)
    generated = weights / GENERATION_FLOPS[dtype] + TOKEN_SECONDS
    trained = 3 * weights / TRAINING_FLOPS[dtype]
    prompt = max(MEAN_PROMPT_SHARE * config.data.max_prompt_tokens, min(SHORT_TOKENS, config.data.max_prompt_tokens))
    response = _mean_tokens(rollout.max_response_tokens)
    count = step_responses(config)
    update = count * (prompt + response) * trained * (2 if config.has_critic else 1)
    phases = {"train": update * config.training.epochs}
    if config.algorithm.name != "sft":
        sampled = count / (KEPT_SHARE if rollout.filter_groups else 1.0)
        # A group's prompt is prefilled once; a forward pass costs a third of training.
        generate = sampled * (response + prompt / rollout.group_size) * generated
        phases = {"generate": generate, "log_probs": update / 3 * config.algorithm.loss.needs_old_logprobs, **phases}
    step = sum(phases.values())
    times = evaluation.at_start + evaluation.at_end
    times += config.run.total_steps // evaluation.interval if evaluation.interval else 0
    of_evaluation = num_problems * evaluation.num_samples * _mean_tokens(config.evaluation_response_tokens) * generated
    of_cores = {name: seconds / cores for name, seconds in phases.items()}
    return CpuEstimate(of_cores, (config.run.total_steps * step + times * of_evaluation) / cores)


def _mean_tokens(longest: int) -> float:
    return max(MEAN_SHARE * longest, min(SHORT_TOKENS, longest))


def phase_bytes(memory: RunMemory) -> dict[str, dict[str, int]]:
    """Return the bytes of a trainer process on CPUs by phase and component: those of a GPU without CUDA, NCCL and servers."""
    hidden = _NOT_ON_CPUS if memory.engine_memory is None else (*_NOT_ON_CPUS, *_SERVER_PARTS)
    return {
        phase.phase: {name: size for name, size in phase.parts.items() if size and name not in hidden}
        for phase in memory.phases
    }


def memory_bytes(config: Config, memory: RunMemory, processes: int) -> int:
    """Return the bytes of host memory that a run on CPUs takes on one node."""
    of_process = PROCESS_BYTES + max(sum(parts.values()) for parts in phase_bytes(memory).values())
    servers = 0
    if memory.engine_memory is not None:
        sglang = config.sglang
        longest = config.longest_trained
        tokens = sglang.max_total_tokens or sglang.max_running_requests * longest
        of_rank = SERVER_BYTES + memory.engine_memory.weights + tokens * memory.engine_memory.bytes_per_token
        servers = memory.num_engines * sglang.tp_size * of_rank
    return processes * of_process + servers + config.reward.num_processes * VERIFIER_BYTES


def plan_on_cpus(config: Config, architecture: ModelArchitecture, processes: int, cluster: Cluster) -> StepPlan:
    """Return the plan of a step on CPUs: memory of a process by phase, and the estimated seconds."""
    planned = plan_step(config, architecture, processes, cluster, SLOWEST)
    found = phase_bytes(planned.memory)
    phases = tuple(replace(one, parts=found[one.phase]) for one in planned.memory.phases)
    memory = replace(planned.memory, phases=phases, trainer=max(one.total for one in phases), engine=0)
    seconds = estimate(config, architecture, cluster.cores, cluster.has_bf16).phases
    return replace(planned, memory=memory, seconds={name: {"tokens": value} for name, value in seconds.items()})


def step_line(config: Config, found: CpuEstimate, cores: int) -> str:
    """Return what a step is and how long it and the run take."""
    return (
        f"a step: {step_responses(config):,} responses of up to {config.rollout.max_response_tokens:,} tokens; "
        f"about {duration(found.step)} on {cores} cores; the run about {duration(found.run)}"
    )


def problems(
    config: Config,
    cluster: Cluster,
    architecture: ModelArchitecture,
    processes: int,
    num_problems: int = 0,
) -> Iterator[Violation]:
    """Yield what this machine has too little of: memory, or time below a day. Nothing if its cores are not known."""
    if cluster.gpus_per_node or not cluster.cores or config.run.ignore_estimates:
        return
    needed = memory_bytes(config, run_memory(config, architecture, processes, cluster), processes)
    elsewhere = "plan another machine with --gpus-per-node or --nodes"
    if needed > cluster.host_gib * GIB:
        yield UnusableInput(
            "training.micro_batch_tokens",
            f"the run takes about {needed / GIB:.1f} GiB of memory, and {cluster.host_gib:.1f} GiB are free here",
            f"lower data.max_prompt_tokens, rollout.max_response_tokens, training.micro_batch_tokens or rollout.slots_per_rank, "
            f"{elsewhere}, {_OVERRIDE}",
        )
    found = estimate(config, architecture, cluster.cores, cluster.has_bf16, num_problems)
    if found.run > MOST_HOURS * 3600:
        yield UnusableInput(
            "run.total_steps",
            f"the run would take more than a day on a CPU: {step_line(config, found, cluster.cores)}",
            f"lower rollout.prompts_per_step, rollout.group_size or rollout.max_response_tokens (`megatron-dapo init DATA` writes a "
            f"recipe for this machine), {elsewhere}, {_OVERRIDE}",
        )


def duration(seconds: float) -> str:
    """Return a time in its largest unit: 40 s, 12 min, 5.3 h, 96 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            value = seconds / size
            return f"{value:.1f} {unit}" if value < 10 and unit == "h" else f"{value:,.0f} {unit}"
    return f"{max(1.0, seconds):.0f} s"
