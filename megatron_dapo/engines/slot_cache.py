"""A transformers key/value cache of fixed slots, and the attention that reads it.

Every running sequence owns one slot (a row) and writes token t at column t: nothing is padded on the left, a row may be
at any length, and positions are plain column numbers. Active rows are always the first ones, so a tick reads views,
never copies.
"""

from __future__ import annotations

import math

import numpy
import torch
from transformers import AttentionInterface, Cache

ATTENTION_NAME = "slot_rows"


class SlotCache(Cache):
    """Keys and values [layers, 2, slots, kv_heads, max_length, head_dim] in one buffer; two modes of writing.

    `begin_decode`: one new token a row for rows [0, B), each at its own column; attention sees columns [0, span).
    `begin_prefill`: whole prompts for any rows at columns [0, L); attention sees just the prompts.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: str,
    ):
        super().__init__(layers=[])
        self.buffer = _zeros((num_layers, 2, num_slots, num_kv_heads, max_length, head_dim), dtype, device)
        flat = self.buffer.view(num_layers, 2, -1, head_dim)
        self._flat = [(flat[layer, 0], flat[layer, 1]) for layer in range(num_layers)]
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._first_column = (
            torch.arange(num_slots * num_kv_heads, device=device).view(num_slots, num_kv_heads) * max_length
        )
        self._cells: torch.Tensor | None = None  # decode: [B * kv_heads] rows of `_flat` to write
        self._prefill_rows: torch.Tensor | None = None

    @property
    def max_length(self) -> int:
        return self.buffer.shape[4]

    def begin_decode(self, columns: torch.Tensor, span: int) -> None:
        """Row r writes its next token at columns[r] (int64 [B]); attention reads columns [0, span)."""
        num_rows = columns.numel()
        self._prefill_rows = None
        self._cells = (self._first_column[:num_rows] + columns[:, None]).view(-1)
        window = self.buffer[:, :, :num_rows, :, :span]
        self._views = [(layer[0], layer[1]) for layer in window.unbind(0)]

    def begin_prefill(self, rows: torch.Tensor) -> None:
        """The next forward pass holds whole prompts (padded on the right) for slots `rows` (int64 [m])."""
        self._prefill_rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, kv_heads, L, head_dim] and return what attention has to read."""
        if self._prefill_rows is not None:
            length = key_states.shape[2]
            self.buffer[layer_idx, 0, self._prefill_rows, :, :length] = key_states
            self.buffer[layer_idx, 1, self._prefill_rows, :, :length] = value_states
            return key_states, value_states
        assert self._cells is not None, "begin_decode or begin_prefill comes before the forward pass"
        keys, values = self._flat[layer_idx]
        keys.index_copy_(0, self._cells, key_states.reshape(self._cells.numel(), -1))
        values.index_copy_(0, self._cells, value_states.reshape(self._cells.numel(), -1))
        return self._views[layer_idx]

    def copy_prefix(self, source: int, rows: torch.Tensor, length: int) -> None:
        """Give slots `rows` (int64 [m]) the first `length` columns of slot `source`."""
        self.buffer[:, :, rows, :, :length] = self.buffer[:, :, source : source + 1, :, :length]

    def move(self, sources: torch.Tensor, rows: torch.Tensor, length: int) -> None:
        """Overwrite slots `rows` by slots `sources` (both int64 [m], disjoint), columns [0, length)."""
        self.buffer[:, :, rows, :, :length] = self.buffer[:, :, sources, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given explicitly

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros, not empty: a masked column still enters 0 x value, which must not be NaN.

    On a CPU through NumPy, whose zeros take memory only once a page is written: short responses do not pay for
    max_length.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(numpy.zeros(num_bytes, dtype=numpy.uint8)).view(dtype).view(shape)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface over a `SlotCache`.

    query [B, heads, L, head_dim], key and value [B, kv_heads, S, head_dim]; returns [B, L, heads, head_dim].
    Without a mask: causal over whole prompts. With an additive mask [B, 1, 1, S]: one query a row; the heads that share
    a kv head are laid along the query dimension, so the cache is read in place instead of being repeated for each head.
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    if attention_mask is None:
        output = attend(query, key, value, scale=scaling, is_causal=True, enable_gqa=key.shape[1] != query.shape[1])
        return output.transpose(1, 2).contiguous(), None
    num_rows, num_heads, _, head_dim = query.shape
    folded = query.reshape(num_rows, key.shape[1], -1, head_dim)
    mask = attention_mask.expand(-1, 1, folded.shape[2], -1)
    output = attend(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(num_rows, 1, num_heads, head_dim), None


def register_attention() -> str:
    """Make `slot_attention` known to transformers; returns the name for `attn_implementation`."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    return ATTENTION_NAME
