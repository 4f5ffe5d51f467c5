"""One episode of the engine: what it waits for, what it has sampled and observed, and what its next turn may have."""

from __future__ import annotations

import enum
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_dapo.data.tool_calls import TurnParser
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.environments.protocol import Reply
from megatron_dapo.rollout.episodes.stream import EpisodeStreams, recorded_turns
from megatron_dapo.types import Completion, EpisodeEnd, GenerationRequest


@dataclass(frozen=True)
class EpisodeSettings:
    """Limits of an episode; `sampling.max_new_tokens` of its request bounds its sampled tokens."""

    max_context_tokens: int  # longest stream; at most the engine's length
    max_prompt_tokens: int  # longest begin of a conversation
    max_turns: int = 8
    max_turn_tokens: int = 0  # 0: what is left of the others
    max_seconds: float = 600.0  # limit of its environment's time
    success: float = 0.5  # sum of rewards from which on it is correct, if its environment does not say it
    max_environments: int = 256  # most episodes that the processes hold at a time; further ones wait
    retries: int = 2  # losses after which it is given up, less one
    resume: Literal["replay", "state", "restart"] = "replay"
    order: Literal["rounds", "arrival"] = "rounds"
    parser: str = "auto"
    on_cut: Literal["end", "observe"] = "end"


class EpisodeStage(enum.Enum):
    """What an open episode waits for; see `engine`."""

    WAITING = "a place for its environment"
    STARTING = "the environment's begin of the conversation"
    READY = "its turn to be submitted"
    GENERATING = "the policy's turn"
    ACTING = "the environment's answer"


@dataclass(frozen=True)
class TurnFormat:
    """Template and parser for an environment's tools."""

    turns: TurnTemplate
    parser: TurnParser


@dataclass(frozen=True)
class TurnEnd:
    """What continues a conversation after a turn."""

    turn_format: TurnFormat
    history: tuple[Mapping[str, Any], ...]  # messages up to it, if the template may rewrite them


@dataclass(eq=False)
class LiveEpisode:
    """An episode until it has ended, also while it is held."""

    request: GenerationRequest
    stage: EpisodeStage = EpisodeStage.WAITING
    due: int = 0  # round in which it continues
    streams: EpisodeStreams | None = None  # None before the environment's first answer
    turn_format: TurnFormat | None = None
    history: tuple[Mapping[str, Any], ...] = ()  # messages of the current stream, if the template may rewrite them
    turn_ends: list[TurnEnd] = field(default_factory=list)  # one a turn, in order
    partial: Completion | None = None  # a turn that was interrupted
    record: Completion | None = None  # tokens that are being played again
    recorded: deque[Completion] = field(default_factory=deque)  # turns of it that are left
    reply: Reply | None = None  # has come, and has not entered yet
    max_tokens: int | None = None  # limit of the next turn, if the environment sets one
    figures: dict[str, float] = field(default_factory=dict)  # numbers that the environment recorded, by name
    state: dict[str, Any] | None = None  # the environment's after its last answer; see `keep_state`
    num_lost: int = 0
    attempt: int = 0
    num_fruitless: int = 0
    is_rewarded: bool = False
    is_paused: bool = False  # held at the end of its window
    begun_s: float = field(default_factory=time.perf_counter)  # submission time, then start of its current turn
    seconds: dict[str, float] = field(default_factory=lambda: {"generating": 0.0, "acting": 0.0, "waiting": 0.0})

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def turn_name(self) -> str:
        return f"{self.name}@{self.streams.num_turns if self.streams else 0}"

    def so_far(self, end: EpisodeEnd = "abort") -> Completion:
        """Return its tokens; of an episode that is played again, those that it had."""
        if self.record is not None:
            return self.record
        return (self.streams or EpisodeStreams(self.request.prompt_ids)).completion(
            self.request, end, self.partial, state=json.dumps(self.state) if self.state else "", **self.facts
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of `Episode` whatever its end."""
        return {
            "attempt": self.attempt,
            "num_retries": self.num_lost,
            "seconds": dict(self.seconds),
            "figures": dict(self.figures),
        }

    @property
    def playing(self) -> tuple[EpisodeStreams, TurnFormat]:
        """Streams and turn format of an episode that has begun."""
        assert self.streams is not None and self.turn_format is not None, f"{self.name} has not begun"
        return self.streams, self.turn_format

    def begin(self, record: Completion | None) -> None:
        """Forget what has been played, to play the turns of `record` again if there is one."""
        self.stage, self.streams, self.partial, self.is_rewarded = EpisodeStage.STARTING, None, None, False
        self.turn_ends, self.reply, self.seconds["acting"] = [], None, 0.0
        self.record, self.recorded = record, deque(recorded_turns(record) if record is not None else ())
        self.state, self.figures = None, {}
        if record is not None and record.episode is not None and record.episode.state:
            self.state, self.figures = json.loads(record.episode.state), dict(record.episode.figures)

    def restore(self, record: Completion, state: Mapping[str, Any]) -> None:
        """Have the streams of `record` as they were in the environment's state, without playing their turns again."""
        assert self.turn_format is not None, f"{self.name} has not begun"
        self.is_rewarded = state["is_rewarded"]
        self.streams = EpisodeStreams.restored(record, self.request.prompt_ids, state["turns"])
        for _ in range(state["turns"]):
            self.recorded.popleft()
            self.turn_ends.append(TurnEnd(self.turn_format, self.history))

    def keep_state(self, reply: Reply) -> None:
        """Keep what `resume` "state" needs besides the tokens, after an answer."""
        self.state = None  # an episode with several streams is played again
        if reply.state is not None and (self.streams is None or self.streams.num_streams == 1):
            num_turns = self.streams.num_turns if self.streams else 0
            self.state = {"environment": reply.state, "turns": num_turns, "is_rewarded": self.is_rewarded}

    def budget(self, settings: EpisodeSettings) -> tuple[int, EpisodeEnd]:
        """Return the tokens that the next turn may have, and what ends the episode if it is cut there."""
        streams, _ = self.playing
        budgets: list[tuple[int, EpisodeEnd]] = [
            (self.request.sampling.max_new_tokens - streams.num_sampled, "max_tokens"),
            (settings.max_context_tokens - streams.num_context_tokens, "max_context"),
        ]
        budgets += [(limit, "length") for limit in (settings.max_turn_tokens, self.max_tokens) if limit]
        return min(budgets, key=lambda budget: budget[0])

    def left_of_window(self, settings: EpisodeSettings) -> int | None:
        """Return the tokens that the next turn may have in its window; None if the episode's own limits come first."""
        streams, _ = self.playing
        left = self.request.window_end - streams.num_sampled
        return left if self.request.window_end and left < self.budget(settings)[0] else None
