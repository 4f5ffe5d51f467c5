"""Recipes of precision and their demands on shapes: facts and arithmetic, for configuration and model.

A recipe defines the products of the linear layers of a transformer layer. Everything else (embedding, norms, attention, the
residual stream) is in the model's type, and main params and moments are fp32 in every recipe.

    fp32, bf16      in the model's type
    fp8_blockwise   e4m3, a scale for 128 values of a token (of a gradient: of its row, or of 128 tokens if tokens
                    are summed) and for 128 x 128 of a weight; no state; what SGLang serves as FP8
    fp8_current     e4m3 forward, e5m2 backward, one scale a tensor, of the tensor itself; no state
    fp8_delayed     the same with the scale of earlier steps: a history of maxima is state

**Multiples.** Transformer Engine's FP8 products need sizes that are multiples of 16. Blocks need 128: of a weight on a
rank, so that its blocks are those of the served checkpoint; of a rank's own tokens, so that blocks of tokens are the same
whether tensor ranks gather the tokens before or after quantizing.

The tokens routed to an expert are not aligned by padding a micro-batch. Its rank appends rows of zeros up to the next
multiple: they change no scale, no product and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType

from megatron_dapo.rounding import round_up

FP32, BF16 = "fp32", "bf16"
FP8_BLOCKWISE, FP8_CURRENT, FP8_DELAYED = "fp8_blockwise", "fp8_current", "fp8_delayed"
BY_DTYPE = ""  # fp32 or bf16, by the model's type


@dataclass(frozen=True)
class PrecisionRecipe:
    """Facts about one recipe."""

    is_fp8: bool = False
    size_multiple: int = 1  # required of both sizes of a linear layer's weight on a rank
    end_multiple: int = 1  # divides rows whose last block may be smaller
    token_multiple: int = 1  # required of a rank's tokens in a micro-batch
    dtype: str = ""  # the model's type, if the recipe fixes it
    has_state: bool = False  # more state than the parameters
    products: str = "in the type of the operands"  # text for logs


RECIPES: Mapping[str, PrecisionRecipe] = MappingProxyType(
    {
        FP32: PrecisionRecipe(dtype="float32"),
        BF16: PrecisionRecipe(dtype="bfloat16"),
        FP8_BLOCKWISE: PrecisionRecipe(
            is_fp8=True,
            size_multiple=128,
            end_multiple=16,
            token_multiple=128,
            products="e4m3 x e4m3, scales of 1 x 128 and 128 x 128, powers of two",
        ),
        FP8_CURRENT: PrecisionRecipe(
            is_fp8=True,
            size_multiple=16,
            end_multiple=16,
            token_multiple=16,
            products="e4m3 forward, e5m2 gradients, a scale a tensor",
        ),
        FP8_DELAYED: PrecisionRecipe(
            is_fp8=True,
            size_multiple=16,
            end_multiple=16,
            token_multiple=16,
            has_state=True,
            products="e4m3 forward, e5m2 gradients, a scale a tensor of earlier steps",
        ),
    }
)
_BY_DTYPE = {recipe.dtype: name for name, recipe in RECIPES.items() if recipe.dtype}


def recipe_name(requested: str, dtype: str) -> str:
    """Return the requested recipe, or the one for the model's type. ValueError for an unknown one, and for one of another
    type than the model's."""
    if requested == BY_DTYPE:
        if dtype not in _BY_DTYPE:
            raise ValueError(f"precision: no recipe for a model in {dtype!r}; choose one of {', '.join(_BY_DTYPE)}")
        return _BY_DTYPE[dtype]
    if requested not in RECIPES:
        raise ValueError(f"precision: recipe {requested!r} is unknown; choose one of {', '.join(RECIPES)}")
    wanted = RECIPES[requested].dtype
    if wanted and wanted != dtype:
        raise ValueError(f"precision: recipe {requested} is of a model in {wanted}, but the model is in {dtype}")
    return requested


def token_multiple(recipe: str) -> int:
    """Return the multiple for a rank's own tokens; 1 for a recipe by the model's type."""
    return RECIPES[recipe].token_multiple if recipe in RECIPES else 1


def sequence_multiple(context: int) -> int:
    """Return the multiple for the tokens of a packed sequence."""
    # Context parallelism cuts every sequence into two chunks a rank.
    return 2 * context if context > 1 else 1


def micro_batch_multiple(tensor: int, context: int, sequence_parallel: bool, token_multiple: int = 1) -> int:
    """Return the multiple for the tokens of a micro-batch that makes every rank's own tokens one of `token_multiple`."""
    # Under sequence parallelism tensor ranks share the tokens of their context rank; else each has all of them.
    shards = context * (tensor if sequence_parallel else 1)
    return lcm(sequence_multiple(context), shards * token_multiple)


def padded_tokens(num_tokens: int, tensor: int, context: int, sequence_parallel: bool, recipe: str) -> int:
    """Return the tokens of a micro-batch with padding, for a recipe."""
    multiple = micro_batch_multiple(tensor, context, sequence_parallel, token_multiple(recipe))
    return round_up(num_tokens, multiple)


@dataclass(frozen=True)
class LinearSize:
    """A size of a linear layer's weight."""

    what: str
    size: int  # unsharded
    axis: str = ""  # "tensor" or "expert_tensor": the ranks that cut it evenly; "": whole on every rank
    ends_inside: bool = False  # rows whose last block may be smaller than the others


@dataclass(frozen=True)
class Misfit:
    """A size on a rank that is no multiple of `multiple`."""

    what: str
    size: int
    multiple: int
    cut: str = ""  # the size of the layout that divides it, "" for none

    def __str__(self) -> str:
        return f"{self.what} = {self.size} is no multiple of {self.multiple}"


def misfits(
    recipe: str, sizes: Iterable[LinearSize], tensor: int, expert_tensor: int = 1, section: str = "parallel"
) -> list[Misfit]:
    """Return the sizes of weights on a tensor rank that do not fit the recipe. `section`: the configuration's name of the
    layout."""
    cuts = {"tensor": (f"{section}.tp_size", tensor), "expert_tensor": ("parallel.etp_size", expert_tensor)}
    found = []
    for one in sizes:
        multiple = RECIPES[recipe].end_multiple if one.ends_inside else RECIPES[recipe].size_multiple
        path, ranks = cuts.get(one.axis, ("", 1))
        if ranks == 1:
            found.append(Misfit(one.what, one.size, multiple))
        else:
            found.append(Misfit(f"{one.what} / {path} ({ranks})", one.size // ranks, multiple, one.axis))
    return [one for one in found if one.size % one.multiple]
