"""The token streams of one episode while it is played, and the completion that holds them.

    prompt | sampled turn | observed | sampled turn | observed | ...    stream 0: the completion's
    prompt | sampled turn | ...                                         stream 1: its first segment

A stream only grows: turns stay as the engine returned them. A template that rewrites history begins a new segment.
The streams are also the episode's record: its turns, played again, must be followed by the same observed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_dapo.engines.base import merge_versions
from megatron_dapo.types import Completion, Episode, EpisodeEnd, GenerationRequest, Segment, Turn, VersionRange

_FINISH_REASONS: dict[EpisodeEnd, Any] = {"done": "stop", "abort": "abort"}  # any other end is a truncation


@dataclass(eq=False)
class _Stream:
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [R]
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [R]
    versions: tuple[VersionRange, ...] = ()
    turns: tuple[Turn, ...] = ()

    def grown(self, token_ids: Any, logprobs: Any, versions: Sequence[VersionRange], turns: tuple[Turn, ...]) -> _Stream:
        """Return the stream with tokens appended; `versions` are those of the new tokens, from 0."""
        shift = len(self.token_ids)
        moved = [replace(entry, start=entry.start + shift, end=entry.end + shift) for entry in versions]
        return _Stream(
            self.prompt_ids,
            np.concatenate((self.token_ids, np.asarray(token_ids, np.int32))),
            np.concatenate((self.logprobs, np.asarray(logprobs, np.float32))),
            merge_versions([*self.versions, *moved]),
            turns,
        )

    def with_turn(self, turn: Completion) -> _Stream:
        start = len(self.token_ids)
        end = start + turn.num_tokens
        added = Turn(start, end, end, turn.finish_reason)
        return self.grown(turn.token_ids, turn.logprobs, turn.versions, (*self.turns, added))


class EpisodeStreams:
    """What was sampled and observed in an episode so far."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self._streams = [_Stream(prompt_ids)]

    @property
    def segment(self) -> int:
        """Number of the current stream, which grows; 0 is the completion's."""
        return len(self._streams) - 1

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and tokens of the current stream."""
        current = self._streams[-1]
        return current.prompt_ids + tuple(current.token_ids.tolist())

    @property
    def num_turns(self) -> int:
        return sum(len(stream.turns) for stream in self._streams)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, in all streams."""
        return sum(turn.end - turn.start for stream in self._streams for turn in stream.turns)

    @property
    def reward(self) -> float:
        return sum(turn.reward for stream in self._streams for turn in stream.turns)

    def add_turn(self, turn: Completion) -> None:
        """Append a turn as an engine returned it."""
        self._streams[-1] = self._streams[-1].with_turn(turn)

    def judge_turn(self, **facts: Any) -> None:
        """Set fields of the last turn that the environment decides: its reward and its calls."""
        current = self._streams[-1]
        *before, last = current.turns
        current.turns = (*before, replace(last, **facts))

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append the environment's answer to the last turn; it counts as sampled by the turn's last version."""
        current, count = self._streams[-1], len(token_ids)
        *before, last = current.turns
        turns = (*before, replace(last, observed_end=last.observed_end + count))
        version = VersionRange(0, count, current.versions[-1].version)
        self._streams[-1] = current.grown(token_ids, np.zeros(count), [version], turns)

    def begin_segment(self, prompt_ids: tuple[int, ...]) -> None:
        """Begin a stream that does not extend the current one."""
        self._streams.append(_Stream(prompt_ids))

    def agree_with(self, record: Completion, group_prompt: tuple[int, ...]) -> bool:
        """Return True if these streams and those of `record` are the same as far as both go."""
        num_recorded = 1 + record.num_segments
        for number, ours in enumerate(self._streams[:num_recorded]):
            theirs = record.stream(number)
            both = min(len(ours.token_ids), len(theirs.token_ids))
            has_ended = number + 1 < num_recorded
            if (
                ours.prompt_ids != (group_prompt if theirs.prompt_ids is None else theirs.prompt_ids)
                or not np.array_equal(ours.token_ids[:both], theirs.token_ids[:both])
                or (has_ended and len(ours.token_ids) > both)
            ):
                return False
        return True

    def completion(
        self, request: GenerationRequest, end: EpisodeEnd, partial: Completion | None = None, **facts: Any
    ) -> Completion:
        """Return the episode so far; `partial`: a turn that is not complete. `facts`: other fields of `Episode`."""
        streams = list(self._streams)
        if partial is not None and partial.num_tokens:
            streams[-1] = streams[-1].with_turn(replace(partial, finish_reason="abort"))
        main, *others = streams
        segments = tuple(
            Segment(one.prompt_ids, one.token_ids, one.logprobs, one.versions, one.turns, parent=number)
            for number, one in enumerate(others)
        )
        return Completion(
            request.request_id,
            main.token_ids,
            main.logprobs,
            _FINISH_REASONS.get(end, "length"),
            main.versions,
            prompt_ids=None if main.prompt_ids == request.prompt_ids else main.prompt_ids,
            episode=Episode(end, main.turns, segments, **facts),
        )


def recorded_turns(record: Completion) -> Iterator[Completion]:
    """Yield the turns of an episode in order, as an engine returned them; one that was interrupted has "abort"."""
    assert record.episode is not None, f"{record.request_id} holds no episode"
    for number in range(1 + record.num_segments):
        stream = record.stream(number)
        turns = record.episode.turns if number == 0 else record.episode.segments[number - 1].turns
        for turn in turns:
            ranges = [
                VersionRange(max(entry.start, turn.start) - turn.start, min(entry.end, turn.end) - turn.start, entry.version)
                for entry in stream.versions
                if entry.start < turn.end and entry.end > turn.start
            ]
            yield Completion(
                record.request_id,
                stream.token_ids[turn.start : turn.end],
                stream.logprobs[turn.start : turn.end],
                turn.finish_reason,
                tuple(ranges),
            )
