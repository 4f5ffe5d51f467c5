"""Starts the environments of episodes: for the first time, and again with the same seed after a loss or in another process.

`resume` "replay": the turns so far are played again; no token is sampled for it. If an answer, a reward or a call then
differs from the recorded one, the episode begins anew. "state": the environment is given the state that it had after its
last answer, and only a turn that had no answer is played again. "restart": the episode begins anew.
"""

from __future__ import annotations

import logging
from collections import Counter

from megatron_dapo.environments.protocol import EnvironmentPool, Task
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings, LiveEpisode
from megatron_dapo.rollout.episodes.stream import recorded_turns
from megatron_dapo.types import Completion

logger = logging.getLogger(__name__)


class Recovery:
    """`counts`: retried, diverged, restarted and discarded_tokens, see `EpisodeAccounting`."""

    def __init__(self, pool: EnvironmentPool, settings: EpisodeSettings) -> None:
        self.counts: Counter[str] = Counter()
        self._pool, self._settings = pool, settings

    def start(self, episode: LiveEpisode, record: Completion | None) -> None:
        """Start the environment, to play the turns of `record` again if there is one."""
        if record is not None and record.episode is not None:
            episode.attempt = max(episode.attempt, record.episode.attempt)
            if self._settings.resume == "restart":
                self.counts["restarted"] += 1
                self._discard(episode, record)
                record = None
        episode.begin(record)
        assert episode.request.task is not None, f"{episode.name} has no task"
        state = episode.state["environment"] if episode.state else None
        self._pool.start(episode.name, Task(episode.request.task, episode.request.seed, state))

    def begin_anew(self, episode: LiveEpisode, record: Completion) -> None:
        """Start an episode without its record, because its environment, played again, was another one."""
        logger.warning("episode %s: its environment did not repeat its answers; it begins anew", episode.name)
        self.counts["diverged"] += 1
        self._discard(episode, record)
        self._pool.end(episode.name)
        self.start(episode, None)

    def start_again(self, episode: LiveEpisode, reason: str, is_cause: bool) -> bool:
        """Start a lost environment again. Return False if that happened too often, and not through others."""
        episode.num_lost += is_cause
        self._pool.end(episode.name)  # it may be open: what it said was wrong, or too late
        if episode.num_lost > self._settings.retries:
            logger.warning("episode %s is given up: lost %d times: %s", episode.name, episode.num_lost, reason)
            return False
        logger.warning("episode %s: its environment is lost and started again: %s", episode.name, reason)
        self.counts["retried"] += 1
        self.start(episode, episode.so_far() if episode.streams or episode.record else None)
        return True

    def _discard(self, episode: LiveEpisode, record: Completion) -> None:
        """Count the tokens of an episode that begins anew."""
        self.counts["discarded_tokens"] += sum(turn.num_tokens for turn in recorded_turns(record))
        episode.attempt += 1
