"""Faults in the messages of a weight sync, to simulated engines or to a real server."""

from __future__ import annotations

import json
import pickle
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch


def texts_of(payload: bytes) -> list[str]:
    """The commands of a rank's message."""
    return [text for text, _ in pickle.loads(payload)]


def payload_of(texts: list[str]) -> bytes:
    return pickle.dumps([(text, torch.empty(0)) for text in texts])


@dataclass
class Strike(ABC):
    """A fault that strikes a message: the commands of every rank, and the command of one rank that it affects."""

    texts: list[list[str]]  # commands of every rank
    rank: int
    at: int
    random: random.Random

    @property
    def own(self) -> list[str]:
        """Commands of the struck rank."""
        return self.texts[self.rank]

    @property
    def command(self) -> dict:
        return json.loads(self.own[self.at])

    @abstractmethod
    def carry_out(self) -> None:
        """Carry the message out, as it is now, in all ranks that it reaches."""


def dropped(strike: Strike) -> None:
    """Drop one command of one rank."""
    del strike.own[strike.at]
    strike.carry_out()


def doubled(strike: Strike) -> None:
    """Repeat one command of a message, or the message."""
    if strike.random.random() < 0.5:
        strike.own.insert(strike.at, strike.own[strike.at])
        strike.carry_out()
        return
    strike.carry_out()
    strike.carry_out()


def truncated(strike: Strike) -> None:
    text = strike.own[strike.at]
    strike.own[strike.at] = text[: strike.random.randrange(len(text))]
    strike.carry_out()


def reordered(strike: Strike) -> None:
    """Swap two neighboring commands; drop a command that is alone in its message."""
    own, at = strike.own, strike.at
    if len(own) == 1:
        strike.own.clear()
    else:
        other = at + 1 if at + 1 < len(own) else at - 1
        own[at], own[other] = own[other], own[at]
    strike.carry_out()


def corrupted_command(strike: Strike) -> None:
    """Change one digit of the command, except in the version and the sync's number, which no lower one may follow, and in
    the number of writers and their deadline, which the engine would wait for."""
    text = strike.own[strike.at]
    sizes = r'"(version|number)":\d+|"(writers|wait_s)":[\d.]+'
    spared = {i for match in re.finditer(sizes, text) for i in range(*match.span())}
    position = strike.random.choice([i for i, c in enumerate(text) if c.isdigit() and i not in spared])
    digit = strike.random.choice([d for d in "0123456789" if d != text[position]])
    strike.own[strike.at] = text[:position] + digit + text[position + 1 :]
    strike.carry_out()


def lost_answer(strike: Strike) -> None:
    strike.carry_out()
    raise ConnectionError("connection reset by peer")


PAYLOAD_FAULTS: dict[str, Callable[[Strike], None]] = {
    "dropped": dropped,
    "doubled": doubled,
    "truncated": truncated,
    "reordered": reordered,
    "corrupted command": corrupted_command,
    "lost answer": lost_answer,
}
HARMLESS_AT_TIMES = ("corrupted command",)  # a changed digit may have no meaning
