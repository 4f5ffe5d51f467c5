"""A reward: the right result, and a little for a short answer. reward.verifier = "reward.py:reward"."""

from megatron_dapo import RewardResult, RewardSample


def reward(sample: RewardSample) -> RewardResult:
    """Return the parts of a response's reward; groups are filtered by is_correct."""
    is_right = sample.answer in sample.response.split()
    return RewardResult(
        parts={"right": float(is_right), "short": 0.1 * (len(sample.response) < 40)}, is_correct=is_right
    )
