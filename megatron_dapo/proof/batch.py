"""One ragged batch that a wrong denominator, mask, shift or rank order cannot get through: lengths from 1 up, gaps in
the masks, groups of different sizes, a response that is filtered out, advantages of both signs and ratios on both sides
of every bound of the clipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.types import TrainSample

RESPONSE_LENGTHS = ((1, 17, 60, 5), (33, 2, 48), (9, 26, 1, 54, 12), (21,))  # one tuple a group
FILTERED = (1, 2)  # group and place of a response that is left out of the loss
GAP_SHARE = 0.15  # of response tokens that are not trained
# Ratios pi / pi_old, each far enough from every bound (0.8, 1.28, and 3 of the dual clip) that rounding cannot move a
# token across.
RATIOS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.35, 2.0, 2.9, 3.1, 5.0)
MAX_RESPONSE_TOKENS = 64  # Dr. GRPO's constant length


@dataclass(frozen=True)
class ProofBatch:
    """Samples whose `rollout_logprobs` are still to be set, and the ratio each response token shall have."""

    samples: tuple[TrainSample, ...]
    ratios: tuple[torch.Tensor, ...]  # [R] float64 each


def make_batch(vocab_size: int, seed: int = 0) -> ProofBatch:
    """The same batch for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (group, place, length) for group, lengths in enumerate(RESPONSE_LENGTHS) for place, length in enumerate(lengths)
    ]
    samples = tuple(_sample(group, place, length, vocab_size, generator) for group, place, length in shapes)
    table = torch.tensor(RATIOS, dtype=torch.float64)
    ratios = tuple(table[torch.randint(len(RATIOS), (length,), generator=generator)] for _, _, length in shapes)
    return ProofBatch(samples, ratios)


def _sample(group: int, place: int, length: int, vocab_size: int, generator: torch.Generator) -> TrainSample:
    prompt_length = int(torch.randint(1, 9, (), generator=generator))
    mask = (torch.rand(length, generator=generator) > GAP_SHARE).float()
    mask[-1] = 1.0
    return TrainSample(
        sample_id=f"{group}/{place}",
        group_index=group,
        tokens=torch.randint(vocab_size, (prompt_length + length,), generator=generator),
        prompt_length=prompt_length,
        loss_mask=mask * float((group, place) != FILTERED),
        advantages=torch.randn(length, generator=generator),
        rollout_logprobs=torch.zeros(length),
    )
