"""Groups with an episode that a failure of its environment ended: their prompts are queued again, within limits."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.collector import EpisodesLost, GroupCounters, LossLimits

logger = logging.getLogger(__name__)

MIN_SHRUNK_SIZE = 2  # a group without its lost episodes: one episode has no advantage


@dataclass
class LostGroups:
    """Counts lost groups, one after another and by prompt (`GroupCounters.lost_in_row`)."""

    limits: LossLimits
    stream: PromptStream
    num_in_row: int = 0

    def may_shrink(self, num_kept: int) -> bool:
        """Return True if a group is trained with its `num_kept` other episodes."""
        return self.limits.shrinks and num_kept >= MIN_SHRUNK_SIZE

    def end_streak(self, prompt_id: str, counters: GroupCounters) -> None:
        """Note a group of `prompt_id` that lost nothing."""
        self.num_in_row = 0
        counters.lost_in_row.pop(prompt_id, None)

    def give_up(self, prompt_id: str, reason: str, counters: GroupCounters) -> None:
        """Queue a prompt again whose group was lost, unless it was lost too often: then the cause is the prompt's.

        Raises EpisodesLost after too many groups in a row.
        """
        counters.num_lost += 1
        self.num_in_row += 1
        counts = counters.lost_in_row
        counts[prompt_id] = counts.get(prompt_id, 0) + 1
        if counts[prompt_id] <= self.limits.max_of_prompt:
            self.stream.requeue(prompt_id)
        else:
            logger.warning(
                "prompt %s is left out until the next epoch: an episode of it was lost in %d groups in a row: %s",
                *(prompt_id, counts.pop(prompt_id), reason),
            )
        if self.num_in_row >= self.limits.max_in_row:
            raise EpisodesLost(
                f"{self.num_in_row} groups in a row lost an episode to a failure of its environment, the last one of "
                f"prompt {prompt_id}: {reason}; mend the environment, or what it needs, and start again"
            )
