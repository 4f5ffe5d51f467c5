"""Episodes with tools on one simulated engine: how many must be open so that its slots do not idle.

An episode alternates between generating a turn, for which it needs a slot, and waiting for a tool, for which it needs none.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from twin.simulation import Cost, Fleet, Response


@dataclass(frozen=True)
class Episodes:
    """Episodes that are played on an engine; a finished one is followed by a new one."""

    cost: Cost
    slots: int = 64
    num_turns: int = 8
    turn_tokens: float = 300.0  # median
    turn_sigma: float = 0.6
    tool_seconds: float = 4.0  # median
    tool_sigma: float = 1.0
    prompt: int = 500
    num_finished: int = 6000  # turns after which a measurement ends; a third is not counted

    @property
    def mean_tool_seconds(self) -> float:
        return self.tool_seconds * math.exp(self.tool_sigma**2 / 2)


@dataclass(frozen=True)
class Occupancy:
    """Shares of an engine's slots and of an episode's time."""

    num_open: int
    idle_share: float  # slots without a turn
    generating: float  # seconds of a turn in its slot, mean
    acting: float  # seconds of a tool, mean

    @property
    def open_per_slot(self) -> float:
        """Open episodes for each slot that the rule asks for: (generating + acting) / generating."""
        return (self.generating + self.acting) / self.generating


def occupancy(episodes: Episodes, num_open: int, seed: int = 0) -> Occupancy:
    """Play `num_open` episodes at a time."""
    chance = random.Random(seed)
    # Contexts are cached from the turn before.
    fleet = Fleet(1, episodes.cost.without_prefill(), slots=episodes.slots)
    engine = fleet.engines[0]
    acting: list[tuple[float, int]] = []  # heap: (end of the tool's call, episode)
    contexts = [episodes.prompt] * num_open
    turns = [chance.randrange(episodes.num_turns) for _ in range(num_open)]
    num_turns, begin, busy_before, tool_seconds = 0, 0.0, 0.0, 0.0

    def generate(episode: int) -> None:
        length = max(1, int(episodes.turn_tokens * math.exp(episodes.turn_sigma * chance.gauss(0, 1))))
        fleet.submit([Response(episode, episode, contexts[episode] + length, contexts[episode])])

    for episode in range(num_open):
        heapq.heappush(acting, (chance.random() * episodes.mean_tool_seconds, episode))
    while num_turns < episodes.num_finished:
        if acting and acting[0][0] < fleet.next_end:
            time, episode = heapq.heappop(acting)
            fleet.advance(time)
            generate(episode)
            continue
        response = fleet.end_next()
        episode, num_turns = int(str(response.key)), num_turns + 1
        contexts[episode], turns[episode] = response.length, turns[episode] + 1
        if turns[episode] == episodes.num_turns:
            contexts[episode], turns[episode] = episodes.prompt, 0
        seconds = episodes.tool_seconds * math.exp(episodes.tool_sigma * chance.gauss(0, 1))
        heapq.heappush(acting, (fleet.now + seconds, episode))
        tool_seconds += seconds
        if num_turns == episodes.num_finished // 3:
            begin, busy_before = fleet.now, engine.response_seconds
    counted = engine.response_seconds - busy_before
    running = counted / (fleet.now - begin)
    num_counted = episodes.num_finished - episodes.num_finished // 3
    return Occupancy(num_open, 1 - running / episodes.slots, counted / num_counted, tool_seconds / num_turns)


def rule(episodes: Episodes, seed: int = 0) -> int:
    """Return the number of open episodes by the rule, with a turn's seconds measured at full slots."""
    full = occupancy(episodes, 8 * episodes.slots, seed)
    return round(episodes.slots * full.open_per_slot)
