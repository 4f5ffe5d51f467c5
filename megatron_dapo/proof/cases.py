"""Cases of `check-loss`: one ragged batch, and the layouts, cuts, packings and aggregations under which it is trained.

The batch exposes a wrong denominator, mask, shift or rank order: lengths from 1 up, gaps in the masks, groups of
different sizes, a filtered response, advantages of both signs, ratios on both sides of every clipping bound, and responses
that were sampled by top-p and top-k, some of their tokens without an alternative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import Packing
from megatron_dapo.parallel.packing import MicroBatchLimits, pack, pad_to_longest
from megatron_dapo.token_support import join_supports
from megatron_dapo.types import TrainSample

RESPONSE_LENGTHS = ((1, 17, 60, 5), (33, 2, 48), (9, 26, 1, 54, 12), (21,))  # one tuple a group
FILTERED = (1, 2)  # group and index of a response that is left out of the loss
SUPPORT_SIZE = 12  # most ids that a token of a restricted response was drawn from
GAP_SHARE = 0.15  # share of response tokens that are not trained
# Ratios pi / pi_old, each far enough from every bound (0.8, 1.28, and 3 of the dual clip) that rounding cannot move a
# token across.
RATIOS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.35, 2.0, 2.9, 3.1, 5.0)
MAX_RESPONSE_TOKENS = 64  # Dr. GRPO's constant length

SEQUENCES = {"1": 1, "2": 2, "4": 4, "dynamic": 0}  # sequences a micro-batch; 0: a bound on its tokens
PACKINGS: Mapping[str, Packing] = {"packed": pack, "padded": pad_to_longest}


@dataclass(frozen=True)
class ProofBatch:
    """Samples without `rollout_logprobs`, and the ratio that each response token must get."""

    samples: tuple[TrainSample, ...]
    ratios: tuple[torch.Tensor, ...]  # [R] float64 each


def make_batch(vocab_size: int) -> ProofBatch:
    """Return the batch; the same arguments give the same batch."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (group, index, length) for group, lengths in enumerate(RESPONSE_LENGTHS) for index, length in enumerate(lengths)
    ]
    samples = tuple(_sample(group, index, length, vocab_size, generator) for group, index, length in shapes)
    table = torch.tensor(RATIOS, dtype=torch.float64)  # the oracle's type
    ratios = tuple(table[torch.randint(len(RATIOS), (length,), generator=generator)] for _, _, length in shapes)
    return ProofBatch(samples, ratios)


def _sample(group: int, index: int, length: int, vocab_size: int, generator: torch.Generator) -> TrainSample:
    prompt_length = int(torch.randint(1, 9, (), generator=generator))
    # Gaps inside a response: a mask that is only a length would pass a loss that ignores it.
    mask = (torch.rand(length, generator=generator) > GAP_SHARE).float()
    mask[-1] = 1.0  # a response of length 1 keeps its token
    tokens = torch.randint(vocab_size, (prompt_length + length,), generator=generator)
    return TrainSample(
        sample_id=f"{group}/{index}",
        group_index=group,
        tokens=tokens,
        prompt_length=prompt_length,
        loss_mask=mask * float((group, index) != FILTERED),
        advantages=torch.randn(length, generator=generator),
        rollout_logprobs=torch.zeros(length),
        support=_support(tokens[prompt_length:].numpy(), vocab_size, seed=10 * group + index) if index % 2 else None,
    )


def _support(tokens: np.ndarray, vocab_size: int, seed: int) -> torch.Tensor:
    """Return supports of 1 to SUPPORT_SIZE ids, the token itself among them."""
    draws = np.random.default_rng(seed)
    sizes = draws.integers(1, SUPPORT_SIZE + 1, len(tokens))
    rows = [
        draws.permutation([token, *draws.choice(np.delete(np.arange(vocab_size), token), size - 1, replace=False)])
        for token, size in zip(tokens, sizes, strict=True)
    ]
    return torch.from_numpy(join_supports(sizes, np.concatenate(rows)))


@dataclass(frozen=True)
class Cut:
    """A way to cut the mini-batch into micro-batches and to lay out their sequences."""

    micro_batch: str  # key of SEQUENCES
    packing: str  # key of PACKINGS

    def limits(self, longest: int) -> MicroBatchLimits:
        """Return the limits of a micro-batch; `longest` is the padded length of the longest sequence in tokens."""
        if self.micro_batch == "dynamic":
            # Room for the longest sequence and a few short ones.
            return MicroBatchLimits(max_tokens=longest * 5 // 4)
        return MicroBatchLimits(max_sequences=SEQUENCES[self.micro_batch])


# One sequence a micro-batch is the same packed and padded, so it is listed once.
CUTS = [Cut(size, packing) for size, packing in product(SEQUENCES, PACKINGS) if (size, packing) != ("1", "padded")]
# Experts see tokens only, so one cut whose ranks have different numbers of them is enough.
EXPERT_CUTS = [Cut("dynamic", "packed")]


def expert_layouts(world_size: int) -> list[ParallelLayout]:
    """Return the layouts of exactly `world_size` processes with expert parallelism.

    They cover every size of the expert axis, experts cut like dense layers and not cut, over data, context and tensor
    ranks, with and without a pipeline.
    """
    sizes = _divisors(world_size)
    return [
        ParallelLayout(
            world_size,
            tensor,
            pipeline,
            context=context,
            expert=expert,
            sequence_parallel=tensor > 1,
            expert_tensor=expert_tensor,
        )
        for tensor, pipeline, context, expert in product(sizes, repeat=4)
        if expert > 1 and world_size % (tensor * pipeline * context) == 0
        for expert_tensor in ((1, tensor) if tensor > 1 else (1,))
        if world_size // pipeline % (expert * expert_tensor) == 0
    ]


def layouts(world_size: int) -> list[ParallelLayout]:
    """Return every TP x PP x CP x DP of exactly `world_size` processes, with and without sequence parallelism and two
    virtual stages."""
    return [
        ParallelLayout(world_size, tensor, pipeline, virtual, context, sequence_parallel=sequence)
        for tensor, pipeline, context in product(_divisors(world_size), repeat=3)
        if world_size % (tensor * pipeline * context) == 0
        for virtual in ((1, 2) if pipeline > 1 else (1,))
        for sequence in ((False, True) if tensor > 1 else (False,))
    ]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
