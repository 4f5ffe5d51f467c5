"""Plans one step of a run by phase: memory of each kind of GPU, seconds by purpose, bytes moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_dapo.config.derive import as_critic
from megatron_dapo.config.distillation_schema import TeacherConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import Gpu
from megatron_dapo.plan.memory import EngineMemory, RunMemory, run_checkpoint_bytes, run_memory, teacher_architectures
from megatron_dapo.plan.memory.batch import step_responses
from megatron_dapo.plan.overlap import Collection, QueuedStep, overlapped_seconds
from megatron_dapo.plan.rollout import (
    KEPT_SHARE,
    READ_PROMPT_SHARE,
    Lengths,
    Queue,
    engine_rates,
    lengths_of,
    prefill_seconds,
    running_at_once,
    simulate,
)
from megatron_dapo.plan.training import LOG_PROBS, Batch, Model, Pass, add, pass_seconds, update_seconds
from megatron_dapo.plan.weight_sync import SyncTraffic, sync_seconds, sync_traffic


@dataclass(frozen=True)
class StepPlan:
    """A planned step of one layout."""

    config: Config
    processes: int  # the trainer's
    cluster: Cluster
    memory: RunMemory
    queue: Queue | None  # None: nothing is known of the engines
    seconds: Mapping[str, Mapping[str, float]]  # phase -> purpose -> seconds
    sync: SyncTraffic | None  # a weight update's; None: nothing is known of the engines
    checkpoint_bytes: int
    generated_tokens: float
    trained_tokens: float
    overlapped: float | None = None  # seconds of a step whose engines generate ahead; None: they do not, or hold nothing

    @property
    def overlaps(self) -> bool:
        """True if engines generate the next batch while the trainer works."""
        return self.config.sglang.placement == "disaggregated" and self.config.rollout.max_staleness > 0

    def of_phase(self, phase: str) -> float:
        """Return the seconds of a phase, 0 if the run does not have it."""
        return sum(self.seconds.get(phase, {}).values())

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        if self.overlapped is not None:
            return self.overlapped
        generate, update, rest = self.of_phase("generate"), self.of_phase("weight_update"), self.trainer
        return update + (max(generate, rest) if self.overlaps else generate + rest)

    @property
    def trainer(self) -> float:
        """Seconds of the trainer's phases."""
        return sum(self.of_phase(phase) for phase in self.seconds if phase not in ("generate", "weight_update"))

    @property
    def peak(self) -> int:
        """Bytes of the fullest GPU at its peak."""
        return max(self.memory.trainer, self.memory.engine)


def plan_step(
    config: Config,
    architecture: ModelArchitecture,
    processes: int,
    cluster: Cluster,
    gpu: Gpu,
    mean_response: float | None = None,
) -> StepPlan:
    """Return the plan of a step of `processes`; the layouts must fit the model."""
    memory = run_memory(config, architecture, processes, cluster)
    lengths = step_lengths(config, mean_response)
    generated = generated_responses(config)
    seconds, queue, sync = dict[str, Mapping[str, float]](), None, None
    if memory.engine_memory is not None and config.rollout.engine == "sglang":
        engine, engines = memory.engine_memory, memory.num_engines
        queue = generation_queue(config, architecture, engine, engines, lengths, gpu)
        sync = sync_traffic(config, architecture, processes, cluster)
        prefill = prefill_seconds(config, engine_rates(config, architecture, engine, gpu), queue, lengths)
        seconds["generate"] = {**_generation(queue), "prefill": prefill}
    seconds |= trainer_seconds(config, architecture, processes, cluster, gpu, lengths, memory)
    if sync:
        seconds["weight_update"] = sync_seconds(config, sync, cluster, gpu)
    saved = run_checkpoint_bytes(config, architecture)
    trained = Batch.of(step_responses(config), lengths).tokens
    plan = StepPlan(config, processes, cluster, memory, queue, seconds, sync, saved, generated * lengths.mean, trained)
    is_continued = config.rollout.partial_rollout or config.algorithm.name == "tppo"
    if plan.overlaps and queue is not None and memory.engine_memory is not None and is_continued:
        rates = engine_rates(config, architecture, memory.engine_memory, gpu)
        running = running_at_once(config, memory.engine_memory, lengths)
        return replace(plan, overlapped=overlapped_seconds(rates, lengths, _queued_step(plan, queue, running)).step)
    return plan


def _queued_step(plan: StepPlan, queue: Queue, running: int) -> QueuedStep:
    rollout = plan.config.rollout
    return QueuedStep(
        queue.responses,
        running,
        plan.trainer,
        plan.of_phase("weight_update"),
        rollout.max_staleness,
        rollout.oversample,
        rollout.ahead,
        Collection.of(plan.config),
    )


def step_lengths(config: Config, mean_response: float | None = None) -> Lengths:
    """Return the lengths that one step generates: of windows under T-PPO, otherwise of whole responses."""
    lengths = lengths_of(config, mean_response)
    return lengths.in_windows(config.window.tokens) if config.algorithm.name == "tppo" else lengths


def generated_responses(config: Config) -> float:
    """Return the number of responses that a step generates, including those it drops."""
    return step_responses(config) / (KEPT_SHARE if config.rollout.filter_groups else 1.0)


def trainer_seconds(
    config: Config,
    architecture: ModelArchitecture,
    processes: int,
    cluster: Cluster,
    gpu: Gpu,
    lengths: Lengths,
    memory: RunMemory,
) -> dict[str, Mapping[str, float]]:
    """Return the seconds of the trainer's phases, by purpose."""
    seconds: dict[str, Mapping[str, float]] = {}
    responses, per_node = step_responses(config), cluster.gpus_per_node or 1
    own, prompts, training = config.num_critic_processes, config.rollout.prompts_per_step, config.training
    policy = Model(config, architecture, processes - own, gpu, per_node)
    batch = Batch.of(responses, lengths)
    times = config.algorithm.loss.needs_old_logprobs + config.algorithm.needs_reference
    seconds["log_probs"] = add(pass_seconds(policy, batch, LOG_PROBS), times=times)
    mini = max(1, prompts // training.mini_batch_prompts)
    for teacher, shape in zip(config.distillation.models, teacher_architectures(config, architecture), strict=True):
        model = Model(config, shape, processes - own, gpu, per_node)
        read = lengths
        if teacher.prompt:
            longest = READ_PROMPT_SHARE * config.data.max_prompt_tokens
            read = replace(lengths, prompt=max(lengths.prompt, longest))
        taught = Batch.of(max(1, round(responses * taught_share(config, teacher))), read)
        once = pass_seconds(model, taught, LOG_PROBS)
        seconds["log_probs"] = add(seconds["log_probs"], add(once, times=training.epochs))
    seconds["train"] = _training(policy, responses, lengths, mini, training.epochs)
    if config.has_critic:
        critic = Model(as_critic(config), architecture, own or processes, gpu, per_node, has_value_head=True)
        mini = max(1, prompts // (config.critic.mini_batch_prompts or training.mini_batch_prompts))
        trained = _training(critic, responses, lengths, mini, config.critic.epochs)
        seconds["train_critic"] = add(pass_seconds(critic, batch, LOG_PROBS), trained)
    if moved := _offload_seconds(config, memory, gpu):
        seconds["offload"] = moved
    return seconds


def taught_share(config: Config, teacher: TeacherConfig) -> float:
    """Return the share of a step's responses that a teacher reads: by the weights of data.sources, without them all."""
    weights = {source.label: source.weight for source in config.data.sources}
    if not teacher.sources or not weights:
        return 1.0
    return sum(weights.get(name, 0.0) for name in teacher.sources) / sum(weights.values())


def generation_queue(
    config: Config,
    architecture: ModelArchitecture,
    engine: EngineMemory,
    num_engines: int,
    lengths: Lengths,
    gpu: Gpu,
) -> Queue:
    """Return how one of the servers generates its share of a step's responses."""
    rates = engine_rates(config, architecture, engine, gpu)
    # Windows end with the step; so do whole responses if unfinished ones are carried over.
    has_tail = not config.rollout.partial_rollout
    each = max(1, round(generated_responses(config) / max(1, num_engines)))
    return simulate(rates, lengths, each, running_at_once(config, engine, lengths), has_tail)


def _generation(queue: Queue) -> dict[str, float]:
    return {
        "reading": queue.read * queue.seconds,
        "products": queue.products * queue.seconds,
        "launches_and_sampling": queue.overhead * queue.seconds,
    }


def _training(model: Model, responses: int, lengths: Lengths, mini_batches: int, epochs: int) -> dict[str, float]:
    """Return the seconds of all optimizer steps of a train step."""
    batch = Batch.of(max(1, responses // mini_batches), lengths)
    one = add(pass_seconds(model, batch, Pass.of(model.config, model.has_adapters)), update_seconds(model))
    return add(one, times=mini_batches * epochs)


def _offload_seconds(config: Config, memory: RunMemory, gpu: Gpu) -> dict[str, float]:
    """Return the seconds for offloading and onloading models once per step."""
    found = {"policy": 2 * memory.policy.moved(config.model.offload) / gpu.host_bytes_s}
    if memory.critic:
        found["critic"] = 2 * memory.critic.moved(config.critic.offload) / gpu.host_bytes_s
    return {name: seconds for name, seconds in found.items() if seconds}


def most_seconds(plan: StepPlan) -> tuple[str, str, float]:
    """Return the phase and the purpose that take most of the step, and their seconds."""
    parts = [(phase, name, seconds) for phase, found in plan.seconds.items() for name, seconds in found.items()]
    return max(parts, key=lambda part: part[2])
