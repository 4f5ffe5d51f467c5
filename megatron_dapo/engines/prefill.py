"""Prefill of the embedded engine: whole contexts, and what the next turn of a conversation adds to a kept one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from megatron_dapo.engines.embedded_model import GLOBAL, LOCAL
from megatron_dapo.engines.kept_contexts import KeptContext
from megatron_dapo.engines.slot_cache import SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Prefix:
    """A context whose keys and values, without the last token, stand in prefix slot `index`, by one version."""

    tokens: tuple[int, ...]  # the whole context: the prompt, and for continued requests the tokens so far
    index: int = -1
    num_rows: int = 0
    kept: KeptContext | None = None  # its first tokens, if the conversation's last turn left them

    def order(self) -> tuple[bool, int]:
        """Return the order of slots: what is computed together stands together, the longest first."""
        return self.kept is not None, -self.length

    @property
    def num_new(self) -> int:
        """Tokens to be computed for the slot."""
        return self.length - (self.kept.length if self.kept is not None else 0)

    @property
    def length(self) -> int:
        """Tokens in the slot."""
        return len(self.tokens) - 1


class Prefill:
    """Computes prefixes into their slots of `cache`, at most `max_tokens` padded tokens in a forward pass.

    `window`: tokens that a token of local layers sees; None for a model without such layers.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache, window: int | None, max_tokens: int):
        self._decoder = model.get_decoder()
        self._cache = cache
        self._window = window
        self._max_tokens = max_tokens
        self._device = cache.responses.device
        self._columns = torch.arange(cache.responses.shape[4], device=self._device)

    def fill(self, prefixes: Sequence[Prefix]) -> None:
        """Fill the slots of `prefixes`, which are consecutive and in order."""
        for is_kept, same in groupby(prefixes, key=lambda prefix: prefix.kept is not None):
            for chunk in _chunks([prefix for prefix in same if prefix.num_new], self._max_tokens):
                self._extend(chunk) if is_kept else self._compute(chunk)

    def _compute(self, prefixes: list[Prefix]) -> None:
        """Compute prefixes in consecutive slots, the longest first. Padding on the right is never visible."""
        tokens = self._padded([prefix.tokens[:-1] for prefix in prefixes])
        self._cache.begin_prefill(slice(prefixes[0].index, prefixes[-1].index + 1))
        # The attention over whole prompts makes its own mask.
        masks = None if self._window is None else {GLOBAL: None, LOCAL: None}
        self._fill(tokens, self._columns[: tokens.shape[1]].expand_as(tokens), masks)

    def _extend(self, prefixes: list[Prefix]) -> None:
        """Compute what kept contexts lack of prefixes in consecutive slots."""
        for prefix in prefixes:
            assert prefix.kept is not None, "only a kept context can be extended"
            self._cache.write_prefix(prefix.index, prefix.kept.stored)
        tokens = self._padded(
            [prefix.tokens[prefix.kept.length : -1] for prefix in prefixes if prefix.kept is not None]
        )
        new = self._integers([prefix.num_new for prefix in prefixes])
        columns = self._integers([prefix.length for prefix in prefixes]) - new
        columns = columns[:, None] + self._columns[: tokens.shape[1]]
        in_use = self._columns[: tokens.shape[1]] < new[:, None]
        self._cache.begin_extend(slice(prefixes[0].index, prefixes[-1].index + 1), columns, in_use)
        distance = columns[:, None, :, None] - self._columns[: max(prefix.length for prefix in prefixes)]
        seen = distance >= 0
        self._fill(
            tokens, columns, seen if self._window is None else {GLOBAL: seen, LOCAL: seen & (distance < self._window)}
        )
        for prefix in prefixes:
            prefix.kept = None

    def _padded(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Tokens as rows [n, L], padded on the right."""
        width = max(map(len, tokens))
        return torch.tensor(
            [[*row, *[0] * (width - len(row))] for row in tokens], dtype=torch.int64, device=self._device
        )

    def _fill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: torch.Tensor | Mapping[str, torch.Tensor | None] | None,
    ) -> None:
        """Store keys and values of tokens [n, L] where the cache was told to."""
        self._decoder(
            input_ids=tokens, position_ids=positions, attention_mask=masks, past_key_values=self._cache, use_cache=True
        )

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _chunks(prefixes: list[Prefix], max_tokens: int) -> list[list[Prefix]]:
    """Prefixes in order, cut so that count x most new tokens stays within max_tokens (a single one may exceed it)."""
    chunks: list[list[Prefix]] = []
    most = 0
    for prefix in prefixes:
        most = max(most, prefix.num_new)
        if chunks and (len(chunks[-1]) + 1) * most <= max_tokens:
            chunks[-1].append(prefix)
        else:
            chunks.append([prefix])
            most = prefix.num_new
    return chunks
