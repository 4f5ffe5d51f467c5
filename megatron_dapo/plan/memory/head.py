"""Bytes of the log-prob head: tiles of logits, hidden states and gradients."""

from __future__ import annotations

from typing import NamedTuple

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.memory.activations import Kernels, tokens_of_rank
from megatron_dapo.plan.memory.parameters import FP32, ITEM_SIZES, padded_vocabulary

# Elements per tile of logits. On a CPU, a tile should stay in the last-level cache; an accelerator needs large
# products.
CPU_TILE_ELEMENTS = 1 << 20
DEVICE_TILE_ELEMENTS = 1 << 25
# On an accelerator, a tile covers all tokens up to this many, so that one product gives the gradient of a weight tile.
DEVICE_TILE_TOKENS = 8192
# With fewer rows, the matrix products are bound by reading the weight (measured at V = 32,000 on a CPU: 8 rows 2.4x
# slower); with fewer columns, by the accumulation of the gradients.
MIN_TILE_TOKENS = 128
MIN_TILE_COLUMNS = 512
# Tiles of fp32 logits in memory at a time, measured on H100 and rounded up: logits, exponentials, their gradient and
# its copy in the model's type.
DEVICE_HEAD_TILES = 4
CPU_HEAD_TILES = 2  # logits and exponentials
# Number of columns that share a maximum; kept 16-bit logits are stored relative to it.
KEPT_GROUP = 64


class Tiles(NamedTuple):
    """Number of tokens and of vocabulary columns whose logits are in memory at a time."""

    tokens: int
    columns: int


def head_tiles(
    num_tokens: int,
    num_columns: int,
    on_cpu: bool,
    chunk_tokens: int | None = None,
    chunk_columns: int | None = None,
    num_models: int = 1,
) -> Tiles:
    """Return the requested tiles, or tiles of about the device's preferred number of elements, of all models together.

    On a CPU a tile spans the whole vocabulary if enough tokens fit, otherwise it is square; on an accelerator it spans
    all tokens.
    """
    width = max(num_columns, 1)
    if on_cpu:
        elements = CPU_TILE_ELEMENTS // num_models
        fitting = elements // min(width, chunk_columns or width)
        tokens = chunk_tokens or (fitting if fitting >= MIN_TILE_TOKENS else 1 << (elements.bit_length() // 2))
    else:
        elements, tokens = DEVICE_TILE_ELEMENTS // num_models, chunk_tokens or DEVICE_TILE_TOKENS
    columns = chunk_columns or max(MIN_TILE_COLUMNS, elements // max(1, min(tokens, num_tokens)) // 128 * 128)
    return Tiles(tokens, min(columns, width))


def kept_logit_bytes(num_tokens: int, num_columns: int, item: int, is_grouped: bool) -> int:
    """Return the bytes of logits of `item` bytes that are kept for the backward pass, with or without the maximum of
    each group."""
    groups = -(-num_columns // KEPT_GROUP) if is_grouped else 0
    return num_tokens * (item * num_columns + FP32 * groups)


def head_bytes(
    config: Config, architecture: ModelArchitecture, kernels: Kernels = "transformer_engine", trains: bool = True
) -> int:
    """Return the bytes of the log-prob head: hidden states of all tokens and tiles of logits.

    If it `trains`, also the kept logits, the gradient of the hidden states in fp32 and in the model's type, and the
    placeholder for the gradient of the output weight, which is accumulated over micro-batches.
    """
    item, tokens = ITEM_SIZES[config.model.dtype], tokens_of_rank(config)
    tensor, width = config.parallel.tp_size, architecture.hidden_size
    rows = padded_vocabulary(architecture.vocab_size, tensor) // tensor
    columns = min(rows, architecture.vocab_size)
    if config.model.logprob_implementation == "reference":
        tiles = 3 * FP32 * tokens * rows  # logits, probabilities and their gradient of all tokens
    elif kernels == "torch":
        return _torch_head_bytes(config, tokens, columns, width, trains)
    else:
        tiles = DEVICE_HEAD_TILES * FP32 * min(DEVICE_TILE_ELEMENTS, tokens * rows) + _kept(
            config, tokens, columns, trains
        )
    # One tensor has the weight's shape and type; the plan counts an fp32 one, without which plans fell 1 % short of the
    # memory that a device had allocated.
    gradients = tokens * width * (item + FP32) + (item + FP32) * rows * width
    return tokens * width * item + tiles + gradients * trains


def _kept(config: Config, tokens: int, columns: int, trains: bool, on_cpu: bool = False) -> int:
    """Return the most bytes of kept logits: those of a full micro-batch or, if that has too many, of a smaller one."""
    is_fused = not on_cpu and config.model.logprob_implementation in ("auto", "triton", "triton_tuned")
    item = ITEM_SIZES[config.model.dtype] if is_fused else FP32
    return trains * min(round(1e9 * config.model.logprob_kept_gb), kept_logit_bytes(tokens, columns, item, is_fused))


def _torch_head_bytes(config: Config, tokens: int, columns: int, width: int, trains: bool) -> int:
    """Return the peak bytes of the tiled head on a CPU, over its forward and backward pass."""
    item = ITEM_SIZES[config.model.dtype]
    tile = head_tiles(tokens, columns, True, config.model.logprob_chunk_tokens)
    logits, kept = FP32 * min(tile.tokens, tokens) * tile.columns, _kept(config, tokens, columns, trains, on_cpu=True)
    # Rows of a 16-bit weight are widened to fp32 for its products; the backward pass also widens tokens.
    widened = FP32 * width * tile.columns if item < FP32 else 0
    forward = CPU_HEAD_TILES * logits + widened
    backward = (0 if kept else logits) + tokens * width * FP32
    if widened:
        # The widened tokens are freed before the gradient of the hidden states is rounded.
        backward += widened + FP32 * width * min(tile.tokens, tokens)
    return item * tokens * width + kept + (max(forward, backward) if trains else forward)
