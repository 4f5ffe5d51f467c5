"""The language-model loss on correct responses (VAPO, arXiv 2504.05118, Eq 9 and 10; T-PPO uses it too).

    L = L_PPO + mu L_NLL          L_NLL = - (1 / sum_{o in T} |o|) sum_{o in T} sum_t log pi(o_t)

T: the correct responses of the optimizer mini-batch, |o|: their trained tokens, the end token included. The weight
contains mu and the count over the WHOLE mini-batch, so losses can be summed over micro-batches and ranks and the result
does not depend on the split. The other parts of VAPO are settings of other modules: the lambdas of the actor and
the critic, `length_adaptive_lambda`, `policy_loss.ppo_clip`, "token_mean" in `aggregation`. VAPO samples groups only
for contrast: the advantage comes from the critic.
"""

from __future__ import annotations

import torch

Metrics = dict[str, torch.Tensor]


def positive_tokens(trained: torch.Tensor, is_positive: torch.Tensor) -> torch.Tensor:
    """Return [S], trained tokens of correct responses, 0 for others; the sum over the mini-batch is the denominator."""
    return torch.where(is_positive.to(torch.bool), trained, 0)


def positive_token_weights(
    trained: torch.Tensor, is_positive: torch.Tensor, num_positive_tokens: int, coefficient: float
) -> torch.Tensor:
    """Return the weight, float64 [S], of each sample's trained tokens: mu / num_positive_tokens if correct, else 0.

    `trained` and `is_positive` [S] describe any part of the optimizer mini-batch, `num_positive_tokens` all of it. With
    no correct response all weights are 0, and so is the loss.
    """
    if not 0.0 <= coefficient < float("inf"):
        raise ValueError(f"positive-example coefficient {coefficient} must be a finite number of at least 0, e.g. 0.1")
    positive = positive_tokens(trained, is_positive)
    here = int(positive.sum())
    assert here <= num_positive_tokens, f"{here} positive tokens here, {num_positive_tokens} in the whole mini-batch"
    return (positive > 0).to(torch.float64) * (coefficient / max(num_positive_tokens, 1))


def positive_example_loss(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, is_positive: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """Return token losses -log pi [P], 0 where masked or in an incorrect response, and their sums.

    `logprobs` [P] of the current policy carry the gradient; `is_positive` [P] bool marks tokens of correct responses.
    """
    chosen = (loss_mask > 0) & is_positive.to(torch.bool)
    token_loss = torch.where(chosen, -logprobs, 0.0)
    metrics = {
        "num_positive_tokens": chosen.sum().to(torch.float64),
        "positive_nll_sum": token_loss.detach().sum(dtype=torch.float64),
    }
    return token_loss, metrics
