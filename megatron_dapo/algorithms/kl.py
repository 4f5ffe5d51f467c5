"""Estimators of KL(pi || pi_ref) from samples of pi, one number per token (J. Schulman, "Approximating KL divergence").

With d = log pi - log pi_ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d.

As a METRIC on samples of pi, k1 and k3 are unbiased (k3 with less variance, and never negative), k2 is biased. As a
LOSS what counts is the gradient, and the ranking changes: E[grad k1] = 0, E[grad k2] = grad KL(pi || pi_ref)
exactly, E[grad k3] = grad KL(pi_ref || pi), the other direction. All of this holds for samples of the current pi. On a
batch reused for several updates every estimator is biased, increasingly so as pi moves.
"""

from __future__ import annotations

import torch

from megatron_dapo.config.algorithm_schema import GeneralizedKlConfig

# exp(20) is 4.9e8: too large a ratio to train on, yet far from fp32 overflow.
LOG_RATIO_LIMIT = 20.0


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log pi - log pi_ref, [P]."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log pi - log pi_ref)^2 / 2, [P]."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """pi_ref / pi - 1 - log(pi_ref / pi), [P]; the log-ratio is clamped to +-20."""
    difference = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits of a small difference; exp(x) - 1 - x would be rounding noise.
    return torch.expm1(difference) - difference


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
KL_LOSSES = {"k2": k2, "k3": k3}


def generalized_kl_loss(
    weighted_mse: torch.Tensor, cross_entropy: torch.Tensor, loss_mask: torch.Tensor, section: GeneralizedKlConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return token losses [P] (0 where masked) of the generalized KL (arXiv 2503.08038) and the sums of its terms.

    The terms [P] come from `ops.divergence`, which gives their formulas. Multiply by the token weights of the policy
    loss: the authors' code normalizes over the whole batch, which would couple the tokens of an optimizer step.
    """
    trained = loss_mask > 0
    weighted_mse, cross_entropy = (torch.where(trained, term, 0.0) for term in (weighted_mse, cross_entropy))
    loss = section.coefficient * (section.weighted_mse * weighted_mse + section.cross_entropy * cross_entropy)
    metrics = {
        "gkl_weighted_mse_sum": weighted_mse.detach().sum(),
        "gkl_cross_entropy_sum": cross_entropy.detach().sum(),
    }
    return loss, metrics


def kl_loss(
    name: str, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the token losses [P] (0 where masked) of estimator `name` and the sums of all three estimators as metrics.

    Multiply by the coefficient and by the same token weights as the policy loss. `name` is k2 (gradient of
    KL(pi || pi_ref)) or k3 (GRPO, arXiv 2402.03300 Eq 4; gradient of KL(pi_ref || pi)). k1 is refused: its gradient is
    0 in expectation, so it would only add noise.
    """
    if name == "k1":
        raise ValueError("KL loss 'k1' has a gradient of zero mean: it adds noise and no pull; choose k2 (or k3)")
    trained = loss_mask > 0
    logprobs = torch.where(trained, logprobs, 0.0)
    ref_logprobs = torch.where(trained, ref_logprobs, 0.0)
    metrics = {f"kl_{key}_sum": value(logprobs.detach(), ref_logprobs).sum() for key, value in KL_ESTIMATORS.items()}
    return KL_LOSSES[name](logprobs, ref_logprobs), metrics
