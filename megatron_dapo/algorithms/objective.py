"""The loss of one micro-batch: policy loss x correction, KL towards the reference, and entropy.

    loss = sum over trained tokens of loss_weight * (w * policy_loss + beta * kl + gkl + distilled - c * entropy)
         + sum over trained tokens of correct responses of positive_weight * -log pi        (VAPO)

`loss_weights` contain the global denominators, so the caller sums losses and gradients and never averages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.kl import generalized_kl_loss, kl_loss
from megatron_dapo.algorithms.off_policy import OffPolicyInputs, importance_weights
from megatron_dapo.algorithms.policy_loss import policy_loss
from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs
from megatron_dapo.algorithms.segments import identity
from megatron_dapo.algorithms.vapo import positive_example_loss
from megatron_dapo.config.algorithm_schema import AlgorithmConfig
from megatron_dapo.types import MicroBatch

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BehaviorTerms:
    """Constants for this rank's part of a micro-batch, [P] each: earlier policies' log-probs and token weights."""

    old_logprobs: torch.Tensor  # the engine's for a loss that needs no others
    importance_weights: torch.Tensor | None = None  # None: all 1
    ref_logprobs: torch.Tensor | None = None  # None: no KL term


@dataclass(frozen=True)
class PolicyObjective:
    """The loss configured in [algorithm]; calling it returns (loss, metric sums) for a micro-batch."""

    algorithm: AlgorithmConfig
    # See PolicyLossInputs: an all-reduce over the context-parallel group if sequences are cut.
    reduce_over_sequence_parts: Callable[[torch.Tensor], torch.Tensor] = identity
    num_sequence_parts: int = 1  # ranks over which sequences are cut

    def importance(self, micro_batch: MicroBatch, old_logprobs: torch.Tensor) -> tuple[torch.Tensor | None, Metrics]:
        """Return the correction's weights [P] for a micro-batch and their sums; (None, {}) without a correction."""
        if self.algorithm.off_policy.correction == "none":
            return None, {}
        return importance_weights(
            self.algorithm.off_policy,
            OffPolicyInputs(
                old_logprobs=old_logprobs,
                rollout_logprobs=micro_batch.rollout_logprobs,
                loss_mask=micro_batch.loss_mask,
                sequence_ids=micro_batch.sequence_ids,
                num_sequences=len(micro_batch.sequence_lengths),
                reduce_over_sequence_parts=self.reduce_over_sequence_parts,
            ),
        )

    def __call__(
        self,
        micro_batch: MicroBatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        behavior: BehaviorTerms,
        divergence: tuple[torch.Tensor, torch.Tensor] | None = None,
        distilled: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the scalar loss and sums over trained tokens from the policy's `logprobs` [P] and `entropy` [P].

        `divergence`: the two terms [P] of the generalized KL towards the reference, if algorithm.gkl has a coefficient.
        `distilled`: the token losses [P] of distillation.
        """
        algorithm = self.algorithm
        token_loss, metrics = policy_loss(
            algorithm.loss,
            PolicyLossInputs(
                logprobs=logprobs,
                old_logprobs=behavior.old_logprobs,
                advantages=micro_batch.advantages,
                loss_mask=micro_batch.loss_mask,
                sequence_ids=micro_batch.sequence_ids,
                num_sequences=len(micro_batch.sequence_lengths),
                reduce_over_sequence_parts=self.reduce_over_sequence_parts,
                rollout_logprobs=micro_batch.rollout_logprobs,
                staleness=micro_batch.staleness,
                places=self._places(micro_batch),
                num_whole_tokens=self.num_sequence_parts * micro_batch.num_tokens,
            ),
        )
        if behavior.importance_weights is not None:
            token_loss = token_loss * behavior.importance_weights
        bonus, entropy_metrics = entropy_loss(entropy, micro_batch.loss_mask, algorithm.entropy_coefficient)
        metrics = {**metrics, **entropy_metrics}
        # Without a coefficient the bonus stays out of the graph, so the head's kernel computes no entropy gradient.
        if algorithm.entropy_coefficient:
            token_loss = token_loss + bonus
        if behavior.ref_logprobs is not None:
            penalty, kl_metrics = kl_loss(
                algorithm.kl_estimator, logprobs, behavior.ref_logprobs, micro_batch.loss_mask
            )
            token_loss = token_loss + algorithm.kl_loss_coefficient * penalty
            metrics = {**metrics, **kl_metrics}
        if divergence is not None:
            penalty, gkl_metrics = generalized_kl_loss(*divergence, micro_batch.loss_mask, algorithm.gkl)
            token_loss = token_loss + penalty
            metrics = {**metrics, **gkl_metrics}
        if distilled is not None:
            token_loss = token_loss + distilled
        # loss_weights cover the whole optimizer step, so no mean over micro-batches follows.
        loss = (token_loss * micro_batch.loss_weights * micro_batch.loss_mask).sum()
        positive = micro_batch.positive_weights
        if algorithm.positive_example_coefficient and positive is not None:
            negative_logprobs, positive_metrics = positive_example_loss(logprobs, micro_batch.loss_mask, positive > 0)
            loss = loss + (negative_logprobs * positive).sum()
            metrics = {**metrics, **positive_metrics}
        return loss, {**metrics, "loss_sum": loss.detach()}

    def _places(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Return the positions of this rank's tokens in the whole micro-batch; None if they are all."""
        if self.num_sequence_parts == 1:
            return None
        return micro_batch.cu_seqlens.long()[micro_batch.sequence_ids] + micro_batch.position_ids


def entropy_loss(entropy: torch.Tensor, loss_mask: torch.Tensor, coefficient: float) -> tuple[torch.Tensor, Metrics]:
    """Return the entropy bonus -coefficient * H_t [P] (arXiv 1707.06347, Eq 9), 0 where masked, and the sum of H.

    The sum is returned even if the coefficient is 0 (as in DAPO), so that an entropy collapse is visible.
    """
    entropy = torch.where(loss_mask > 0, entropy, 0.0)
    return -coefficient * entropy, {"entropy_sum": entropy.detach().sum()}
