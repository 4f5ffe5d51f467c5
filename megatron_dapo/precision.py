"""What a recipe of precision is and what it asks of shapes: facts and arithmetic, for configuration and model alike.

A recipe says how the linear layers of a transformer layer multiply. Everything else (embedding, norms, attention, the
residual stream) is in the model's type, and main params and moments are fp32 in every recipe.

    fp32, bf16      in the model's type, which they name
    fp8_blockwise   e4m3, a scale for 128 values of a token (of a gradient: of its row, or of 128 tokens where tokens
                    are summed) and for 128 x 128 of a weight; no state; what SGLang serves as FP8
    fp8_current     e4m3 forward, e5m2 backward, one scale a tensor, of the tensor itself; no state
    fp8_delayed     the same with the scale of earlier steps: a history of maxima is state

**Multiples.** Transformer Engine multiplies FP8 where every size is a multiple of 16. Blocks ask for 128: of a weight on
a rank, so that its blocks are those of the served checkpoint; of a rank's own tokens, so that blocks of tokens are the
same whether tensor ranks gather the tokens before or after rounding.

An expert gets as many tokens as are routed to it, which no padding of a micro-batch aligns. Rows of zeros are put
behind them on the rank that multiplies, up to the next multiple: they change no scale, no product and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType

FP32, BF16 = "fp32", "bf16"
FP8_BLOCKWISE, FP8_CURRENT, FP8_DELAYED = "fp8_blockwise", "fp8_current", "fp8_delayed"
BY_DTYPE = ""  # asks for fp32 or bf16, as the model's type says


@dataclass(frozen=True)
class Recipe:
    """`size_multiple`: of both sizes of a linear layer's weight on a rank. `token_multiple`: of the tokens of a
    micro-batch that a rank computes. `dtype`: the model's type, where the recipe names it. `has_state`: beside the
    parameters. `products`: what they are made of, in words."""

    is_fp8: bool = False
    size_multiple: int = 1
    token_multiple: int = 1
    dtype: str = ""
    has_state: bool = False
    products: str = "in the type of the operands"


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        FP32: Recipe(dtype="float32"),
        BF16: Recipe(dtype="bfloat16"),
        FP8_BLOCKWISE: Recipe(
            is_fp8=True,
            size_multiple=128,
            token_multiple=128,
            products="e4m3 x e4m3, scales of 1 x 128 and 128 x 128, powers of two",
        ),
        FP8_CURRENT: Recipe(
            is_fp8=True,
            size_multiple=16,
            token_multiple=16,
            products="e4m3 forward, e5m2 gradients, a scale a tensor",
        ),
        FP8_DELAYED: Recipe(
            is_fp8=True,
            size_multiple=16,
            token_multiple=16,
            has_state=True,
            products="e4m3 forward, e5m2 gradients, a scale a tensor of earlier steps",
        ),
    }
)
_BY_DTYPE = {recipe.dtype: name for name, recipe in RECIPES.items() if recipe.dtype}


def recipe_name(asked: str, dtype: str) -> str:
    """The recipe that is asked for, or the one of the model's type. ValueError for one that does not exist, or names
    another type than the model's."""
    if asked == BY_DTYPE:
        if dtype not in _BY_DTYPE:
            raise ValueError(f"precision: no recipe for a model in {dtype!r}; choose one of {', '.join(_BY_DTYPE)}")
        return _BY_DTYPE[dtype]
    if asked not in RECIPES:
        raise ValueError(f"precision: recipe {asked!r} is unknown; choose one of {', '.join(RECIPES)}")
    wanted = RECIPES[asked].dtype
    if wanted and wanted != dtype:
        raise ValueError(f"precision: recipe {asked} is of a model in {wanted}, but the model is in {dtype}")
    return asked


def token_multiple(asked: str) -> int:
    """Of a rank's own tokens; 1 for a recipe that follows the model's type."""
    return RECIPES[asked].token_multiple if asked in RECIPES else 1


def sequence_multiple(context: int) -> int:
    """What a packed sequence's tokens are a multiple of: context parallelism cuts it into two pieces a rank."""
    return 2 * context if context > 1 else 1


def micro_batch_multiple(tensor: int, context: int, sequence_parallel: bool, token_multiple: int = 1) -> int:
    """What a micro-batch's tokens are a multiple of, so that every rank's own tokens (its part of those of its context
    rank under sequence parallelism, else all of these) are one of `token_multiple`."""
    shards = context * (tensor if sequence_parallel else 1)
    return lcm(sequence_multiple(context), shards * token_multiple)


def padded_tokens(num_tokens: int, tensor: int, context: int, sequence_parallel: bool, recipe: str) -> int:
    """The tokens of a micro-batch with padding, for a recipe."""
    multiple = micro_batch_multiple(tensor, context, sequence_parallel, token_multiple(recipe))
    return -(-num_tokens // multiple) * multiple


@dataclass(frozen=True)
class LinearSizes:
    """Sizes of a decoder's linear layers; 0 for those that no layer has."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # of a dense MLP
    expert_intermediate_size: int = 0  # of one expert


@dataclass(frozen=True)
class Misfit:
    """`what`, of `size` on a rank, is no multiple of `multiple`. `cut`: which size of the layout divides it, "" if
    none."""

    what: str
    size: int
    multiple: int
    cut: str = ""

    def __str__(self) -> str:
        return f"{self.what} = {self.size} is no multiple of {self.multiple}"


def misfits(recipe: str, sizes: LinearSizes, tensor: int, expert_tensor: int = 1) -> list[Misfit]:
    """Sizes of weights on a tensor rank that the recipe cannot multiply, where the cuts themselves are even; experts
    are cut over `expert_tensor` ranks."""
    multiple = RECIPES[recipe].size_multiple
    whole = Misfit("hidden_size", sizes.hidden_size, multiple)
    cut = [_cut(what, size, multiple, "tensor", tensor) for what, size in _cut_sizes(sizes)]
    experts = _cut("moe_intermediate_size", sizes.expert_intermediate_size, multiple, "expert_tensor", expert_tensor)
    return [one for one in (whole, *cut, experts) if one.size % multiple]


_SIZES = {"tensor": "tp_size", "expert_tensor": "etp_size"}  # the configuration's names


def _cut(what: str, size: int, multiple: int, axis: str, ranks: int) -> Misfit:
    if ranks == 1:
        return Misfit(what, size, multiple)
    return Misfit(f"{what} / parallel.{_SIZES[axis]} ({ranks})", size // ranks, multiple, axis)


def _cut_sizes(sizes: LinearSizes) -> Iterator[tuple[str, int]]:
    """What tensor ranks divide."""
    heads, groups, dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
    yield (
        f"QKV rows, (num_attention_heads {heads} + 2 num_key_value_heads {groups}) x head_dim {dim}",
        (heads + 2 * groups) * dim,
    )
    yield f"attention outputs, num_attention_heads {heads} x head_dim {dim}", heads * dim
    yield "intermediate_size", sizes.intermediate_size


def has_served_blocks(head_dim: int) -> bool:
    """Whether the 128 x 128 blocks of a fused QKV weight are those of separate q, k and v matrices: every head is whole
    blocks. Else trainer and server round q, k and v by the same rule, but in other blocks."""
    return head_dim % RECIPES[FP8_BLOCKWISE].size_multiple == 0
