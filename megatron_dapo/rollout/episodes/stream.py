"""The token streams of one episode while it is played, and the completion that holds them.

    prompt | sampled turn | observed | sampled turn | observed | ...    stream 0: the completion's
    prompt | sampled turn | ...                                         stream 1: its first segment

A stream only grows: turns stay as the engine returned them. A template that rewrites history begins a new segment, and
so does an environment that continues an earlier turn in another way, or says another conversation. It may come back to
a stream later. A segment that continues a turn has the turn's tokens in its prompt: they are trained only where they were sampled.

The streams are also the episode's record: its turns, played again, must be followed by the same observed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_dapo.engines.base import merge_versions
from megatron_dapo.token_support import followed_by, supports_between
from megatron_dapo.types import Completion, Episode, EpisodeEnd, GenerationRequest, Segment, Turn, VersionRange

_FINISH_REASONS: dict[EpisodeEnd, Any] = {"done": "stop", "abort": "abort", "window": "abort"}  # any other end is a truncation


@dataclass(eq=False)
class _Stream:
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [R]
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [R]
    versions: tuple[VersionRange, ...] = ()
    turns: tuple[Turn, ...] = ()
    parent: int = 0
    reason: str = ""
    support: np.ndarray | None = None  # see Completion; observed tokens count as drawn from the whole vocabulary

    def grown(
        self,
        token_ids: Any,
        logprobs: Any,
        versions: Sequence[VersionRange],
        turns: tuple[Turn, ...],
        support: np.ndarray | None = None,
    ) -> _Stream:
        """Return the stream with tokens appended; `versions` are those of the new tokens, from 0."""
        shift = len(self.token_ids)
        moved = [replace(entry, start=entry.start + shift, end=entry.end + shift) for entry in versions]
        return replace(
            self,
            token_ids=np.concatenate((self.token_ids, np.asarray(token_ids, np.int32))),
            logprobs=np.concatenate((self.logprobs, np.asarray(logprobs, np.float32))),
            versions=merge_versions([*self.versions, *moved]),
            turns=turns,
            support=followed_by(self.support, shift, support, len(token_ids)),
        )

    def with_turn(self, turn: Completion, order: int) -> _Stream:
        start = len(self.token_ids)
        end = start + turn.num_tokens
        added = Turn(start, end, end, turn.finish_reason, order=order)
        return self.grown(turn.token_ids, turn.logprobs, turn.versions, (*self.turns, added), turn.support)

    def up_to_turn(self) -> _Stream:
        """Return the stream up to its last turn, without an answer that no turn has read."""
        *before, last = self.turns
        return replace(
            self,
            token_ids=self.token_ids[: last.end],
            logprobs=self.logprobs[: last.end],
            versions=tuple(_clipped(self.versions, 0, last.end)),
            turns=(*before, replace(last, observed_end=last.end)),
            support=supports_between(self.support, 0, last.end),
        )


class EpisodeStreams:
    """What was sampled and observed in an episode so far."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self._streams = [_Stream(prompt_ids)]
        self._current = 0
        self._turns: list[tuple[int, int]] = []  # stream and end of each turn, in order

    @classmethod
    def restored(cls, record: Completion, group_prompt: tuple[int, ...], num_turns: int) -> EpisodeStreams:
        """Return the streams as they were when the first `num_turns` turns of `record`, which has one stream, were answered."""
        assert record.episode is not None and not record.num_segments, f"{record.request_id} has several streams"
        streams = cls(group_prompt if record.prompt_ids is None else record.prompt_ids)
        turns = record.episode.turns[:num_turns]
        end = turns[-1].observed_end if turns else 0
        versions, support = _clipped(record.versions, 0, end), supports_between(record.support, 0, end)
        streams._streams = [
            streams._streams[0].grown(record.token_ids[:end], record.logprobs[:end], versions, turns, support)
        ]
        streams._turns = [(0, turn.end) for turn in turns]
        return streams

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def segment(self) -> int:
        """Number of the current stream, which grows; 0 is the completion's."""
        return self._current

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and tokens of the current stream."""
        current = self._streams[self._current]
        return current.prompt_ids + tuple(current.token_ids.tolist())

    @property
    def num_context_tokens(self) -> int:
        """Length of `context`."""
        current = self._streams[self._current]
        return len(current.prompt_ids) + len(current.token_ids)

    def context_after(self, turn: int) -> tuple[int, ...]:
        """Return the prompt and the tokens of a turn's stream up to its end; `turn` is its number in the episode."""
        number, end = self._turns[turn]
        stream = self._streams[number]
        return stream.prompt_ids + tuple(stream.token_ids[:end].tolist())

    def segment_of(self, turn: int) -> int:
        """Return the number of a turn's stream."""
        return self._turns[turn][0]

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, in all streams."""
        return sum(turn.end - turn.start for stream in self._streams for turn in stream.turns)

    @property
    def reward(self) -> float:
        return sum(turn.reward for stream in self._streams for turn in stream.turns)

    def add_turn(self, turn: Completion) -> None:
        """Append a turn as an engine returned it."""
        grown = self._streams[self._current] = self._streams[self._current].with_turn(turn, self.num_turns)
        self._turns.append((self._current, len(grown.token_ids)))

    def judge_turn(self, **facts: Any) -> None:
        """Set fields of the last turn that the environment decides: its reward and its calls."""
        current = self._streams[self._current]
        *before, last = current.turns
        current.turns = (*before, replace(last, **facts))

    def observe(self, turn: int, token_ids: tuple[int, ...], reason: str = "") -> None:
        """Append the environment's answer to a turn, by its number; it counts as sampled by the turn's last version.

        The turn's stream continues. If the turn has been answered, a segment begins that has it and its context as the prompt.
        """
        number, end = self._turns[turn]
        stream, count = self._streams[number], len(token_ids)
        if end < len(stream.token_ids):
            self.begin_segment(self.context_after(turn) + token_ids, number, reason or f"another continuation of turn {turn}")
            return
        *before, last = stream.turns
        turns = (*before, replace(last, observed_end=last.observed_end + count))
        version = VersionRange(0, count, stream.versions[-1].version)
        self._streams[number] = stream.grown(token_ids, np.zeros(count), [version], turns)
        self._current = number

    def begin_segment(self, prompt_ids: tuple[int, ...], parent: int, reason: str) -> None:
        """Begin a stream that does not extend another one."""
        self._current = len(self._streams)
        self._streams.append(_Stream(prompt_ids, parent=parent, reason=reason))

    def agree_with(self, record: Completion, group_prompt: tuple[int, ...]) -> bool:
        """Return True if `record` begins with these streams, and its next turn is at the end of the current one.

        Once all of its turns have been played, what the environment said last may be missing in it.
        """
        turns = record.ordered_turns[self.num_turns :]
        if turns and (turns[0][0], turns[0][1].start) != (self._current, len(self._streams[self._current].token_ids)):
            return False
        for number, ours in enumerate(self._streams):
            if number > record.num_segments:
                return not turns  # it has begun since
            theirs = record.stream(number)
            may_grow = not turns and number == self._current
            both = min(len(ours.token_ids), len(theirs.token_ids))
            if (
                ours.prompt_ids != (group_prompt if theirs.prompt_ids is None else theirs.prompt_ids)
                or not np.array_equal(ours.token_ids[:both], theirs.token_ids[:both])
                or (len(ours.token_ids) > both and not may_grow)
                or (len(theirs.token_ids) > both and not turns)
            ):
                return False
        return bool(turns) or record.num_segments < len(self._streams)

    def judged_as(self, record: Completion, is_answered: bool) -> bool:
        """Return True if the last turn has the reward and the calls that it has in `record`, if it was answered there.

        `is_answered`: it has been answered, and so has a turn of `record` that has observed tokens or others after it.
        """
        turns, place = record.ordered_turns, self.num_turns - 1
        if place >= len(turns):
            return True
        ours, theirs = self._streams[self._current].turns[-1], turns[place][1]
        was_answered = (
            place + 1 < len(turns) or theirs.observed_end > theirs.end or record.num_segments >= self.num_streams
        )
        if not is_answered and was_answered:
            return False
        return not was_answered or (ours.reward, ours.calls) == (theirs.reward, theirs.calls)

    def completion(
        self, request: GenerationRequest, end: EpisodeEnd, partial: Completion | None = None, **facts: Any
    ) -> Completion:
        """Return the episode so far; `partial`: a turn that is not complete. `facts`: other fields of `Episode`."""
        streams = list(self._streams)
        if partial is not None and partial.num_tokens:
            interrupted = replace(partial, finish_reason="abort")
            streams[self._current] = streams[self._current].with_turn(interrupted, self.num_turns)
        if end not in ("abort", "window"):  # an answer that no turn reads may be longer than a sequence can be
            streams = [one.up_to_turn() if one.turns else one for one in streams if one.turns or one is streams[0]]
        main, *others = streams
        segments = tuple(
            Segment(one.prompt_ids, one.token_ids, one.logprobs, one.versions, one.turns, one.parent, one.reason, support=one.support)
            for one in others
        )
        return Completion(
            request.request_id,
            main.token_ids,
            main.logprobs,
            _FINISH_REASONS.get(end, "length"),
            main.versions,
            support=main.support,
            prompt_ids=None if main.prompt_ids == request.prompt_ids else main.prompt_ids,
            episode=Episode(end, main.turns, segments, **facts),
        )


def _clipped(versions: Sequence[VersionRange], start: int, end: int) -> list[VersionRange]:
    """Return the ranges of tokens [start, end), counted from `start`."""
    return [
        VersionRange(max(entry.start, start) - start, min(entry.end, end) - start, entry.version)
        for entry in versions
        if entry.start < end and entry.end > start
    ]


def recorded_turns(record: Completion) -> Iterator[Completion]:
    """Yield the turns of an episode in order, as an engine returned them; one that was interrupted has "abort"."""
    for number, turn in record.ordered_turns:
        stream = record.stream(number)
        yield Completion(
            record.request_id,
            stream.token_ids[turn.start : turn.end],
            stream.logprobs[turn.start : turn.end],
            turn.finish_reason,
            tuple(_clipped(stream.versions, turn.start, turn.end)),
            support=supports_between(stream.support, turn.start, turn.end),
        )
