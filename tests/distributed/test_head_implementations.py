"""Implementations of the log-prob head over real tensor-parallel ranks, against fp64 on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launcher import run_distributed, target_in

from megatron_dapo.ops.distillation import DIVERGENCES, vocab_parallel_distillation
from megatron_dapo.ops.divergence import vocab_parallel_divergence

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "ops"))
from lm_head_cases import exact, make, run

NUM_TOKENS, ROWS = 40, 32
SETTINGS = ({"implementation": "reference"}, {"implementation": "chunked", "chunk_tokens": 16, "chunk_columns": 7})


def worker(_: Any) -> list[float]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return [
        _worst(settings, vocab_size, rank, num_ranks)
        for settings in SETTINGS
        for vocab_size in (ROWS * num_ranks - 3, ROWS + 1, 5)
    ]


def _worst(settings: dict[str, Any], vocab_size: int, rank: int, num_ranks: int) -> float:
    hidden, weight, targets = make(NUM_TOKENS, vocab_size=vocab_size, rows=ROWS * num_ranks, scale=0.5)
    edges = [t for k in range(num_ranks + 1) for t in (k * ROWS - 1, k * ROWS) if 0 <= t < vocab_size]
    targets[: len(edges)] = torch.tensor(edges, dtype=torch.int64)
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    found = run(
        (hidden, weight[own].clone(), targets),
        vocab_size=vocab_size,
        temperature=0.8,
        group=dist.group.WORLD,
        **settings,
    )
    dist.all_reduce(found.to_hidden)
    right = exact((hidden, weight, targets), vocab_size=vocab_size, temperature=0.8)
    pairs = zip(found.parts(), (*right.parts()[:3], right.to_weight[own]), strict=True)
    return max(float((ours.double() - oracle).abs().max()) for ours, oracle in pairs)


def fp8_worker(_: Any) -> list[float]:
    """Compare with one rank, which has the same blocks of 128 rows; other tests cover FP8 itself."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, targets = make(NUM_TOKENS, 128, 128 * num_ranks - 3, 128 * num_ranks, scale=0.1)
    own = slice(rank * 128, (rank + 1) * 128)
    settings = {"vocab_size": 128 * num_ranks - 3, "implementation": "te_fp8", "temperature": 0.8}
    found = run((hidden, weight[own].clone(), targets), group=dist.group.WORLD, chunk_tokens=16, **settings)
    dist.all_reduce(found.to_hidden)
    whole = run((hidden, weight, targets), **settings)
    pairs = zip(found.parts(), (*whole.parts()[:3], whole.to_weight[own]), strict=True)
    return [float((ours - one).abs().max()) for ours, one in pairs]


def divergence_worker(_: Any) -> list[float]:
    """Compare the divergence with one rank's in fp64; in the second case the second rank has only padding columns."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    return [
        difference
        for size in (ROWS * num_ranks - 3, 20)
        for difference in _divergence_differences(size, own, ROWS * num_ranks)
    ]


def distillation_worker(_: Any) -> list[float]:
    """Compare each divergence from a teacher with one rank's in fp64, in the same two cases."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    return [
        difference
        for size in (ROWS * num_ranks - 3, 20)
        for divergence in DIVERGENCES
        for difference in _distillation_differences(size, own, ROWS * num_ranks, divergence)
    ]


def _distillation_differences(vocab_size: int, own: slice, rows: int, divergence: str) -> list[float]:
    hidden, weight, _ = make(NUM_TOKENS, vocab_size=vocab_size, rows=rows, scale=0.5, dtype=torch.float64)
    found = []
    for part, group in ((own, dist.group.WORLD), (slice(None), None)):
        leaves = hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()
        settings = {"vocab_size": vocab_size, "divergence": divergence, "beta": 0.3, "group": group, "chunk_columns": 9}
        value = vocab_parallel_distillation(*leaves, hidden[:, :8], weight[part, :8] * 1.2, **settings)
        value.square().sum().backward()
        found.append([value.detach(), *(leaf.grad for leaf in leaves)])
    ours, whole = found
    dist.all_reduce(ours[1])
    pairs = ((ours[0], whole[0]), (ours[1], whole[1]), (ours[2], whole[2][own]))
    return [float((one - other).abs().max()) for one, other in pairs]


def _divergence_differences(vocab_size: int, own: slice, rows: int) -> list[float]:
    hidden, weight, _ = make(NUM_TOKENS, vocab_size=vocab_size, rows=rows, scale=0.5, dtype=torch.float64)
    found, whole = (
        _divergence(hidden, weight[part], weight[part] * 1.2, vocab_size, group)
        for part, group in ((own, dist.group.WORLD), (slice(None), None))
    )
    dist.all_reduce(found[2])
    differences = [float((ours - one).abs().max()) for ours, one in zip(found[:3], whole[:3], strict=True)]
    differences.append(float((found[3] - whole[3][own]).abs().max()))
    return differences


def _divergence(
    hidden: torch.Tensor, weight: torch.Tensor, reference_weight: torch.Tensor, vocab_size: int, group: Any
) -> list[torch.Tensor]:
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = vocab_parallel_divergence(
        *leaves, hidden * 0.9, reference_weight, vocab_size=vocab_size, gamma=0.5, group=group, chunk_columns=9
    )
    (found.weighted_mse + 0.3 * found.cross_entropy).sum().backward()
    return [found.weighted_mse.detach(), found.cross_entropy.detach(), leaves[0].grad, leaves[1].grad]


def test_the_divergence_is_that_of_one_rank() -> None:
    differences = run_distributed(target_in(__file__, "divergence_worker"), 2)
    assert len(differences) == 8 and max(differences) < 1e-10


def test_the_distillation_is_that_of_one_rank() -> None:
    differences = run_distributed(target_in(__file__, "distillation_worker"), 2)
    assert len(differences) == 2 * 3 * len(DIVERGENCES) and max(differences) < 1e-10


def test_several_ranks_match_one() -> None:
    worst = run_distributed(target_in(__file__, "worker"), 2)
    assert len(worst) == 3 * len(SETTINGS) and max(worst) < 2e-5


def test_several_ranks_match_one_in_fp8() -> None:
    assert max(run_distributed(target_in(__file__, "fp8_worker"), 2)) < 2e-5
