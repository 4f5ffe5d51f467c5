"""Data, verifiers and the collector from the configuration: what rank 0 collects with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_dapo.algorithms.dynamic_sampling import GroupFilter
from megatron_dapo.algorithms.length_reward import soft_overlong_penalty
from megatron_dapo.config.schema import Config
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.base import CollectiveEngine
from megatron_dapo.rewards.disagreement import Disagreement, ShadowedPool
from megatron_dapo.rollout.batch import CollectProgress
from megatron_dapo.rollout.batch_collector import BatchCollector
from megatron_dapo.rollout.buffer import ReplayBuffer
from megatron_dapo.rollout.collector import Collector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.settings import CollectorSettings, WindowSettings
from megatron_dapo.rollout.windows import WindowCollector
from megatron_dapo.trainer.evaluator import EvaluationTask
from megatron_dapo.trainer.inputs import (
    ModelInputs,
    evaluation_protocol,
    load_eval_dataset,
    load_train_dataset,
    open_verifier_pool,
    read_model_inputs,
)
from megatron_dapo.trainer.recorder import RunPaths
from megatron_dapo.trainer.train_samples import TrainSamples, build_critic_samples, build_train_samples
from megatron_dapo.types import Group, Prompt, SamplingParams


@dataclass
class RolloutContext:
    """What only the rank that drives the rollout has: data, verifiers, collector."""

    inputs: ModelInputs
    scorer: Any  # VerifierPool or ShadowedPool
    collector: BatchCollector
    stream: PromptStream
    prompts: tuple[Prompt, ...]
    evaluation: EvaluationTask | None

    def disagreement_share(self) -> float:
        """Share of responses so far that the shadow verifier scores otherwise; 0 without one."""
        if not isinstance(self.scorer, ShadowedPool):
            return 0.0
        statistics = self.scorer.statistics()
        return statistics.num_disagreements / max(1, statistics.num_compared)


def build_rollout_context(
    config: Config, engine: CollectiveEngine, on_progress: Callable[[CollectProgress], None], stack: ExitStack
) -> RolloutContext:
    """Data, verifiers and the collector; `stack` closes the verifiers' processes."""
    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    scorer = stack.enter_context(_scorer(config))
    pool = scorer.primary if isinstance(scorer, ShadowedPool) else scorer
    dataset = load_train_dataset(config, inputs, pool)
    stream = PromptStream(dataset.prompt_ids, config.data.shuffle_seed, config.data.max_epochs or None)

    sampling = SamplingParams(
        config.rollout.temperature,
        config.rollout.top_p,
        config.rollout.top_k,
        config.rollout.max_response_tokens,
        inputs.stop_tokens.token_ids,
    )
    parts = _CollectorParts(
        stream, dataset.by_id, engine, SampleScorer(scorer, inputs.decode, _overlong_penalty(config)), on_progress
    )
    collector = _COLLECTORS[config.algorithm.name](config, parts, sampling)
    return RolloutContext(
        inputs, scorer, collector, stream, tuple(dataset.prompts), _evaluation_task(config, inputs, pool)
    )


@dataclass(frozen=True)
class _CollectorParts:
    """What every kind of collector is made of."""

    stream: PromptStream
    prompts: Mapping[str, Prompt]
    engine: CollectiveEngine
    scorer: SampleScorer
    on_progress: Callable[[CollectProgress], None]


def _group_collector(config: Config, parts: _CollectorParts, sampling: SamplingParams) -> Collector:
    """Whole groups, filtered and refilled (dynamic sampling)."""
    rollout = config.rollout
    settings = CollectorSettings(
        group_size=rollout.group_size,
        sampling=sampling,
        seed=config.run.seed,
        oversample=rollout.oversample,
        max_num_gen_batches=rollout.max_num_gen_batches,
        on_exhausted=rollout.on_exhausted,
        partial="continue" if rollout.partial_rollout else "restart",
    )
    group_filter = GroupFilter(rollout.accuracy_min, rollout.accuracy_max) if rollout.filter_groups else None
    buffer = ReplayBuffer(max_staleness=rollout.max_staleness)
    return Collector(
        parts.stream, parts.prompts, parts.engine, parts.scorer, buffer, settings, group_filter, parts.on_progress
    )


def _window_collector(config: Config, parts: _CollectorParts, sampling: SamplingParams) -> WindowCollector:
    """A window of every response that is worked on."""
    settings = WindowSettings(
        group_size=config.rollout.group_size,
        sampling=sampling,
        seed=config.run.seed,
        window_tokens=config.window.tokens,
        windows_per_step=config.window.windows_per_step,
        on_exhausted=config.rollout.on_exhausted,
    )
    return WindowCollector(parts.stream, parts.prompts, parts.engine, parts.scorer, settings, parts.on_progress)


_COLLECTORS: dict[str, Callable[[Config, _CollectorParts, SamplingParams], BatchCollector]] = {
    "dapo": _group_collector,
    "ppo": _group_collector,
    "vapo": _group_collector,
    "tppo": _window_collector,
}


def _scorer(config: Config) -> Any:
    """The verifier pool; with a second pool in its shadow where one is asked for."""
    primary = open_verifier_pool(config.reward)
    if not config.reward.shadow_verifier:
        return primary
    path = RunPaths(config.run.output_dir).disagreements
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(disagreement: Disagreement) -> None:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(disagreement.record(), ensure_ascii=False) + "\n")

    return ShadowedPool(primary, open_verifier_pool(config.reward, config.reward.shadow_verifier), write)


def _overlong_penalty(config: Config) -> Callable[[int], float] | None:
    settings = config.reward.overlong_punishment
    if not settings.enabled:
        return None
    return lambda length: float(
        soft_overlong_penalty(torch.tensor([length]), settings.max_length, settings.cache_length, settings.factor)[0]
    )


def sample_builder(config: Config) -> Callable[[Sequence[Group]], TrainSamples]:
    """Turns groups into train samples: by the configured advantage, or with the context a critic needs."""
    filter_overlong = config.reward.overlong_filter
    if config.has_critic:
        return partial(build_critic_samples, filter_overlong=filter_overlong)
    return partial(build_train_samples, advantage=config.algorithm.advantage, filter_overlong=filter_overlong)


def _evaluation_task(config: Config, inputs: ModelInputs, pool: Any) -> EvaluationTask | None:
    if not config.data.eval_paths:
        return None
    dataset = load_eval_dataset(config, inputs, pool)
    protocol = evaluation_protocol(config, str(config.model.path), dataset, inputs.stop_tokens, pool.version)
    return EvaluationTask(dataset, protocol, pool.score_many, inputs, RunPaths(config.run.output_dir).evaluations)
