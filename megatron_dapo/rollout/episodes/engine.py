"""Plays episodes on any rollout engine: one request in, one completion out that holds the whole conversation.

    collector, evaluation --- submit, poll, abort ---> EpisodeEngine --- one request a turn ---> the rollout engine
                                                            +---------- start, act, end ------> environments

    submit -> WAITING -> STARTING -> READY -> GENERATING -> ACTING -> READY ... -> returned by `poll`, with its end
                 ^                     ^          |            |
                 |                     +-- held --+------------+  abort: its tokens come back, the environment stays and keeps
                 |                             |                  acting; the next request with these tokens continues it
                 +-----------------------------+
                   its environment was lost, or the process is another one: the recorded turns are played again

An environment that is lost to a failure of the machine is started again with the same seed, see `recovery`. After
`retries` losses the episode ends as lost: it says nothing about the policy.

A request with a `window_end` (T-PPO) comes back as an aborted one does once its episode has that many sampled tokens, in
the middle of a turn or after the answer to its last one. Its environment stays until others need the place.

Order "arrival": answers enter when they come. "rounds": an answer to a turn of one poll enters in the next one, which
waits for it, so what an engine is given depends on counts only, and a resumed run repeats it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from megatron_dapo.data.template import Messages
from megatron_dapo.data.tool_calls import ParsedTurn, Tool, TurnParser
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.base import CollectiveEngine, PrefixReuse, RolloutEngine, check_request_ids
from megatron_dapo.environments.protocol import Action, EnvironmentPool, Reply
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings, EpisodeStage, LiveEpisode, TurnEnd, TurnFormat
from megatron_dapo.rollout.episodes.recovery import Recovery
from megatron_dapo.rollout.episodes.stream import EpisodeStreams
from megatron_dapo.rollout.open_group import MAX_FRUITLESS
from megatron_dapo.types import Completion, EpisodeEnd, GenerationRequest

Result = TypeVar("Result")
_WAIT_S = 0.5  # longest wait of one poll for an environment
_OWED = (EpisodeStage.STARTING, EpisodeStage.ACTING)  # stages in which the environment owes an answer


@dataclass(frozen=True)
class EpisodeAccounting:
    """Counts every episode begun by its place. One that is begun from a saved record counts once more."""

    begun: int
    ended: Mapping[str, int]  # keyed by `EpisodeEnd`
    dropped: int  # held or aborted, and not continued
    held: int
    open: Mapping[str, int]  # keyed by the name of the stage
    retried: int = 0  # times an environment was lost and started again
    diverged: int = 0  # times a repeated environment answered differently
    restarted: int = 0  # times one began anew because `resume` says so
    discarded_tokens: int = 0  # sampled in episodes that began anew

    @property
    def is_balanced(self) -> bool:
        """Return True if every episode is in exactly one place."""
        return self.begun == sum(self.ended.values()) + self.dropped + self.held + sum(self.open.values())


class EpisodeEngine:
    """`RolloutEngine` whose requests with a task are episodes; the others go to `engine` untouched.

    It is a `CollectiveEngine` if `engine` is one.
    """

    def __init__(
        self, engine: RolloutEngine, pool: EnvironmentPool, turns: TurnTemplate, settings: EpisodeSettings
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._turns = turns
        self._settings = settings
        self._recovery = Recovery(pool, settings)
        self._open: dict[str, LiveEpisode] = {}
        self._held: dict[str, LiveEpisode] = {}
        self._waiting: deque[LiveEpisode] = deque()
        self._generating: dict[str, LiveEpisode] = {}  # keyed by the name of the turn
        self._passing: set[str] = set()  # requests without a task
        self._finished: list[Completion] = []
        self._turn_formats: dict[str, TurnFormat] = {}
        self._round = 0
        self._counts: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    # RolloutEngine

    @property
    def num_unfinished(self) -> int:
        return len(self._open) + len(self._passing) + len(self._finished)

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def prefix_reuse(self) -> PrefixReuse:
        return self._engine.prefix_reuse

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """See `CollectiveEngine`."""
        return cast(CollectiveEngine, self._engine).run_on_rank0(body)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `RolloutEngine`. A prefix with an episode continues it."""
        check_request_ids(requests, self._open.keys() | self._passing | {one.request_id for one in self._finished})
        for request in requests:
            if request.task is not None and request.prefix is not None and request.prefix.episode is None:
                raise ValueError(f"request {request.request_id!r}: its prefix is no episode, but it has a task")
        passing = [request for request in requests if request.task is None]
        if passing:
            self._engine.submit(passing)
            self._passing.update(request.request_id for request in passing)
        new = [one for one in requests if one.task is not None and not self._continue(one)]
        # What was held is continued by one call; the others' places in the environments' processes go to new episodes.
        begun = {request.request_id for request in new}
        self._drop_held(one for one in self._held.values() if new and (not one.is_paused or one.name in begun))
        # Those with a record first: they had environments in the process that wrote it.
        for request in sorted(new, key=lambda one: one.prefix is None):
            episode = LiveEpisode(replace(request, prefix=None), record=request.prefix)
            self._open[episode.name] = episode
            self._waiting.append(episode)
            self._counts["begun"] += 1
        self._start_waiting()

    def poll(self) -> list[Completion]:
        """See `RolloutEngine`. Episodes that ended come in order of their names, after requests without a task."""
        passed: list[Completion] = []
        if self._take_replies():
            self._start_waiting()
            self._submit_turns()
            for completion in self._engine.poll() if self._engine.num_unfinished else ():
                if (episode := self._generating.pop(completion.request_id, None)) is not None:
                    self._receive_turn(episode, completion)
                else:
                    self._passing.remove(completion.request_id)
                    passed.append(completion)
            self._round += 1
        return passed + self._take_finished()

    def abort(self) -> list[Completion]:
        """See `RolloutEngine`. Environments of episodes with tokens stay, until others begin or are aborted."""
        self._drop_held(one for one in self._held.values() if not one.is_paused)
        passed = []
        for completion in self._engine.abort():
            if (episode := self._generating.pop(completion.request_id, None)) is not None:
                episode.partial, episode.stage = completion, EpisodeStage.READY
            else:
                self._passing.remove(completion.request_id)
                passed.append(completion)
        stopped, self._open = self._open, {}
        self._waiting.clear()
        completions = [stopped[name].so_far() for name in sorted(stopped)]
        for completion in completions:
            episode = stopped[completion.request_id]
            if completion.num_tokens and episode.stage is not EpisodeStage.WAITING:
                self._held[episode.name] = episode
            else:  # it begins anew, as it would in another process
                self._drop(episode)
        return passed + self._take_finished() + completions

    def accounting(self) -> EpisodeAccounting:
        """Count every episode begun by its place."""
        stages = Counter(episode.stage.name.lower() for episode in self._open.values())
        return EpisodeAccounting(
            begun=self._counts["begun"],
            ended=dict(self._ended),
            dropped=self._counts["dropped"],
            held=len(self._held),
            open=dict(stages),
            retried=self._recovery.counts["retried"],
            diverged=self._recovery.counts["diverged"],
            restarted=self._recovery.counts["restarted"],
            discarded_tokens=self._recovery.counts["discarded_tokens"],
        )

    # Beginning and continuing

    def _continue(self, request: GenerationRequest) -> bool:
        """Continue the held episode of a request; return False if it has other tokens or there is none."""
        held = self._held.get(request.request_id)
        if held is None or not _same_tokens(request.prefix, held.so_far()):
            return False
        self._open[held.name] = self._held.pop(held.name)
        held.request, held.due, held.is_paused = replace(request, prefix=None), self._round, False
        return True

    def _start_waiting(self) -> None:
        """Start episodes that wait, in order, while environments have places."""
        num_free = self._settings.max_environments - (len(self._held) + len(self._open) - len(self._waiting))
        # A paused episode whose environment is gone is played again from its tokens.
        paused = [one for one in self._held.values() if one.is_paused]
        num_dropped = self._drop_held(paused[: max(0, len(self._waiting) - num_free)])
        for _ in range(min(len(self._waiting), num_free + num_dropped)):
            episode = self._waiting.popleft()
            # One with a record enters in the round in which a process that holds it would continue it.
            episode.due = self._round + (episode.record is None)
            episode.seconds["waiting"] += time.perf_counter() - episode.begun_s
            self._recovery.start(episode, episode.record)

    def _drop_held(self, episodes: Iterable[LiveEpisode]) -> int:
        """Drop episodes that are held; return their number."""
        dropped = list(episodes)
        for episode in dropped:
            self._drop(self._held.pop(episode.name))
        return len(dropped)

    def _drop(self, episode: LiveEpisode) -> None:
        self._pool.end(episode.name)
        self._counts["dropped"] += 1

    # The environment's answers

    def _take_replies(self) -> bool:
        """Let answers enter; return False if one is due in this round and has not come yet."""
        in_rounds, wait = self._settings.order == "rounds", 0.0
        while True:
            replies = self._pool.poll(wait)
            for reply in replies:
                if (known := self._open.get(reply.episode_id) or self._held.get(reply.episode_id)) is not None:
                    known.reply = reply
            owed = [one for one in self._open.values() if one.stage in _OWED and (not in_rounds or one.due <= self._round)]
            entering = sorted((one for one in owed if one.reply is not None), key=lambda one: one.name)
            if entering and (not in_rounds or len(entering) == len(owed)):
                for episode in entering:
                    self._enter(episode)
                wait = 0.0
            elif owed and (in_rounds or not self._has_work):
                if wait and not replies:
                    return False
                wait = _WAIT_S
            else:
                return True

    @property
    def _has_work(self) -> bool:
        """True if the engine has requests, or will get some before it is polled."""
        return bool(self._engine.num_unfinished or self._finished) or any(
            one.stage is EpisodeStage.READY for one in self._open.values()
        )

    def _enter(self, episode: LiveEpisode) -> None:
        reply, episode.reply = episode.reply, None
        assert reply is not None, f"{episode.name} has no answer"
        episode.seconds["acting"] += reply.seconds
        episode.max_tokens = reply.max_tokens
        episode.figures |= reply.figures
        if reply.lost:
            self._lose(episode, reply.lost, reply.is_cause)
        elif reply.timed_out:
            self._time_out(episode)
        elif episode.stage is EpisodeStage.STARTING:
            self._open_conversation(episode, reply)
        else:
            self._answer(episode, reply)

    def _open_conversation(self, episode: LiveEpisode, reply: Reply) -> None:
        episode.turn_format = self._turn_format(reply.tools)
        if episode.state is not None and episode.record is not None:
            episode.restore(episode.record, episode.state)
            self._make_ready(episode)
            return
        prompt_ids = episode.turn_format.turns.template.render(reply.messages)
        if len(prompt_ids) > self._settings.max_prompt_tokens:
            raise ValueError(
                f"episode {episode.name}: its environment begins with {len(prompt_ids)} tokens, data.max_prompt_tokens = "
                f"{self._settings.max_prompt_tokens}: raise it, or shorten the first messages or the tools' descriptions"
            )
        episode.streams = EpisodeStreams(prompt_ids)
        episode.history = self._remembered((), reply.messages)
        episode.keep_state(reply)
        self._make_ready(episode)

    def _answer(self, episode: LiveEpisode, reply: Reply) -> None:
        streams, _ = episode.playing
        streams.judge_turn(reward=reply.reward or 0.0, calls=reply.calls)
        episode.is_rewarded |= reply.reward is not None
        if episode.record is not None and not streams.judged_as(episode.record, is_answered=not reply.done):
            self._recovery.begin_anew(episode, episode.record)
        elif reply.done:
            is_correct = reply.is_correct
            if is_correct is None and episode.is_rewarded:
                is_correct = streams.reward >= self._settings.success
            self._finish(episode, "done", is_correct=is_correct, parts=dict(reply.parts))
        elif streams.num_turns >= self._settings.max_turns:
            self._finish(episode, "max_turns")
        elif episode.seconds["acting"] > self._settings.max_seconds and episode.record is None:
            self._finish(episode, "seconds")
        elif reply.begins:
            self._begin_conversation(episode, reply)
        else:
            self._follow(episode, reply)

    def _follow(self, episode: LiveEpisode, reply: Reply) -> None:
        """Append the messages to the turn that they follow."""
        streams, _ = episode.playing
        turn = streams.num_turns - 1 if reply.after is None else reply.after
        if not 0 <= turn < streams.num_turns:
            self._lose(episode, f"its environment answered turn {turn} of {streams.num_turns}, which are numbered from 0")
            return
        end = episode.turn_ends[turn]
        try:
            new = end.turn_format.turns.follow(streams.context_after(turn), end.history, reply.messages)
        except ValueError as error:
            raise ValueError(f"episode {episode.name}: its environment's answer: {error}") from error
        if new.begins_segment:
            streams.begin_segment(new.token_ids, streams.segment_of(turn), "the chat template rewrites history")
        else:
            streams.observe(turn, new.token_ids)
        episode.turn_format, episode.history = end.turn_format, self._remembered(end.history, reply.messages)
        episode.keep_state(reply)
        self._make_ready(episode)

    def _begin_conversation(self, episode: LiveEpisode, reply: Reply) -> None:
        """Begin a stream with a conversation that continues no stream."""
        streams, _ = episode.playing
        turn_format = self._turn_format(reply.tools)
        try:
            prompt_ids = turn_format.turns.begin(reply.messages)
        except ValueError as error:
            self._lose(episode, f"its environment began another conversation: {error}")
            return
        streams.begin_segment(prompt_ids, streams.segment, reply.begins)
        episode.turn_format, episode.history = turn_format, self._remembered((), reply.messages)
        episode.keep_state(reply)
        self._make_ready(episode)

    def _make_ready(self, episode: LiveEpisode) -> None:
        """Continue with the next recorded turn, or wait to be submitted."""
        episode.stage = EpisodeStage.READY
        if episode.record is None:
            return
        streams, _ = episode.playing
        if not streams.agree_with(episode.record, episode.request.prompt_ids):
            self._recovery.begin_anew(episode, episode.record)
            return
        if not episode.recorded:
            episode.record = None
            return
        turn = replace(episode.recorded.popleft(), request_id=episode.turn_name)
        if turn.finish_reason == "abort":
            episode.partial, episode.record = turn, None
        else:
            self._end_turn(episode, turn)

    def _time_out(self, episode: LiveEpisode) -> None:
        """End an episode whose environment has used up its seconds. In a repetition the machine is slower than it was."""
        if episode.record is None:
            self._finish(episode, "seconds")
            return
        self._lose(episode, f"played again, it took longer than environment.episode_seconds = {self._settings.max_seconds:g}")

    def _lose(self, episode: LiveEpisode, reason: str, is_cause: bool = True) -> None:
        """Start a lost environment again, or give the episode up."""
        if self._recovery.start_again(episode, reason, is_cause):
            episode.due = self._round
        else:
            self._finish(episode, "lost", lost=reason)

    # The policy's turns

    def _pause(self, episode: LiveEpisode) -> None:
        """Return the episode unfinished and hold it."""
        self._finished.append(episode.so_far("window"))
        self._held[episode.name] = self._open.pop(episode.name)
        episode.is_paused = True

    def _submit_turns(self) -> None:
        requests, in_rounds = [], self._settings.order == "rounds"
        ready = [name for name, episode in self._open.items() if episode.stage is EpisodeStage.READY]
        for name in sorted(ready):
            episode = self._open[name]
            if in_rounds and episode.due > self._round:
                continue
            streams, _ = episode.playing
            num_tokens, end = episode.budget(self._settings)
            if num_tokens < 1:
                self._finish(episode, end)
                continue
            left = episode.left_of_window(self._settings)
            if left is not None and left <= (episode.partial.num_tokens if episode.partial is not None else 0):
                self._pause(episode)
                continue
            num_tokens = num_tokens if left is None else left
            request, episode.stage = episode.request, EpisodeStage.GENERATING
            episode.begun_s = time.perf_counter()
            self._generating[episode.turn_name] = episode
            requests.append(
                GenerationRequest(
                    episode.turn_name,
                    streams.context,
                    replace(request.sampling, max_new_tokens=num_tokens),
                    _segment_seed(request.seed, streams.segment),
                    prefix=episode.partial if episode.partial is not None and episode.partial.num_tokens else None,
                    affinity=(name, name.rpartition("/")[0]),
                )
            )
            episode.partial = None
        if requests:
            self._engine.submit(requests)

    def _receive_turn(self, episode: LiveEpisode, turn: Completion) -> None:
        episode.seconds["generating"] += time.perf_counter() - episode.begun_s
        if turn.finish_reason == "length" and turn.num_tokens == episode.left_of_window(self._settings):
            episode.partial, episode.stage = replace(turn, finish_reason="abort"), EpisodeStage.READY
            self._pause(episode)
            return
        if turn.finish_reason != "abort":
            episode.num_fruitless = 0
            self._end_turn(episode, turn)
            return
        # An engine may abort by itself, e.g. on a restart.
        episode.num_fruitless += 1
        if episode.num_fruitless > MAX_FRUITLESS:
            raise RuntimeError(f"turn {turn.request_id}: the engine gave it up {episode.num_fruitless} times in a row")
        episode.partial, episode.stage = turn, EpisodeStage.READY

    def _end_turn(self, episode: LiveEpisode, turn: Completion) -> None:
        """Take a whole turn to the environment, or end the episode if the turn was cut."""
        streams, turn_format = episode.playing
        _, cut_by = episode.budget(self._settings)
        streams.add_turn(turn)
        is_cut = turn.finish_reason != "stop"
        if is_cut and (cut_by != "length" or self._settings.on_cut == "end"):
            self._finish(episode, cut_by)
            return
        parsed = turn_format.parser.parse(turn.token_ids.tolist(), turn.finish_reason)
        episode.history = self._remembered(episode.history, [_as_message(parsed)])
        episode.turn_ends.append(TurnEnd(turn_format, episode.history))
        episode.stage = EpisodeStage.ACTING
        episode.due = self._round + (0 if episode.record is not None else 1)
        if episode.reply is None:  # otherwise the environment was lost in the meantime
            calls = () if is_cut else parsed.calls
            action = Action(
                parsed.content,
                calls,
                turn.finish_reason,
                parsed.reasoning,
                parsed.text,
                turn.num_tokens,
                streams.num_context_tokens - turn.num_tokens,
            )
            self._pool.act(episode.name, action)

    def _remembered(self, history: tuple[Mapping[str, Any], ...], messages: Messages) -> tuple[Mapping[str, Any], ...]:
        return (*history, *messages) if self._turns.history == "rewrite" else ()

    def _turn_format(self, tools: Sequence[Mapping[str, Any]]) -> TurnFormat:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._turn_formats:
            turns, template = self._turns, self._turns.template
            if tools and template.name != "plain":
                shown = [{"type": "function", "function": dict(schema)} for schema in tools]
                turns = replace(turns, template=replace(template, options={**(template.options or {}), "tools": shown}))
            parser = TurnParser(self._settings.parser, turns, [Tool(schema) for schema in tools])
            self._turn_formats[key] = TurnFormat(turns, parser)
        return self._turn_formats[key]

    # Ending

    def _finish(self, episode: LiveEpisode, end: EpisodeEnd, **facts: Any) -> None:
        if end == "lost":
            completion = replace(episode.so_far(), finish_reason="length")
            assert completion.episode is not None, f"{episode.name} is no episode"
            completion = replace(completion, episode=replace(completion.episode, end="lost", **facts))
        else:
            streams, _ = episode.playing
            reward = streams.reward if episode.is_rewarded else None
            completion = streams.completion(episode.request, end, reward=reward, **facts, **episode.facts)
        del self._open[episode.name]
        self._pool.end(episode.name)
        self._ended[end] += 1
        self._finished.append(completion)

    def _take_finished(self) -> list[Completion]:
        finished, self._finished = sorted(self._finished, key=lambda one: one.request_id), []
        return finished


def _same_tokens(prefix: Completion | None, held: Completion) -> bool:
    if prefix is None:
        return False
    segments = [stream.token_ids for one in (prefix, held) for stream in map(one.stream, range(1 + one.num_segments))]
    half = len(segments) // 2
    return prefix.num_segments == held.num_segments and all(map(np.array_equal, segments[:half], segments[half:]))


def _segment_seed(seed: int, segment: int) -> int:
    """Return the seed of a stream: two streams of an episode pass the same positions, where random numbers are keyed."""
    if not segment:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{segment}".encode()).digest()[:8], "little") >> 1


def _as_message(turn: ParsedTurn) -> dict[str, Any]:
    """Return a turn as the template's message, for a template that renders it again."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "id": f"call{index:05}", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for index, call in enumerate(turn.calls)
        ]
    return message
