"""What an episode and its environment say to each other, whatever the environment is and wherever it runs.

    engine -- start(task) --> pool --> Reply: the begin of the conversation, and the tools
           -- act(action) --> pool --> Reply: what is appended to it, the turn's reward, whether the episode is done
           -- end() -------> pool       (no reply)

Each `start` and `act` gets exactly one `Reply`, unless `end` comes first. An episode has at most one of them open. After a
reply with `lost`, the pool has forgotten the episode: it can be started again, with the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_dapo.data.tool_calls import ToolCall
from megatron_dapo.types import FinishReason, TurnCall


@dataclass(frozen=True)
class Task:
    """What an episode begins from."""

    fields: Mapping[str, Any]  # JSON: the data row's task, with the prompt's `messages` and `answer`
    seed: int  # the same seed gives the same environment
    state: Any = None  # JSON: the environment continues from it, as an earlier reply had it; None: from its begin


@dataclass(frozen=True)
class Action:
    """A turn of the policy as the environment sees it."""

    text: str
    calls: tuple[ToolCall, ...]  # parsed from the turn's ids; failed ones have their status and the text for the model
    finish_reason: FinishReason  # "length": cut, so that nothing in it was parsed
    reasoning: str = ""
    raw_text: str = ""  # the whole turn as it was sampled
    num_tokens: int = 0
    num_prompt_tokens: int = 0  # length of the context that it was sampled in


@dataclass(frozen=True)
class Reply:
    """An environment's answer to `start` or `act`."""

    episode_id: str
    messages: tuple[
        Mapping[str, Any], ...
    ] = ()  # the begin of the conversation in answer to `start`, then what is appended; empty in answer to a `start` with a state
    tools: tuple[
        Mapping[str, Any], ...
    ] = ()  # JSON schemas for the chat template, in answer to `start`; see `data.tool_calls.Tool`
    done: bool = False
    reward: float | None = None  # reward of the preceding turn
    is_correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # reward parts, for metrics
    figures: Mapping[str, float] = field(default_factory=dict)  # means go to the metrics; the last value of a name counts
    calls: tuple[TurnCall, ...] = ()  # calls of the turn before, as they ended
    max_tokens: int | None = None  # limit of the next turn; None: what the episode's limits leave
    after: int | None = None  # turn that the messages follow, from 0; None: the last one
    begins: str = ""  # the messages are another conversation of the episode, with `tools`: the reason
    lost: str = ""  # the reason if the infrastructure failed, not the policy
    is_cause: bool = True  # False: it is lost because another episode took their process down
    timed_out: bool = False  # its environment has used up the episode's seconds, without an answer; it is still open
    seconds: float = 0.0  # time that the environment took
    state: Any = None  # JSON: what `Task.state` may be later


class EnvironmentPool(Protocol):
    """Environments of all open episodes. Its methods are called from one thread and, except `poll`, do not wait."""

    def start(self, episode_id: str, task: Task) -> None:
        """Begin an episode; `episode_id` must not be open."""

    def act(self, episode_id: str, action: Action) -> None:
        """Send the policy's turn to an open episode."""

    def end(self, episode_id: str) -> None:
        """Close an episode and clean up; a reply that is still open never comes. Unknown and ended ones are ignored."""

    def poll(self, timeout: float = 0.0) -> list[Reply]:
        """Return the replies since the last call, in order of arrival; wait at most `timeout` seconds for the first."""

    def close(self) -> None:
        """End every episode and every process."""
