"""Number of responses per prompt by difficulty, with a fixed total: more for hard prompts, fewer for easy ones.

A prompt's pass rate is estimated only from its earlier visits, as a Beta distribution whose counts fade as the policy
changes. This estimate sets the size of a group before the first response is drawn; the responses themselves never do.
Every response in a group is then an independent draw, so k / n is an unbiased estimate of the pass rate, and so is the
group's baseline. Stopping at the first success would bias k / n upwards: 0.256 at a pass rate of 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FADING = 0.9  # weight of a visit after each further policy version


@dataclass(frozen=True)
class PassRate:
    """Beta distribution of a prompt's pass rate, from faded counts over a uniform prior."""

    passes: float = 0.0
    failures: float = 0.0

    @property
    def mean(self) -> float:
        """Posterior mean; 0.5 for a prompt never seen."""
        return (self.passes + 1) / (self.passes + self.failures + 2)

    def faded(self, num_versions: int) -> PassRate:
        """Return the estimate `num_versions` policy versions later."""
        weight = FADING**num_versions
        return PassRate(weight * self.passes, weight * self.failures)

    def seen(self, passes: int, failures: int) -> PassRate:
        """Return the estimate after one more visit."""
        return PassRate(self.passes + passes, self.failures + failures)

    def probability_below(self, value: float) -> float:
        """Return the probability that the pass rate is below `value`. Above 0.95: `value` exceeds its 95 % upper bound."""
        return beta_cdf(value, self.passes + 1, self.failures + 1)


def wanted_size(pass_rate: float, smallest: int = 4, largest: int = 64, miss: float = 0.05) -> int:
    """Return the responses needed for a success with probability 1 - miss: ln miss / ln(1 - p), within the bounds."""
    if not 0 <= pass_rate <= 1:
        raise ValueError(f"pass rate {pass_rate} is not a probability")
    if pass_rate in (0.0, 1.0):
        return largest if pass_rate == 0 else smallest
    return min(max(math.ceil(math.log(miss) / math.log1p(-pass_rate)), smallest), largest)


def fit_total(wanted: Sequence[int], total: int, smallest: int = 4, largest: int = 64) -> list[int]:
    """Return sizes that add up to `total`, within the bounds.

    Each prompt gets `smallest`, and the rest is dealt in rounds. A round shares what is left in proportion to what the
    prompts below `largest` want above `smallest`, equally if none wants more; shares are rounded down and end at
    `largest`. The last round, in which no share reaches 1, gives one response to each of the largest shares, the first
    prompts if shares are equal. Raise ValueError if the bounds do not allow the total.
    """
    if not smallest * len(wanted) <= total <= largest * len(wanted):
        raise ValueError(
            f"sampling budget: {total} responses do not fit {len(wanted)} groups of {smallest} to {largest}; "
            "set rollout.budget.min_size and max_size around rollout.group_size"
        )
    sizes = [smallest] * len(wanted)
    while left := total - sum(sizes):
        open_ones = [index for index, size in enumerate(sizes) if size < largest]
        weights = [max(0, wanted[index] - smallest) for index in open_ones]
        if not any(weights):
            weights = [1] * len(open_ones)
        shares = [left * weight / sum(weights) for weight in weights]
        if max(shares) < 1:
            order = sorted(range(len(open_ones)), key=lambda place: -shares[place])
            shares = [float(place in order[:left]) for place in range(len(open_ones))]
        for index, share in zip(open_ones, shares, strict=True):
            sizes[index] = min(largest, sizes[index] + int(share))
    return sizes


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return P(X <= x) for X ~ Beta(a, b): the regularized incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # converges fast on the other side
        return 1 - beta_cdf(1 - x, b, a)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for step in range(1, 500):
        even = step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step))
        odd = -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1))
        before = value
        for term in (even, odd):
            c, d = 1 + term / c, 1 / (1 + term * d)
            value *= c * d
        if abs(value / before - 1) < 1e-15:
            break
    return front * value
