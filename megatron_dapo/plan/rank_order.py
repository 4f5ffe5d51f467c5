"""Numbering of ranks by megatron-core's default order "tp-cp-ep-dp-pp": tensor ranks are neighbors, pipeline stages far apart."""

from __future__ import annotations


def dense_coordinates(rank: int, tensor: int, context: int, data: int) -> tuple[int, int, int, int]:
    """Return a rank's index along the axes tensor, context, data and pipeline, given the sizes of all but the last."""
    # Tensor ranks communicate most, so they are neighbors and share a node.
    rest, tensor_index = divmod(rank, tensor)
    rest, context_index = divmod(rest, context)
    pipeline_index, data_index = divmod(rest, data)
    return tensor_index, context_index, data_index, pipeline_index


def expert_coordinates(rank: int, stage_size: int, expert_tensor: int, expert: int) -> tuple[int, int, int]:
    """Return a rank's part of each expert, its share of the experts and its replica of them, within its stage of `stage_size`."""
    rest, tensor_index = divmod(rank % stage_size, expert_tensor)
    data_index, expert_index = divmod(rest, expert)
    return tensor_index, expert_index, data_index
