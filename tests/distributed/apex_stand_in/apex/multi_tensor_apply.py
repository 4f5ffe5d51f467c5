"""apex.multi_tensor_apply: calls an extension's function with the size of a chunk before its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MultiTensorApply:
    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        *args: Any,
    ) -> Any:
        assert noop_flag_buffer.dtype == torch.int32
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
