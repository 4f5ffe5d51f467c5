"""The policy losses of `check-loss`, from the papers: tokens of one sequence in fp64, gradients by autograd.

They share nothing with `algorithms`. `logprobs` [R] carries the gradient, `old` [R] are the log-probs of the policy that
sampled, which are the engine's and the trainer's alike here; `mask` [R] 0 or 1. The bounds are chosen so that the
batch has tokens or sequences on both sides of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

# (logprobs, old, advantages, mask), each [R] -> losses [R]
TokenLosses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ProofLoss:
    """A section [algorithm.loss] and what it computes."""

    section: Mapping[str, Any]
    token_losses: TokenLosses
    has_sequence_advantage: bool = False  # a sequence's tokens have one advantage


def _clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def ppo_clip(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-min(r A, clip(r, 0.8, 1.28) A), for A < 0 at most -3 A (DAPO, arXiv 2503.14476, Eq 10; dual clip, arXiv 1912.09729)."""
    loss = _clipped((logprobs - old).exp(), advantages, 0.2, 0.28)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * 3.0), loss)


def gspo(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-min(s A, clip(s, 0.8, 1.3) A), s = exp(mean log r) of the sequence, for each token (arXiv 2507.18071, Eq 5-7)."""
    mean = ((logprobs - old) * mask).sum() / mask.sum().clamp(min=1)
    return _clipped(mean.exp().expand_as(mask), advantages, 0.2, 0.3)


def gmpo(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-A exp(mean b), b = min(log r, 0.3) if A > 0, max(log r, -0.2) if A < 0, for each token (arXiv 2507.20673)."""
    log_ratio = logprobs - old
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=0.3), log_ratio.clamp(min=-0.2))
    return -advantages * ((bounded * mask).sum() / mask.sum().clamp(min=1)).exp()


def cispo(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-sg[clip(r, 0.8, 1.5)] A log pi (arXiv 2506.13585, Eq 4)."""
    return -(logprobs - old).exp().detach().clamp(0.8, 1.5) * advantages * logprobs


def sapo(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-4 / tau sigmoid(tau (r - 1)) A, tau = 1 or, if A < 0, 1.5 (arXiv 2511.20347)."""
    gain = (logprobs - old).exp() - 1
    return torch.where(advantages > 0, -4 * gain.sigmoid(), -4 / 1.5 * (1.5 * gain).sigmoid()) * advantages


def fipo(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ppo_clip with f A for A, f = clip(exp(sum_{k >= t} 2^{-(k - t) / 8} log r_k), 0.8, 1.4) without tokens with r > 3
    (arXiv 2603.19835); k and t count trained tokens."""
    log_ratio = (logprobs - old).detach()
    trained = mask.nonzero()[:, 0]
    weights = torch.ones_like(advantages)
    for place, token in enumerate(trained.tolist()):
        later = log_ratio[trained[place:]]
        decay = 0.5 ** (torch.arange(len(later), dtype=later.dtype) / 8)
        total = float((decay * later * (later <= math.log(3))).sum())
        weights[token] = min(max(math.exp(total), 0.8), 1.4)
    return ppo_clip(logprobs, old, advantages * weights, mask)


def dis(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-sg[R] A log pi for R in [0.6, 3], else 0 (arXiv 2607.07508, Eq 3)."""
    ratio = (logprobs - old).exp().detach()
    return -torch.where((ratio >= 0.6) & (ratio <= 3.0), ratio, 0.0) * advantages * logprobs


def _without(moved: torch.Tensor, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return -sg[min(R, 20)] A log pi, 0 for tokens that `moved` [R] (-1, 0, 1) too far to where A pushes them."""
    weight = (logprobs - old).exp().detach().clamp(max=20.0)
    return -torch.where(moved * advantages.sign() > 0, 0.0, weight) * advantages * logprobs


def dppo_tv(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Trust region |pi - pi_rollout| <= 0.003 (arXiv 2602.04879)."""
    difference = (logprobs.exp() - old.exp()).detach()
    return _without(difference.sign() * (difference.abs() > 0.003), logprobs, old, advantages)


def dppo_kl(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Trust region KL(Bernoulli(pi_rollout) || Bernoulli(pi)) <= 0.002 (arXiv 2602.04879)."""
    new, sampled = logprobs.exp().detach(), old.exp()
    divergence = sampled * (sampled / new).log() + (1 - sampled) * ((1 - sampled) / (1 - new)).log()
    return _without((new - sampled).sign() * (divergence > 0.002), logprobs, old, advantages)


_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "dual_clip": 3.0}
_SEQUENCE_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
PROOF_LOSSES: Mapping[str, ProofLoss] = MappingProxyType(
    {
        "ppo_clip": ProofLoss(_CLIP, ppo_clip),
        "gspo": ProofLoss(_SEQUENCE_CLIP, gspo, has_sequence_advantage=True),
        "luspo": ProofLoss(_SEQUENCE_CLIP, gspo, has_sequence_advantage=True),
        "gmpo": ProofLoss(
            {"clip_log_ratio_low": 0.2, "clip_log_ratio_high": 0.3}, gmpo, has_sequence_advantage=True
        ),
        "fipo": ProofLoss({**_CLIP, "half_life": 8.0, "weight_low": 0.2, "weight_high": 0.4}, fipo),
        "cispo": ProofLoss({"clip_ratio_low": 0.2, "clip_ratio_high": 0.5}, cispo),
        "sapo": ProofLoss({"temperature_negative": 1.5}, sapo),
        "dis": ProofLoss({"clip_ratio_low": 0.4, "clip_ratio_high": 2.0}, dis),
        "dppo_tv": ProofLoss({"divergence_low": 0.003, "divergence_high": 0.003}, dppo_tv),
        "dppo_kl": ProofLoss({"divergence_low": 0.002, "divergence_high": 0.002}, dppo_kl),
    }
)
