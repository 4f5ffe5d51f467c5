"""Overlap of tensor-parallel communication with matrix products, by Transformer Engine's user buffers.

The gathers and scatters of sequence parallelism run in pieces, overlapped with the products that consume or produce
them. The buffers are allocated once per process for one number of tokens, so every micro-batch of every model is padded
to it.
"""

from __future__ import annotations

import importlib
from math import lcm

from megatron_dapo.megatron.model_config import GPTConfig, uses_transformer_engine
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.rounding import round_up

ROWS = 64  # a rank's share of the tokens is cut into up to 8 pieces, each of whole rows of a product's tiles

_shapes: set[tuple[int, int, int]] = set()  # shapes of this process's buffers: at most one


def overlapped_tokens(num_tokens: int, layout: ParallelLayout) -> int:
    """Return the length of every micro-batch of at most `num_tokens`."""
    return round_up(num_tokens, lcm(layout.micro_batch_alignment, ROWS * layout.tensor * layout.context))


def initialize_overlap(config: GPTConfig, layout: ParallelLayout, num_tokens: int) -> None:
    """Allocate the buffers for micro-batches of `num_tokens`, once per process. Collective among all processes.

    Raise ValueError without Transformer Engine, or for a second model that needs other buffers.
    """
    if not uses_transformer_engine():
        raise ValueError("megatron.tp_comm_overlap needs Transformer Engine and a CUDA device; set it to false")
    shape = (num_tokens // layout.context, config.hidden_size, layout.tensor)
    if _shapes and shape not in _shapes:
        raise ValueError(
            f"megatron.tp_comm_overlap: the buffers of this process are for (tokens, hidden size, tensor ranks) = "
            f"{min(_shapes)}, and another model needs {shape}; give both the same layout and micro_batch_tokens"
        )
    if shape in _shapes:
        return
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    base.initialize_ub(
        shape=list(shape[:2]),
        tp_size=layout.tensor,
        quantization_modes=[base.UserBufferQuantizationMode.NONE],
        dtype=config.params_dtype,
        bootstrap_backend=config.tp_comm_bootstrap_backend,
    )
    _shapes.add(shape)
