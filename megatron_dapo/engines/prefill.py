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


@dataclass(frozen=True)
class _Filling:
    """A slot, and the tokens whose keys and values it gets; `kept` has those of the first ones."""

    slot: int
    tokens: tuple[int, ...]
    kept: KeptContext | None

    @property
    def num_new(self) -> int:
        """Tokens to be computed."""
        return len(self.tokens) - (self.kept.length if self.kept is not None else 0)


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

    def fill(self, slot: int, contexts: Sequence[tuple[int, ...]], kept: Sequence[KeptContext | None]) -> None:
        """Fill consecutive slots from `slot` on, each with its context but the last token, of which `kept` may have the first.

        Those of one kind and similar length are computed together, so they should be next to each other.
        """
        fillings = [_Filling(slot + place, tokens[:-1], kept[place]) for place, tokens in enumerate(contexts)]
        states = self._cache.states
        if states is not None:
            states.clear_prefixes(slice(slot, slot + len(contexts)))
        for is_kept, same in groupby(fillings, key=lambda filling: filling.kept is not None):
            new = [filling for filling in same if filling.num_new]
            for chunk in _chunks(new, self._max_tokens, any_lengths=states is None):
                self._extend(chunk) if is_kept else self._compute(chunk)

    def _compute(self, fillings: list[_Filling]) -> None:
        """Compute contexts in consecutive slots, the longest first. Padding on the right is never visible."""
        tokens = self._padded([filling.tokens for filling in fillings])
        self._cache.begin_prefill(slice(fillings[0].slot, fillings[-1].slot + 1))
        # The attention over whole prompts makes its own mask.
        masks = None if self._window is None else {GLOBAL: None, LOCAL: None}
        self._fill(tokens, self._columns[: tokens.shape[1]].expand_as(tokens), masks)

    def _extend(self, fillings: list[_Filling]) -> None:
        """Compute what kept contexts lack in consecutive slots."""
        for filling in fillings:
            assert filling.kept is not None, "only a kept context can be extended"
            self._cache.write_prefix(filling.slot, filling.kept.stored)
            if self._cache.states is not None:
                self._cache.states.write_prefix(filling.slot, filling.kept.states)
        new = self._integers([filling.num_new for filling in fillings])
        lengths = [len(filling.tokens) for filling in fillings]
        tokens = self._padded([filling.tokens[-filling.num_new :] for filling in fillings])
        columns = (self._integers(lengths) - new)[:, None] + self._columns[: tokens.shape[1]]
        in_use = self._columns[: tokens.shape[1]] < new[:, None]
        self._cache.begin_extend(slice(fillings[0].slot, fillings[-1].slot + 1), columns, in_use)
        distance = columns[:, None, :, None] - self._columns[: max(lengths)]
        seen = distance >= 0
        self._fill(
            tokens, columns, seen if self._window is None else {GLOBAL: seen, LOCAL: seen & (distance < self._window)}
        )

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


def _chunks(fillings: list[_Filling], max_tokens: int, any_lengths: bool) -> list[list[_Filling]]:
    """Fillings in order, cut so that count x most new tokens stays within max_tokens (a single one may exceed it). Unless they
    may have any lengths, all of a chunk have as many new tokens: padding would change a recurrent state."""
    chunks: list[list[_Filling]] = []
    most = 0
    for filling in fillings:
        is_alike = any_lengths or filling.num_new == most
        most = max(most, filling.num_new)
        if chunks and is_alike and (len(chunks[-1]) + 1) * most <= max_tokens:
            chunks[-1].append(filling)
        else:
            chunks.append([filling])
            most = filling.num_new
    return chunks
