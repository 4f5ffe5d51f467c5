"""Extended GAE: advantages of responses that are cut at the end of a window (T-PPO, arXiv 2506.15050).

A window holds the tokens s_0..s_{l-1} that one step has generated of a response. Where the response continues, nothing
is known of s_l, and its value is taken to be the last one known:

    V(s_l) := V(s_{l-1}),   so   delta_{l-1} = r_{l-1} + (gamma - 1) V(s_{l-1}),   0 at gamma = 1 without reward

and a finished response has V(s_l) = 0. (A value of 0 at a cut end would punish the tail of every unfinished response.)
This is GAE with that bootstrap. Splitting changes the advantages before a cut by one number, discounted:

    A_t(whole) - A_t(window) = (gamma lambda)^{l-1-t} (A_{l-1}(whole) - A_{l-1}(window))

and leaves those of the last window as they are.
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
) -> ValueEstimates:
    """Advantages [P] of the tokens of the current windows; the returns [P] beside them are no targets for a critic.

    `values`, `rewards`, `loss_mask` [P], `lengths` [S] as in `gae.ValueInputs`, of the windows alone; `is_finished` [S]
    bool: the response ended in this window, or this was its last one. Errors as in `gae.estimate_values`.
    """
    bootstrap = window_bootstrap(values, loss_mask, lengths, is_finished)
    return estimate_values(ValueInputs(values, rewards, loss_mask, lengths, bootstrap), gamma, lambdas)


def window_bootstrap(
    values: torch.Tensor, loss_mask: torch.Tensor, lengths: torch.Tensor, is_finished: torch.Tensor
) -> torch.Tensor:
    """[S] the value behind each window: V of its last trained token where the response continues, else 0."""
    tokens = trained_tokens(loss_mask, lengths)
    goes_on = tokens.present & ~is_finished.to(torch.bool)
    bootstrap = values.new_zeros(lengths.numel())
    bootstrap[goes_on] = tokens.take(values.detach())[tokens.last[goes_on]]
    return bootstrap


def without_tail(
    loss_mask: torch.Tensor, lengths: torch.Tensor, is_finished: torch.Tensor, num_tail_tokens: int
) -> torch.Tensor:
    """`loss_mask` [P] without the last `num_tail_tokens` TRAINED tokens of every window whose response continues.

    Their advantages rest on the stand-in for V(s_l) alone. They leave the policy loss and its denominator; finished
    responses keep all of theirs. Advantages are computed with the whole mask, before this.
    """
    if num_tail_tokens < 0:
        raise ValueError(f"num_tail_tokens {num_tail_tokens} must be at least 0, e.g. 8")
    tokens = trained_tokens(loss_mask, lengths)
    kept = tokens.take(loss_mask).clone()
    back = torch.arange(num_tail_tokens, device=lengths.device)
    in_window = (back < tokens.lengths[:, None]) & ~is_finished.to(torch.bool)[:, None]
    kept[(tokens.last[:, None] - back)[in_window]] = 0
    return tokens.put(kept)
