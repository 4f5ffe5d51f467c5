"""One decoding step by transformers' own forward pass: for every model and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_dapo.engines.embedded_model import GLOBAL, LOCAL
from megatron_dapo.engines.row_state import COLUMN, PREFIX, PREFIX_SLOT, SEED, TOKEN, RowState
from megatron_dapo.engines.sampling import RowSampling, draw, uniforms
from megatron_dapo.engines.slot_cache import Sharing, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersDecoder:
    """Gives each active row of `state` its next token; `refresh` comes before, after each change of the active rows.

    `window`: tokens that a token of local layers sees; None for a model without such layers.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache, state: RowState, window: int | None):
        self._model, self._cache, self._state, self._window = model, cache, state, window
        dtype, device = cache.responses.dtype, cache.responses.device
        self._columns = torch.arange(cache.responses.shape[4], device=device)
        # Tensors, as torch.where makes a float32 mask of two Python numbers whatever the model's dtype.
        self._visible = torch.zeros((), dtype=dtype, device=device)
        self._hidden = torch.full((), float("-inf"), dtype=dtype, device=device)
        self._num_rows = 0
        self._span = 0  # response columns in use by the longest row
        self._prefix_span = 0  # columns of the longest prefix
        self._past_prefix: torch.Tensor | None = None  # [B, prefix_span]: not the row's prompt
        self._sharing: Sharing | None = None
        self._sampling: RowSampling | None = None

    def refresh(self, num_rows: int, prefix_lengths: Sequence[int]) -> None:
        """Recompute what a step keeps about the active rows and the prefix slots, of these lengths."""
        self._num_rows = num_rows
        state = self._state.integers[:, :num_rows]
        self._span = int(state[COLUMN].max())
        self._prefix_span = max(prefix_lengths)
        self._past_prefix = self._columns[: self._prefix_span] >= state[PREFIX][:, None]
        self._sharing = Sharing.of(state[PREFIX_SLOT].tolist(), prefix_lengths, str(state.device))
        self._sampling = self._state.sampling(num_rows)

    def step(self) -> torch.Tensor | None:
        """One token for every active row; the bool mask [B] of rows that finished, or None.

        FloatingPointError if a log-probability is not finite.
        """
        assert self._sampling is not None, "no rows were announced by refresh"
        state = self._state.integers[:, : self._num_rows]
        column = state[COLUMN]
        position = state[PREFIX] + column
        self._span += 1
        logits = self._forward(state[TOKEN], position, column)
        # Random numbers are keyed by the absolute position: a response resumed from its prefix continues the same
        # stream.
        return self._state.append(*draw(logits, self._sampling, uniforms(state[SEED], position + 1)))

    def _forward(self, tokens: torch.Tensor, position: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after token tokens[r] at position[r], which is response column column[r] of row r."""
        assert self._sharing is not None and self._past_prefix is not None, "no rows were announced by refresh"
        self._cache.begin_decode(column, self._span, self._sharing, self._prefix_span)
        hidden = torch.cat((self._past_prefix, self._columns[: self._span] > column[:, None]), dim=1)
        output = self._model(
            input_ids=tokens[:, None],
            position_ids=position[:, None],
            attention_mask=self._masks(hidden, column),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _masks(self, hidden: torch.Tensor, column: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [B, 1, 1, P + S] from the hidden columns: one, or one for each kind of layer."""
        mask = torch.where(hidden, self._hidden, self._visible)[:, None, None, :]
        if self._window is None:
            return mask
        # The first column that a local layer still sees. A prefix column is a position; response columns start at 0 after it.
        first = column - self._window + 1
        length = self._state.integers[PREFIX, : self._num_rows]
        prefix, response = self._columns[: self._prefix_span], self._columns[: self._span]
        past = torch.cat((prefix < (first + length)[:, None], response < first[:, None]), dim=1)
        return {GLOBAL: mask, LOCAL: mask.masked_fill(past[:, None, None, :], float("-inf"))}
