"""A world of episodes without models and processes: an engine whose turns depend on seed and position, environments that
are functions of the actions so far, and the conversation played straight."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megatron_dapo.data.tool_calls import Tool, ToolCall, TurnParser
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.base import PrefixReuse, finish_reason_of, is_complete, aborted
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams, TurnCall, VersionRange
from tests.unit.data.published_templates import any_ids, turn_template

LOOKUP: dict[str, Any] = {
    "name": "lookup",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
CALLS = (
    '<tool_call>{"name": "lookup", "arguments": {"word": "cat"}}</tool_call>',
    'Well.<tool_call>{"name": "lookup", "arguments": {"word": 3}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
    '<tool_call>{"name": </tool_call>',
)


def number(*key: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6], "little")


def template(name: str = "qwen3", history: str = "keep") -> TurnTemplate:
    return turn_template(name, history)


def turn_of(turns: TurnTemplate, seed: int, position: int) -> list[int]:
    """The turn that the policy takes at a position of a stream: any ids, or a call, and the stop token."""
    draw = random.Random(number(seed, position))
    call = draw.random() < 0.4
    ids = list(turns.template.encode(draw.choice(CALLS))) if call else any_ids(draw, turns)
    return [*ids, turns.stop_token_ids[0]]


def logprob(seed: int, position: int) -> np.float32:
    return np.float32(-(number(seed, position, "logprob") % 1000) / 300)


@dataclass
class FakeTurnEngine:
    """`RolloutEngine` over `turn_of`. It may abort requests by itself."""

    turns: TurnTemplate
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    abort_rate: float = 0.0
    policy_version: int = 0
    sampled: Counter[tuple[int, int]] = field(default_factory=Counter)  # (seed, position) -> times
    version_of: dict[tuple[int, int], int] = field(default_factory=dict)
    requests: list[GenerationRequest] = field(default_factory=list)
    running: dict[str, GenerationRequest] = field(default_factory=dict)
    prefix_reuse = PrefixReuse()

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def run_on_rank0(self, body):
        return body()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            assert request.request_id not in self.running and request.task is None
            self.running[request.request_id] = replace(request, prefix=request.prefix or None)
            self.requests.append(request)

    def poll(self) -> list[Completion]:
        finished = []
        for name, request in list(self.running.items()):
            request = self._advanced(request, self.draw.randint(0, 6))
            self.running[name] = request
            if is_complete(request) or (request.prefix and self.draw.random() < self.abort_rate):
                del self.running[name]
                finished.append(aborted(request))
        return finished

    def abort(self) -> list[Completion]:
        stopped = [aborted(request) for request in self.running.values()]
        self.running.clear()
        return stopped

    def _advanced(self, request: GenerationRequest, count: int) -> GenerationRequest:
        start, whole = len(request.prompt_ids), turn_of(self.turns, request.seed, len(request.prompt_ids))
        for _ in range(count):
            if is_complete(request):
                break
            done = request.prefix.num_tokens if request.prefix else 0
            place = (request.seed, start + done)
            self.sampled[place] += 1
            self.version_of[place] = self.policy_version
            held = request.prefix or Completion(request.request_id, (), (), "abort", ())
            versions = [*(run.version for run in held.versions for _ in range(run.start, run.end)), self.policy_version]
            token_ids = [*held.token_ids.tolist(), whole[done]]
            logprobs = [*held.logprobs, logprob(*place)]
            grown = Completion(
                request.request_id, token_ids, logprobs, finish_reason_of(request.sampling, np.array(token_ids)), ranges(versions)
            )
            request = replace(request, prefix=grown)
        return request


def ranges(versions: Sequence[int]) -> tuple[VersionRange, ...]:
    starts = [place for place, version in enumerate(versions) if place == 0 or versions[place - 1] != version]
    ends = [*starts[1:], len(versions)]
    return tuple(VersionRange(start, end, versions[start]) for start, end in zip(starts, ends, strict=True) if end > start)


def answer_of(task: Task, actions: Sequence[Action], has_tools: bool = True) -> dict[str, Any]:
    """An environment: what it answers after `actions`, as fields of a reply."""
    draw = random.Random(number(task.seed, [(one.text, one.calls, one.finish_reason) for one in actions]))
    if not actions:
        begin = {"role": "user", "content": f"Begin {task.fields['question']} with {draw.randint(0, 99)}."}
        return {"messages": (begin,), "tools": (LOOKUP,) if has_tools else ()}
    calls = tuple(TurnCall(call.name, call.status, draw.random()) for call in actions[-1].calls)
    branch: dict[str, Any] = {}
    if task.fields.get("branches") and draw.random() < 0.6:
        branch = draw.choice([{"after": draw.randrange(len(actions))}, {"begins": "a sub-agent", "tools": (LOOKUP,)}])
    reward = round(draw.random(), 3) if draw.random() < 0.5 else None
    if draw.random() < 0.2:
        return {"done": True, "reward": reward, "is_correct": draw.random() < 0.5, "parts": {"fit": draw.random()}, "calls": calls}
    answers = tuple({"role": "tool", "content": f"{call.message} {draw.randint(0, 99)}"} for call in actions[-1].calls)
    said = answers if answers and not branch else ({"role": "user", "content": f"go on {draw.randint(0, 99)}"},)
    return {"messages": said, "reward": reward, "calls": calls, **branch}


def row_of(action: Action) -> list[Any]:
    """What an answer depends on, as JSON."""
    return [action.text, [asdict(call) for call in action.calls], action.finish_reason]


def action_of(row: Sequence[Any]) -> Action:
    return Action(row[0], tuple(ToolCall(**call) for call in row[1]), row[2])


@dataclass
class ScriptedPool:
    """`EnvironmentPool` over `answer_of`: answers come late and in any order, and some are losses."""

    draw: random.Random = field(default_factory=lambda: random.Random(0))
    loss_rate: float = 0.0
    changes: bool = False  # each start has another environment
    with_state: bool = False
    num_others_losses: int = 0  # the first losses, which other episodes cause
    tasks: dict[str, Task] = field(default_factory=dict)
    actions: dict[str, list[Action]] = field(default_factory=dict)
    open_calls: dict[str, Reply] = field(default_factory=dict)
    num_acts: Counter[str] = field(default_factory=Counter)
    num_starts: Counter[str] = field(default_factory=Counter)

    def start(self, episode_id: str, task: Task) -> None:
        assert episode_id not in self.tasks, f"{episode_id} is open"
        self.num_starts[episode_id] += 1
        if self.changes:
            task = replace(task, seed=task.seed + self.num_starts[episode_id])
        self.tasks[episode_id], self.actions[episode_id] = task, []
        if task.state is not None:
            self.actions[episode_id] = [action_of(row) for row in task.state]
        self._reply(episode_id, is_restored=task.state is not None)

    def act(self, episode_id: str, action: Action) -> None:
        assert episode_id in self.tasks and episode_id not in self.open_calls
        self.num_acts[episode_id] += 1
        self.actions[episode_id].append(action)
        self._reply(episode_id)

    def end(self, episode_id: str) -> None:
        for table in (self.tasks, self.actions, self.open_calls):
            table.pop(episode_id, None)

    def poll(self, timeout: float = 0.0) -> list[Reply]:
        chosen = [name for name in self.open_calls if self.draw.random() < 0.3]
        if timeout and not chosen and self.open_calls:
            chosen = [self.draw.choice(list(self.open_calls))]
        self.draw.shuffle(chosen)
        replies = [self.open_calls.pop(name) for name in chosen]
        for reply in replies:
            if reply.lost:
                self.end(reply.episode_id)
        return replies

    def close(self) -> None:
        self.tasks.clear()

    def _reply(self, name: str, is_restored: bool = False) -> None:
        facts = {"tools": (LOOKUP,)} if is_restored else answer_of(self.tasks[name], self.actions[name])
        if self.with_state and not is_restored and not facts.get("done"):
            facts["state"] = [row_of(action) for action in self.actions[name]]
        if self.draw.random() < self.loss_rate:
            facts = {"lost": "the worker died", "is_cause": self.num_starts[name] > self.num_others_losses}
        self.open_calls[name] = Reply(name, seconds=0.5, **facts)


def settings(**changes: Any) -> EpisodeSettings:
    return EpisodeSettings(**{"max_context_tokens": 700, "max_prompt_tokens": 600, "max_turns": 5, "parser": "hermes", **changes})


def request(name: str, turns: TurnTemplate, seed: int, max_new_tokens: int = 60, **task: Any) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=turns.stop_token_ids)
    return GenerationRequest(name, (1, 2), sampling, seed, task={"question": f"question {seed}", **task})


# ---- the conversation, played straight


@dataclass
class Played:
    end: str = ""
    streams: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)  # prompt, tokens
    sampled: list[tuple[int, int]] = field(default_factory=list)  # (seed, position) in order
    places: list[list[tuple[int, int] | None]] = field(default_factory=list)  # one a token of each stream; None: observed
    rewards: list[float] = field(default_factory=list)
    is_rewarded: bool = False
    is_correct: bool | None = None
    num_acts: int = 0


def play(one: GenerationRequest, turns: TurnTemplate, limits: EpisodeSettings) -> Played:
    """Play an episode without an engine that is asked in between."""
    task, actions, played = Task(one.task or {}, one.seed), [], Played()
    first = answer_of(task, actions)
    shown = {**(turns.template.options or {}), "tools": [{"type": "function", "function": dict(LOOKUP)}]}
    turns = replace(turns, template=replace(turns.template, options=shown))
    parser = TurnParser(limits.parser, turns, [Tool(LOOKUP)])
    played.streams.append((turns.template.render(first["messages"]), []))
    played.places.append([])
    current, turn_ends = 0, []
    while True:
        prompt, tokens = played.streams[current]
        left = {
            "max_tokens": one.sampling.max_new_tokens - len(played.sampled),
            "max_context": limits.max_context_tokens - len(prompt) - len(tokens),
        }
        if limits.max_turn_tokens:
            left["length"] = limits.max_turn_tokens
        played.end = min(left, key=lambda name: left[name])
        if left[played.end] < 1:  # no turn reads the last answer
            while played.places[current] and played.places[current][-1] is None:
                del played.places[current][-1], tokens[-1]
            if current and not tokens:
                del played.places[current], played.streams[current]
            return played
        seed = stream_seed(one.seed, current)
        turn = turn_of(turns, seed, len(prompt) + len(tokens))
        is_cut = len(turn) > left[played.end]
        turn = turn[: left[played.end]]
        places = [(seed, len(prompt) + len(tokens) + place) for place in range(len(turn))]
        played.sampled += places
        played.places[current] += places
        tokens.extend(turn)
        turn_ends.append((current, len(tokens)))
        if is_cut and (played.end != "length" or limits.on_cut == "end"):
            return played
        parsed = parser.parse(turn, "length" if is_cut else "stop")
        actions.append(Action(parsed.content, () if is_cut else parsed.calls, "length" if is_cut else "stop"))
        played.num_acts += 1
        answer = answer_of(task, actions)
        played.rewards.append(answer["reward"] or 0.0)
        played.is_rewarded |= answer["reward"] is not None
        if answer.get("done"):
            played.end, played.is_correct = "done", answer["is_correct"]
            return played
        if len(actions) == limits.max_turns:
            played.end = "max_turns"
            return played
        current, end = turn_ends[answer.get("after", -1)]
        prompt, tokens = played.streams[current]
        delta = turns.delta(tokens[end - 1], answer["messages"])
        if "begins" in answer or end < len(tokens):
            fresh = turns.template.render(answer["messages"])
            current = len(played.streams)
            played.streams.append((fresh if "begins" in answer else (*prompt, *tokens[:end], *delta), []))
            played.places.append([])
            continue
        tokens.extend(delta)
        played.places[current] += [None] * len(delta)


def stream_seed(seed: int, stream: int) -> int:
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1 if stream else seed


def world(
    seed: int, limits: EpisodeSettings, name: str = "qwen3", loss_rate: float = 0.0, abort_rate: float = 0.0
) -> tuple[EpisodeEngine, FakeTurnEngine, ScriptedPool]:
    turns = template(name)
    engine = FakeTurnEngine(turns, random.Random(seed), abort_rate)
    pool = ScriptedPool(random.Random(seed + 1), loss_rate)
    return EpisodeEngine(engine, pool, turns, limits), engine, pool


def drain(engine: EpisodeEngine, limit: int = 10_000) -> list[Completion]:
    finished: list[Completion] = []
    for _ in range(limit):
        if not engine.num_unfinished:
            return finished
        finished += engine.poll()
        assert engine.accounting().is_balanced
    raise AssertionError(f"{engine.num_unfinished} unfinished: {engine.accounting()}")


def facts_of(completions: Sequence[Completion]) -> Mapping[str, tuple[Any, ...]]:
    return {
        one.request_id: (one.token_ids.tobytes(), one.logprobs.tobytes(), one.finish_reason, one.prompt_ids, one.episode)
        for one in completions
    }
