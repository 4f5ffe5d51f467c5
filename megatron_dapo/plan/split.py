"""Proposes how many devices of a run with separate servers train and how many generate, from what the run measured.

    measured collection of a batch -> the rates at which the queue of `overlap` collects a batch in that time
    each split                     -> the queue's step, which side waits for the other, and the smallest `oversample` and
                                      `ahead` that take no longer

The trainer's seconds of another split are the measured ones times what `plan` says of both layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist

from megatron_dapo.plan.overlap import Collection, Overlapped, QueuedStep, overlapped_seconds
from megatron_dapo.plan.rollout import EngineRates, Lengths

SAME = 0.01  # steps that differ by less are as long
STEP = 0.25  # resolution of `oversample` and `ahead`
NUM_LENGTHS = 1024
_SLOWEST, _FASTEST = 1e-5, 1e3  # engines, as multiples of the given rates
# Times agree within _OFF; rates are told by one if those that agree differ by less than _TOLD.
_OFF, _TOLD = 0.05, 1.5


@dataclass(frozen=True)
class Measured:
    """Means of the steps of a run."""

    step: float  # seconds; so are the next four
    wait: float  # the trainer's for its batch
    train: float  # seconds of the trainer's phases
    update: float  # seconds of a weight update
    collect: float  # seconds to collect a batch, including updates in between
    responses: float  # generated a step
    lengths: Lengths


@dataclass(frozen=True)
class Split:
    """A way to divide the devices."""

    trainer: int  # devices
    servers: int
    train: float  # seconds of the trainer's phases


@dataclass(frozen=True)
class SplitLimits:
    """What a split does not change."""

    running: int  # responses of a server at once
    max_staleness: int
    has_windows: bool = False  # T-PPO, which starts each step's windows together
    collection: Collection = Collection()


@dataclass(frozen=True)
class Proposal:
    """A split with the settings that suit it."""

    split: Split
    oversample: float
    ahead: float  # 0: max_staleness
    seconds: Overlapped

    @staticmethod
    def of(
        rates: EngineRates, measured: Measured, split: Split, limits: SplitLimits, oversample: float, ahead: float
    ) -> Proposal:
        """Return a split with given settings."""
        return Proposal(split, oversample, ahead, _seconds(rates, measured, split, limits, oversample, ahead))

    @property
    def waits(self) -> str:
        """Return the side that waits longer for the other, "" if neither does for a hundredth of the step."""
        sides = {"trainer": self.seconds.wait, "engines": self.seconds.engine_idle}
        side = max(sides, key=sides.__getitem__)
        return side if sides[side] > SAME * self.seconds.step else ""


_SCORES = tuple(NormalDist().inv_cdf((index + 0.5) / NUM_LENGTHS) for index in range(NUM_LENGTHS))


def measured_lengths(longest: int, mean: float, most: float, cut_share: float, num_responses: int, prompt: float) -> Lengths:
    """Return log-normal lengths with this mean, whose longest of `num_responses` has `most` tokens.

    `longest`: the limit; `cut_share`: share of the responses that reach it, by which the spread is set if there are any.
    """
    most = min(max(most, mean), longest)
    tail = cut_share if cut_share * num_responses > 1 else 0.5 / max(1, num_responses)
    score = NormalDist().inv_cdf(1 - tail)
    if most <= mean * 1.001:
        return Lengths((max(1, round(mean)),), prompt)
    low, high = 1e-3, 3.0
    for _ in range(60):  # the tail of a given mean grows with the spread
        sigma = (low + high) / 2
        median = _median(mean, sigma, most)
        low, high = (sigma, high) if median * math.exp(sigma * score) < most else (low, sigma)
    median = _median(mean, high, most)
    drawn = (min(most, median * math.exp(high * score)) for score in _SCORES[:-1])
    return Lengths((*(max(1, round(length)) for length in drawn), round(most)), prompt)


def _median(mean: float, sigma: float, most: float) -> float:
    """Return the median of log-normal lengths with this mean, of which those above `most` are cut to it."""
    spread = [math.exp(sigma * score) for score in _SCORES]
    sums, total = list(accumulate(spread)), mean * NUM_LENGTHS
    # More and more of the longest are cut, until the rest are shorter than `most`.
    medians = ((total - most * (NUM_LENGTHS - uncut)) / sums[uncut - 1] for uncut in range(NUM_LENGTHS, 0, -1))
    return next(median for median, longest in zip(medians, reversed(spread)) if median * longest <= most)


def calibrated(
    rates: EngineRates, measured: Measured, now: Split, limits: SplitLimits, oversample: float, ahead: float
) -> tuple[EngineRates, float, bool]:
    """Return the rates at which the queue of the measured run collects a batch in the measured time, their factor, and whether
    the time tells them.

    It does not if the trainer sets the pace of the collections, too: then the factor is the one closest to 1 that agrees with
    the time.
    """

    def collect(factor: float) -> float:
        return _seconds(_scaled(rates, factor), measured, now, limits, oversample, ahead).collect

    def factor_for(seconds: float) -> float:
        low, high = math.log(_SLOWEST), math.log(_FASTEST)
        for _ in range(26):  # to 3e-7 of the factor
            middle = (low + high) / 2
            low, high = (middle, high) if collect(math.exp(middle)) > seconds else (low, middle)
        return math.exp((low + high) / 2)

    slowest, factor, fastest = (factor_for(measured.collect * (1 + off)) for off in (_OFF, 0.0, -_OFF))
    is_told = fastest <= _TOLD * slowest
    if not is_told:
        factor = min(max(1.0, slowest), fastest)
    return _scaled(rates, factor), factor, is_told


def _scaled(rates: EngineRates, factor: float) -> EngineRates:
    gpu = rates.gpu
    return replace(rates, gpu=replace(gpu, flops=gpu.flops * factor, memory_bytes_s=gpu.memory_bytes_s * factor))


def propose(rates: EngineRates, measured: Measured, splits: Sequence[Split], limits: SplitLimits) -> list[Proposal]:
    """Return the splits with their settings, the shortest step first."""
    found = [_proposal(rates, measured, split, limits) for split in splits]
    return sorted(found, key=lambda one: one.seconds.step)


def _proposal(rates: EngineRates, measured: Measured, split: Split, limits: SplitLimits) -> Proposal:
    free = limits.max_staleness if not limits.has_windows else 0
    least = 1.0 if limits.collection.order == "start" else 1.0 + STEP  # a guarded batch chooses among more than its groups
    rounds = {one: _seconds(rates, measured, split, limits, one, 0.0) for one in _grid(least, 1.0 + free)}
    best = min(one.step for one in rounds.values())
    oversample = next(one for one, seconds in rounds.items() if seconds.step <= best * (1 + SAME))
    # If it is not limited, `ahead` is max_staleness.
    less = {one: _seconds(rates, measured, split, limits, oversample, one) for one in _grid(STEP, free - STEP)}
    ahead = next((one for one, seconds in less.items() if seconds.step <= best * (1 + SAME)), 0.0)
    return Proposal(split, oversample, ahead, less[ahead] if ahead else rounds[oversample])


def _grid(low: float, high: float) -> Iterator[float]:
    return (low + STEP * index for index in range(round((high - low) / STEP) + 1))


def _seconds(
    rates: EngineRates, measured: Measured, split: Split, limits: SplitLimits, oversample: float, ahead: float
) -> Overlapped:
    each = max(1, round(measured.responses / split.servers))
    turns = QueuedStep(
        each,
        limits.running,
        split.train,
        measured.update,
        limits.max_staleness,
        oversample,
        ahead,
        limits.collection,
    )
    return overlapped_seconds(rates, measured.lengths, turns)
