"""The ledgers: everything drawn since the run began is in exactly one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accounting:
    """Where the prompts drawn since the run began have gone (a prompt drawn twice counts twice)."""

    drawn: int
    trained: int
    filtered: int
    queued_again: int  # aborted or too stale
    buffered: int
    unfinished: int  # held to go on in the next collection
    in_flight: int

    @property
    def is_balanced(self) -> bool:
        waiting = self.buffered + self.unfinished + self.in_flight
        return self.drawn == self.trained + self.filtered + self.queued_again + waiting


@dataclass(frozen=True)
class WindowAccounting:
    """Where the responses of the prompts drawn since the run began are. A group drawn counts with all its responses."""

    drawn: int
    trained: int  # to their end: handed out finished
    not_chosen: int  # finished in a window that was not trained
    given_back: int  # finished, in batches that were given back
    in_flight: int  # of the collection being made
    unfinished: int  # wait for their next window
    not_started: int  # wait for their first

    @property
    def is_balanced(self) -> bool:
        waiting = self.given_back + self.in_flight + self.unfinished + self.not_started
        return self.drawn == self.trained + self.not_chosen + waiting


@dataclass
class GroupCounters:
    """Of whole groups; saved in checkpoints."""

    num_started: int = 0  # groups ever started; the next group's number
    num_trained: int = 0
    num_filtered: int = 0
    num_queued_again: int = 0
    generation_step: int = 0  # rounds of generation begun
    train_step: int = 0  # batches handed out


@dataclass
class WindowCounters:
    """Of windows; saved in checkpoints."""

    num_groups: int = 0  # ever begun; the next group's number
    num_drawn: int = 0  # responses of those
    num_trained: int = 0
    num_not_chosen: int = 0
    generation_step: int = 0  # collections begun
    train_step: int = 0  # batches handed out
