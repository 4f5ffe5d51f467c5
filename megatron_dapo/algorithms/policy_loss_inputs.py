"""What a policy loss is given, and what all of them share: ratios, clipping, metric sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT
from megatron_dapo.algorithms.segments import identity

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PolicyLossInputs:
    """Tokens of one packed micro-batch (or of this rank's share of it)."""

    logprobs: torch.Tensor  # [P], the only one that carries gradients
    # [P], the trainer's numbers for the policy that sampled; the engine's for a loss that does not need them, which spares
    # the pass that computes them.
    old_logprobs: torch.Tensor
    advantages: torch.Tensor  # [P]
    loss_mask: torch.Tensor  # [P] 0 or 1
    sequence_ids: torch.Tensor  # [P] int64 in [0, num_sequences)
    num_sequences: int
    # Reduces per-sequence sums [k, num_sequences] of this rank's tokens to sums over whole sequences: an all-reduce
    # over the context-parallel group if sequences are cut. No gradient flows through it.
    reduce_over_sequence_parts: Callable[[torch.Tensor], torch.Tensor] = identity
    # [P], the engine's numbers as it sampled, at the sampling temperature; None: those of old_logprobs.
    rollout_logprobs: torch.Tensor | None = None
    # [P], how many versions older than the trained policy the one that sampled a token is; None: all 0.
    staleness: torch.Tensor | None = None
    # [P] int64, positions of the tokens in the whole micro-batch of `num_whole_tokens`, if sequences are cut; None: it is here.
    places: torch.Tensor | None = None
    num_whole_tokens: int = 0

    def of_whole_sequences(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [k, P] of all tokens of the whole micro-batch, [k, num_whole_tokens], on every rank that holds a part."""
        if self.places is None:
            return values
        whole = values.new_zeros(len(values), self.num_whole_tokens).index_copy(1, self.places, values)
        return self.reduce_over_sequence_parts(whole)  # each token is on one rank: the sum is exact

    def of_these_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return [P] of values of the whole micro-batch, [num_whole_tokens]."""
        return values if self.places is None else values.index_select(0, self.places)

    @property
    def trained(self) -> torch.Tensor:
        """[P] bool."""
        return self.loss_mask > 0

    def log_ratio(self) -> torch.Tensor:
        """[P] log pi / pi_old, 0 for masked tokens, even over NaN."""
        return self._log_ratio_to(self.old_logprobs)

    def rollout_log_ratio(self) -> torch.Tensor:
        """[P] log pi / pi_rollout, 0 for masked tokens, even over NaN."""
        return self._log_ratio_to(self.sampled_logprobs)

    @property
    def sampled_logprobs(self) -> torch.Tensor:
        """[P] log pi_rollout."""
        return self.old_logprobs if self.rollout_logprobs is None else self.rollout_logprobs

    def _log_ratio_to(self, logprobs: torch.Tensor) -> torch.Tensor:
        difference = torch.where(self.trained, self.logprobs - logprobs, 0.0)
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def trained_logprobs(self) -> torch.Tensor:
        """[P] log pi, 0 for masked tokens."""
        return torch.where(self.trained, self.logprobs, 0.0)

    def trained_advantages(self) -> torch.Tensor:
        """[P], 0 for masked tokens."""
        return torch.where(self.trained, self.advantages, 0.0)


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ratio clipped so that min(r A, clip(r) A) = ratio * A, and masks of tokens clipped below, above."""
    below = (advantages < 0) & (ratio < 1.0 - low)
    above = (advantages > 0) & (ratio > 1.0 + high)
    # Detached: a clipped token has the bound's value and no gradient.
    bounded = ratio.detach().clamp(1.0 - low, 1.0 + high)
    return torch.where(below | above, bounded, ratio), below, above


def loss_metrics(inputs: PolicyLossInputs, token_loss: torch.Tensor, below: torch.Tensor, above: torch.Tensor) -> Metrics:
    """Return sums over trained tokens. The approximate KL is that of pi_old from pi, on tokens drawn from pi_old."""
    log_ratio = inputs.log_ratio().detach()
    zeros = torch.zeros_like(log_ratio)
    return {
        "num_tokens": inputs.trained.sum().to(log_ratio.dtype),
        "policy_loss_sum": token_loss.detach().sum(),
        "ratio_sum": torch.where(inputs.trained, log_ratio.exp(), 0.0).sum(),
        "approx_kl_k1_sum": KL_ESTIMATORS["k1"](zeros, log_ratio).sum(),
        "approx_kl_k3_sum": KL_ESTIMATORS["k3"](zeros, log_ratio).sum(),
        "clip_low_sum": below.sum().to(log_ratio.dtype),
        "clip_high_sum": above.sum().to(log_ratio.dtype),
    }
