"""Cost of episodes: worker processes, the episode engine, and a simulated rollout engine.

    python benchmarks/episodes.py [--json] [--tiny]
    python benchmarks/episodes.py --engine-python .venv-sglang/bin/python [--json] [--tiny]    on a stock SGLang server
    python benchmarks/episodes.py --chaos [--episodes N] [--json]    accounting, replies and leftovers under faults
    python benchmarks/episodes.py --chaos --engine-python PATH       the same on a stock SGLang server that is killed, too

Environments wait for a log-normal time in each step, as tools do; they run in real worker processes. The simulated engine has
slots, and a turn takes one for a fixed time.

`concurrency_vs_bound`: seconds until all episodes have ended / max(engine's work, longest episode). `driver_ms_per_turn`:
processor time of this process (the engine's and the pool's threads) a turn, the tokens of a turn included.
`round_trip_ms`: median time from sending a turn to its answer, with an environment that does not wait and nothing else to do.
`endpoint_ms`: processor time of the chat endpoint for a request of a program with 32 turns; `endpoint_p50_ms`, `endpoint_p99_ms`:
what the program waits for an answer that is there at once, the way to this process and back included; 8 programs at a time.
`open_bytes_per_episode`: resident memory of this process for an open episode of eight turns of 1,024 tokens, less 8 bytes a token (its id and log-prob);
`open_poll_ms`: median time of a poll with 16,384 open episodes of which none has an answer.

With a server (SmolLM2-135M-Instruct): `engine_busy`: share of the time with at least one turn that is ready or being sampled in
which the server's scheduler runs or waits for a core; a turn is ready once the answer of its environment is here.
`cached_share`: share of the tokens of contexts from the second turn on that the server had in its cache; `cached_share_with_update`
with an update that empties it once half of the turns are sampled. `endpoint_vs_direct`: tokens a second of turns that programs
ask the endpoint for / those of the same prompts submitted to the engine. `agents_wait_ratio`: seconds that the program that waited
longest waited for its turns / those of the one that waited least.
"""

from __future__ import annotations

import functools
import gc
import heapq
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import episode_chaos
import numpy as np
import options
import psutil
import served_chaos
import served_episodes
import waiting_environment

from megatron_dapo.config.loader import load_config
from megatron_dapo.data.dataset import prompt_template
from megatron_dapo.data.model_inputs import read_model_inputs
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.endpoint import AGENTS
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams, VersionRange
from megatron_dapo.workers.supervisor import resident_pages

RECIPE = Path(__file__).parent.parent / "examples/quickstart/quickstart.toml"
TURN_TOKENS = 64
_IDLE_S = 0.002  # longest wait of a poll, in which an answer of an environment is not seen


@dataclass(frozen=True)
class Size:
    """What is played."""

    episodes: int
    turns: int
    median_s: float  # median seconds of a step
    sigma: float  # standard deviation of its logarithm
    slots: int
    turn_s: float  # seconds for which a turn occupies a slot
    processes: int


# A tool with a median of 1 s and a 99th percentile of 30 s has sigma = ln(30) / 2.326.
FULL = Size(1024, 8, 1.0, math.log(30.0) / 2.326, 64, 0.4, 4)
TINY = Size(48, 4, 0.02, 0.5, 8, 0.02, 2)


@dataclass
class SlottedEngine:
    """A `RolloutEngine` that takes a fixed time for each turn and runs `slots` of them at a time."""

    slots: int
    turn_s: float
    stop_token: int
    turn_tokens: int = TURN_TOKENS
    policy_version: int = 0
    prefix_reuse: PrefixReuse = field(default_factory=PrefixReuse)
    _waiting: list[GenerationRequest] = field(default_factory=list)
    _running: list[tuple[float, int, GenerationRequest]] = field(default_factory=list)  # a heap of ends
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting += requests
        self._fill(time.monotonic())

    def poll(self) -> list[Completion]:
        if self._running:
            time.sleep(max(0.0, min(_IDLE_S, self._running[0][0] - time.monotonic())))
        finished = []
        while self._running and self._running[0][0] <= time.monotonic():
            end, _, request = heapq.heappop(self._running)
            finished.append(self._completion(request))
            self._fill(end)  # the slot was free from then on
        return finished

    def abort(self) -> list[Completion]:
        raise NotImplementedError("nothing is interrupted here")

    def _fill(self, start: float) -> None:
        while self._waiting and len(self._running) < self.slots:
            heapq.heappush(self._running, (start + self.turn_s, next(self._numbers), self._waiting.pop(0)))

    def _completion(self, request: GenerationRequest) -> Completion:
        count = self.turn_tokens
        ids = np.full(count, self.stop_token, np.int32)
        ids[:-1] = np.random.default_rng(request.seed).integers(0, 200, count - 1)
        versions = (VersionRange(0, count, self.policy_version),)
        return Completion(request.request_id, ids, np.zeros(count, np.float32), "stop", versions)


def quickstart_turns() -> TurnTemplate:
    """Return the turns of the model that comes with the package."""
    config = load_config(RECIPE).config
    inputs = read_model_inputs(config.model.path, trust_remote_code=False)
    return TurnTemplate(prompt_template(config.data, inputs.tokenizer, inputs.vocab_size), inputs.stop_tokens.token_ids)


def worker_settings(size: Size) -> WorkerSettings:
    place = f"{waiting_environment.__file__}:Waiting"
    episodes = -(-size.episodes // size.processes)
    limits = {"step_seconds": 3600.0, "episode_seconds": 36000.0}
    return WorkerSettings("environment", place, num_processes=size.processes, episodes_per_process=episodes, **limits)


def play(size: Size, turns: TurnTemplate) -> dict[str, float]:
    """Play all episodes and return the figures."""
    fields = {"median_s": size.median_s, "sigma": size.sigma, "turns": size.turns}
    limits = EpisodeSettings(
        100_000, 1000, max_turns=size.turns + 1, max_seconds=36000.0, order="arrival", parser="none"
    )
    sampling = SamplingParams(max_new_tokens=(size.turns + 1) * TURN_TOKENS, stop_token_ids=turns.stop_token_ids)
    requests = [
        GenerationRequest(f"episode/{index}", (), sampling, seed=index, task=fields) for index in range(size.episodes)
    ]
    inner = SlottedEngine(size.slots, size.turn_s, turns.stop_token_ids[0])
    with WorkerPool(worker_settings(size)) as pool:
        engine = EpisodeEngine(inner, pool, turns, limits)
        started, cpu_started, finished = time.perf_counter(), time.process_time(), []
        engine.submit(requests)
        while engine.num_unfinished:
            finished += engine.poll()
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    assert len(finished) == size.episodes and engine.accounting().is_balanced
    assert all(one.episode is not None and one.episode.end == "done" for one in finished)
    paths = [
        sum(itertools.islice(waiting_environment.waits(fields, index), size.turns)) + size.turns * size.turn_s
        for index in range(size.episodes)
    ]
    num_turns = size.episodes * size.turns
    bound_s = max(num_turns * size.turn_s / size.slots, max(paths))
    return {
        "concurrency_vs_bound": round(seconds / bound_s, 4),
        "seconds": round(seconds, 3),
        "bound_s": round(bound_s, 3),
        "driver_ms_per_turn": round(1000 * cpu_s / num_turns, 4),
        "num_turns": num_turns,
    }


def endpoint(num_programs: int, num_turns: int) -> dict[str, float]:
    """Return the figures of programs that ask the chat endpoint as fast as it answers."""
    program = [sys.executable, str(Path(__file__).with_name("busy_agent.py"))]
    rules = {"command": program, "temperature": 1.0, "top_p": 1.0, "other_sampling": "refuse", "max_branches": 2}
    command = (sys.executable, "-m", AGENTS, json.dumps(rules))
    waits: dict[str, list[float]] = {"p50": [], "p99": []}
    with WorkerPool(WorkerSettings("command", command=command)) as pool:
        (server,) = (one for pid in pool.processes() for one in psutil.Process(pid).children())
        for index in range(num_programs):
            pool.start(str(index), Task({"turns": num_turns}, index))
        started = sum(server.cpu_times()[:2])
        left = num_programs
        while left:
            for reply in pool.poll(60.0):
                assert not reply.lost, reply.lost
                if reply.done:
                    left -= 1
                    for name, values in waits.items():
                        values.append(reply.parts[name])
                    pool.end(reply.episode_id)
                else:
                    pool.act(reply.episode_id, Action("Yes, certainly.", (), "stop"))
        cpu_s = sum(server.cpu_times()[:2]) - started
    return {
        "endpoint_ms": round(1000 * cpu_s / (num_programs * num_turns), 4),
        **{f"endpoint_{name}_ms": round(1000 * statistics.median(values), 3) for name, values in waits.items()},
    }


@dataclass
class SilentPool:
    """An `EnvironmentPool` that answers at once, but never the last of `turns` turns."""

    turns: int
    _num_acts: Counter[str] = field(default_factory=Counter)
    _replies: list[Reply] = field(default_factory=list)

    def start(self, episode_id: str, task: Task) -> None:
        self._replies.append(Reply(episode_id, messages=({"role": "user", "content": "Begin."},)))

    def act(self, episode_id: str, action: Action) -> None:
        self._num_acts[episode_id] += 1
        if self._num_acts[episode_id] < self.turns:
            self._replies.append(Reply(episode_id, messages=({"role": "user", "content": "Go on."},)))

    def end(self, episode_id: str) -> None:
        raise AssertionError(f"{episode_id} has ended")

    def poll(self, timeout: float = 0.0) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Nothing runs."""

    @property
    def num_waiting(self) -> int:
        return sum(count == self.turns for count in self._num_acts.values())


def open_episodes(count: int, num_turns: int, turn_tokens: int, turns: TurnTemplate) -> tuple[float, float]:
    """Return bytes of memory of an open episode less 8 a token, and milliseconds of a poll, once all episodes wait."""
    inner = SlottedEngine(count, 0.0, turns.stop_token_ids[0], turn_tokens)
    pool = SilentPool(num_turns)
    limits = EpisodeSettings(10**6, 1000, max_turns=num_turns + 1, max_environments=count, order="arrival", parser="none")
    engine = EpisodeEngine(inner, pool, turns, limits)
    sampling = SamplingParams(max_new_tokens=10**6, stop_token_ids=turns.stop_token_ids)
    gc.collect()
    before = resident_pages(os.getpid())
    engine.submit([GenerationRequest(f"open/{index:06d}", (), sampling, index, task={}) for index in range(count)])
    while pool.num_waiting < count:
        engine.poll()
    gc.collect()
    grown = (resident_pages(os.getpid()) - before) * os.sysconf("SC_PAGE_SIZE") / count
    inner.turn_s = 3600.0
    engine.submit([GenerationRequest("other", (1,), sampling, 0)])  # a poll waits for environments if the engine has nothing
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        engine.poll()
        seconds.append(time.perf_counter() - started - _IDLE_S)
    return round(grown - 8 * num_turns * turn_tokens), round(1000 * statistics.median(seconds), 2)


def round_trip(size: Size, count: int) -> float:
    """Return the median milliseconds between a turn and its answer."""
    seconds = []
    with WorkerPool(worker_settings(size)) as pool:
        pool.start("one", Task({"median_s": 0.0, "sigma": 0.0, "turns": count + 1}, 0))
        pool.poll(60.0)
        for _ in range(count):
            started = time.perf_counter()
            pool.act("one", Action("text", (), "stop"))
            pool.poll(60.0)
            seconds.append(time.perf_counter() - started)
        pool.end("one")
    return round(1000 * statistics.median(seconds), 4)


def main() -> None:
    """Print the figures."""
    parser = options.parser(__doc__, "48 episodes whose tools wait 20 ms")
    parser.add_argument("--chaos", action="store_true", help="play episodes under injected faults, and check every one")
    parser.add_argument("--episodes", type=int, help="number of episodes of --chaos, 5000 or with a server 300")
    parser.add_argument("--engine-python", type=Path, help="interpreter with SGLang: measure a server and nothing else")
    parser.add_argument("--parts", default="turns,endpoint", help="what to measure of a server, separated by commas")
    arguments = parser.parse_args()
    if arguments.chaos and arguments.engine_python is not None:
        every = served_chaos.TINY_EVERY if arguments.tiny else served_chaos.EVERY
        count = served_chaos.TINY_EPISODES if arguments.tiny else arguments.episodes or served_chaos.NUM_EPISODES
        engine = functools.partial(served_chaos.killed_server, arguments.engine_python)
        options.show(episode_chaos.play_chaos(count, quickstart_turns(), engine, every), arguments)
        return
    if arguments.engine_python is not None:
        served = served_episodes.TINY if arguments.tiny else served_episodes.FULL
        options.show(served_episodes.measure_served(served, arguments.engine_python, arguments.parts.split(",")), arguments)
        return
    if arguments.chaos:
        count = 200 if arguments.tiny else arguments.episodes or 5000
        options.show(episode_chaos.play_chaos(count, quickstart_turns()), arguments)
        return
    size = TINY if arguments.tiny else FULL
    result: dict[str, Any] = {"size": vars(size), **play(size, quickstart_turns())}
    result["round_trip_ms"] = round_trip(size, 50 if arguments.tiny else 1000)
    small = arguments.tiny
    result |= endpoint(2, 4) if small else endpoint(8, 32)
    result["open_bytes_per_episode"], _ = open_episodes(16 if small else 1024, 8, 1024, quickstart_turns())
    _, result["open_poll_ms"] = open_episodes(64 if small else 16384, 1, 64, quickstart_turns())
    options.show(result, arguments)


if __name__ == "__main__":
    main()
