"""Data plane of the rank that drives the rollout: from the first byte of the servers' JSON to the train batch.

A fake fleet of servers on loopback (in a separate process) answers real HTTP requests with bytes in stock SGLang's
JSON: text, output_ids, and meta_info with output_token_logprobs as [[log-prob, token id, null], ...]. Answers are made
once and repeated. The driver is the one used in training: SglangEngine, GroupCollector, train samples. Scoring is left
out: responses are not decoded, scores are made up, and the statistics computed from them are timed separately.

    python benchmarks/driver_throughput.py [--json] [--tiny] [--groups 512] [--group-size 16] [--tokens 20000]
                                           [--servers 64] [--data-parallel 16] [--fleet-rate 200000] [--routing]

`cpu_vs_orjson`: CPU time per token of the driver's process (all threads, user and kernel; requests, HTTP, checks and
batch included) over that of `orjson.loads` of the same bytes in the same run, half before and half after. Python's
garbage collector is on for both, as in training. `cpu_vs_orjson_without_gc`: the same for an eighth of the groups with
the collector off on both sides: with it on, most of orjson's time goes to the collector, which visits an answer's
20,000 lists again and again. `simdjson_vs_orjson`: simdjson only parsing the same bytes, without extracting a number,
over orjson, collector off: a lower bound for any driver with this parser. `bytes_per_token`: growth of resident memory
per response token once the batch is assembled: all completions, and the numbers of the train samples of one of
`--data-parallel` ranks. `interpreter_share`: CPU seconds per second of the collecting threads, which run next to the
main thread, with a fleet that generates `--fleet-rate` tokens per second. A thread cannot hold the interpreter for
longer than it runs, so this bounds the delay of training. `longest_hold_ms`: the longest of its calls that holds the
interpreter, which reads one answer. `routed_*` (`--routing`: only these): CPU time of the dispatcher, and of its
reading of an answer, per token of prompt or response, with the experts of 48 layers, 8 per token. `max_files`: open
files of the driver, sockets included. The defaults are 164 M tokens: 2 GB and four minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import options
import orjson
import psutil
import pybase64
import simdjson

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.dispatcher import HttpDispatcher
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.wire import parse_generation
from megatron_dapo.launch.environment import raise_open_files_limit
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import MicroBatchLimits, plan_micro_batches
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.trainer.batch_header import header_of, numbers_of, samples_of, sequences_of
from megatron_dapo.trainer.rollout import release_freed_memory
from megatron_dapo.types import (
    Completion,
    GenerationRequest,
    Prompt,
    RoutingShape,
    SamplingParams,
    Score,
    ScoredSample,
    TrainSample,
)

VOCAB_SIZE = 151936  # Qwen2's: the size in JSON depends on the digits of the ids
PROMPT_TOKENS = 200
TEXT_BYTES_PER_TOKEN = 4  # English text and formulas
NUM_ANSWERS = 16  # distinct answers
NUM_ROUTED_ANSWERS = 2  # the same with routing: 12 MB each
EXPERTS = RoutingShape(num_layers=48, experts_per_token=8, num_experts=128)  # Qwen3-30B-A3B
BURST_RATE = 1_000_000  # tokens per second, five real fleets; without a limit, answers in flight would fill memory


@dataclass(frozen=True)
class Fleet:
    """Running servers and the answers that they give in turn."""

    process: subprocess.Popen[str]
    ports: list[int]
    answers: list[bytes]


def make_answer(num_tokens: int, seed: int, is_routed: bool = False) -> bytes:
    """Return the JSON of one response that ran into its limit, key by key as SGLang 0.5.17 writes it."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB_SIZE, num_tokens).tolist()
    # float32, as a server computes them; their 17 digits are most of the bytes.
    logprobs = (-rng.exponential(0.4, num_tokens)).astype(np.float32).tolist()
    read = PROMPT_TOKENS + num_tokens - 1
    experts = rng.integers(0, EXPERTS.num_experts, (read, EXPERTS.num_layers, EXPERTS.experts_per_token), np.int32)
    routed = {"routed_experts": pybase64.b64encode(experts.tobytes()).decode()} if is_routed else {}
    words = "so x^2 + 1 = \\frac{5}{2},\nand then we add both sides. "
    return orjson.dumps(
        {
            "text": (words * (TEXT_BYTES_PER_TOKEN * num_tokens // len(words) + 1))[
                : TEXT_BYTES_PER_TOKEN * num_tokens
            ],
            "output_ids": tokens,
            "meta_info": {
                "id": f"{seed:012d}/0#{seed}.",
                "finish_reason": {"type": "length", "length": num_tokens},
                "prompt_tokens": PROMPT_TOKENS,
                "weight_version": "0",
                "total_retractions": 0,
                "input_token_logprobs": [],
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
                "reasoning_tokens": 0,
                "completion_tokens": num_tokens,
                "cached_tokens": PROMPT_TOKENS - 1,
                "cached_tokens_details": None,
                "dp_rank": None,
                "e2e_latency": 512.3125,
                "response_sent_to_client_ts": 1750000000.5,
                **routed,
            },
        }
    )


class Server(asyncio.Protocol):
    """One connection: answers every POST with the next answer, at the fleet's rate, and every GET with nothing."""

    def __init__(self, answers: Sequence[bytes], pace: Pace) -> None:
        self._answers, self._pace, self._buffer = answers, pace, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if lengths and len(body) < int(lengths[0].split(b":")[1]):
            return
        self._buffer.clear()
        if head.startswith(b"GET"):
            self._send(b"")
        else:
            self._pace.after_turn(lambda number: self._send(self._answers[number % len(self._answers)]))

    def _send(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.writelines([head.encode(), body])


class Pace:
    """Answers of the whole fleet, `seconds` apart (0: as fast as they can be sent)."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._number, self._next = seconds, 0, 0.0

    def after_turn(self, answer: Any) -> None:
        loop = asyncio.get_running_loop()
        self._next = max(loop.time(), self._next + self._seconds)
        loop.call_at(self._next, answer, self._number)
        self._number += 1


def make_answers(num_tokens: int, is_routed: bool) -> list[bytes]:
    return [
        make_answer(num_tokens, seed, is_routed) for seed in range(NUM_ROUTED_ANSWERS if is_routed else NUM_ANSWERS)
    ]


def serve(num_servers: int, num_tokens: int, seconds: float, is_routed: bool) -> None:
    """Serve as the fleet until stdin closes; the first line of stdout lists the ports."""
    raise_open_files_limit()
    answers = make_answers(num_tokens, is_routed)

    async def run() -> None:
        loop, pace = asyncio.get_running_loop(), Pace(seconds)
        servers = [
            await loop.create_server(lambda: Server(answers, pace), "127.0.0.1", 0, backlog=1024)
            for _ in range(num_servers)
        ]
        print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)

    asyncio.run(run())


def start_fleet(num_servers: int, num_tokens: int, seconds: float = 0.0, is_routed: bool = False) -> Fleet:
    command = [sys.executable, __file__, "--serve", json.dumps([num_servers, num_tokens, seconds, is_routed])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ports = json.loads(process.stdout.readline())
    return Fleet(process, ports, make_answers(num_tokens, is_routed))


def stop_fleet(fleet: Fleet) -> None:
    assert fleet.process.stdin is not None
    fleet.process.stdin.close()
    try:
        fleet.process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        fleet.process.kill()


class MadeUpVerifier:
    def score_many(self, items: Any) -> dict[Any, Score]:
        return {name: Score(0.0, -1.0, "truncated") for name, *_ in items}


class TimedScorer(SampleScorer):
    """Measures the CPU time of scoring, which is not the data plane's: verdicts are made up, statistics are computed."""

    cpu_seconds = 0.0

    def score(self, responses: Sequence[tuple[Prompt, Completion]]) -> dict[str, ScoredSample]:
        start = time.thread_time()
        scored = super().score(responses)
        TimedScorer.cpu_seconds += time.thread_time() - start
        return scored


def make_collector(fleet: Fleet, num_groups: int, group_size: int, num_tokens: int) -> tuple[SglangEngine, Any]:
    clients = [SglangClient(f"http://127.0.0.1:{port}", None) for port in fleet.ports]
    settings = SglangEngineSettings(max_length=PROMPT_TOKENS + num_tokens, vocab_size=VOCAB_SIZE)
    engine = SglangEngine(clients, settings)
    engine.set_policy_version(0)
    prompts = {str(i): Prompt(str(i), (), tuple(range(i, i + PROMPT_TOKENS)), "1") for i in range(num_groups)}
    inputs = CollectorInputs(
        stream=PromptStream(list(prompts), seed=0),
        prompts=prompts,
        engine=engine,
        scorer=TimedScorer(MadeUpVerifier(), lambda token_ids: ""),
    )
    config = RolloutConfig(group_size=group_size, filter_groups=False)
    return engine, GroupCollector(inputs, config, SamplingParams(max_new_tokens=num_tokens), seed=0)


def parse_seconds(parse: Callable[[bytes], Any], answers: Sequence[bytes], num_loads: int) -> float:
    """Return the CPU seconds of one call of `parse`, the result's end included, with the garbage collector as it is set."""
    start = time.process_time()
    for number in range(num_loads):
        parse(answers[number % len(answers)])
    return (time.process_time() - start) / num_loads


def assemble(batch: RolloutBatch, data_parallel: int) -> list[TrainSample]:
    """Return the train samples as the first data-parallel rank holds them, with numbers only for its share."""
    release_freed_memory()
    samples = samples_of(header_of(batch.groups, batch.training_version))
    limits = MicroBatchLimits(max_tokens=2 * samples[0].num_tokens)
    plan = plan_micro_batches([one.num_tokens for one in samples], ParallelLayout(data_parallel), limits)
    kept = {index for part in plan[0] for index in part}
    return [
        replace(one, **numbers_of(*each)) if index in kept else one
        for index, (one, each) in enumerate(zip(samples, sequences_of(batch.groups), strict=True))
    ]


def measure_batch(
    num_servers: int, num_groups: int, group_size: int, num_tokens: int, data_parallel: int
) -> dict[str, float]:
    """Collect one batch, faster than a real fleet generates it."""
    fleet = start_fleet(num_servers, num_tokens, num_tokens / BURST_RATE)
    num_loads = max(NUM_ANSWERS, min(256, num_groups * group_size // 8))
    try:
        parse = parse_seconds(orjson.loads, fleet.answers, num_loads) / 2
        TimedScorer.cpu_seconds = 0.0
        engine, collector = make_collector(fleet, num_groups, group_size, num_tokens)
        process = psutil.Process()
        connections = [0]
        sampling = threading.Event()

        def count_connections() -> None:
            while not sampling.wait(1.0):
                connections[0] = max(connections[0], len(os.listdir("/proc/self/fd")))

        thread = threading.Thread(target=count_connections, daemon=True)
        gc.collect()
        resident = process.memory_info().rss
        thread.start()
        cpu, wall = time.process_time(), time.perf_counter()
        batch: RolloutBatch = collector.collect(num_groups)
        samples = assemble(batch, data_parallel)
        cpu, wall = time.process_time() - cpu - TimedScorer.cpu_seconds, time.perf_counter() - wall
        connections[0] = max(connections[0], len(os.listdir("/proc/self/fd")))
        sampling.set()
        thread.join()
        gc.collect()
        grown = process.memory_info().rss - resident
        num_response = sum(sample.num_response_tokens for sample in samples)
        assert num_response == num_groups * group_size * num_tokens, f"{num_response} tokens came back"
        engine.close()
        parse += parse_seconds(orjson.loads, fleet.answers, num_loads) / 2
        parse_alone = parse_seconds(simdjson.Parser().parse, fleet.answers, num_loads)
    finally:
        stop_fleet(fleet)
    return {
        "responses": len(samples),
        "tokens": num_response,
        "seconds": wall,
        "json_bytes_per_token": statistics.mean(map(len, fleet.answers)) / num_tokens,
        "bytes_per_token": grown / num_response,
        "cpu_us_per_token": cpu / num_response * 1e6,
        "scoring_us_per_token": TimedScorer.cpu_seconds / num_response * 1e6,
        "orjson_us_per_token": parse / num_tokens * 1e6,
        "cpu_vs_orjson": cpu / num_response / (parse / num_tokens),
        "simdjson_vs_orjson": parse_alone / parse,
        "max_files": connections[0],
    }


def measure_without_gc(
    num_servers: int, num_groups: int, group_size: int, num_tokens: int, data_parallel: int
) -> dict[str, float]:
    """Return the ratios of a batch collected with Python's garbage collector off."""
    gc.disable()
    try:
        found = measure_batch(num_servers, num_groups, group_size, num_tokens, data_parallel)
    finally:
        gc.enable()
    times = {f"{name}_without_gc": found[name] for name in ("cpu_us_per_token", "orjson_us_per_token", "cpu_vs_orjson")}
    return {**times, "simdjson_vs_orjson": found["simdjson_vs_orjson"]}


def measure_interpreter(num_servers: int, num_tokens: int, fleet_rate: float, seconds: float) -> dict[str, float]:
    """Collect in a thread, at the rate of a real fleet, while the main thread computes."""
    num_groups = max(1, round(seconds * fleet_rate / num_tokens / 16))
    fleet = start_fleet(num_servers, num_tokens, num_tokens / fleet_rate)
    try:
        engine, collector = make_collector(fleet, num_groups, 16, num_tokens)
        thread = threading.Thread(target=lambda: collector.collect(num_groups), daemon=True)
        cpu, own, wall = time.process_time(), time.thread_time(), time.perf_counter()
        thread.start()
        while thread.is_alive():
            sum(range(1000))
        cpu, own, wall = time.process_time() - cpu, time.thread_time() - own, time.perf_counter() - wall
        engine.close()
    finally:
        stop_fleet(fleet)
    request = GenerationRequest("a", tuple(range(PROMPT_TOKENS)), SamplingParams(max_new_tokens=num_tokens), seed=0)
    holds = []
    for answer in fleet.answers:
        start = time.thread_time()
        parse_generation(answer, request, vocab_size=VOCAB_SIZE)
        holds.append(time.thread_time() - start)
    rate = num_groups * 16 * num_tokens / wall
    return {
        "fleet_tokens_per_s": rate,
        "interpreter_share": (cpu - own) / wall,
        "longest_hold_ms": statistics.median(holds) * 1e3,
    }


def measure_routing(num_answers: int, num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Receive answers with routing through the dispatcher, as fast as they come."""
    request = GenerationRequest(
        "a", tuple(range(PROMPT_TOKENS)), SamplingParams(max_new_tokens=num_tokens), seed=0, with_routing=True
    )
    fleet = start_fleet(1, num_tokens, is_routed=True)
    client = SglangClient(f"http://127.0.0.1:{fleet.ports[0]}", None)
    dispatcher = HttpDispatcher(VOCAB_SIZE, num_answers, EXPERTS)
    rounds = []
    try:
        for first in range(0, num_rounds * num_answers, num_answers):
            cpu, outcomes = time.process_time(), []
            dispatcher.send([(first + number, client, request, "") for number in range(num_answers)])
            while len(outcomes) < num_answers:
                outcomes += dispatcher.receive(1.0)
            rounds.append(time.process_time() - cpu)
            shapes = {one.result.routing.shape for one in outcomes}
            assert shapes == {(PROMPT_TOKENS + num_tokens - 1, EXPERTS.num_layers, EXPERTS.experts_per_token)}
    finally:
        dispatcher.close()
        stop_fleet(fleet)

    def parse(answer: bytes) -> None:
        parse_generation(answer, request, vocab_size=VOCAB_SIZE, routing=EXPERTS)

    million = (PROMPT_TOKENS + num_tokens) / 1e6
    return {
        "routed_answers": num_answers * num_rounds,
        "routed_mb_per_answer": len(fleet.answers[0]) / 1e6,
        "routed_cpu_us_per_token": statistics.median(rounds) / num_answers / million,
        "routed_parse_us_per_token": parse_seconds(parse, fleet.answers, num_answers) / million,
    }


def main() -> None:
    parser = options.parser(__doc__, "the smallest size")
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--data-parallel", type=int, default=16)
    parser.add_argument("--fleet-rate", type=float, default=200_000, help="tokens a second of all servers together")
    parser.add_argument("--routing", action="store_true", help="measure only the answers with routing")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*json.loads(arguments.serve))
        return
    raise_open_files_limit()  # Every worker does this.
    if arguments.tiny:
        arguments.groups, arguments.group_size, arguments.tokens, arguments.servers, arguments.data_parallel = (
            4,
            4,
            500,
            3,
            2,
        )
    result: dict[str, float] = {}
    if not arguments.routing:
        result |= {"servers": arguments.servers, "tokens_per_response": arguments.tokens}
        result |= {"data_parallel": arguments.data_parallel}
        result |= measure_batch(
            arguments.servers, arguments.groups, arguments.group_size, arguments.tokens, arguments.data_parallel
        )
        few = max(1, arguments.groups // 8)
        result |= measure_without_gc(
            arguments.servers, few, arguments.group_size, arguments.tokens, arguments.data_parallel
        )
        seconds = 0.5 if arguments.tiny else 10.0
        result |= measure_interpreter(arguments.servers, arguments.tokens, arguments.fleet_rate, seconds)
    result |= measure_routing(*((4, 50, 1) if arguments.tiny else (16, 5500, 9)))
    result |= {"load": os.getloadavg()[0]}
    options.show(result, arguments)


if __name__ == "__main__":
    main()
