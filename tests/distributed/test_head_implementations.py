"""Implementations of the log-prob head over real tensor-parallel ranks, against fp64 on one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
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
    return [difference for size in _sizes() for difference in _differences(size, _divergence)]


def distillation_worker(_: Any) -> list[float]:
    """Compare each divergence from a teacher with one rank's in fp64, in the same two cases."""
    return [
        difference
        for size in _sizes()
        for divergence in DIVERGENCES
        for difference in _differences(size, partial(_distillation, divergence=divergence))
    ]


def _sizes() -> tuple[int, int]:
    return ROWS * dist.get_world_size() - 3, 20


def _divergence(hidden: torch.Tensor, weight: torch.Tensor, **settings: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    reference = hidden.detach() * 0.9, weight.detach() * 1.2
    found = vocab_parallel_divergence(hidden, weight, *reference, gamma=0.5, **settings)
    return [found.weighted_mse, found.cross_entropy], (found.weighted_mse + 0.3 * found.cross_entropy).sum()


def _distillation(hidden: torch.Tensor, weight: torch.Tensor, **settings: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    teacher = hidden.detach()[:, :8], weight.detach()[:, :8] * 1.2
    value = vocab_parallel_distillation(hidden, weight, *teacher, beta=0.3, **settings)
    return [value], value.square().sum()


def _differences(vocab_size: int, compute: Callable[..., tuple[list[torch.Tensor], torch.Tensor]]) -> list[float]:
    """Differences of the token values and of both gradients between this rank's rows of the weight and all of them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    hidden, weight, _ = make(NUM_TOKENS, vocab_size=vocab_size, rows=ROWS * num_ranks, scale=0.5, dtype=torch.float64)
    found = []
    for part, group in ((own, dist.group.WORLD), (slice(None), None)):
        leaves = hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()
        values, loss = compute(*leaves, vocab_size=vocab_size, group=group, chunk_columns=9)
        loss.backward()
        found.append([*(value.detach() for value in values), *(leaf.grad for leaf in leaves)])
    ours, whole = found
    dist.all_reduce(ours[-2])
    pairs = zip(ours, [*whole[:-1], whole[-1][own]], strict=True)
    return [float((one - other).abs().max()) for one, other in pairs]


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
