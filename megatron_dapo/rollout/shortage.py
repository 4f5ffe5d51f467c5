"""A batch that cannot be filled: when rounds are exhausted, and what the user is told."""

from __future__ import annotations

import math

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.rollout.batch import Exhaustion
from megatron_dapo.rollout.statistics import StatisticsBuilder

# With max_num_gen_batches = 0 and endless epochs, a collection ends after this many rounds without a kept group.
MAX_FRUITLESS_ROUNDS = 100


def round_size_of(num_groups: int, config: RolloutConfig) -> int:
    """Return the number of prompts in one generation round for a batch of `num_groups` groups."""
    return math.ceil(num_groups * config.oversample)


def rounds_are_exhausted(config: RolloutConfig, round_size: int, num_started: int, num_up_to_kept: int) -> bool:
    """Return True if a collection may start no further group.

    `num_started`: groups that it started; `num_up_to_kept`: the same, up to the last one that was kept.
    """
    if config.max_num_gen_batches:
        return num_started >= config.max_num_gen_batches * round_size
    return num_started - num_up_to_kept >= MAX_FRUITLESS_ROUNDS * round_size


def describe_shortage(
    config: RolloutConfig, exhausted: Exhaustion, builder: StatisticsBuilder, num_available: int, num_groups: int
) -> str:
    """Return the counts of a batch that has `num_available` of `num_groups` groups, and the remedy."""
    counts = ", ".join(f"{decision} {count}" for decision, count in builder.filter_decisions.items())
    limit = config.max_num_gen_batches
    if exhausted == "prompts":
        remedy = "raise data.max_epochs, add data"
    elif limit:
        remedy = f"raise rollout.max_num_gen_batches (now {limit}); choose easier or harder data"
    else:
        remedy = (
            f"rollout.max_num_gen_batches = 0 sets no limit, but the last {MAX_FRUITLESS_ROUNDS} rounds kept no "
            "group; choose easier or harder data"
        )
    is_partial_trained = config.on_exhausted == "train_partial"
    remedy += "" if is_partial_trained else ", or let rollout.on_exhausted train partial batches"
    return (
        f"only {num_available} of {num_groups} groups{' are trained' if is_partial_trained else ''}: {exhausted} are "
        f"exhausted after {builder.num_started} groups ({counts}); {remedy}"
    )
