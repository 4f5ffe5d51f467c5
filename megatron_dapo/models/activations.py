"""What parts of layers keep for their backward pass on a trainer's rank, in bytes per token.

A part states its tensors (`LayerPart.kept`) as it states its weights: for Transformer Engine's kernels on a GPU, and for
this project's modules on a CPU, whose norms, rotary embedding and activation function keep intermediates that fused
kernels recompute. Plans add them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["transformer_engine", "torch"]

FP32 = 4  # bytes
FP64 = 8
INDEX = 8  # bytes of a torch index


@dataclass(frozen=True)
class Kept:
    """Bytes per token that a part keeps, by what can be computed again."""

    whole: float
    core: float = 0  # share of core attention or the delta rule, whose recomputation does not need it
    core_again: float = 0  # held by one recomputation of the core, beyond what has not been freed by then
    expansion: float = 0  # share of `whole` from latent vectors to core attention: megatron-core's `mla_up_proj`
    working: float = 0  # gradients inside the part while its backward pass runs
    forward: float = 0  # held by a pass without gradients, if that is more than `working`


@dataclass(frozen=True)
class TrainerCut:
    """A rank's share of a layer and the kernels that compute it. Widths are per token of a context rank."""

    kernels: Kernels
    item: int  # bytes of a number
    factor: int  # bytes of a number in the kept input of a linear layer: 1 under FP8
    tensor: int = 1
    context: int = 1
    expert_tensor: int = 1  # ranks that an expert is cut over
    sequence_parallel: bool = False
    sequence_tokens: int = 1  # length of the packed sequences

    @property
    def is_torch(self) -> bool:
        return self.kernels == "torch"

    @property
    def local(self) -> float:
        """Share of the tokens on each tensor-parallel rank between the layer's linear layers."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    def stream(self, width: int) -> float:
        """Return the width of a tensor that sequence parallelism cuts."""
        return width * self.local

    def normed(self, width: int) -> float:
        """Return the bytes of the norm of a vector and of its output, which a linear layer keeps."""
        if self.is_torch:
            return self.norm(width) + self.item * self.stream(width)
        return self.norm(width) + self.factor * self.stream(width)

    def norm(self, width: int) -> float:
        """Return the bytes that a norm keeps: its input and a scale and, in torch, both in fp32 and the input times it."""
        held = 2 * FP32 if self.is_torch else self.item
        return held * self.stream(width) + FP32 * self.local

    def gated_mlp(self, inner: float) -> float:
        """Return the bytes of a gated MLP of this width on a rank, without its input."""
        if self.is_torch:  # [gate; up], the activation, up, and their product
            return 5 * self.item * inner
        return (2 * self.item + self.factor) * inner  # [gate; up], and the product

    def chunk_padding(self, chunk: int) -> float:
        """Return the slots per token of sequences that are padded to a multiple of `chunk` tokens."""
        return -(-self.sequence_tokens // chunk) * chunk / self.sequence_tokens
