"""States of gated delta nets in the embedded engine, one for each running response and each prefix.

A state holds everything before the next token of its sequence, so rows that share a prefix start from copies of its state.
transformers' layers read and write views of these buffers as those of its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DELTA = "linear_attention"  # transformers' name of a layer with a gated delta net


@dataclass
class LayerState:
    """The states that a layer sees in a forward pass, rows first."""

    conv_states: torch.Tensor  # [n, channels, kernel size]: the last inputs of the convolution
    recurrent_states: torch.Tensor  # [n, heads, K, V] fp32


class RecurrentStates:
    """States of the layers `layers`, for `num_slots` responses; those of prefixes grow on request."""

    def __init__(self, config: PreTrainedConfig, num_slots: int, dtype: torch.dtype, device: str):
        kinds = getattr(config, "layer_types", None) or ()
        self.layers = [index for index, kind in enumerate(kinds) if kind == DELTA]
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        channels = 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim
        conv = (len(self.layers), num_slots, channels, config.linear_conv_kernel_dim)
        heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        # Of convolutions and of recurrences, each [layers, slots, ...].
        self._rows = (
            torch.zeros(conv, dtype=dtype, device=device),
            torch.zeros(len(self.layers), num_slots, *heads, dtype=torch.float32, device=device),
        )
        self._prefixes = tuple(part[:, :0].clone() for part in self._rows)
        self.continues = False  # the next forward pass continues the visible states

    def reserve_prefixes(self, num_prefixes: int) -> None:
        """Have at least `num_prefixes` prefix slots; what they hold is kept."""
        missing = num_prefixes - self._prefixes[0].shape[1]
        if missing > 0:
            self._prefixes = tuple(
                torch.cat((part, part.new_zeros(part.shape[0], missing, *part.shape[2:])), dim=1)
                for part in self._prefixes
            )

    def show_rows(self, num_rows: int) -> dict[int, LayerState]:
        """Return the states of rows [0, num_rows) by layer, for a forward pass that gives each its next token."""
        self.continues = True
        return self._views(self._rows, slice(0, num_rows))

    def show_prefixes(self, slots: slice, continues: bool) -> dict[int, LayerState]:
        """Return the states of prefix slots by layer, for a forward pass from their first token on, or one that continues
        them."""
        self.continues = continues
        return self._views(self._prefixes, slots)

    def _views(self, states: Sequence[torch.Tensor], slots: slice) -> dict[int, LayerState]:
        conv, recurrent = (part[:, slots] for part in states)
        return {layer: LayerState(conv[index], recurrent[index]) for index, layer in enumerate(self.layers)}

    def start_rows(self, first: int, prefix_slots: Sequence[int]) -> None:
        """Start rows from `first` on with the states of their prefixes."""
        for rows, prefixes in zip(self._rows, self._prefixes, strict=True):
            rows[:, first : first + len(prefix_slots)] = prefixes[:, list(prefix_slots)]

    def clear_prefixes(self, slots: slice) -> None:
        """Set the states of prefix slots to those before a first token."""
        for part in self._prefixes:
            part[:, slots] = 0

    def of_row(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return a copy of a row's states, each [layers, ...]."""
        return tuple(part[:, row].clone() for part in self._rows)

    def write_prefix(self, slot: int, states: Sequence[torch.Tensor]) -> None:
        """Write the states that `of_row` returned to a prefix slot."""
        for part, state in zip(self._prefixes, states, strict=True):
            part[:, slot] = state

    def move_row(self, source: int, slot: int) -> None:
        """Overwrite a row's states by another's."""
        _move(self._rows, source, slot)

    def move_prefix(self, source: int, slot: int) -> None:
        """Overwrite a prefix slot's states by another's."""
        _move(self._prefixes, source, slot)


def _move(states: Sequence[torch.Tensor], source: int, slot: int) -> None:
    for part in states:
        part[:, slot] = part[:, source]
