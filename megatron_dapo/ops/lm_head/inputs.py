"""What every implementation of the head is given, and what they share: the shard, the tiles, the sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Elements of a tile of logits. On a CPU a tile should stay in the last-level cache; an accelerator wants large products.
TILE_ELEMENTS = {"cpu": 1 << 20}
DEFAULT_TILE_ELEMENTS = 1 << 24
# Below this many rows the matrix products are bound by reading the weight (measured at V = 32,000 on a CPU: 8 rows 2.4x
# slower); below as many columns, by the accumulation of the gradients.
MIN_TILE_TOKENS = 128
MIN_TILE_COLUMNS = 512


@dataclass(frozen=True)
class Shard:
    """This rank's real columns [first_column, first_column + num_columns) of the vocabulary."""

    first_column: int
    num_columns: int
    vocab_size: int
    temperature: float
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Tiles:
    """Tokens and vocabulary columns whose logits live at a time."""

    tokens: int
    columns: int


@dataclass(frozen=True)
class HeadInputs:
    """hidden [P, h], weight [rows, h] of this rank, targets [P] in the whole vocabulary."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    shard: Shard
    tiles: Tiles

    @property
    def own_column(self) -> torch.Tensor:
        """[P] column of each target counted from the shard's first; outside [0, num_columns) where it is another's."""
        return self.targets - self.shard.first_column

    def token_tiles(self) -> Iterator[slice]:
        return _slices(self.hidden.size(0), self.tiles.tokens)

    def column_tiles(self) -> Iterator[slice]:
        return _slices(self.shard.num_columns, self.tiles.columns)


@dataclass(frozen=True)
class Upstream:
    """What the backward pass knows: [P] each of the forward pass (log Z is maxima + log_totals, kept apart because
    their sum loses the small one to rounding where logits are large), and the [P] gradients of both outputs (None:
    unused) divided by the temperature, so that they are those of the raw products."""

    entropy: torch.Tensor
    maxima: torch.Tensor
    log_totals: torch.Tensor
    to_logprobs: torch.Tensor | None
    to_entropy: torch.Tensor | None
    needs_hidden: bool
    needs_weight: bool


Gradients = tuple["torch.Tensor | None", "torch.Tensor | None"]


@dataclass(frozen=True)
class Kernels:
    """`sums(inputs)`: maxima [P] over this rank's columns, and [3, P]: sum exp and sum exp * logit, both of logits
    relative to that maximum, and the target's logit as it is (0 where another rank owns it).
    `gradients(inputs, upstream)`: those of hidden [P, h] (this rank's part) and weight [rows, h], in their types."""

    sums: Callable[[HeadInputs], tuple[torch.Tensor, torch.Tensor]]
    gradients: Callable[[HeadInputs, Upstream], Gradients]


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def choose_tiles(
    num_tokens: int, num_columns: int, device: torch.device, asked_tokens: int | None, asked_columns: int | None
) -> Tiles:
    """Tiles of about the device's TILE_ELEMENTS where nothing is asked: the whole vocabulary where enough tokens fit
    beside it, else square. ValueError where less than 1 is asked."""
    for name, asked in (("chunk_tokens", asked_tokens), ("chunk_columns", asked_columns)):
        if asked is not None and asked < 1:
            raise ValueError(f"logprobs: {name} {asked} must be at least 1")
    elements, width = TILE_ELEMENTS.get(device.type, DEFAULT_TILE_ELEMENTS), max(num_columns, 1)
    fitting = elements // min(width, asked_columns or width)
    tokens = asked_tokens or (fitting if fitting >= MIN_TILE_TOKENS else 1 << (elements.bit_length() // 2))
    columns = asked_columns or max(MIN_TILE_COLUMNS, elements // max(1, min(tokens, num_tokens)) // 128 * 128)
    return Tiles(tokens, min(columns, width))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Type of the factors of the matrix products. Tensor cores take bf16 factors into fp32 sums; a CPU needs fp32
    factors for that."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return dtype if hidden.is_cuda else accumulation_dtype(dtype)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right with sums and result in fp32, or fp64 for fp64 factors."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, accumulated in the type of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(product(left, right))


def rebase(sums: torch.Tensor, shift: torch.Tensor) -> None:
    """Turn (sum exp, sum exp * logit) relative to one maximum into those relative to a larger one; `shift` [P] is the
    old maximum less the new one, at most 0."""
    factor = shift.exp()
    sums[1].addcmul_(sums[0], shift).mul_(factor)
    sums[0].mul_(factor)


def combine(maxima: torch.Tensor, sums: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, ...]:
    """(logprobs, entropy, maxima, log of sum exp relative to them), each [P], from this rank's sums and the others'.
    Overwrites its arguments."""
    if shard.group is not None:
        local_maxima = maxima.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=shard.group)
        rebase(sums, local_maxima - maxima)
        dist.all_reduce(sums, group=shard.group)
    total, weighted, target = sums
    log_total = total.log()
    # Rounding may leave a log-probability a last bit above 0, which downstream would read as a probability above 1.
    logprobs = (target - maxima).sub_(log_total).clamp_(max=0.0)
    entropy = (log_total - weighted / total).clamp_(min=0.0)
    return logprobs, entropy, maxima, log_total
