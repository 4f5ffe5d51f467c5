"""One process of a training run: builds the parts, lets the loop go, exports and summarizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.checkpoints.atomic_directory import replace_directory
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.config.inputs import read_architecture
from megatron_dapo.config.loader import LoadedConfig, write_resolved
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import require_valid
from megatron_dapo.engines.base import CollectiveEngine
from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.megatron.critic import MegatronCritic
from megatron_dapo.megatron.parallel_state import initialize_process_group
from megatron_dapo.megatron.platform import use_deterministic_kernels
from megatron_dapo.megatron.trained_model import TrainedModel
from megatron_dapo.parallel.coordination import collective_timeout
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.precision import RECIPES, recipe_name
from megatron_dapo.recovery.checkpoint_store import Checkpoint, CheckpointStore, find_resume
from megatron_dapo.recovery.deadlines import exit_with_stacks, watch
from megatron_dapo.recovery.signals import StopRequest
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import CollectProgress
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.telemetry.summary import RunSummary, write_summary
from megatron_dapo.telemetry.trend import TrendSettings
from megatron_dapo.trainer.actor_critic import ActorCriticLearner
from megatron_dapo.trainer.actor_learner import PolicyLearner
from megatron_dapo.trainer.build_critic import export_critic_folder
from megatron_dapo.trainer.build_engines import start_engines
from megatron_dapo.trainer.build_learner import build_actor, build_learner
from megatron_dapo.trainer.build_rollout import RolloutContext, build_rollout_context, sample_builder
from megatron_dapo.trainer.checkpointing import Checkpoints, CriticState, RunProgress, RunState
from megatron_dapo.trainer.critic_learner import CriticLearner
from megatron_dapo.trainer.driven_engine import Engines
from megatron_dapo.trainer.evaluator import Evaluator
from megatron_dapo.trainer.loop import LoopSettings, Parts, TrainingLoop
from megatron_dapo.trainer.model_moves import CRITIC, POLICY, REFERENCE, ModelMoves
from megatron_dapo.trainer.parity_probe import Parity, ParityProbe, RoundedParityProbe, sequences_to_probe
from megatron_dapo.trainer.phases import Phases
from megatron_dapo.trainer.publisher import PausingPublisher
from megatron_dapo.trainer.recorder import Recorder, RunPaths
from megatron_dapo.trainer.rollout_phase import RolloutPhase
from megatron_dapo.trainer.topology import RunTopology, run_topology

logger = logging.getLogger(__name__)

NUM_PARITY_PROMPTS = 8
STOPPED_BY_SIGNAL = "stopped by a signal"


BuildLearner = Callable[..., "PolicyLearner | ActorCriticLearner"]


def run_training(loaded: LoadedConfig, rank: int, world_size: int) -> None:
    """From the configuration to the exported model. Every process of the run calls it."""
    start = time.perf_counter()
    with prepared_run(loaded, rank, world_size, build_learner) as run:
        reason = run.loop.run()
        exports = _exports(run, reason)
        run.summarize(reason, exports, time.perf_counter() - start)


@dataclass
class Run:
    """A run ready to go. `recorder` exists on rank 0, `actor` on the ranks that hold the policy."""

    config: Config
    rank: int
    loop: TrainingLoop
    actor: MegatronActor | None
    progress: RunProgress
    learner: PolicyLearner | ActorCriticLearner
    recorder: Recorder | None
    world: RunTopology

    def summarize(
        self, reason: str, exports: Mapping[str, Path], total_seconds: float, extra: Mapping[str, object] | None = None
    ) -> None:
        """summary.json, by rank 0."""
        if self.rank == 0:
            _summarize(self, reason, exports, total_seconds, extra or {})


@contextmanager
def prepared_run(loaded: LoadedConfig, rank: int, world_size: int, build: BuildLearner) -> Iterator[Run]:
    """A run with the learner that `build` makes, restored where there is a checkpoint; everything is closed behind it."""
    config = loaded.config
    require_valid(config, world_size, read_architecture(config.model.path))
    if config.run.deterministic:
        use_deterministic_kernels()
    initialize_process_group(collective_timeout(config.run.wait_timeout_seconds))
    if rank == 0:
        write_resolved(loaded, config.run.output_dir / "config.json")
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        yield _build(config, run_topology(config), build, stop, stack)
    dist.barrier()
    dist.destroy_process_group()


def _build(config: Config, world: RunTopology, build: BuildLearner, stop: StopRequest, stack: ExitStack) -> Run:
    rank = world.rank
    phases = Phases(PhaseTimer(list(PHASES)), _watch(config, world))
    connect = start_engines(config, world.policy, Rank0Commands(world.coordination), stack)
    actor = build_actor(config, world)
    engines = connect(actor)
    engine = engines.engine

    def show(progress: CollectProgress) -> None:
        phases.show("generate", progress.num_accepted, progress.num_groups)

    driver = build_rollout_context(config, engine, show, stack) if rank == 0 else None
    world.coordination.barrier("rank 0 to read the data")
    learner = build(config, actor, world, phases.phase)
    phases.moves = _moves(config, actor, learner)
    progress = RunProgress()
    rollout = _rollout(config, driver, engines, stack) if driver else None
    state = run_state(world, actor, learner, progress, rollout)
    store = CheckpointStore(config.checkpoint_dir, config.checkpoint.keep)
    checkpoints = Checkpoints(store, state, world.coordination.all_true)
    found = _restore(config, store, checkpoints, world)
    recorder = _recorder(config, rank, progress, stack)
    phases.view = recorder.phase if recorder else None
    parts = Parts(
        rollout=RolloutPhase(engine, rollout, sample_builder(config), world.coordination, engines.sleep),
        learner=learner,
        publisher=PausingPublisher(engines.publisher, rollout),
        parity=_parity(config, engines, driver, learner, world),
        evaluator=_evaluator(config, engine, driver, world.policy_layout, rollout),
        checkpoints=checkpoints,
        recorder=recorder,
        disagreement_share=driver.disagreement_share if driver else lambda: 0.0,
        epoch=lambda: driver.stream.epoch if driver else 0,
        has_converged=learner.has_converged,
    )
    loop = TrainingLoop(parts, _loop_settings(config), progress, phases, lambda: stop.requested)
    loop.saved_step = found.step if found else -1
    return Run(config, rank, loop, actor, progress, learner, recorder, world)


def _moves(
    config: Config, actor: MegatronActor | None, learner: PolicyLearner | ActorCriticLearner
) -> ModelMoves | None:
    """What moves this process's models between the phases, where one of them leaves the device."""
    if config.model.offload == "none" and (config.critic.offload == "none" or not config.has_critic):
        return None
    policy = learner.policy if isinstance(learner, ActorCriticLearner) else learner
    models = {
        POLICY: actor,
        REFERENCE: policy.reference if isinstance(policy, PolicyLearner) else None,
        CRITIC: local_critic(learner) if isinstance(learner, ActorCriticLearner) else None,
    }
    return ModelMoves({name: model for name, model in models.items() if isinstance(model, TrainedModel)})


def run_state(
    world: RunTopology,
    actor: MegatronActor | None,
    learner: PolicyLearner | ActorCriticLearner,
    progress: RunProgress,
    collector: AsyncCollector | None,
) -> RunState:
    """What a checkpoint holds, on this rank."""
    critic = _critic_state(world, learner) if isinstance(learner, ActorCriticLearner) else None
    layout = world.policy_layout
    return RunState(actor, progress, learner.counters, collector, layout, world.rank, world.size, critic)


def _critic_state(world: RunTopology, learner: ActorCriticLearner) -> CriticState:
    model = local_critic(learner)
    rank = world.critic.rank if world.critic.is_member else 0
    return CriticState(model, learner.critic.counters, world.critic_layout, rank)


def local_critic(learner: ActorCriticLearner) -> MegatronCritic | None:
    """This rank's part of the critic, on ranks that hold one."""
    critic = learner.critic.critic if isinstance(learner.critic, CriticLearner) else None
    assert critic is None or isinstance(critic, MegatronCritic), "a run's critic is Megatron's"
    return critic


def _rollout(config: Config, driver: RolloutContext, engines: Engines, stack: ExitStack) -> AsyncCollector:
    """Rank 0's batches; collected ahead where the servers have devices of their own."""
    apart = config.rollout.engine == "sglang" and config.sglang.placement == "disaggregated"
    ahead = config.rollout.max_staleness if apart else 0
    rollout = AsyncCollector(driver.collector, ahead, config.run.wait_timeout_seconds, engines.recover)
    stack.callback(rollout.close)
    return rollout


def _parity(
    config: Config,
    engines: Engines,
    driver: RolloutContext | None,
    learner: PolicyLearner | ActorCriticLearner,
    world: RunTopology,
) -> Parity | None:
    """The comparison of servers with the trainer, where there are servers. Collective among the policy's ranks."""
    if engines.served is None:
        return None
    prompts = [prompt.token_ids for prompt in driver.prompts] if driver else None
    # Every data-parallel rank needs one.
    assert world.policy.coordination is not None, "ranks with servers hold the policy"
    group = world.policy.coordination.group
    sequences = sequences_to_probe(prompts, max(NUM_PARITY_PROMPTS, world.policy_layout.data), group)
    compare = partial(learner.compare, temperature=1.0)
    if engines.as_served is None:
        probe = ParityProbe(sequences, compare, config.mismatch.step0_max_mean_abs, group)
    else:
        # Servers on GPUs round activations, and so does a trainer in FP8: neither does it as the other.
        in_fp8 = RECIPES[recipe_name(config.precision.recipe, config.model.dtype)].is_fp8
        rounds = torch.cuda.is_available() or in_fp8
        gate = config.mismatch_gate if rounds else config.mismatch.step0_max_mean_abs
        probe = RoundedParityProbe(sequences, compare, gate, engines.as_served, group)
    return Parity(probe, engines.served, config.sglang.parity_interval)


def _restore(config: Config, store: CheckpointStore, checkpoints: Checkpoints, world: RunTopology) -> Checkpoint | None:
    """Continue from the checkpoint that checkpoint.resume asks for, if any."""
    found = find_resume(
        config.checkpoint.resume, store, rank=world.rank, num_ranks=world.size, agree=world.coordination.all_true
    )
    if found is not None:
        checkpoints.restore(found)
        logger.info("continuing from %s", found.directory)
    return found


def _recorder(config: Config, rank: int, progress: RunProgress, stack: ExitStack) -> Recorder | None:
    if rank != 0:
        return None
    recorder = Recorder(config, progress.train_step, max(map(int, progress.evaluations), default=-1))
    stack.callback(recorder.close)
    return recorder


def _watch(config: Config, world: RunTopology) -> Callable[[str], AbstractContextManager[None]]:
    on_expired = partial(exit_with_stacks, config.run.output_dir, world.rank)
    return lambda name: watch(
        f"rank {world.rank}, phase {name}", config.run.wait_timeout_seconds, on_expired, world.coordination.progress
    )


def _evaluator(
    config: Config,
    engine: CollectiveEngine,
    driver: RolloutContext | None,
    layout: ParallelLayout,
    rollout: AsyncCollector | None,
) -> Evaluator | None:
    if not config.data.eval_paths:
        return None
    in_flight = 4 * config.rollout.slots_per_rank * layout.world_size
    task, paused = driver.evaluation if driver else None, rollout.paused if rollout else nullcontext
    return Evaluator(engine, task, in_flight, paused)


def _loop_settings(config: Config) -> LoopSettings:
    groups = config.rollout.prompts_per_step
    return LoopSettings(
        total_steps=config.run.total_steps,
        max_generation_steps=config.run.max_generation_steps,
        groups_per_step=groups,
        groups_per_round=max(1, round(groups * config.rollout.oversample)),
        evaluation_interval=config.evaluation.interval,
        evaluate_at_start=config.evaluation.at_start,
        evaluate_at_end=config.evaluation.at_end,
        checkpoint_interval=config.checkpoint.interval,
        mismatch_gate=config.mismatch_gate,
        mismatch_alarm=config.mismatch.alarm,
        mismatch_trend=TrendSettings(factor=config.mismatch.trend_factor, floor=config.mismatch.trend_floor),
    )


def _exports(run: Run, reason: str) -> dict[str, Path]:
    """What was trained as Hugging Face folders by their names, where the run came to its end; earlier ones are replaced once
    the new ones are whole.
    """
    config = run.config
    has_source = any(config.model.path.glob("*.safetensors"))  # random models have no folder whose form they could take
    if not config.checkpoint.export_huggingface or reason == STOPPED_BY_SIGNAL or not has_source:
        return {}
    paths = RunPaths(config.run.output_dir)
    if run.actor is not None:
        _export_policy(config, run.actor, run.world, paths.huggingface)
    if not isinstance(run.learner, ActorCriticLearner):
        return {"huggingface": paths.huggingface}
    critic = local_critic(run.learner)
    if critic is not None:
        export_critic_folder(config, critic, paths.critic)
    dist.barrier()  # whoever holds one of them waits for the other
    return {"huggingface": paths.huggingface, "critic": paths.critic}


def _export_policy(config: Config, actor: MegatronActor, world: RunTopology, target: Path) -> None:
    tensors, group = actor.tensors, world.policy.group
    parameters = {name: tensor.detach() for name, tensor in actor.named_local_parameters().items()}
    with replace_directory(target, group) as directory:
        export_to_huggingface(directory, config.model.path, tensors, parameters, group)


def _summarize(
    run: Run, reason: str, exports: Mapping[str, Path], total_seconds: float, extra: Mapping[str, object]
) -> None:
    config = run.config
    progress, paths = run.progress, RunPaths(config.run.output_dir)
    steps = sorted(int(step) for step in progress.evaluations)
    accuracy = {step: progress.evaluations[str(step)]["eval/avg_at_k"] for step in steps}
    seconds = max(progress.train_seconds, 1e-9)
    folders = {"tensorboard": str(paths.tensorboard), "samples": str(paths.samples), "metrics": str(paths.metrics)}
    summary = RunSummary(
        name=config.run.name,
        layout=run.world.policy_layout.describe(),
        stopped=reason,
        train_steps=progress.train_step,
        optimizer_steps=run.learner.counters.optimizer_steps,
        accuracy_before=accuracy.get(0),
        accuracy_after=accuracy.get(progress.train_step) if progress.train_step else None,
        train_seconds=progress.train_seconds,
        total_seconds=total_seconds,
        samples_per_s=progress.num_samples / seconds,
        generated_tokens_per_s=progress.num_generated_tokens / seconds,
        directories={**folders, **{name: str(folder) for name, folder in exports.items()}},
        extra={
            "lost_records": run.recorder.num_lost if run.recorder else 0,
            "evaluations": progress.evaluations,
            **extra,
        },
    )
    write_summary(paths.summary, summary)
