"""Episodes whose turns a stock SGLang server samples: what `episodes.py --engine-python PATH` plays and measures."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import waiting_environment

from megatron_dapo.config.data_schema import DataConfig
from megatron_dapo.data.dataset import prompt_template
from megatron_dapo.data.model_inputs import read_model_inputs
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.base import context_length
from megatron_dapo.engines.endpoint import AGENTS
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.standalone import started
from megatron_dapo.engines.sglang.wire import Generation
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.environments.protocol import Reply
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams

ROOT = Path(__file__).parent.parent
Work = Sequence[tuple[str, int]]  # a program's turns: the text that begins each turn's conversation, and its most tokens
BEGIN = "You have tools that take a while to answer. Go on until they say that you are done. "


@dataclass(frozen=True)
class ServedSize:
    """What is played on a server."""

    model: Path
    dtype: str
    episodes: int
    turns: int
    begin: str  # an episode's first message, which is about as long as tools' schemas
    turn_tokens: int  # most tokens of an episode's turn
    median_s: float  # median seconds of a step, as tools take
    sigma: float  # standard deviation of its logarithm
    programs: int  # concurrent programs, on both sides
    single_turns: int  # turns of each program
    single_tokens: int  # most tokens of such a turn; lengths are evenly spread, the same for each program in another order
    rounds: int  # measurements of each side, which take turns
    context: int = 1024
    updates: int = 1  # weight updates in a play with updates
    in_flight: int = 64  # requests at the server


FULL = ServedSize(ROOT / "runs/models/smollm2", "bfloat16", 16, 5, 16 * BEGIN, 16, 0.2, 0.8, 64, 4, 11, 2)
TINY = ServedSize(ROOT / "examples/quickstart/base_model", "float32", 6, 3, 2 * BEGIN, 8, 0.02, 0.5, 4, 2, 8, 1)


@dataclass
class ReadyTime:
    """Seconds in which at least one turn was ready, and what `busy` counted in them."""

    busy: Callable[[], float]
    seconds: float = 0.0
    busy_seconds: float = 0.0
    _count: int = 0
    _since: tuple[float, float] = (0.0, 0.0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, change: int) -> None:
        """Count turns that become ready, or that have been sampled."""
        with self._lock:
            before, self._count = self._count, self._count + change
            if not before and self._count:
                self._since = time.monotonic(), self.busy()
            elif before and not self._count:
                self.seconds += time.monotonic() - self._since[0]
                self.busy_seconds += self.busy() - self._since[1]


class TimedPool(WorkerPool):
    """Environments; a turn is ready from the moment in which an answer to the last one arrives."""

    ready: ReadyTime

    def _take(self, number: int, reply: Reply | None) -> None:
        self.ready.add(reply is not None)
        super()._take(number, reply)

    def poll(self, timeout: float = 0.0) -> list[Reply]:
        replies = super().poll(timeout)
        self.ready.add(-sum(bool(reply.done or reply.lost) for reply in replies))
        return replies


class TimedEngine(SglangEngine):
    """An engine that tells when turns have been sampled."""

    ready: ReadyTime | None = None

    def poll(self) -> list[Completion]:
        finished = super().poll()
        if self.ready is not None:
            self.ready.add(-sum(one.finish_reason != "abort" for one in finished))
        return finished


class CountingClient(SglangClient):
    """A client that counts the tokens a server read for a turn, and those that it had in its cache."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.read, self.cached, self.possible = Counter[bool](), Counter[bool](), 0  # keyed by: a turn after the first

    async def generate(self, http: Any, request: GenerationRequest, rid: str, **options: Any) -> Generation:
        generation = await super().generate(http, request, rid, **options)
        is_later = not request.request_id.endswith("@0")
        self.read[is_later] += context_length(request)
        self.cached[is_later] += generation.num_cached
        return generation

    def cached_share(self) -> float:
        """Return the share of the tokens of later turns' contexts that was cached, and count anew."""
        share = self.cached[True] / self.read[True]
        self.read.clear()
        self.cached.clear()
        return round(share, 4)


@dataclass
class Served:
    """A server with its weights, and this project's engine over it."""

    server: SglangServer
    client: CountingClient
    engine: TimedEngine
    turns: TurnTemplate

    def busy_seconds(self) -> float:
        """Return the seconds in which the server's scheduler ran or waited for a core."""
        return sum(int(word) for word in Path(f"/proc/{self._scheduler}/schedstat").read_text().split()[:2]) / 1e9

    @property
    def _scheduler(self) -> int:
        return next(pid for pid in self.server.pids() if "scheduler" in " ".join(psutil.Process(pid).cmdline()))

    def update(self) -> None:
        """Do what a weight update does to a server, but for the weights. No request may run."""
        version = self.engine.policy_version + 1
        self.client.pause()
        self.client.flush_cache()
        self.client.update_weight_version(version)
        self.client.resume()
        self.engine.set_policy_version(version)


@contextmanager
def served(size: ServedSize, python: Path, **fields: Any) -> Iterator[Served]:
    """Start a server of the model. `fields`: of its settings."""
    inputs = read_model_inputs(size.model, trust_remote_code=False)
    template = prompt_template(DataConfig(), inputs.tokenizer, inputs.vocab_size)
    turns = TurnTemplate(template, inputs.stop_tokens.token_ids)
    with tempfile.TemporaryDirectory() as directory:
        settings = ServerSettings(
            python=python.absolute(),
            model_path=size.model,
            key_file=create_key(Path(directory)),
            log_dir=Path(directory) / "logs",
            dtype=size.dtype,
            **{
                "max_running_requests": size.in_flight,
                "max_total_tokens": size.in_flight * size.context,
                "context_length": size.context,
                "start_timeout_s": 600.0,
                **fields,
            },
        )
        with started([settings]) as (server,):
            client = CountingClient(server.url, read_key(server.key_file))
            client.update_weight_version(0)
            limits = SglangEngineSettings(client.max_length(), inputs.vocab_size, max_in_flight=size.in_flight)
            with TimedEngine([client], limits) as engine:
                engine.set_policy_version(0)
                yield Served(server, client, engine, turns)


def measure_served(size: ServedSize, python: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a server."""
    result: dict[str, Any] = {"model": size.model.name}
    with served(size, python) as one:
        if "turns" in parts:
            result |= play_turns(size, one)
            result["cached_share"] = one.client.cached_share()
            play_turns(size, one, size.updates)
            result["cached_share_with_update"] = one.client.cached_share()
        if "endpoint" in parts:
            result |= endpoint_against_direct(size, one)
    return {**result, "load": round(os.getloadavg()[0], 1)}


def play_turns(
    size: ServedSize, one: Served, num_updates: int = 0, kept: list[Completion] | None = None
) -> dict[str, float]:
    """Play episodes with tools; updates interrupt them, with equally many turns before, between and after them.

    `kept` gets what was played.
    """
    fields = {"median_s": size.median_s, "sigma": size.sigma, "turns": size.turns, "begin": size.begin}
    sampling = SamplingParams(max_new_tokens=size.turns * size.turn_tokens + 1, stop_token_ids=one.turns.stop_token_ids)
    limits = EpisodeSettings(
        size.context - 8, size.context, max_turns=size.turns + 1, max_environments=size.episodes,
        max_turn_tokens=size.turn_tokens, order="arrival", parser="none", on_cut="observe",
    )  # fmt: skip
    place = f"{waiting_environment.__file__}:Waiting"
    settings = WorkerSettings("environment", place, num_processes=2, episodes_per_process=size.episodes)
    one.client.flush_cache()
    ready = ReadyTime(one.busy_seconds)
    with TimedPool(settings, one.engine.wake) as pool:
        pool.ready = one.engine.ready = ready
        engine = EpisodeEngine(one.engine, pool, one.turns, limits)
        names = [f"e{index:03}" for index in range(size.episodes)]
        requests = {
            name: GenerationRequest(name, (), sampling, index, task=fields) for index, name in enumerate(names)
        }
        made = 0
        started, before = time.monotonic(), one.engine.statistics.num_completions
        engine.submit(list(requests.values()))
        finished: list[Completion] = []
        while engine.num_unfinished:
            finished += engine.poll()
            num_sampled = one.engine.statistics.num_completions - before
            if made < num_updates and num_sampled * (num_updates + 1) >= (made + 1) * size.episodes * size.turns:
                made += 1
                finished += _interrupt(engine, one, requests)
        seconds = time.monotonic() - started
    one.engine.ready = None
    assert len(finished) == size.episodes and engine.accounting().is_balanced
    ends = Counter(done.episode.end for done in finished if done.episode is not None)
    assert ends == {"done": size.episodes}, ends
    sampled = sum(done.num_sampled for done in finished)
    if kept is not None:
        kept += finished
    return {
        "engine_busy": round(ready.busy_seconds / ready.seconds, 4),
        "ready_share": round(ready.seconds / seconds, 4),
        "turns": size.episodes * size.turns,
        "tokens_per_second": round(sampled / seconds, 1),
    }


def _interrupt(engine: EpisodeEngine, one: Served, requests: Mapping[str, GenerationRequest]) -> list[Completion]:
    """Update the server while episodes are held; return those that had ended."""
    stopped = engine.abort()
    one.update()
    left = [done for done in stopped if done.finish_reason == "abort"]
    engine.submit([replace(requests[held.request_id], prefix=held if held.num_tokens else None) for held in left])
    return [done for done in stopped if done.finish_reason != "abort"]


# ---- the endpoint against the engine


def endpoint_against_direct(size: ServedSize, one: Served) -> dict[str, Any]:
    """Give both sides the same prompts, in turns; return their speeds, and how evenly programs wait."""
    speeds: dict[str, list[float]] = {"direct": [], "endpoint": []}
    waits: list[float] = []
    for number in range(size.rounds):
        for side in sorted(speeds, reverse=bool(number % 2)):
            draw = random.Random(number)
            lengths = [-(-size.single_tokens * (1 + index) // size.single_turns) for index in range(size.single_turns)]
            work = [
                [
                    (f"Write line {index} of a poem about the number {draw.random()}.", count)
                    for index, count in enumerate(draw.sample(lengths, len(lengths)))
                ]
                for _ in range(size.programs)
            ]
            one.client.flush_cache()
            num_tokens, seconds, new_waits = (single_turns if side == "direct" else programs)(size, one, work)
            speeds[side].append(num_tokens / seconds)
            waits += [max(new_waits) / min(new_waits)] if new_waits else []
    rates = {side: sum(values) / len(values) for side, values in speeds.items()}
    return {
        "endpoint_vs_direct": round(rates["endpoint"] / rates["direct"], 4),
        **{f"{side}_tokens_per_second": [round(value, 1) for value in values] for side, values in speeds.items()},
        "agents_wait_ratio": round(max(waits), 3),
        "agents": size.programs,
    }


def single_turns(size: ServedSize, one: Served, work: Sequence[Work]) -> tuple[int, float, list[float]]:
    """Return tokens and seconds of turns that are submitted to the engine, each when the one before it has ended, as a program
    asks for them: the two sides then differ by the endpoint and not by what waits in the server's queue."""

    def request(program: int, index: int) -> GenerationRequest:
        text, count = work[program][index]
        sampling = SamplingParams(max_new_tokens=count, stop_token_ids=one.turns.stop_token_ids)
        prompt_ids = one.turns.begin([{"role": "user", "content": text}])
        return GenerationRequest(f"{program}/{index}", prompt_ids, sampling, index)

    num_tokens, start = 0, time.monotonic()
    one.engine.submit([request(program, 0) for program in range(size.programs)])
    while one.engine.num_unfinished:
        finished = one.engine.poll()
        num_tokens += sum(done.num_tokens for done in finished)
        places = [tuple(map(int, done.request_id.split("/"))) for done in finished]
        one.engine.submit([request(program, index + 1) for program, index in places if index + 1 < size.single_turns])
    return num_tokens, time.monotonic() - start, []


def programs(size: ServedSize, one: Served, work: Sequence[Work]) -> tuple[int, float, list[float]]:
    """Return tokens and seconds of turns that programs ask for, and the seconds that each program waited."""
    program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("busy_agent.py"))]
    rules = {"command": program, "temperature": 1.0, "top_p": 1.0, "other_sampling": "refuse"}
    rules["max_branches"] = size.single_turns
    settings = WorkerSettings(
        "command",
        command=(sys.executable, "-m", AGENTS, json.dumps(rules)),
        episodes_per_process=size.programs,
        max_processes=2 * size.programs + 16,
        reset_seconds=600.0,
        step_seconds=600.0,
    )
    limits = EpisodeSettings(
        size.context - 8, 512, max_turns=size.single_turns + 1, max_turn_tokens=size.single_tokens, order="arrival", parser="none",
        on_cut="observe",
    )  # fmt: skip
    sampling = SamplingParams(
        max_new_tokens=size.single_turns * size.single_tokens + 1, stop_token_ids=one.turns.stop_token_ids
    )
    with tempfile.TemporaryDirectory() as directory, WorkerPool(settings, one.engine.wake) as pool:
        engine = EpisodeEngine(one.engine, pool, one.turns, limits)
        tasks: list[Mapping[str, Any]] = [
            {"turns": size.single_turns, "begins": list(turns), "starts": directory, "name": str(index)}
            for index, turns in enumerate(work)
        ]
        engine.submit(
            [GenerationRequest(task["name"], (), sampling, index, task=task) for index, task in enumerate(tasks)]
        )
        while len(os.listdir(directory)) < len(tasks):
            time.sleep(0.05)
        start = time.monotonic()
        Path(directory, "go").touch()
        finished: list[Completion] = []
        while engine.num_unfinished:
            finished += engine.poll()
        seconds = time.monotonic() - start
    waits = []
    for done in finished:
        assert done.episode is not None and done.episode.end == "done", done.episode
        waits.append(float(done.episode.parts["total"]))
    return sum(done.num_sampled for done in finished), seconds, waits
