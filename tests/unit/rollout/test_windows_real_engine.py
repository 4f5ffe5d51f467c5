"""Windows with a real engine: with unchanged weights they join to the unsplit response."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_dapo.config.algorithm_schema import WindowConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.rollout.collector import CollectorInputs, sample_seed
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams, ScoredSample

SAMPLING = SamplingParams(max_new_tokens=40, stop_token_ids=(2, 5))
PROMPTS = {f"p{i}": Prompt(f"p{i}", (), (3 + i, 7, 11 + i), "1") for i in range(12)}
SEED, GROUP_SIZE = 1, 4


def make_engine() -> EmbeddedEngine:
    """The same small sharp model every time, serving version 0; three tokens a poll, fewer slots than requests."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = AutoModelForCausalLM.from_config(config)
    engine = EmbeddedEngine(config, EmbeddedEngineSettings(max_slots=6, max_length=64, ticks_per_poll=3))
    source = stored_tensors(dict(model.named_parameters()))
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(source[name].detach() * 5.0)
    engine.set_policy_version(0)
    return engine


def make_collector(engine: EmbeddedEngine, window_tokens: int) -> WindowCollector:
    import rollout_world

    inputs = CollectorInputs(
        PromptStream(list(PROMPTS), seed=0, max_epochs=1),
        PROMPTS,
        engine,
        SampleScorer(rollout_world.FakeVerifier(), rollout_world.decode),
    )
    config, window = RolloutConfig(group_size=GROUP_SIZE), WindowConfig(tokens=window_tokens)
    return WindowCollector(inputs, config, window, SAMPLING, SEED)


def in_one_piece(prompts: dict[str, Prompt]) -> dict[str, Completion]:
    """Return the engine's responses without windows or collector, by sample id, for groups with these prompts."""
    engine = make_engine()
    engine.submit(
        [
            GenerationRequest(name, prompt.token_ids, SAMPLING, sample_seed(SEED, group_id, index))
            for group_id, prompt in prompts.items()
            for index in range(GROUP_SIZE)
            if (name := f"{group_id}/{index}")
        ]
    )
    completions: dict[str, Completion] = {}
    while engine.num_unfinished:
        completions.update((completion.request_id, completion) for completion in engine.poll())
    return completions


@pytest.mark.parametrize("window_tokens", [1, 9, 16, 50])
def test_windows_by_unchanged_weights_are_the_unsplit_response(make_world: Callable, window_tokens: int) -> None:
    """The version moves on with every batch, the weights do not; the run is stopped and resumed at random."""
    chance = random.Random(window_tokens)
    engine = make_engine()
    collector = make_collector(engine, window_tokens)
    finished: dict[str, ScoredSample] = {}
    windows: dict[str, list[tuple[int, int, int]]] = {}
    prompts: dict[str, Prompt] = {}

    def disturb() -> None:
        if chance.random() < 0.2:
            collector.hold()
            assert engine.num_unfinished == 0

    while not (batch := collector.collect(4, between_polls=disturb)).should_stop:
        for group in batch.groups:
            prompts[group.group_id] = group.prompt
            assert group.policy_version == engine.policy_version
            for sample in group.samples:
                num_tokens = len(sample.completion.token_ids)
                window = (sample.window.start, num_tokens, engine.policy_version)
                windows.setdefault(sample.sample_id, []).append(window)
                if sample.window.is_finished:
                    finished[sample.sample_id] = sample
        engine.set_policy_version(engine.policy_version + 1)
        if chance.random() < 0.3:
            state = json.loads(json.dumps(collector.state_dict(), default=np.ndarray.tolist))
            collector = make_collector(engine, window_tokens)
            collector.load_state_dict(state)
    expected = in_one_piece(prompts)
    assert set(finished) == set(expected) == set(windows) and len(expected) == GROUP_SIZE * len(PROMPTS)
    for name, whole in expected.items():
        actual = finished[name].completion
        assert actual.token_ids.tolist() == whole.token_ids.tolist() and actual.finish_reason == whole.finish_reason
        torch.testing.assert_close(torch.tensor(actual.logprobs), torch.tensor(whole.logprobs), rtol=1e-4, atol=1e-4)
        assert [(run.start, run.end, run.version) for run in actual.versions] == windows[name]
    reasons = [whole.finish_reason for whole in expected.values()]
    assert {"stop", "length"} == set(reasons), "some end by themselves, some at the maximum"
