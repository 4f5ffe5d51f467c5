"""Lengths, the engine's curve against a measured server, and queues against a loop that counts every token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.memory import engine_memory
from megatron_dapo.plan.rollout import (
    EngineRates,
    Lengths,
    active_parameters,
    engine_rates,
    lengths_of,
    running_at_once,
    simulate,
)
from tests.unit.plan.models import MODELS, QWEN_1_5B, run_of


def config_of(longest: int = 20480, **sglang: Any) -> Any:
    settings = {"placement": "disaggregated", "mem_fraction_static": 0.4, "max_running_requests": 256, **sglang}
    rollout = {"engine": "sglang", "max_response_tokens": longest}
    return run_of(data={"max_prompt_tokens": 64}, rollout=rollout, sglang=settings)


def test_lengths_have_their_mean_and_reach_the_limit() -> None:
    lengths = lengths_of(config_of(), 5000)
    assert lengths.mean == pytest.approx(5000, rel=0.01) and max(lengths.responses) == 20480
    assert lengths_of(config_of()).mean == pytest.approx(20480 / 4, rel=0.01)
    windows = lengths.in_windows(8192)
    assert max(windows.responses) == 8192 and sum(windows.responses) == sum(lengths.responses)


def test_a_server_is_as_fast_as_a_device_was(repository: Path) -> None:
    """256 requests of 64 prompt and 512 response tokens on an H100, in benchmarks/results, within a tenth."""
    file = repository / "benchmarks" / "results" / "gpu_rollout_nvidia_h100_80gb_hbm3.json"
    found = json.loads(file.read_text(encoding="utf-8"))["cases"]["alone"]
    config, facts = config_of(512), parse_architecture(QWEN_1_5B)
    engine = engine_memory(config, facts, Cluster())
    queue = simulate(engine_rates(config, facts, engine, GPUS["H100"]), Lengths((512,), 64.0), 256, 256, True)
    assert 256 * 512 / queue.seconds == pytest.approx(found["tokens_per_second"], rel=0.1)
    assert engine.kv_tokens == pytest.approx(found["kv_tokens"], rel=0.01)


RATES = EngineRates(3e9, 28672, 1.5e9, 1, GPUS["H100"])


def counted(drawn: list[int], running: int, prompt: float) -> float:
    """Seconds of a loop over decoding steps."""
    waiting, held, seconds = list(drawn), list[list[int]](), 0.0
    while waiting or held:
        while waiting and len(held) < running:
            held.append([waiting.pop(0), 0])
        context = sum(prompt + done + 0.5 for _, done in held)
        seconds += RATES.seconds(len(held), context)
        held = [[left - 1, done + 1] for left, done in held if left > 1]
    return seconds


def test_a_queue_takes_as_long_as_a_loop_over_tokens() -> None:
    lengths = Lengths(tuple(range(10, 110)), 20.0)
    queue = simulate(RATES, lengths, 100, 8, True)
    orders = [counted(sorted(lengths.responses, reverse=way), 8, 20.0) for way in (True, False)]
    assert 0.97 * min(orders) < queue.seconds < 1.1 * max(orders), "in an order of its own"
    assert (queue.running, queue.waiting) == (8, 92) and 0 < queue.last_start < queue.seconds
    assert queue.read + queue.products + queue.overhead == pytest.approx(1)
    alone = simulate(RATES, Lengths((50,), 20.0), 3, 8, True)
    assert alone.seconds == pytest.approx(counted([50] * 3, 3, 20.0)) and alone.idle_share == pytest.approx(0)


def test_what_is_carried_over_has_no_tail() -> None:
    lengths = lengths_of(config_of(), 2000)
    whole, carried = (simulate(RATES, lengths, 128, 128, tail) for tail in (True, False))
    assert carried.seconds < 0.5 * whole.seconds and carried.idle_share == 0 < whole.idle_share


def test_few_run_at_once_where_the_cache_is_small() -> None:
    config, facts = config_of(), parse_architecture(MODELS["7B"])
    lengths = lengths_of(config, 5000)
    engine = engine_memory(config, facts, Cluster())
    assert running_at_once(config, engine, lengths) == int(engine.kv_tokens / lengths.held) < 256
    assert running_at_once(config_of(max_running_requests=4), engine, lengths) == 4


def test_parameters_that_multiply_a_token_are_the_published_ones() -> None:
    for name, billions in (("30B-A3B", 3.3), ("235B-A22B", 22)):
        facts = parse_architecture(MODELS[name])
        embedding = facts.vocab_size * facts.hidden_size  # The published figure includes it.
        assert (active_parameters(facts) + embedding) / 1e9 == pytest.approx(billions, rel=0.05)
