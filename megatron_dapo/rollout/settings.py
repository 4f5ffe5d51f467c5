"""How responses are generated: in whole groups, or in windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_dapo.rollout.continuation import SURVIVORS
from megatron_dapo.types import SamplingParams

OnExhausted = Literal["train_partial", "stop", "error"]
Partial = Literal["restart", "continue"]


@dataclass(frozen=True)
class CollectorSettings:
    """How groups are generated."""

    group_size: int  # responses a prompt
    sampling: SamplingParams
    seed: int  # of the run; with the group id and the index it makes the seed of a response
    oversample: float = (
        1.0  # groups in flight as a multiple of those missing; above 1 leaves surplus and unfinished ones
    )
    max_num_gen_batches: int = 10  # of num_groups x oversample groups started in one collection; 0: no limit
    on_exhausted: OnExhausted = "train_partial"  # when rounds or prompts run out
    partial: Partial = "restart"  # what becomes of responses that are stopped before their end

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"collector: group_size = {self.group_size}, must be at least 1")
        if self.oversample < 1:
            raise ValueError(f"collector: oversample = {self.oversample}, must be at least 1")
        if self.max_num_gen_batches < 0:
            raise ValueError(
                f"collector: max_num_gen_batches = {self.max_num_gen_batches}, must be at least 0 (0: no limit)"
            )
        _check_on_exhausted("collector", self.on_exhausted)
        if self.partial not in SURVIVORS:
            raise ValueError(f"collector: unknown partial {self.partial!r}; there are {', '.join(SURVIVORS)}")


@dataclass(frozen=True)
class WindowSettings:
    """How windows are generated."""

    group_size: int  # responses a prompt
    sampling: SamplingParams  # max_new_tokens bounds the whole response
    seed: int  # of the run; with the group id and the index it makes the seed of a response
    window_tokens: int  # new tokens of a response in one collection, at most
    max_pool_items: int = 0  # a collection that could leave more responses waiting is refused; 0: no limit
    windows_per_step: int = 0  # windows of a batch, at most; 0: all
    on_exhausted: OnExhausted = "train_partial"  # when prompts run out before the collection is full

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"windows: group_size = {self.group_size}, must be at least 1")
        if self.window_tokens < 1:
            raise ValueError(f"windows: window_tokens = {self.window_tokens}, must be at least 1")
        if self.max_pool_items < 0:
            raise ValueError(f"windows: max_pool_items = {self.max_pool_items}, must be at least 0 (0: no limit)")
        if self.windows_per_step and self.windows_per_step < self.group_size:
            raise ValueError(
                f"windows: windows_per_step = {self.windows_per_step} cannot hold one group of {self.group_size}; "
                "make it 0 (all) or at least group_size"
            )
        _check_on_exhausted("windows", self.on_exhausted)


def _check_on_exhausted(who: str, name: str) -> None:
    names = get_args(OnExhausted)
    if name not in names:
        raise ValueError(f"{who}: unknown on_exhausted {name!r}; there are {', '.join(names)}")
