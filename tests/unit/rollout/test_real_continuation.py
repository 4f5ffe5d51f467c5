"""Partial rollouts with a real engine: however often responses are stopped, they are those of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.types import Prompt, SamplingParams

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make_engine() -> EmbeddedEngine:
    """The same small sharp model every time, serving version 0; three tokens a poll."""
    torch.manual_seed(0)
    config = Qwen2Config(**CONFIG)
    model = AutoModelForCausalLM.from_config(config)
    settings = EmbeddedEngineSettings(max_slots=6, max_length=64, ticks_per_poll=3)
    engine = EmbeddedEngine(config, settings)
    source = stored_tensors(dict(model.named_parameters()))
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(source[name].detach() * 5.0)
    engine.set_policy_version(0)
    return engine


def make_collector(engine: EmbeddedEngine) -> GroupCollector:
    import rollout_world

    prompts = {f"p{i}": Prompt(f"p{i}", (), (3 + i, 7, 11 + i), "1") for i in range(12)}
    inputs = CollectorInputs(
        PromptStream(list(prompts), seed=0),
        prompts,
        engine,
        SampleScorer(rollout_world.FakeVerifier(), rollout_world.decode),
    )
    config = RolloutConfig(group_size=4, max_staleness=2, partial_rollout=True, filter_groups=False)
    return GroupCollector(inputs, config, SamplingParams(max_new_tokens=40, stop_token_ids=(2, 5, 9)), seed=1)


@pytest.mark.parametrize("seed", range(3))
def test_responses_stopped_at_random_are_those_of_an_undisturbed_run(make_world: Callable, seed: int) -> None:
    chance = random.Random(seed)
    engine = make_engine()
    collector = make_collector(engine)

    def disturb() -> None:
        if chance.random() < 0.5:
            collector.hold()
            assert engine.num_unfinished == 0 and collector.accounting().is_balanced
        if engine.policy_version == 0 and chance.random() < 0.3:
            collector.hold()
            engine.set_policy_version(1)  # The weights stay.

    expected = make_collector(make_engine()).collect(6)
    actual = collector.collect(6, training_version=1, between_polls=disturb)
    assert actual.statistics.num_continued > 0 and actual.statistics.num_discarded_tokens == 0
    assert actual.statistics.num_tokens == expected.statistics.num_tokens
    spans = set()
    for before, after in zip(expected.groups, actual.groups, strict=True):
        for one, two in zip(before.samples, after.samples, strict=True):
            assert two.completion.token_ids.tolist() == one.completion.token_ids.tolist()
            assert two.completion.finish_reason == one.completion.finish_reason
            torch.testing.assert_close(
                torch.tensor(two.completion.logprobs), torch.tensor(one.completion.logprobs), rtol=1e-4, atol=1e-4
            )
            assert two.completion.versions[-1].end == len(two.completion.token_ids)
            spans.add(len({run.version for run in two.completion.versions}))
    assert spans == {1, 2}, "some responses were sampled by both versions"
