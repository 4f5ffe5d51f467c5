"""Alarms on a step's metrics: thresholds from the configuration, and fixed ones for every run.

The training loop warns about the configured ones; a run's report shows both. Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Alarm:
    """A bound on a metric, which is passed once the metric exceeds it for `patience` steps in a row."""

    metric: str
    side: Literal["above", "below"]
    limit: float | str  # a number, or the configuration key that holds it
    title: str
    advice: str
    patience: int = 1

    def is_passed(self, value: float, limit: float) -> bool:
        """Return True for a value beyond the limit; NaN is beyond no limit."""
        return value > limit if self.side == "above" else value < limit

    def limit_in(self, config: Mapping[str, object]) -> float | None:
        """Return the limit, given a configuration with dotted keys; None if it lacks the key."""
        found = config.get(self.limit) if isinstance(self.limit, str) else self.limit
        return float(found) if isinstance(found, (int, float)) else None


# Largest mean |log-prob difference| in nats that rounding explains; docs/tuning.md has the measurements.
_ROUNDING = {("float32", "cpu"): 1e-3, ("float32", "gpu"): 0.02, ("bfloat16", "cpu"): 0.06, ("bfloat16", "gpu"): 0.06}
_QUANTIZED = 0.2  # trainer or engine multiplies in FP8
_STALE = 0.02  # added if responses of earlier policies are trained: the policies differ too


def mismatch_limit(value_of: Callable[[str], object], is_on_gpu: bool) -> float:
    """Return the mismatch above which trainer and engine disagree: mismatch.alarm, or if it is 0 a bound on rounding.

    value_of: returns a value of the configuration by its dotted key.
    """
    if isinstance(chosen := value_of("mismatch.alarm"), (int, float)) and chosen:
        return float(chosen)
    if value_of("sglang.quantization") == "fp8" or "fp8" in str(value_of("precision.recipe")):
        return _QUANTIZED
    limit = _ROUNDING.get((str(value_of("model.dtype")), "gpu" if is_on_gpu else "cpu"), _QUANTIZED)
    return limit + (_STALE if value_of("rollout.max_staleness") else 0.0)


QUALITY_ALARMS = (
    Alarm(
        "quality/repetition_mean",
        "above",
        "quality.repetition_alarm",
        "responses repeat themselves",
        "read samples: loops often begin when the length punishment is too weak or the learning rate too high",
    ),
    Alarm(
        "quality/tail_loop_share",
        "above",
        "quality.tail_loop_alarm",
        "responses end in loops",
        "read the truncated samples; a repetition filter or a stronger overlong punishment removes what they teach",
    ),
    Alarm(
        "quality/compression_mean",
        "below",
        "quality.compression_alarm",
        "responses compress too well",
        "read samples: text that compresses well is repetitive",
    ),
    Alarm(
        "quality/probability_mean",
        "above",
        "quality.probability_alarm",
        "tokens are nearly certain",
        "exploration ends: raise clip_ratio_high, or lower the learning rate",
    ),
    Alarm(
        "reward/failed_share",
        "above",
        "quality.reward_failure_alarm",
        "the reward fails or runs out of time",
        "read the samples of kind other: their outcome is timeout or error; raise the deadline, or mend the function",
    ),
)
RUN_ALARMS = (
    Alarm(
        "mismatch/abs_logprob_diff_mean",
        "above",
        "mismatch.alarm",
        "trainer and engine disagree",
        "compare precision and kernels of both sides; algorithm.off_policy.correction bounds what it does to the gradient",
    ),
    *QUALITY_ALARMS,
    Alarm(
        "rollout/truncated_share",
        "above",
        0.5,
        "most responses are cut at the length limit",
        "raise rollout.max_response_tokens, or let reward.overlong_punishment teach shorter ones",
        3,
    ),
    Alarm(
        "rollout/groups_filtered_share",
        "above",
        0.8,
        "dynamic sampling filters most groups",
        "the data is too easy or too hard for this policy: see the shares of groups all correct and all wrong",
        3,
    ),
    Alarm(
        "advantage/zero_std_groups_share",
        "above",
        0.5,
        "most trained groups have equal rewards",
        "they have no gradient: turn dynamic sampling on, or change the data's difficulty",
        3,
    ),
    Alarm(
        "mismatch/ess",
        "below",
        0.3,
        "few samples carry the importance weights",
        "samples are too stale, or trainer and engine differ: see staleness and mismatch",
        2,
    ),
    Alarm(
        "rollout/duplicate_share",
        "above",
        0.9,
        "nearly all responses of a group are the same",
        "the policy no longer explores: raise the temperature or clip_ratio_high",
        3,
    ),
)
