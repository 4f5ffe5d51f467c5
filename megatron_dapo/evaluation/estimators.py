"""avg@k, pass@k and cons@k by problem, and bootstrap intervals over problems.

A problem is counted once, however many rows of a file repeat it: k is the number of responses sampled for it. Problems
are the unit of resampling, because the responses to one problem are not independent draws from the benchmark.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK = 64  # resamples drawn at once, to bound memory on large benchmarks


@dataclass(frozen=True)
class Estimate:
    """A metric and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ProblemRecord:
    """The n responses to one problem, in the order of their sample number."""

    problem_id: str
    answer: str
    num_rows: int  # rows of the data file that were this problem
    accuracies: tuple[float, ...]  # n, 0 or 1
    extracted: tuple[str | None, ...]  # n, the answer found in the response
    outcomes: tuple[str, ...]  # n, see types.Outcome
    truncated: tuple[bool, ...]  # n
    response_tokens: tuple[int, ...]  # n
    source: str = ""  # an entry of data.eval_paths; "": all problems are of one

    def __post_init__(self) -> None:
        columns = (self.extracted, self.outcomes, self.truncated, self.response_tokens)
        if not self.accuracies or any(len(column) != len(self.accuracies) for column in columns):
            lengths = [len(self.accuracies), *(len(column) for column in columns)]
            raise ValueError(f"problem {self.problem_id}: columns of lengths {lengths}, want one and the same above 0")


def avg_at_k(accuracies: Sequence[float], k: int) -> float:
    """Return the mean accuracy of the first k responses."""
    _check_k(k, len(accuracies))
    return math.fsum(accuracies[:k]) / k


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k responses drawn without replacement hold a correct one: 1 - C(n - c, k) / C(n, k).

    Unbiased for any n >= k (Chen et al., arXiv 2107.03374, Eq 1). The binomials are exact integers.
    """
    _check_k(k, num_samples)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@k: {num_correct} correct of {num_samples} responses")
    # comb is 0 if fewer than k responses are wrong: every draw then includes a correct one.
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def cons_at_k(extracted: Sequence[str | None], accuracies: Sequence[float], k: int) -> float:
    """Return the accuracy of the majority answer of the first k responses (self-consistency, arXiv 2203.11171): 0 or 1.

    Responses without an answer do not vote; if none votes the score is 0. A tie goes to the answer that was given
    first. The majority answer is right if any of its k voters was scored right: a truncated response may carry the
    right answer and still be scored wrong.
    """
    _check_k(k, len(extracted))
    votes = Counter(answer for answer in extracted[:k] if answer is not None)
    if not votes:
        return 0.0
    # Counter keeps the order of first appearance, and max takes the first of equals.
    majority = max(votes, key=votes.__getitem__)
    return max(accuracy for answer, accuracy in zip(extracted[:k], accuracies) if answer == majority)


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k = {k} needs between 1 and all of the {num_samples} responses of a problem; sample at least {k}"
        )


def reported_ks(num_samples: int) -> tuple[int, ...]:
    """Return the powers of two below the number of samples, and that number."""
    powers = [1 << exponent for exponent in range(num_samples.bit_length()) if 1 << exponent < num_samples]
    return (*powers, num_samples)


def problem_values(records: Sequence[ProblemRecord]) -> dict[str, list[float]]:
    """Return metric name -> value of each problem. Raises ValueError if problems differ in their number of responses."""
    num_samples = _common_num_samples(records)
    values: dict[str, list[float]] = {
        f"avg@{num_samples}": [avg_at_k(record.accuracies, num_samples) for record in records]
    }
    for k in reported_ks(num_samples):
        values[f"pass@{k}"] = [
            pass_at_k(num_samples, sum(accuracy >= 1.0 for accuracy in record.accuracies), k) for record in records
        ]
        values[f"cons@{k}"] = [cons_at_k(record.extracted, record.accuracies, k) for record in records]
    return values


def _common_num_samples(records: Sequence[ProblemRecord]) -> int:
    if not records:
        raise ValueError("an evaluation needs at least one problem")
    counts = {len(record.accuracies): record.problem_id for record in records}
    if len(counts) > 1:
        raise ValueError(f"problems with different numbers of responses, e.g. {counts}: k must be the same for all")
    return len(records[0].accuracies)


def bootstrap_mean(
    values: Sequence[float], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Estimate:
    """Return the mean over problems and the percentile interval of the means of `num_resamples` resamples with replacement.

    Equal seeds resample the same problems whatever the metric. One problem has no interval: low = high = value.
    """
    if not 0.0 < confidence < 1.0 or num_resamples < 1:
        raise ValueError(
            f"bootstrap: confidence {confidence} must be in (0, 1), num_resamples {num_resamples} at least 1"
        )
    import torch  # here: who reads results, such as the report of a run, needs no intervals and no seconds of import

    data = torch.tensor(values, dtype=torch.float64)
    if data.numel() == 0:
        raise ValueError("bootstrap: no values to resample")
    generator = torch.Generator().manual_seed(seed)  # A CPU generator: intervals do not depend on the device.
    means = []
    for start in range(0, num_resamples, CHUNK):
        shape = (min(CHUNK, num_resamples - start), data.numel())
        means.append(data[torch.randint(data.numel(), shape, generator=generator)].mean(dim=1))
    tail = (1.0 - confidence) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Estimate(float(data.mean()), low, high)


def student_mean(values: Sequence[float], *, confidence: float = 0.95) -> Estimate:
    """Return the mean of a few independent values, such as one per seed, with Student's interval.

    A bootstrap of three values would cover far less than its name says. One value has no interval: low = high = value.
    """
    if not values or not 0.0 < confidence < 1.0:
        raise ValueError(
            f"Student's interval: {len(values)} values, confidence {confidence}; want one or more, in (0, 1)"
        )
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, mean, mean)
    degrees = len(values) - 1
    variance = math.fsum((value - mean) ** 2 for value in values) / degrees
    reach = student_quantile(degrees, confidence) * math.sqrt(variance / len(values))
    return Estimate(mean, mean - reach, mean + reach)


def student_quantile(degrees: int, confidence: float) -> float:
    """Return t with P(|T| <= t) = confidence, for Student's T with whole degrees of freedom (Abramowitz and Stegun, 26.7.3
    and 26.7.4)."""
    low, high = 0.0, math.pi / 2
    while high - low > 1e-15:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(degrees, middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_share(degrees: int, angle: float) -> float:
    """Return P(|T| <= t) at tan(angle) = t / sqrt(degrees)."""
    odd, cosine = degrees % 2, math.cos(angle)
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def estimate_metrics(records: Sequence[ProblemRecord], *, seed: int = 0) -> dict[str, Estimate]:
    """Return every metric of `problem_values` as a mean over problems with its interval."""
    return {name: bootstrap_mean(values, seed=seed) for name, values in problem_values(records).items()}


def response_rates(records: Sequence[ProblemRecord]) -> dict[str, float]:
    """Return the truncation rate, the mean length in tokens, and the share of every outcome, over all responses."""
    outcomes = Counter(outcome for record in records for outcome in record.outcomes)
    num_responses = sum(outcomes.values())
    truncated = sum(sum(record.truncated) for record in records)
    tokens = sum(sum(record.response_tokens) for record in records)
    rates = {"truncation_rate": truncated / num_responses, "mean_response_tokens": tokens / num_responses}
    return {**rates, **{f"outcome/{name}": count / num_responses for name, count in sorted(outcomes.items())}}
