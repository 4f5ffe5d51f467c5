"""Random weights that depend on a seed and the tensor's name alone, so every layout starts from the same model."""

from __future__ import annotations

import hashlib

import torch

from megatron_dapo.checkpoints.huggingface import huggingface_layout
from megatron_dapo.checkpoints.load import WeightLoadReport, fill
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.parallel.reshard.boxes import Box
from megatron_dapo.parallel.reshard.executors import Buffers
from megatron_dapo.parallel.reshard.layout import Piece

STANDARD_DEVIATION = 0.02  # of matrices, as the initializer_range of the published configs


class RandomReader:
    """Makes whole tensors on demand and keeps the last one, which is asked for piece by piece."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._name = ""
        self._tensor = torch.zeros(0)

    def read(self, rank: int, piece: Piece, box: Box, out: torch.Tensor) -> None:
        """See `PieceReader`."""
        if piece.tensor != self._name:
            self._name, self._tensor = piece.tensor, self._make(piece.tensor, piece.shape)
        slices = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        out.copy_(self._tensor[slices].reshape(out.shape))

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Norms are 1, biases 0, everything else is normal."""
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        return random_normal(self._seed, name, shape) * STANDARD_DEVIATION


def random_normal(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """fp32 of mean 0 and variance 1 that depends on the seed and the name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)


def initialize_randomly(seed: int, layout: MegatronLayout, rank: int, parameters: Buffers) -> WeightLoadReport:
    """Fills `parameters` of `rank` with random weights; padding becomes zero."""
    source = huggingface_layout(layout.architecture, torch.float32, num_ranks=layout.num_ranks)
    return fill(source, RandomReader(seed), layout, rank, parameters)
