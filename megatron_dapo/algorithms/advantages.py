"""One advantage per response, from the rewards of its group (and of the batch).

Notation: R_i reward of response i, G its group's size, mean_g and std_g over the group. Every estimator is a function of
`AdvantageInputs`, of COMPLETE groups before any split into mini-batches, and of its section of the configuration, and
returns float64 [S]; `compute_advantages` adds checks, exclusion from the group statistics, the cast to fp32 and diagnostics.

Guarantees of every estimator: arithmetic in float64; a group whose rewards are all equal gets exactly 0 before any
global shift (0.1 + 0.1 + 0.1 is not 3 x 0.1 in binary, so equality is tested on the rewards, not on their std).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dapo.algorithms.segments import group_positions, segment_sum
from megatron_dapo.config.algorithm_schema import (
    AdvantageConfig,
    DrGrpoAdvantageConfig,
    FunctionAdvantageConfig,
    GdpoAdvantageConfig,
    GrpoAdvantageConfig,
    MaxRlAdvantageConfig,
    ReinforceBaselineAdvantageConfig,
    ReinforcePpAdvantageConfig,
    RlooAdvantageConfig,
)
from megatron_dapo.hooks import HookError, load_hook, named


@dataclass(frozen=True)
class AdvantageInputs:
    """Rewards of S responses in complete groups."""

    rewards: torch.Tensor  # [S] floating point
    group_index: torch.Tensor  # [S] int64, equal within a group; any integers
    response_lengths: torch.Tensor  # [S] int64, TRAINED tokens of each response
    # [S] bool, or None for all: responses that enter the group's statistics. The rest get advantage 0.
    in_statistics: torch.Tensor | None = None
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [S] float64 of each reward; their sum is `rewards`


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch and their diagnostics."""

    values: torch.Tensor  # [S] float32, one scalar per response
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class GroupStatistics:
    """Moments of the rewards by group, and the rewards centered on their group's mean."""

    positions: torch.Tensor  # [S] int64, 0..num_groups-1
    sizes: torch.Tensor  # [num_groups] float64
    constant: torch.Tensor  # [num_groups] bool, all rewards equal (so are singletons)
    centered: torch.Tensor  # [S] float64, exactly 0 in constant groups
    squares: torch.Tensor  # [num_groups] float64, sum of centered^2

    @property
    def singleton(self) -> torch.Tensor:
        """[S] bool: responses that are the only one in their group."""
        return (self.sizes == 1)[self.positions]


def group_statistics(rewards: torch.Tensor, group_index: torch.Tensor) -> GroupStatistics:
    """Statistics of `rewards` [S] by `group_index` [S]."""
    rewards = rewards.to(torch.float64)
    positions, num_groups = group_positions(group_index)
    sizes = segment_sum(torch.ones_like(rewards), positions, num_groups)
    lowest = rewards.new_full((num_groups,), torch.inf).scatter_reduce_(0, positions, rewards, "amin")
    highest = rewards.new_full((num_groups,), -torch.inf).scatter_reduce_(0, positions, rewards, "amax")
    constant = lowest == highest
    mean = segment_sum(rewards, positions, num_groups) / sizes
    centered = torch.where(constant[positions], 0.0, rewards - mean[positions])
    return GroupStatistics(positions, sizes, constant, centered, segment_sum(centered.square(), positions, num_groups))


# Degrees of freedom taken from the count before dividing the sum of squares.
STD_CONVENTIONS: dict[str, float] = {"unbiased": 1.0, "biased": 0.0}


def grpo(inputs: AdvantageInputs, section: GrpoAdvantageConfig) -> torch.Tensor:
    """A_i = (R_i - mean_g) / (std_g + eps). GRPO (arXiv 2402.03300, sec. 4.1.2), DAPO (arXiv 2503.14476, Eq 9).

    `std` "unbiased" divides by G - 1, "biased" by G. Zero-std groups and singletons get 0.
    """
    groups = group_statistics(inputs.rewards, inputs.group_index)
    freedom = (groups.sizes - STD_CONVENTIONS[section.std]).clamp(min=1)
    spread = (groups.squares / freedom).sqrt() + section.eps
    # A constant group's numerator is exactly 0; dividing it by 1 keeps eps = 0 finite.
    return groups.centered / torch.where(groups.constant, 1.0, spread)[groups.positions]


def gdpo(inputs: AdvantageInputs, section: GdpoAdvantageConfig) -> torch.Tensor:
    """A = sum_k w_k A_k / (std of the batch + eps), A_k GRPO's advantage of reward k. GDPO (arXiv 2601.05242, Eq 4-6).

    Eq 6 also subtracts the batch's mean, which is 0, as that of every group is. Without parts there is one reward. Raise
    ValueError if the weights name rewards, but none that a response of the batch has.
    """
    parts = inputs.parts or {"reward": inputs.rewards}
    if section.weights and not section.weights.keys() & parts.keys():
        raise ValueError(
            f"algorithm.advantage.weights names {', '.join(sorted(section.weights))}, the batch has the rewards "
            f"{', '.join(sorted(parts))}: name those"
        )
    total = torch.zeros_like(inputs.rewards, dtype=torch.float64)
    for name in sorted(parts):
        one = AdvantageInputs(parts[name], inputs.group_index, inputs.response_lengths)
        total += section.weights.get(name, 1.0) * grpo(one, section)
    if total.numel() < 2 or not total.any():
        return total
    return total / (total.std(correction=int(STD_CONVENTIONS[section.std])) + section.eps)


def dr_grpo(inputs: AdvantageInputs, section: DrGrpoAdvantageConfig) -> torch.Tensor:
    """A_i = R_i - mean_g. Dr. GRPO (arXiv 2503.20783): no division by std, hence no weight by difficulty."""
    return group_statistics(inputs.rewards, inputs.group_index).centered


def rloo(inputs: AdvantageInputs, section: RlooAdvantageConfig) -> torch.Tensor:
    """A_i = R_i - mean of the OTHER rewards of the group = (R_i - mean_g) G / (G - 1). RLOO (arXiv 2402.14740).

    A singleton has no others and gets 0.
    """
    groups = group_statistics(inputs.rewards, inputs.group_index)
    return groups.centered * (groups.sizes / (groups.sizes - 1).clamp(min=1))[groups.positions]


def maxrl(inputs: AdvantageInputs, section: MaxRlAdvantageConfig) -> torch.Tensor:
    """A_i = (R_i - mean_g) / mean_g, 0 in a group whose mean is not above 0. MaxRL (arXiv 2602.02710).

    With rewards of 0 and 1 it estimates the gradient of log P(correct), the likelihood, not of P(correct), so that hard
    prompts weigh more than under GRPO. Raise ValueError if a reward is not in [0, 1], as of a verifier that gives -1.
    """
    least, most = (float(end) for end in torch.aminmax(inputs.rewards)) if len(inputs.rewards) else (0.0, 1.0)
    if least < 0 or most > 1:
        raise ValueError(
            f"algorithm.advantage = maxrl needs rewards from 0 to 1, have {least:g} to {most:g}: "
            "let the verifier give 0 and 1 without punishments, or take grpo"
        )
    groups = group_statistics(inputs.rewards, inputs.group_index)
    means = (segment_sum(inputs.rewards, groups.positions, len(groups.sizes)) / groups.sizes)[groups.positions]
    return torch.where(means > 0, groups.centered / means, 0.0)


def reinforce_baseline(inputs: AdvantageInputs, section: ReinforceBaselineAdvantageConfig) -> torch.Tensor:
    """A' = R - mean_g, then one scale for the whole batch. REINFORCE++-baseline (arXiv 2501.03262).

    `variant` "scale_only" (default) gives A' / std(A'); "paper" gives (A' - mean(A')) / std(A'). The two differ if
    lengths are ragged: the token-weighted mean of A' is then not 0, and subtracting it moves even the A' = 0 of an
    all-correct group. `weighting` "token" counts each response by its trained tokens, "sequence" counts it once.
    A singleton keeps A' = R. If A' has no spread (or no tokens), it is returned unchanged.
    """
    groups = group_statistics(inputs.rewards, inputs.group_index)
    centered = torch.where(groups.singleton, inputs.rewards.to(torch.float64), groups.centered)
    return _scaled_over_batch(centered, inputs, section)


def reinforce_pp(inputs: AdvantageInputs, section: ReinforcePpAdvantageConfig) -> torch.Tensor:
    """A = (R - mean) / std over the trained tokens of the batch. REINFORCE++ with k = 1 (arXiv 2501.03262), without its
    KL term in the reward: the loss has one (kl_loss_coefficient)."""
    return _scaled_over_batch(inputs.rewards.to(torch.float64), inputs, section)


def _scaled_over_batch(
    values: torch.Tensor, inputs: AdvantageInputs, section: ReinforceBaselineAdvantageConfig
) -> torch.Tensor:
    """Return `values` [S] shifted and scaled by the batch's moments as `section` says."""
    by_token = section.weighting == "token"
    weights = inputs.response_lengths.to(torch.float64) if by_token else torch.ones_like(values)
    # Compared by value, not by a variance of 0: equal rewards such as 0.1 have a variance of 1e-34 in binary.
    counted = values[weights > 0]
    if counted.numel() == 0 or bool(counted.min() == counted.max()):
        return values
    total = weights.sum()
    mean = (weights * values).sum() / total
    freedom = (total - STD_CONVENTIONS[section.std]).clamp(min=1)
    variance = (weights * (values - mean).square()).sum() / freedom
    shifted = values - mean if section.variant == "paper" else values
    return shifted * _scale(section.scale, variance, section.eps)


def _scale(convention: str, variance: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / std by one of the three formulas that public systems use; they differ in the ninth digit."""
    if convention == "variance_floor":
        return variance.clamp(min=eps).rsqrt()
    if convention == "variance_plus_eps":
        return (variance + eps).rsqrt()
    return 1.0 / (variance.sqrt() + eps)


def function(inputs: AdvantageInputs, section: FunctionAdvantageConfig) -> torch.Tensor:
    """Return the advantages [S] that a user's function computes from `inputs`.

    Raise HookError if the function fails, or if its result has another shape or a value that is not finite. Every rank
    calls it with the same numbers and must get the same result.
    """
    field = "algorithm.advantage"
    own = load_hook(section.function, f"{field}.function")
    with named(section.function, field):
        values = torch.as_tensor(own(inputs)).detach().to(torch.float64)
    if values.shape != inputs.rewards.shape:
        raise HookError(
            f"hook {section.function!r} ({field}) returned the shape {tuple(values.shape)}, not {tuple(inputs.rewards.shape)}: one "
            "advantage a response"
        )
    if bad := int((~torch.isfinite(values)).sum()):
        raise HookError(f"hook {section.function!r} ({field}): {bad} of {len(values)} advantages are not finite")
    return values


ADVANTAGES: dict[str, Callable[[AdvantageInputs, Any], torch.Tensor]] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_baseline": reinforce_baseline,
    "reinforce_pp": reinforce_pp,
    "function": function,
}


def compute_advantages(advantage: AdvantageConfig, inputs: AdvantageInputs) -> Advantages:
    """Return the advantages [S] fp32 by the estimator that `advantage` names, and diagnostics.

    Raise ValueError if a reward is not finite.

    Responses left out of the statistics (`in_statistics` False) get 0 and do not enter the diagnostics.
    """
    _check(inputs)
    included = inputs.in_statistics
    if included is None:
        included = torch.ones_like(inputs.rewards, dtype=torch.bool)
    chosen = AdvantageInputs(
        inputs.rewards[included],
        inputs.group_index[included],
        inputs.response_lengths[included],
        parts={name: values[included] for name, values in inputs.parts.items()},
    )
    values = torch.zeros_like(inputs.rewards, dtype=torch.float64)
    values[included] = ADVANTAGES[advantage.name](chosen, advantage)
    return Advantages(values.to(torch.float32), _diagnostics(chosen, values[included]))


def _check(inputs: AdvantageInputs) -> None:
    shape = inputs.rewards.shape
    assert inputs.rewards.dim() == 1, f"rewards have shape {tuple(shape)}, want one scalar per response"
    assert inputs.group_index.shape == shape and inputs.response_lengths.shape == shape, "one entry per response"
    bad = (~torch.isfinite(inputs.rewards)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"reward of response {bad[0]} is {float(inputs.rewards[bad[0]])} ({len(bad)} of {shape[0]} are not "
            "finite); make the reward function return a finite number"
        )


def _diagnostics(inputs: AdvantageInputs, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {"num_groups": 0.0, "frac_zero_std_groups": 0.0}
    groups = group_statistics(inputs.rewards, inputs.group_index)
    return {
        "num_groups": float(groups.sizes.numel()),
        "frac_zero_std_groups": float(groups.constant.to(torch.float64).mean()),
        "reward_mean": float(inputs.rewards.to(torch.float64).mean()),
        "reward_group_std": float((groups.squares / groups.sizes).sqrt().mean()),
        "reward_std": float(inputs.rewards.to(torch.float64).std(correction=0)),
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std(correction=0)),
        "advantage_abs_max": float(values.abs().max()),
    }
