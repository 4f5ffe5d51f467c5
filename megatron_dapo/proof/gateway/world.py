"""A world for the endpoint without HTTP, processes and models: the requests of random clients go through the
parser of Chat Completions, the tree, the worker's lines and the episode engine; the turns are random ids.

    client --body--> chat.parse, ConversationTree --line--> EpisodeEngine --ids--> ScriptedEngine
           <-answer- ChatAnswer, tree.answered    <--line--               <-ids--
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.endpoint import chat
from megatron_dapo.engines.endpoint.agents import TurnLines, answer_of
from megatron_dapo.engines.endpoint.tree import ConversationTree, ServedTurn, TooManyBranches
from megatron_dapo.environments.episode_process import OpenEpisode, act_line, reply_of
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.proof.gateway.clients import Asked, RandomClient
from megatron_dapo.proof.gateway.oracle import STOP, Oracle, Request
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings
from megatron_dapo.types import Completion, FinishReason, GenerationRequest, SamplingParams, VersionRange

SAMPLING = SamplingParams(max_new_tokens=1 << 20, stop_token_ids=(STOP,))
SETTINGS = EpisodeSettings(
    max_context_tokens=1 << 24, max_prompt_tokens=1 << 24, max_turns=1 << 20, retries=0, parser="line", on_cut="observe"
)
_MAX_TURN_TOKENS = 64
_NOWHERE = Path()
_SAID = ("yes", "no", " yes", "add: 1", "add: 2", "sure.\nadd: 3", "")


class GatewayViolation(AssertionError):
    """The endpoint did something else than the oracle."""


class ByteTokenizer:
    """Two ids for each byte: the model samples both, a text is encoded as the first. What is encoded again differs."""

    chat_template = "its own"
    eos_token_id: int | None = STOP

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return bytes(token % 256 for token in token_ids).decode()

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        **_: Any,
    ) -> Any:
        text = f"\3{','.join(tool['function']['name'] for tool in tools)}\0" if tools else ""
        for message in conversation:
            calls = "".join(
                f"\4{call['function']['name']}: {json.dumps(call['function']['arguments'])}"
                for call in message.get("tool_calls") or ()
            )
            text += f"\1{message['role']}\2{message['content']}{calls}\0"
        text += "\1assistant\2" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


TURNS = TurnTemplate(PromptTemplate(ByteTokenizer()), (STOP,), "keep")


def _turns() -> Iterator[list[int]]:
    draw = random.Random(0)
    for _ in range(4093):
        yield [*(byte + 256 * draw.randrange(2) for byte in draw.choice(_SAID).encode()), STOP]


_SAMPLED = tuple(_turns())


def sampled_ids(seed: int, turn: int) -> list[int]:
    """Return the turn that the policy takes."""
    return _SAMPLED[(seed * 1_000_003 + turn * 7_919) % len(_SAMPLED)]


def logprobs(turn: int, num_tokens: int) -> list[float]:
    """Return numbers that name the tokens of an episode: no two are equal."""
    return [-float(turn * _MAX_TURN_TOKENS + place) for place in range(num_tokens)]


class ClientSession:
    """An episode of one client, and what the oracle says about it."""

    def __init__(self, name: str, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        self.name, self.seed, self.counts = name, seed, Counter[str]()
        max_streams = draw.choice([2, 4, *[16] * 8])
        self.oracle, self._tree = Oracle(max_streams), ConversationTree(max_streams=max_streams)
        self._lines = TurnLines()
        self._client, self._num_steps = RandomClient(draw), draw.randint(1, 10)
        self._queue: deque[ServedTurn] = deque()  # the first one is being sampled
        self._waiting: dict[ServedTurn, list[Asked]] = {}  # requests that wait for a turn's answer
        self._limits: dict[ServedTurn, int | None] = {}
        self._expected: dict[ServedTurn, Request] = {}
        self.sampled: list[Request] = []  # a turn's number is its index
        self.lost = ""
        self._wire = OpenEpisode(1, name, Task({}, seed), _NOWHERE)

    def reply(self) -> Reply:
        """Return what the episode says next: a turn to sample, its end, or its loss."""
        while not self._queue and self._num_steps and not self.lost:
            self._step()
        line: dict[str, Any] = {"done": True, "reward": 1.0}
        if self.lost:
            line = {"lost": self.lost}
        elif self._queue:
            line = self._lines.line(self._queue[0], self._limits[self._queue[0]])
            self.sampled.append(self._expected[self._queue[0]])
        reply = reply_of(line, self._wire)
        self._wire.has_begun = True
        return reply

    def take(self, action: Action) -> None:
        """Take the answer to the turn that is being sampled, and let the client do something meanwhile."""
        answer = answer_of(act_line(self._wire, replace(action, reasoning=f"thought {len(self.sampled)}")))
        turn = self._queue.popleft()
        message = answer.message(turn.number)
        self._tree.answered(turn, message)
        self._expected[turn].answer = message
        self._expected[turn].ids = sampled_ids(self.seed, len(self.sampled) - 1)[: action.num_tokens]
        for asked in self._waiting.pop(turn):
            self._client.read(asked, turn.number, message)
        if self._num_steps and self._draw.random() < 0.2:
            self._step()  # Others are sampled meanwhile.
        if not self._num_steps and self._draw.random() < 0.5:
            self._queue.clear()  # the program ends without its answers

    def _step(self) -> None:
        self._num_steps -= 1
        for asked in self._client.requests():
            self._ask(asked)
        waiting = [turn for turn in self._queue if turn in self._waiting]
        if waiting and self._draw.random() < 0.15:
            turn = self._draw.choice(waiting)
            self._client.unread += self._waiting[turn]
            self._waiting[turn] = []
            turn.is_abandoned = self._expected[turn].is_lost = True
            self.counts["disconnect"] += 1

    def _ask(self, asked: Asked) -> None:
        self.counts[asked.kind] += 1
        request, _ = chat.parse(asked.body, SAMPLING)
        expected = self.oracle.ask(asked.messages, asked.tools, asked.is_retry, asked.after)
        after = None if asked.after is None else self._tree.turns[asked.after]
        messages = request.messages if after is None else (*after.conversation(), *request.messages)
        try:
            turn = self._tree.ask(messages, request.tools, is_retry=asked.is_retry, after=after)
        except TooManyBranches as error:
            self.lost = str(error)
            if expected is not None:
                raise GatewayViolation(f"{self.name}: lost, but it has room for the conversation") from None
            return
        if expected is None or self._expected.setdefault(turn, expected) is not expected:
            raise GatewayViolation(f"{self.name}: a {asked.kind} request is answered by turn {turn.number}")
        if turn.stream != expected.stream:
            raise GatewayViolation(f"{self.name}: turn {turn.number} is in stream {turn.stream}, not {expected.stream}")
        if turn.answer is not None:
            self.counts["answered again"] += 1
            self._client.read(asked, turn.number, turn.answer)
        elif turn in self._waiting:
            self._waiting[turn].append(asked)
        else:
            self._queue.append(turn)
            self._waiting[turn], self._limits[turn] = [asked], request.max_tokens


class ClientPool:
    """`EnvironmentPool` of random clients."""

    def __init__(self, ended: Mapping[str, ClientSession] | None = None) -> None:
        self.open: dict[str, ClientSession] = {}
        self.ended = dict(ended or {})
        self._replies: list[Reply] = []

    def start(self, episode_id: str, task: Task) -> None:
        self.open[episode_id] = ClientSession(episode_id, task.seed)
        self._replies.append(self.open[episode_id].reply())

    def act(self, episode_id: str, action: Action) -> None:
        self.open[episode_id].take(action)
        self._replies.append(self.open[episode_id].reply())

    def end(self, episode_id: str) -> None:
        if session := self.open.pop(episode_id, None):
            self.ended[episode_id] = session

    def poll(self, timeout: float = 0.0) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        self.open.clear()


class ScriptedEngine:
    """`RolloutEngine` that samples a few tokens of each turn a poll, and checks what it is asked to continue."""

    prefix_reuse = PrefixReuse()
    policy_version = 0

    def __init__(self, seeds: Mapping[str, int], draw: random.Random) -> None:
        self.sessions = ClientPool()  # those that ask now
        self.sampled: dict[str, list[float]] = {name: [] for name in seeds}  # log-probs of all tokens that were sampled
        self._seeds, self._draw = seeds, draw
        self._running: dict[str, GenerationRequest] = {}
        self._keys: dict[str, dict[tuple[int, int], int]] = {name: {} for name in seeds}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._check(request)
            self._running[request.request_id] = request

    def _check(self, request: GenerationRequest) -> None:
        name, turn = request.request_id.split("@")
        expected = self.sessions.open[name].sampled[int(turn)]
        if list(request.prompt_ids) != expected.context:
            contexts = f"{request.prompt_ids}, not after {expected.context}"
            raise GatewayViolation(f"{name}: turn {turn} is sampled after {contexts}")
        key = (request.seed, len(request.prompt_ids))  # the engine seeds a turn's random numbers with both
        if self._keys[name].setdefault(key, int(turn)) != int(turn):
            raise GatewayViolation(f"{name}: turn {turn} has the random numbers of turn {self._keys[name][key]}")

    def poll(self) -> list[Completion]:
        finished = []
        for key, request in list(self._running.items()):
            completion = self._advanced(request, self._draw.choice([1, 99, 99]))
            self._running[key] = replace(request, prefix=completion)
            if completion.finish_reason != "abort":
                del self._running[key]
                finished.append(completion)
        return finished

    def abort(self) -> list[Completion]:
        stopped = [self._advanced(request, 0) for request in self._running.values()]
        self._running.clear()
        return stopped

    def _advanced(self, request: GenerationRequest, count: int) -> Completion:
        name, turn = request.request_id.split("@")
        ids, most = sampled_ids(self._seeds[name], int(turn)), request.sampling.max_new_tokens
        start = 0 if request.prefix is None else request.prefix.num_tokens
        end = min(start + count, len(ids), most)
        numbers = logprobs(int(turn), end)
        self.sampled[name] += numbers[start:]
        reason: FinishReason = "stop" if end == len(ids) else "length" if end == most else "abort"
        versions = (VersionRange(0, end, 0),) if end else ()
        return Completion(request.request_id, np.array(ids[:end]), np.array(numbers), reason, versions)
