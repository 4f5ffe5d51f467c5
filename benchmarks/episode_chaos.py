"""Episodes under faults: what `episodes.py --chaos` plays, checks and counts.

Real worker processes crash, hang, are killed, answer late, write garbage and run out of memory; the simulated engine gives
requests up; weights are updated in the middle of a collection; and now and then another collector, engine and pool go on
from the saved state. Every prompt has to be trained exactly once with its whole conversation, except those whose
environment can never begin, and nothing may be left at the end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import faulty_environment
import numpy as np

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.base import PrefixReuse, RolloutEngine, aborted, behind_prefix
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.rewards.pool.environment import EnvironmentRewards
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.collector import CollectorInputs, LossLimits, sample_seed
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams, VersionRange
from megatron_dapo.workers.supervisor import descendants, resident_pages

GROUP_SIZE, GROUPS = 4, 25
TURN_TOKENS = 12
STEP_SECONDS = 2.0
NUM_BROKEN = 4  # prompts whose environment can never begin
MAX_OF_PROMPT = 2
RETRIES = 30  # an episode may be in a process that others crash again and again
RUN_SEED = 5


@dataclass
class ChaoticEngine:
    """A `RolloutEngine` that ends turns at random, and gives one in a hundred up."""

    stop_token: int
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    policy_version: int = 0
    num_sampled: int = 0
    prefix_reuse: PrefixReuse = field(default_factory=PrefixReuse)
    _running: dict[str, GenerationRequest] = field(default_factory=dict)

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._running.update((request.request_id, request) for request in requests)

    def poll(self) -> list[Completion]:
        time.sleep(0.001)
        ended = [name for name in self._running if self.draw.random() < 0.5]
        return [self._stopped(self._running.pop(name), self.draw.random() < 0.01) for name in ended]

    def abort(self) -> list[Completion]:
        running, self._running = self._running, {}
        return [self._stopped(request, True) for request in running.values()]

    def wake(self) -> None:
        """The poll never waits for long."""

    def update(self) -> None:
        """Serve the next version."""
        self.policy_version += 1

    def kill(self) -> None:
        raise NotImplementedError("there is no process")

    def _stopped(self, request: GenerationRequest, is_early: bool) -> Completion:
        done = request.prefix.num_tokens if request.prefix is not None else 0
        end = self.draw.randrange(done, TURN_TOKENS) if is_early else TURN_TOKENS
        if end == done:
            return aborted(request)
        whole = np.random.default_rng([request.seed, len(request.prompt_ids)]).integers(0, 200, TURN_TOKENS)
        whole[-1] = self.stop_token
        self.num_sampled += end - done
        rest = Completion(
            request.request_id,
            whole[done:end],
            np.zeros(end - done),
            "stop" if end == TURN_TOKENS else "abort",
            (VersionRange(0, end - done, self.policy_version),),
        )
        return rest if request.prefix is None else behind_prefix(request, rest)


class ChaosEngine(RolloutEngine, Protocol):
    """What samples the turns."""

    num_sampled: int  # tokens

    def wake(self) -> None:
        """End the wait of a poll."""

    def update(self) -> None:
        """Serve the next version. No request runs."""

    def kill(self) -> None:
        """Kill a process of it."""


@dataclass(frozen=True)
class Every:
    """Episodes between two events of a kind."""

    updates: int = 200
    resumes: int = 1000
    kills: int = 250
    server_kills: int = 10**9


USUAL = Every()


class CountingPool:
    """An `EnvironmentPool` that requires one reply for each `start` and `act`, unless `end` comes first, and times it."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.longest_s = 0.0
        self.num_acts = self.num_lost = 0
        self._sent: dict[str, float] = {}

    def start(self, episode_id: str, task: Task) -> None:
        assert episode_id not in self._sent, f"{episode_id} begins while a reply is missing"
        self._sent[episode_id] = time.monotonic()
        self.pool.start(episode_id, task)

    def act(self, episode_id: str, action: Action) -> None:
        assert episode_id not in self._sent, f"{episode_id} acts while a reply is missing"
        self._sent[episode_id] = time.monotonic()
        self.num_acts += 1
        self.pool.act(episode_id, action)

    def end(self, episode_id: str) -> None:
        self._sent.pop(episode_id, None)
        self.pool.end(episode_id)

    def poll(self, timeout: float = 0.0) -> list[Reply]:
        replies = self.pool.poll(timeout)
        for reply in replies:
            self.longest_s = max(self.longest_s, time.monotonic() - self._sent.pop(reply.episode_id))
            self.num_lost += bool(reply.lost)
        return replies

    def close(self) -> None:
        self.pool.close()


class Chaos:
    """A collection of every prompt, with its faults."""

    def __init__(self, num_episodes: int, turns: TurnTemplate, marks: Path, inner: ChaosEngine, every: Every) -> None:
        self._turns, self._every = turns, every
        self._draw = random.Random(0)
        begin = ({"role": "user", "content": "Begin."},)
        self.prompts = {
            f"p{index}": Prompt(
                f"p{index}", begin, (1,), "", begins_episode=True,
                extra={"is_broken": index < NUM_BROKEN, "marks": str(marks), "step_seconds": STEP_SECONDS},
            )
            for index in range(num_episodes // GROUP_SIZE + NUM_BROKEN)
        }  # fmt: skip
        self.inner = inner
        self.counts: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()  # keyed by prompt
        self.longest_s = 0.0
        self._num_ended = 0
        self._open()

    def _open(self) -> None:
        place = f"{faulty_environment.__file__}:Faulty"
        limits = {"reset_seconds": STEP_SECONDS, "step_seconds": STEP_SECONDS, "memory_limit_mb": 1024}
        settings = WorkerSettings("environment", place, num_processes=4, **limits)
        self.pool = CountingPool(WorkerPool(settings, self.inner.wake))
        limits_of_episodes = EpisodeSettings(
            100_000, 1000, max_turns=2 * faulty_environment.TURNS, max_turn_tokens=TURN_TOKENS, max_environments=64,
            retries=RETRIES, order="arrival", parser="none", on_cut="observe",
        )  # fmt: skip
        self.engine = EpisodeEngine(self.inner, self.pool, self._turns, limits_of_episodes)
        scorer = SampleScorer(
            EnvironmentRewards(RewardConfig(verifier="environment")), self._turns.template.tokenizer.decode
        )
        stream = PromptStream(list(self.prompts), 3, 1)
        losses = LossLimits(10**9, MAX_OF_PROMPT)
        rollout = RolloutConfig(
            prompts_per_step=GROUPS, group_size=GROUP_SIZE, filter_groups=False, on_exhausted="train_partial",
            oversample=2.0, max_staleness=1, partial_rollout=True,
        )  # fmt: skip
        inputs = CollectorInputs(stream, self.prompts, self.engine, scorer, losses=losses)
        sampling = SamplingParams(max_new_tokens=10_000, stop_token_ids=self._turns.stop_token_ids)
        self.collector = GroupCollector(inputs, rollout, sampling, RUN_SEED)

    def play(self) -> None:
        """Collect batches until no prompt is left."""
        while True:
            batch = self.collector.collect(GROUPS, between_polls=self._between_polls)
            self._check(batch)
            self.inner.update()
            if batch.should_stop:
                return
            if self._has_passed("resumes", self._every.resumes, sum(self.trained.values()) * GROUP_SIZE):
                self._resume()

    def close(self) -> None:
        self.pool.close()
        self._add_counts()

    def _between_polls(self) -> None:
        assert self.collector.accounting().is_balanced and self.engine.accounting().is_balanced
        ended = self._num_ended + sum(self.engine.accounting().ended.values())
        if self._has_passed("updates", self._every.updates, ended):
            self.collector.hold()
        if self._has_passed("kills_from_outside", self._every.kills, ended) and (workers := self.pool.pool.processes()):
            os.kill(self._draw.choice(workers), signal.SIGKILL)
        if self._has_passed("server_kills", self._every.server_kills, ended):
            self.inner.kill()

    def _has_passed(self, name: str, every: int, count: int) -> bool:
        if count < (self.counts[name] + 1) * every:
            return False
        self.counts[name] += 1
        return True

    def _resume(self) -> None:
        state = json.loads(json.dumps(self.collector.state_dict(), default=np.ndarray.tolist))
        self.close()
        self._open()
        self.collector.load_state_dict(state)

    def _add_counts(self) -> None:
        accounting = self.engine.accounting()
        self._num_ended += sum(accounting.ended.values())
        self.longest_s = max(self.longest_s, self.pool.longest_s)
        self.counts.update({f"workers_{name}": count for name, count in self.pool.pool.counts.items()})
        self.counts.update(
            acts=self.pool.num_acts, lost_replies=self.pool.num_lost, diverged=accounting.diverged, lost=accounting.ended.get("lost", 0)
        )

    def _check(self, batch: RolloutBatch) -> None:
        """Require whole conversations: each turn of an episode sampled, answered and rewarded once."""
        statistics = batch.statistics
        self.counts.update(discarded_tokens=statistics.num_discarded_tokens, tokens=statistics.num_tokens)
        for group in batch.groups:
            self.trained[group.prompt.prompt_id] += 1
            for index, sample in enumerate(group.samples):
                episode = sample.completion.episode
                seed = sample_seed(RUN_SEED, group.group_id, index)
                text = self._turns.template.tokenizer.decode(sample.completion.token_ids)
                is_whole = all(answer in text for answer in faulty_environment.answers(seed))
                assert episode is not None and episode.end == "done" and is_whole, f"{sample.sample_id}: {episode}"
                assert len(episode.turns) == faulty_environment.TURNS and episode.reward == faulty_environment.TURNS / 2
                self.counts["trained_tokens"] += sample.completion.num_sampled


def play_chaos(
    num_episodes: int,
    turns: TurnTemplate,
    engine: Callable[[Path], AbstractContextManager[ChaosEngine]] | None = None,
    every: Every = USUAL,
) -> dict[str, Any]:
    """Play and check; return the figures. AssertionError names the first deviation.

    `engine` opens what samples the turns, and may write to the directory it is given; None: `ChaoticEngine`.
    """
    started, old = time.perf_counter(), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="episode-chaos-") as directory:
        scratch, marks = Path(directory) / "scratch", Path(directory) / "marks"
        scratch.mkdir()
        marks.mkdir()
        tempfile.tempdir = str(scratch)
        descriptors, children = len(os.listdir("/proc/self/fd")), set(descendants(os.getpid()))
        try:
            with engine(Path(directory)) if engine else nullcontext(ChaoticEngine(turns.stop_token_ids[0])) as inner:
                chaos = Chaos(num_episodes, turns, marks, inner, every)
                try:
                    chaos.play()
                finally:
                    chaos.close()
        finally:
            tempfile.tempdir = old
        faults = Counter(path.suffix[1:] for path in marks.iterdir())
        leftovers = {
            "processes": len(set(descendants(os.getpid())) - children),
            "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
            "files": sum(1 for _ in scratch.rglob("*")),
        }
    return {
        "episodes": GROUP_SIZE * sum(chaos.trained.values()),
        "seconds": round(time.perf_counter() - started, 1),
        "faults": dict(faults),
        "deviations": _deviations(chaos),
        "leftovers": leftovers,
        "longest_wait_s": round(chaos.longest_s, 2),
        "resident_mb": resident_pages(os.getpid()) * os.sysconf("SC_PAGE_SIZE") // 2**20,
        **chaos.counts,
    }


def _deviations(chaos: Chaos) -> dict[str, int]:
    """Return how far the counts are from what the faults allow; all 0."""
    healthy = {name for name, prompt in chaos.prompts.items() if not prompt.extra["is_broken"]}
    accounting = chaos.collector.accounting()
    return {
        "prompts_not_trained_once": len(healthy ^ set(chaos.trained)) + sum(count != 1 for count in chaos.trained.values()),
        "groups_lost": accounting.lost - NUM_BROKEN * (MAX_OF_PROMPT + 1),
        "prompts_without_a_place": int(not accounting.is_balanced),
        "tokens_sampled": chaos.inner.num_sampled - chaos.counts["tokens"],
        "tokens_trained_or_discarded": chaos.counts["tokens"] - chaos.counts["trained_tokens"] - chaos.counts["discarded_tokens"],
        "diverged": chaos.counts["diverged"],
    }
