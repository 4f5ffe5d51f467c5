"""Episodes on the embedded engine: one turn is today's response, and interruptions change no token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.token_support import FILLER, support_table
from megatron_dapo.types import Completion, GenerationRequest
from tests.unit.rollout import episode_world as world

TURNS = world.template("llama3")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


RECORDED = {"top_p": 0.9, "top_k": 12, "with_support": True}


def check_supports(one: Completion, other: Completion, is_recorded: bool) -> None:
    """Sampled tokens have the ids they were drawn from, observed ones none, in both episodes alike."""
    assert one.num_segments == other.num_segments
    for segment in range(one.num_segments + 1):
        stream = one.stream(segment)
        if not is_recorded:
            assert stream.support is None
            continue
        assert (stream.support == other.stream(segment).support).all()
        rows = support_table(torch.from_numpy(stream.support)).tolist()
        assert len(rows) == len(stream.token_ids)
        for run in stream.runs:
            for token, row in zip(stream.token_ids[run.start : run.end], rows[run.start : run.end], strict=True):
                assert token in row if run.is_sampled else set(row) == {FILLER}


def make_engine() -> EmbeddedEngine:
    """The same small sharp model every time, serving version 0; three tokens a poll."""
    torch.manual_seed(0)
    size = len(TURNS.template.tokenizer)
    config = Qwen2Config(vocab_size=size, max_position_embeddings=1024, **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    engine = EmbeddedEngine(config, EmbeddedEngineSettings(max_slots=6, max_length=800, ticks_per_poll=3))
    source = stored_tensors(dict(model.named_parameters()))
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(source[name].detach() * 5.0)
    engine.set_policy_version(0)
    return engine


def make_episodes(inner: EmbeddedEngine, **limits) -> tuple[EpisodeEngine, world.ScriptedPool]:
    pool = world.ScriptedPool(random.Random(0))
    settings = world.settings(max_turn_tokens=9, on_cut="observe", max_context_tokens=800, **limits)
    return EpisodeEngine(inner, pool, TURNS, settings), pool


def requests(**sampling: Any) -> dict[str, GenerationRequest]:
    made = [world.request(f"g/{index}", TURNS, index, 40) for index in range(5)]
    return {one.request_id: replace(one, sampling=replace(one.sampling, **sampling)) for one in made}


def test_an_episode_of_one_turn_is_the_response_without_an_environment():
    engine, _ = make_episodes(make_engine(), max_turns=1)
    engine.submit(list(requests().values()))
    played = {one.request_id: one for one in world.drain(engine)}
    inner = make_engine()
    sampling = replace(next(iter(requests().values())).sampling, max_new_tokens=9)
    inner.submit(
        [replace(one, prompt_ids=played[name].prompt_ids, sampling=sampling, task=None) for name, one in requests().items()]
    )
    plains = [done for _ in range(20) for done in inner.poll()]
    assert len(plains) == len(played) == 5
    for plain in plains:
        one = played[plain.request_id]
        assert (one.token_ids.tobytes(), one.logprobs.tobytes()) == (plain.token_ids.tobytes(), plain.logprobs.tobytes())
        assert one.versions == plain.versions and one.num_sampled == plain.num_tokens


@pytest.mark.parametrize("sampling", [{}, RECORDED], ids=["whole", "recorded"])
def test_episodes_interrupted_in_every_turn_have_the_tokens_of_undisturbed_ones(sampling: dict[str, Any]):
    """While their turns are generated and while environments act, and over an update to the same weights."""
    engine, calm = make_episodes(make_engine())
    engine.submit(list(requests(**sampling).values()))
    undisturbed = {one.request_id: one for one in world.drain(engine)}
    assert any(len(one.episode.turns) > 2 for one in undisturbed.values())

    inner = make_engine()
    engine, pool = make_episodes(inner)
    engine.submit(list(requests(**sampling).values()))
    finished: list[Completion] = []
    stages: set[str] = set()
    draw = random.Random(0)
    for _ in range(500):
        if not engine.num_unfinished:
            break
        finished += engine.poll()
        if draw.random() < 0.5:
            stages |= set(engine.accounting().open)
            held = [one for one in engine.abort() if one.finish_reason == "abort" or finished.append(one)]
            inner.set_policy_version(inner.policy_version + 1)
            engine.submit([replace(requests(**sampling)[one.request_id], prefix=one if one.num_tokens else None) for one in held])
    assert stages >= {"generating", "acting"} and len(finished) == len(undisturbed)
    for one in finished:
        before = undisturbed[one.request_id]
        assert one.token_ids.tolist() == before.token_ids.tolist() and one.episode.turns == before.episode.turns
        check_supports(one, before, bool(sampling))
        assert pool.num_acts[one.request_id] == calm.num_acts[one.request_id], "a step is asked for once a turn"
    assert max(len(one.versions) for one in finished) > 2
