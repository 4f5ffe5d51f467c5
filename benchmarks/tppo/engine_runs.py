"""Engines timed: the curve of a tick against the number of responses, and rollouts whole and in windows."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from tppo.simulation import MAX_TOKENS, WINDOW, Setting, Tail, on_curve, simulate, stored_curves

from megatron_dapo.types import Completion, GenerationRequest, SamplingParams


def measure_curve(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a tick at 1, 2, 4, ... responses that all run together, the least of the repeats."""
    with ExitStack() as stack:
        measured = ENGINES[kind](arguments, arguments.ticks + 16, stack)
        # Warm up: the first ticks allocate memory and load kernels.
        measured.seconds(_equal_requests(4, 16))
        points = []
        for power in range(int(math.log2(arguments.most_running)) + 1):
            requests = _equal_requests(2**power, arguments.ticks)
            tick = min(measured.seconds(requests)[0] for _ in range(arguments.repeats)) / arguments.ticks
            points.append({"running": 2**power, "seconds_a_tick": tick, "tokens_per_second": 2**power / tick})
    return {"origin": measured.origin, "machine": _machine(), "ticks": arguments.ticks, "points": points}


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine, the clock it is timed by, and what it is."""

    engine: Any
    clock: Callable[[], float]
    origin: str
    change_weights: Callable[[], None] = lambda: None  # effect of an update on caches; the weights stay

    def seconds(self, requests: Sequence[GenerationRequest]) -> tuple[float, list[Completion]]:
        """Generate everything."""
        start = self.clock()
        self.engine.submit(requests)
        completions: list[Completion] = []
        while self.engine.num_unfinished:
            completions += self.engine.poll()
        seconds = self.clock() - start
        limits = {request.request_id: request.sampling.max_new_tokens for request in requests}
        assert all(len(done.token_ids) == limits[done.request_id] for done in completions), "a response ended early"
        return seconds, completions


def request_of(name: str, num_tokens: int, prefix: Completion | None = None) -> GenerationRequest:
    """A response of exactly `num_tokens`: there is no stop token."""
    seed = int(name)
    return GenerationRequest(name, (5, 6, 7, 8 + seed % 256), SamplingParams(max_new_tokens=num_tokens), seed, prefix)


def _equal_requests(running: int, ticks: int) -> list[GenerationRequest]:
    return [request_of(str(index), ticks) for index in range(running)]


def _embedded(arguments: argparse.Namespace, max_length: int, stack: ExitStack) -> MeasuredEngine:
    from transformers import AutoModelForCausalLM

    from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings

    torch.set_num_threads(1)
    settings = EmbeddedEngineSettings(max_slots=arguments.most_running, max_length=max_length)
    engine = EmbeddedEngine.from_directory(arguments.model, settings)
    source = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).state_dict()
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(source[name])
    engine.set_policy_version(0)
    origin = (
        f"embedded engine, {arguments.model.name} of {arguments.model.parent.name}, fp32, one CPU thread, CPU seconds"
    )
    return MeasuredEngine(
        engine, time.process_time, origin, lambda: engine.set_policy_version(engine.policy_version + 1)
    )


def _sglang(arguments: argparse.Namespace, max_length: int, stack: ExitStack) -> MeasuredEngine:
    from rollout_throughput import Traffic, start_servers

    from megatron_dapo.engines.sglang.client import SglangClient

    vocab_size = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    most = arguments.most_running
    traffic = Traffic(arguments.model, vocab_size, max_length, most, most, ())
    servers: list[SglangClient] = []
    engine = start_servers(traffic, arguments.engine_python, 1, stack, servers)
    origin = f"one SGLang server, {arguments.model.name} of {arguments.model.parent.name}, wall seconds"
    return MeasuredEngine(engine, time.perf_counter, origin, servers[0].flush_cache)


ENGINES = {"embedded": _embedded, "sglang": _sglang}


SCALE = 32  # lengths are those of the simulation divided by this
CACHES = {False: "emptied before every step, as by new weights", True: "kept, as by the same weights"}
ROLLOUT_BATCHES, ROLLOUT_WARMUP, ROLLOUT_STEPS = 2, 2, 4


def measure_rollout(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Whole responses and windows of one engine's lengths, in turns, and what the simulation says of them."""
    tail, window, count = Tail(4000.0 / SCALE, 1.0, MAX_TOKENS // SCALE), WINDOW // SCALE, arguments.most_running
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        measured = ENGINES[kind](arguments, tail.longest + 16, stack)
        measured.seconds(_equal_requests(4, 16))
        if arguments.keep_cache:
            measured = replace(measured, change_weights=lambda: None)
        pool = EnginePool(measured, tail, window, count, generator)
        for _ in range(ROLLOUT_WARMUP):
            pool.step()
        whole, windows = [], []
        # The pool has reached its steady state; reuse is counted from here.
        before = measured.engine.prefix_reuse
        for number in range(ROLLOUT_STEPS):
            windows.append(pool.step())
            if number < ROLLOUT_BATCHES:
                lengths = tail.draw(count, generator)
                seconds, _ = measured.seconds([request_of(str(i), int(n)) for i, n in enumerate(lengths)])
                whole.append((seconds, int(lengths.sum()), int(lengths.max())))
        reuse = measured.engine.prefix_reuse - before
    return {
        "engine": measured.origin,
        "machine": _machine(),
        "responses": count,
        "window": window,
        "longest": tail.longest,
        "lengths": f"those of the simulation / {SCALE}",
        "cache": CACHES[arguments.keep_cache],
        "continued_tokens_a_step": reuse.num_tokens / ROLLOUT_STEPS,
        "prefix_cached_share": reuse.cached_share,
        **compare_rollouts(whole, windows, count),
        "simulated": _predicted(kind, tail, window, count),
    }


class EnginePool:
    """Unfinished responses of an engine that gets a window of each at a step."""

    def __init__(
        self, measured: MeasuredEngine, tail: Tail, window: int, count: int, generator: torch.Generator
    ) -> None:
        self._measured, self._tail, self._window, self._count = measured, tail, window, count
        self._generator = generator
        self._waiting: list[tuple[str, int, Completion | None]] = []  # name, length, what there is of it
        self._num_drawn = 0

    def step(self) -> tuple[float, int, int]:
        """(seconds, new tokens, the longest one's) of one step, by new weights."""
        self._measured.change_weights()
        fresh = self._tail.draw(self._count - len(self._waiting), self._generator).tolist()
        names = range(self._num_drawn, self._num_drawn + len(fresh))
        self._num_drawn += len(fresh)
        items = [*self._waiting, *((str(name), length, None) for name, length in zip(names, fresh, strict=True))]
        requests, new_tokens = [], []
        for name, length, held in items:
            start = len(held.token_ids) if held else 0
            new_tokens.append(min(length - start, self._window))
            requests.append(request_of(name, start + new_tokens[-1], held))
        seconds, completions = self._measured.seconds(requests)
        lengths = {name: length for name, length, _ in items}
        partial = [done for done in completions if len(done.token_ids) < lengths[done.request_id]]
        self._waiting = [
            (done.request_id, lengths[done.request_id], replace(done, finish_reason="abort")) for done in partial
        ]
        return seconds, sum(new_tokens), max(new_tokens)


def compare_rollouts(
    whole: Sequence[tuple[float, int, int]], windows: Sequence[tuple[float, int, int]], count: int
) -> dict[str, Any]:
    """Compare both modes from (seconds, tokens, longest response) of every batch."""
    per_step, speed, idle = {}, {}, {}
    for name, batches in (("full", whole), ("windows", windows)):
        seconds, tokens, ticks = (sum(column) for column in zip(*batches, strict=True))
        per_step[name], speed[name] = seconds / len(batches), tokens / seconds
        idle[name] = 1 - tokens / (count * ticks)
    return {
        "measured_speedup": per_step["full"] / per_step["windows"],
        "measured_speedup_tokens": speed["windows"] / speed["full"],
        "seconds_a_step": per_step,
        "tokens_per_second": speed,
        "idle_share_of_ticks": idle,
    }


def _predicted(kind: str, tail: Tail, window: int, count: int) -> dict[str, float]:
    if kind not in stored_curves():
        return {}
    base = Setting(stored_curves()["flat"], tail=tail, window=window, num_responses=count, per_engine=count)
    figures = simulate(on_curve(base, kind))
    return {name: figures[name] for name in ("speedup", "speedup_tokens")}
