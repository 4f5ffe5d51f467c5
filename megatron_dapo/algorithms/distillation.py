"""The reverse KL from a teacher by its log-probs of the sampled tokens: an advantage for each token.

For samples of the policy, log pi - log pi_teacher is an unbiased estimate of KL(pi || pi_teacher) at a token, and the policy
gradient with the advantage -(log pi - log pi_teacher) descends it, each token for itself: no discount, no baseline. Here pi
is the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.types import TrainSample


def with_teachers(samples: Sequence[TrainSample], section: DistillationConfig) -> list[TrainSample]:
    """Return the samples with the advantages that teachers leave and give them.

    Those of the rewards become 0 if the sample's teachers take the reward's place. `teacher_gains` are the weighted sum of
    log pi_teacher - log pi over the sample's servers.
    """
    return [_with_teachers(sample, section) for sample in samples]


def _with_teachers(sample: TrainSample, section: DistillationConfig) -> TrainSample:
    advantages = sample.advantages
    if not section.learns_from_rewards(sample.source):
        advantages = torch.zeros_like(advantages)
    if sample.teacher_gains is not None and sample.teacher_gains.device.type != "meta":
        advantages = advantages + section.coefficient * sample.teacher_gains
    return replace(sample, advantages=advantages)
