"""Data, verifiers and the collector from the configuration: what rank 0 collects with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_dapo.algorithms.length_reward import soft_overlong_penalty
from megatron_dapo.config.schema import Config
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.base import CollectiveEngine
from megatron_dapo.rewards.disagreement import Disagreement, ShadowedPool
from megatron_dapo.rollout.batch import CollectProgress
from megatron_dapo.rollout.collector import Collector, CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
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
    collector: Collector
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
    sample_scorer = SampleScorer(scorer, inputs.decode, _overlong_penalty(config))
    collector_inputs = CollectorInputs(stream, dataset.by_id, engine, sample_scorer, on_progress)
    collector = _collector(config, collector_inputs, sampling)
    return RolloutContext(
        inputs, scorer, collector, stream, tuple(dataset.prompts), _evaluation_task(config, inputs, pool)
    )


def _collector(config: Config, inputs: CollectorInputs, sampling: SamplingParams) -> Collector:
    """Windows for T-PPO, whole groups otherwise."""
    if config.algorithm.name == "tppo":
        return WindowCollector(inputs, config.rollout, config.window, sampling, config.run.seed)
    return GroupCollector(inputs, config.rollout, sampling, config.run.seed)


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
    return EvaluationTask(dataset, protocol, pool, inputs, RunPaths(config.run.output_dir).evaluations)
