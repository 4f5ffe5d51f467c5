"""Conversations of an episode that a user's function forks and begins, against the oracle of the endpoint."""

from __future__ import annotations

import asyncio
import queue
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dapo.engines.base import PrefixReuse, completion_from_json, completion_to_json
from megatron_dapo.environments import AsyncClient, EpisodeTask, user
from megatron_dapo.environments.episode_process import OpenEpisode, act_line, reply_of
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.environments.remote.worker import Play, _Episode
from megatron_dapo.proof.gateway.clients import TOOL
from megatron_dapo.proof.gateway.oracle import STOP, Oracle, Request
from megatron_dapo.proof.gateway.run import GatewayProof, _check, submit_again
from megatron_dapo.proof.gateway.world import SAMPLING, SETTINGS, TURNS, ClientPool, ScriptedEngine, sampled_ids
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.types import Completion, GenerationRequest, VersionRange
from tests.examples import examples

BUSY_S = 60.0  # limit on a loaded machine


class FunctionSession:
    """An episode of a random function in a worker's thread, and what the oracle says about it."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed, self.counts, self.lost = name, seed, Counter[str](), ""
        max_branches = random.Random(seed).choice([2, 16, 16, 16])
        self.oracle, self.sampled = Oracle(max_branches), list[Request]()
        self.play = Play(self.rollout, True, max_branches=max_branches)
        self.rewards, self.figures = list[float](), dict[str, float]()
        self._number = 0
        self._wire = OpenEpisode(1, name, Task({}, seed), Path())
        self._said: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.thread = _Episode(self, {"episode": 1, "task": {}, "seed": seed, "directory": ""})
        self.thread.start()

    async def rollout(self, task: EpisodeTask, client: AsyncClient) -> float:
        """Go on with, fork and begin conversations, some of them at the same time, in any order."""
        conversations: list[tuple[AsyncClient, list[Any], list[Any]]] = [(client, [], [])]
        for _ in range(task.random.randint(1, 6)):
            chosen, messages, tools = task.random.choice(conversations)
            kind = task.random.choice(["go on", "fork", "fresh", "together"])
            self.counts[kind] += 1
            if kind == "fork":
                conversations.append((chosen.fork(), [*messages], [*tools]))
            elif kind == "fresh":
                conversations.append((chosen.fresh("a sub-agent"), [], []))
            together = task.random.sample(conversations, min(3, len(conversations))) if kind == "together" else [conversations[-1]]
            await asyncio.gather(*(self._talk(task, *one) for one in together))
        self.rewards.append(1.0)
        return 1.0

    async def _talk(self, task: EpisodeTask, client: AsyncClient, messages: list[Any], tools: list[Any]) -> None:
        for _ in range(task.random.randint(1, 2)):
            if not messages and task.random.random() < 0.5:
                tools.append(TOOL)
            self._number += 1
            messages.append(user(f"question {self._number}"))
            request = self.oracle.ask([*messages], [*tools], False)
            if request is not None:
                self.sampled.append(request)
            turn = await client.chat(messages, tools)
            assert request is not None, "it has no room for the conversation"
            number, request.answer = self.sampled.index(request), turn.message
            messages.append(turn.message)
            if task.random.random() < 0.3:
                self.rewards.append(number / 8)
                client.reward(number / 8)
            self.figures = {"turns": float(self._number), **({"called": 1.0} if turn.calls else self.figures)}
            task.record(**self.figures)

    # What an episode's thread needs of its worker.

    def reply(self, message: Mapping[str, Any]) -> None:
        self._said.put(message)

    def forget(self, number: int) -> None:
        pass

    # What the engine needs of its pool.

    def next_reply(self) -> Reply:
        message = self._said.get(timeout=BUSY_S)
        self.lost = message.get("lost", "")
        if self.lost:  # calls that waited are not answered
            self.sampled = [one for one in self.sampled if one.ids]
        reply = reply_of(message, self._wire)
        self._wire.has_begun = True
        return replace(reply, episode_id=self.name)

    def take(self, action: Action) -> None:
        number = next(index for index, one in enumerate(self.sampled) if not one.ids)
        self.sampled[number].ids = sampled_ids(self.seed, number)
        self.thread.inbox.put(act_line(self._wire, action))

    def end(self) -> None:
        self.thread.inbox.put({"op": "end"})
        self.thread.join(BUSY_S)
        assert not self.thread.is_alive()
        assert self._said.get(timeout=BUSY_S)["ended"] and self._said.empty(), "nothing is said after the end"


class FunctionPool(ClientPool):
    """`EnvironmentPool` of random functions."""

    def start(self, episode_id: str, task: Task) -> None:
        self.open[episode_id] = session = FunctionSession(episode_id, task.seed)
        self._replies.append(session.next_reply())

    def act(self, episode_id: str, action: Action) -> None:
        session: Any = self.open[episode_id]
        session.take(action)
        self._replies.append(session.next_reply())

    def end(self, episode_id: str) -> None:
        if session := self.open.get(episode_id):
            session.end()
        super().end(episode_id)


def test_forks_are_streams_whose_sampled_tokens_are_trained_once() -> None:
    """Every turn is sampled after the context of its conversation, also if another process plays the episode again."""
    proof, counts = GatewayProof(), Counter[str]()
    for number in range(examples(24)):
        draw = random.Random(number)
        seeds = {f"g{number}.{index}/0": 1000 * number + index for index in range(4)}
        inner = ScriptedEngine(seeds, draw)
        inner.sessions = FunctionPool()
        engine = EpisodeEngine(inner, inner.sessions, TURNS, SETTINGS)
        requests = {name: GenerationRequest(name, (), SAMPLING, seed, task={}) for name, seed in seeds.items()}
        engine.submit(list(requests.values()))
        try:
            while engine.num_unfinished:
                finished = engine.poll()
                if draw.random() < 0.2:
                    held = engine.abort()
                    if draw.random() < 0.5:  # another process, from what was saved
                        counts["replayed"] += len(held)
                        for session in [*inner.sessions.open.values()]:
                            inner.sessions.end(session.name)
                        inner.sessions = FunctionPool(inner.sessions.ended)
                        engine = EpisodeEngine(inner, inner.sessions, TURNS, SETTINGS)
                        held = [completion_from_json(completion_to_json(one)) for one in held]
                    finished += submit_again(engine, held, requests)
                for completion in finished:
                    session: Any = inner.sessions.ended.pop(completion.request_id)
                    _check(session, completion, inner, proof)
                    counts += session.counts
                    assert completion.episode.figures == session.figures
                    if not session.lost:
                        assert completion.episode.reward == pytest.approx(sum(session.rewards))
        finally:  # threads that wait would hold up the end of this process
            for name in [*inner.sessions.open]:
                inner.sessions.end(name)
        assert engine.accounting().diverged == 0 and engine.accounting().is_balanced
    assert min(counts[kind] for kind in ("go on", "fork", "fresh", "together", "replayed")) > 0
    assert proof.streams > 24 and proof.lost_tokens, "some began more conversations than they may"


class SlotEngine:
    """`RolloutEngine` that samples a token a poll in each of `num_slots` turns, all of them of `LENGTH` tokens."""

    LENGTH = 40
    prefix_reuse = PrefixReuse()
    policy_version = 0

    def __init__(self, num_slots: int) -> None:
        self._num_slots, self._left = num_slots, dict[str, int]()

    @property
    def num_unfinished(self) -> int:
        return len(self._left)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._left |= {request.request_id: self.LENGTH for request in requests}

    def poll(self) -> list[Completion]:
        for name in [*self._left][: self._num_slots]:
            self._left[name] -= 1
        ended = [name for name, left in self._left.items() if not left]
        self._left = {name: left for name, left in self._left.items() if left}
        numbers, versions = np.zeros(self.LENGTH), (VersionRange(0, self.LENGTH, 0),)
        return [Completion(name, np.array([*b"x" * (self.LENGTH - 1), STOP]), numbers, "stop", versions) for name in ended]


class DelegatingPool(ClientPool):
    """`EnvironmentPool` whose episodes have a turn, four that follow it, and one in a conversation about those."""

    def start(self, episode_id: str, task: Task) -> None:
        self.turns = getattr(self, "turns", {}) | {episode_id: 0}
        self._say(episode_id)

    def act(self, episode_id: str, action: Action) -> None:
        self.turns[episode_id] += 1
        self._say(episode_id, after=0, done=self.turns[episode_id] == 6, begins="a judge" if self.turns[episode_id] == 5 else "")

    def _say(self, name: str, **facts: Any) -> None:
        self._replies.append(Reply(name, messages=(user("go on"),), **facts))


@pytest.mark.parametrize(("num_episodes", "cost"), [(8, 2.0), (16, 1.0), (32, 1.0)])
def test_calls_in_turn_cost_nothing_if_an_engine_s_slots_are_full(num_episodes: int, cost: float) -> None:
    """Six turns an episode, four of which a function asks for at the same time, on 16 slots.

    The time of all episodes is that of their tokens on all slots if as many episodes are open as there are slots.
    """
    num_slots, num_turns = 16, 6
    engine = EpisodeEngine(SlotEngine(num_slots), DelegatingPool(), TURNS, replace(SETTINGS, order="arrival"))
    engine.submit([GenerationRequest(f"g{number}/0", (), SAMPLING, number, task={}) for number in range(num_episodes)])
    num_polls = 0
    while engine.num_unfinished:
        engine.poll()
        num_polls += 1
    least = num_episodes * num_turns * SlotEngine.LENGTH / num_slots
    assert num_polls / least == pytest.approx(cost, rel=0.06)
