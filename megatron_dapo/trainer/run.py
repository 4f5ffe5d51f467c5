"""Builds a run from its configuration and lets it go: the one place where configuration meets the parts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.advantages import build_advantage_estimator
from megatron_dapo.algorithms.dynamic_sampling import GroupFilter
from megatron_dapo.algorithms.length_reward import soft_overlong_penalty
from megatron_dapo.algorithms.off_policy import OffPolicyCorrection
from megatron_dapo.algorithms.policy_loss import build_policy_loss
from megatron_dapo.bridge.architecture import ModelArchitecture
from megatron_dapo.bridge.export import export_to_huggingface
from megatron_dapo.bridge.load import load_from_huggingface
from megatron_dapo.bridge.weight_sync import replica_sync
from megatron_dapo.config.architecture import read_architecture
from megatron_dapo.config.loader import LoadedConfig, write_resolved
from megatron_dapo.config.schema import AlgorithmConfig, Config
from megatron_dapo.config.validator import require_valid
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.megatron.model_config import DTYPES, ModelSettings
from megatron_dapo.megatron.optimizer import OptimizerSettings
from megatron_dapo.megatron.parallel_state import initialize_process_group
from megatron_dapo.parallel.collectives import max_over
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.recovery.checkpoint_store import CheckpointStore, find_resume
from megatron_dapo.recovery.deadlines import exit_with_stacks, watch
from megatron_dapo.recovery.signals import StopRequest
from megatron_dapo.rewards.disagreement import Disagreement, ShadowedPool
from megatron_dapo.rollout.buffer import ReplayBuffer
from megatron_dapo.rollout.collector import CollectProgress, Collector, CollectorSettings, keep_every_group
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.telemetry.summary import RunSummary, write_summary
from megatron_dapo.trainer.checkpointing import Checkpoints, RunProgress, RunState
from megatron_dapo.trainer.evaluator import EvaluationTask, Evaluator
from megatron_dapo.trainer.inputs import (
    ModelInputs,
    evaluation_protocol,
    load_eval_dataset,
    load_train_dataset,
    open_verifier_pool,
    read_model_inputs,
)
from megatron_dapo.trainer.learner import Learner, LearnerSettings
from megatron_dapo.trainer.learning_rate import LearningRateSchedule
from megatron_dapo.trainer.loop import LoopSettings, Parts, TrainingLoop
from megatron_dapo.trainer.objective import PolicyObjective
from megatron_dapo.trainer.publisher import WeightPublisher
from megatron_dapo.trainer.recorder import Recorder, RunPaths
from megatron_dapo.trainer.rollout_phase import RolloutPhase
from megatron_dapo.trainer.train_samples import TrainSamples, build_train_samples
from megatron_dapo.types import Group, SamplingParams

logger = logging.getLogger(__name__)


def run_training(loaded: LoadedConfig, rank: int, world_size: int) -> None:
    """One process of a training run, from the configuration to the exported model. Every process of the run calls it."""
    config = loaded.config
    start = time.perf_counter()
    require_valid(config, world_size, read_architecture(config.model.path))
    torch.set_num_threads(max(1, torch.get_num_threads()))
    initialize_process_group(config.run.wait_timeout_seconds)
    if rank == 0:
        write_resolved(loaded, config.run.folder / "config.json")
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        run = _build(config, rank, parallel_layout(config, world_size), stop, stack)
        reason = run.loop.run()
        export = _export(config, run.actor, reason)
        if rank == 0:
            _summarise(config, run, reason, export, time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()


def parallel_layout(config: Config, world_size: int) -> ParallelLayout:
    """The layout the configuration asks for in a world of that size."""
    p = config.parallel
    return ParallelLayout(
        world_size,
        tensor=p.tensor,
        pipeline=p.pipeline,
        virtual_pipeline=p.virtual_pipeline,
        context=p.context,
        expert=p.expert,
        sequence_parallel=p.sequence_parallel,
    )


@dataclass
class _Run:
    """A run ready to go."""

    loop: TrainingLoop
    actor: MegatronActor
    progress: RunProgress
    learner: Learner
    recorder: Recorder | None
    layout: ParallelLayout


@dataclass
class _Rank0:
    """What only rank 0 has: data, verifiers, collector."""

    inputs: ModelInputs
    scorer: Any  # VerifierPool or ShadowedPool
    collector: Collector
    stream: PromptStream
    evaluation: EvaluationTask | None


def _build(config: Config, rank: int, layout: ParallelLayout, stop: StopRequest, stack: ExitStack) -> _Run:
    architecture = ModelArchitecture.from_folder(config.model.path)
    actor = _actor(config, architecture, layout)
    engine = _engine(config)
    timer = PhaseTimer(list(PHASES))
    recorder_box: list[Recorder] = []
    rank0 = _rank0(config, engine, recorder_box, stack) if rank == 0 else None
    # Loading and checking data takes as long as it takes; nobody waits for it inside another collective.
    dist.barrier()

    learner = Learner(
        actor,
        _objective(config.algorithm, actor),
        layout,
        rank,
        _learner_settings(config),
        _schedule(config),
        lambda name: run_loop[0].phase(name),
        reference=_reference(config, architecture, layout),
    )
    progress = RunProgress()
    agree = _agree
    store = CheckpointStore(config.checkpoint_folder, config.checkpoint.keep)
    state = RunState(actor, progress, learner.counters, rank0.collector if rank0 else None, layout, rank)
    checkpoints = Checkpoints(store, state, agree)
    found = find_resume(config.checkpoint.resume, store, rank=rank, num_ranks=layout.world_size, agree=agree)
    if found is not None:
        checkpoints.restore(found)
        logger.info("continuing from %s, train step %d", found.folder, progress.train_step)
    recorder = None
    if rank == 0:
        recorder = Recorder(config, progress.train_step + 1)
        recorder_box.append(recorder)
        stack.callback(recorder.close)
    sync = replica_sync(actor.tensors, DTYPES[config.model.dtype], dist.group.WORLD)
    parts = Parts(
        rollout=RolloutPhase(engine, rank0.collector if rank0 else None, _sample_builder(config)),
        learner=learner,
        publisher=WeightPublisher(sync, actor.named_local_parameters, engine),
        evaluator=_evaluator(config, engine, rank0, layout),
        checkpoints=checkpoints,
        recorder=recorder,
        disagreement_share=_disagreement_share(rank0),
        epoch=lambda: rank0.stream.epoch if rank0 else 0,
    )
    loop = TrainingLoop(parts, _loop_settings(config), progress, timer, _watch(config, rank), lambda: stop.requested)
    run_loop = [loop]
    if found is not None:
        loop.already_saved(found.step)
    return _Run(loop, actor, progress, learner, recorder, layout)


def _agree(ok: bool) -> bool:
    """True on every rank if every rank passed True; also a barrier."""
    return max_over({"failed": float(not ok)})["failed"] == 0.0


def _watch(config: Config, rank: int) -> Callable[[str], AbstractContextManager[None]]:
    on_expired = exit_with_stacks(config.run.folder, rank)
    return lambda name: watch(f"phase {name}", config.run.wait_timeout_seconds, lambda: f"rank {rank} is in phase {name}", on_expired)


# The policy


def _actor(config: Config, architecture: ModelArchitecture, layout: ParallelLayout) -> MegatronActor:
    def load(parameters: Any, tensors: Any) -> None:
        report = load_from_huggingface(config.model.path, tensors, dist.get_rank(), parameters)
        logger.info("loaded %d of %d tensors from %s", report.num_tensors, report.num_model_tensors, config.model.path)

    optimizer = config.optimizer
    settings = ActorSettings(
        model=ModelSettings(config.model.dtype, config.model.recompute),
        optimizer=OptimizerSettings(
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            clip_grad=optimizer.clip_grad,
            distributed=config.parallel.distributed_optimizer,
        ),
        chunk_tokens=config.model.logprob_chunk_tokens,
        seed=config.run.seed,
        collective_timeout_s=config.run.wait_timeout_seconds,
    )
    return MegatronActor(architecture, layout, settings, load)


def _reference(config: Config, architecture: ModelArchitecture, layout: ParallelLayout) -> MegatronActor | None:
    """The initial policy, kept for the KL loss. It is never trained, so its optimizer state stays unmade."""
    return _actor(config, architecture, layout) if config.algorithm.kl_loss_coefficient > 0 else None


def _objective(algorithm: AlgorithmConfig, actor: MegatronActor) -> PolicyObjective:
    settings = {"clip_ratio_low": algorithm.clip_ratio_low, "clip_ratio_high": algorithm.clip_ratio_high}
    if algorithm.policy_loss == "ppo_clip":
        settings = {"clip_ratio": algorithm.clip_ratio_low}
    off_policy = algorithm.off_policy
    correction = None
    if off_policy.correction != "none":
        correction = OffPolicyCorrection(
            off_policy.correction, off_policy.level, upper=off_policy.high, lower=off_policy.low, batch_normalise=off_policy.normalise
        )
    return PolicyObjective(
        build_policy_loss(algorithm.policy_loss, settings, algorithm.dual_clip or None),
        correction=correction,
        entropy_coefficient=algorithm.entropy_coefficient,
        kl_coefficient=algorithm.kl_loss_coefficient,
        kl_estimator=algorithm.kl_estimator,
        reduce_over_sequence_parts=_sum_over_context(actor),
    )


def _sum_over_context(actor: MegatronActor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sums of a sequence's parts over the context ranks that hold them."""
    group = actor.groups.context
    if group.size() == 1:
        return lambda sums: sums

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        total = sums.clone()
        dist.all_reduce(total, group=group)
        return total

    return reduce


def _learner_settings(config: Config) -> LearnerSettings:
    training = config.training
    return LearnerSettings(
        groups_per_mini_batch=training.mini_batch_prompts,
        epochs=training.epochs,
        micro_batch_tokens=training.micro_batch_tokens,
        aggregation=config.algorithm.aggregation,
        aggregation_length=config.aggregation_length,
        temperature=config.rollout.temperature,
        shuffle_seed=config.run.seed if training.shuffle else None,
        schedule_counts_optimizer_steps=config.optimizer.warmup_unit == "optimizer_step",
        max_consecutive_skips=training.max_consecutive_skips,
    )


def _schedule(config: Config) -> LearningRateSchedule:
    optimizer = config.optimizer
    steps_each = config.rollout.prompts_per_step // config.training.mini_batch_prompts * config.training.epochs
    scale = steps_each if optimizer.warmup_unit == "optimizer_step" else 1
    return LearningRateSchedule(
        peak=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        total_steps=config.run.total_steps * scale,
        shape=optimizer.schedule,
        minimum=optimizer.min_learning_rate,
    )


# Generation


def _engine(config: Config) -> DistributedEmbeddedEngine:
    settings = EmbeddedEngineSettings(
        max_slots=config.rollout.slots_per_rank,
        max_length=config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, config.evaluation_response_tokens),
        dtype=DTYPES[config.model.dtype],
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    engine = EmbeddedEngine.from_folder(config.model.path, settings, trust_remote_code=config.model.trust_remote_code)
    return DistributedEmbeddedEngine(engine, dist.group.WORLD)


def _rank0(config: Config, engine: DistributedEmbeddedEngine, recorder: list[Recorder], stack: ExitStack) -> _Rank0:
    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    scorer = stack.enter_context(_scorer(config))
    pool = scorer.primary if isinstance(scorer, ShadowedPool) else scorer
    dataset = load_train_dataset(config, inputs, pool)
    stream = PromptStream(dataset.prompt_ids, config.data.shuffle_seed, config.data.max_epochs or None)

    def show(progress: CollectProgress) -> None:
        if recorder:
            recorder[0].phase("generate", progress.num_accepted, progress.num_groups)

    rollout = config.rollout
    collector = Collector(
        stream,
        dataset.by_id,
        engine,
        SampleScorer(scorer, inputs.decode, _overlong_penalty(config)),
        ReplayBuffer(max_staleness=rollout.max_staleness),
        CollectorSettings(
            group_size=rollout.group_size,
            sampling=SamplingParams(
                rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_response_tokens, inputs.stop_tokens.token_ids
            ),
            seed=config.run.seed,
            oversample=rollout.oversample,
            max_rounds=rollout.max_generation_rounds,
            on_exhausted=rollout.on_exhausted,
        ),
        GroupFilter(rollout.accuracy_min, rollout.accuracy_max).verdict if rollout.filter_groups else keep_every_group,
        show,
    )
    return _Rank0(inputs, scorer, collector, stream, _evaluation_task(config, inputs, pool))


def _scorer(config: Config) -> Any:
    """The verifier pool; with a second pool in its shadow where one is asked for."""
    primary = open_verifier_pool(config.reward)
    if not config.reward.shadow_verifier:
        return primary
    path = RunPaths(config.run.folder).disagreements
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(disagreement: Disagreement) -> None:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(disagreement.record(), ensure_ascii=False) + "\n")

    return ShadowedPool(primary, open_verifier_pool(config.reward, config.reward.shadow_verifier), write)


def _disagreement_share(rank0: _Rank0 | None) -> Callable[[], float]:
    """Share of responses so far that the shadow verifier judged otherwise."""

    def share() -> float:
        if rank0 is None or not isinstance(rank0.scorer, ShadowedPool):
            return 0.0
        statistics = rank0.scorer.statistics
        return statistics.num_disagreements / max(1, statistics.num_compared)

    return share


def _overlong_penalty(config: Config) -> Callable[[int], float] | None:
    settings = config.reward.overlong_punishment
    if not settings.enabled:
        return None
    return lambda length: float(
        soft_overlong_penalty(torch.tensor([length]), settings.max_length, settings.cache_length, settings.factor)[0]
    )


def _sample_builder(config: Config) -> Callable[[Any], TrainSamples]:
    algorithm = config.algorithm
    settings = {"std": algorithm.grpo_std} if algorithm.advantage == "grpo" else {}
    estimator = build_advantage_estimator(algorithm.advantage, settings)

    def build(groups: list[Group]) -> TrainSamples:
        return build_train_samples(groups, estimator, filter_overlong=config.reward.overlong_filter)

    return build


# Evaluation, export, summary


def _evaluation_task(config: Config, inputs: ModelInputs, pool: Any) -> EvaluationTask | None:
    if not config.data.eval_paths:
        return None
    dataset = load_eval_dataset(config, inputs, pool)
    protocol = evaluation_protocol(config, str(config.model.path), dataset, inputs.stop_tokens, pool.version)
    return EvaluationTask(dataset, protocol, pool.score_many, inputs, RunPaths(config.run.folder).evaluations)


def _evaluator(config: Config, engine: DistributedEmbeddedEngine, rank0: _Rank0 | None, layout: ParallelLayout) -> Evaluator | None:
    if not config.data.eval_paths:
        return None
    in_flight = 4 * config.rollout.slots_per_rank * layout.world_size
    return Evaluator(engine, rank0.evaluation if rank0 else None, in_flight)


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
        mismatch_gate=config.mismatch.step0_max_mean_abs,
        mismatch_alarm=config.mismatch.alarm,
    )


def _export(config: Config, actor: MegatronActor, reason: str) -> Path | None:
    """The trained policy as a Hugging Face folder, where the run came to its end; an earlier one is replaced once the new one is whole."""
    if not config.checkpoint.export_huggingface or reason == "stopped by a signal":
        return None
    target = RunPaths(config.run.folder).huggingface
    fresh = target.with_name(target.name + ".new")
    if dist.get_rank() == 0:
        _remove(fresh)
    dist.barrier()
    parameters = {name: tensor.detach() for name, tensor in actor.named_local_parameters().items()}
    export_to_huggingface(fresh, config.model.path, actor.tensors, parameters, dist.group.WORLD)
    if dist.get_rank() == 0:
        _remove(target)
        fresh.rename(target)
    return target


def _remove(folder: Path) -> None:
    import shutil

    if folder.is_dir():
        shutil.rmtree(folder)


def _summarise(config: Config, run: _Run, reason: str, export: Path | None, total_seconds: float) -> None:
    progress, paths = run.progress, RunPaths(config.run.folder)
    steps = sorted(int(step) for step in progress.evaluations)
    accuracy = {step: progress.evaluations[str(step)]["eval/avg_at_k"] for step in steps}
    seconds = max(progress.train_seconds, 1e-9)
    folders = {"tensorboard": str(paths.tensorboard), "samples": str(paths.samples), "metrics": str(paths.metrics)}
    summary = RunSummary(
        name=config.run.name,
        layout=run.layout.describe(),
        stopped=reason,
        train_steps=progress.train_step,
        optimizer_steps=run.learner.counters.optimizer_steps,
        accuracy_before=accuracy.get(0),
        accuracy_after=accuracy.get(progress.train_step) if progress.train_step else None,
        train_seconds=progress.train_seconds,
        total_seconds=total_seconds,
        samples_per_s=progress.num_samples / seconds,
        generated_tokens_per_s=progress.num_generated_tokens / seconds,
        folders={**folders, **({"huggingface": str(export)} if export else {})},
        extra={"lost_records": run.recorder.num_lost if run.recorder else 0, "evaluations": progress.evaluations},
    )
    write_summary(paths.summary, summary)
