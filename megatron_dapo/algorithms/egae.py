"""Extended GAE: advantages for responses cut at the end of a window (T-PPO, arXiv 2506.15050).

A window holds the tokens s_0..s_{l-1} of a response that one step generated. If the response continues, s_l is unknown,
and its value is taken to be the last known one:

    V(s_l) := V(s_{l-1}),   so   delta_{l-1} = r_{l-1} + (gamma - 1) V(s_{l-1}),   0 at gamma = 1 without reward

An episode's window may end with the environment's answer to a turn. s_l is then known, and V(s_l) is the critic's.
A finished response has V(s_l) = 0. (A value of 0 at a cut would punish the tail of every unfinished response.)
The estimator is GAE with this bootstrap. Splitting changes the advantages before a cut by one discounted number:

    A_t(whole) - A_t(window) = (gamma lambda)^{l-1-t} (A_{l-1}(whole) - A_{l-1}(window))

Advantages in the last window do not change.
"""

from __future__ import annotations

import torch

from megatron_dapo.algorithms.gae import ValueEstimates, ValueInputs, estimate_values, trained_tokens


def extended_estimates(
    values: torch.Tensor,
    rewards: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    is_finished: torch.Tensor,
    gamma: float,
    lambdas: float | torch.Tensor,
    values_after: torch.Tensor | None = None,
) -> ValueEstimates:
    """Return the advantages [P] of the current windows' tokens; do not use the returns [P] as targets for a critic.

    `values`, `rewards`, `loss_mask` [P] and `lengths` [S] are as in `gae.ValueInputs`, for the windows only.
    `is_finished` [S] bool: the response ended in this window, or this was its last window. `values_after`: see
    `window_bootstrap`. Raise the errors of `gae.estimate_values`.
    """
    bootstrap = window_bootstrap(values, loss_mask, lengths, is_finished, values_after)
    return estimate_values(ValueInputs(values, rewards, loss_mask, lengths, bootstrap), gamma, lambdas)


def window_bootstrap(
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    is_finished: torch.Tensor,
    values_after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [S], the value after each window: 0 if the response is finished, otherwise that of `values_after` [S], or V of
    the window's last trained token if it is NaN or not given."""
    tokens = trained_tokens(loss_mask, lengths)
    goes_on = tokens.present & ~is_finished.to(torch.bool)
    bootstrap = values.new_zeros(lengths.numel())
    bootstrap[goes_on] = tokens.take(values.detach())[tokens.last[goes_on]]
    if values_after is None:
        return bootstrap
    return torch.where(goes_on & ~values_after.isnan(), values_after.to(bootstrap.dtype), bootstrap)


def without_tail(
    loss_mask: torch.Tensor, lengths: torch.Tensor, is_finished: torch.Tensor, num_tail_tokens: int
) -> torch.Tensor:
    """Drop the last `num_tail_tokens` TRAINED tokens of every window whose response continues from `loss_mask` [P].

    The advantages of those tokens rest only on the stand-in for V(s_l), so they leave the policy loss and its
    denominator. Finished responses keep all their tokens. Compute advantages first, with the full mask.
    """
    if num_tail_tokens < 0:
        raise ValueError(f"num_tail_tokens {num_tail_tokens} must be at least 0, e.g. 8")
    tokens = trained_tokens(loss_mask, lengths)
    kept = tokens.take(loss_mask).clone()
    back = torch.arange(num_tail_tokens, device=lengths.device)
    in_window = (back < tokens.lengths[:, None]) & ~is_finished.to(torch.bool)[:, None]
    kept[(tokens.last[:, None] - back)[in_window]] = 0
    return tokens.put(kept)
