"""Vocabulary-parallel log-probs equal the single-rank ones, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launcher import run_distributed, target_in

from megatron_dapo.ops.restricted import sampled_logprobs

WIDTH, NUM_TOKENS = 12, 40
# True vocabulary, rows a rank: uneven last shard, shards of padding only, no padding.
CASES = ((101, 64), (60, 64), (5, 16), (256, 64))


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    support: torch.Tensor | None,
    vocab_size: int,
    group: Any,
) -> list[torch.Tensor]:
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = sampled_logprobs(
        *leaves,
        targets,
        support,
        temperature=0.8,
        vocab_size=vocab_size,
        group=group,
        chunk_tokens=None if group is None else 16,
    )
    (logprobs * hidden[:, 0] + entropy * hidden[:, 1]).sum().backward()
    return [logprobs.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad]


def worker(_: Any) -> list[float]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    worst = []
    for vocab_size, rows in CASES:
        if vocab_size > rows * num_ranks:
            continue
        generator = torch.Generator().manual_seed(vocab_size)
        hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        weight = torch.randn(rows * num_ranks, WIDTH, generator=generator, dtype=torch.float64) * 3
        targets = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator)
        # Targets on both sides of every shard edge.
        edges = [t for k in range(num_ranks + 1) for t in (k * rows - 1, k * rows) if 0 <= t < vocab_size]
        targets[: len(edges)] = torch.tensor(edges)
        # Supports within one rank's shard and over several, and rows without one.
        support = torch.randint(0, vocab_size, (NUM_TOKENS, 4), generator=generator, dtype=torch.int32)
        support[:, 0] = targets
        support[::3, 1:] = -1
        support[::7] = -1
        for ids in (None, support):
            whole = compute(hidden, weight, targets, ids, vocab_size, None)
            shard = compute(hidden, weight[rank * rows : (rank + 1) * rows], targets, ids, vocab_size, dist.group.WORLD)
            dist.all_reduce(shard[2])
            whole[3] = whole[3][rank * rows : (rank + 1) * rows]
            worst.append(max(float((a - b).abs().max()) for a, b in zip(whole, shard, strict=True)))
            replicas = [torch.empty_like(shard[0]) for _ in range(num_ranks)]
            dist.all_gather(replicas, shard[0])
            assert all(torch.equal(replica, shard[0]) for replica in replicas), "ranks disagree on the log-probs"
    return worst


@pytest.mark.parametrize(("num_ranks", "num_cases"), [(1, 4), (4, 8)])
def test_equal_over_tensor_parallel_ranks(num_ranks, num_cases) -> None:
    worst = run_distributed(target_in(__file__, "worker"), num_ranks)
    assert len(worst) == num_cases and max(worst) < 1e-12
