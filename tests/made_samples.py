"""Train samples of scored groups, with their numbers, as the rank that packs all of them holds them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dapo.trainer.batch_header import header_of, samples_of, with_numbers
from megatron_dapo.types import Group, TrainSample


def train_samples(groups: Sequence[Group], training_version: int, *, filter_overlong: bool = False) -> list[TrainSample]:
    header = header_of(groups, training_version, filter_overlong=filter_overlong)
    return with_numbers(samples_of(header), groups, {})
