"""Keys and values of conversations between two turns, so that a turn computes only the tokens since the last one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptContext:
    """A context and the keys and values of all its tokens but the last: [layers, 2, kv_heads, len(tokens) - 1, head_dim].
    `states`: what recurrent layers have there (`RecurrentStates.of_row`).
    """

    tokens: tuple[int, ...]
    stored: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()

    @property
    def length(self) -> int:
        """Tokens whose keys and values are stored."""
        return len(self.tokens) - 1


class KeptContexts:
    """The latest context of each conversation, of at most `max_kept` conversations.

    The oldest ones go first. What a conversation finds depends only on the conversations after it, so contexts that
    nobody continues never change what the others find.
    """

    def __init__(self, max_kept: int):
        self._max_kept = max_kept
        self._kept: OrderedDict[str, KeptContext] = OrderedDict()

    def keep(self, name: str, context: KeptContext) -> None:
        """Replace the context of conversation `name`."""
        self._kept.pop(name, None)
        self._kept[name] = context
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)

    def take(self, name: str, tokens: tuple[int, ...]) -> KeptContext | None:
        """Remove and return the context of conversation `name` if `tokens` continues it."""
        kept = self._kept.pop(name, None)
        if kept is None or len(tokens) <= len(kept.tokens) or tokens[: len(kept.tokens)] != kept.tokens:
            return None
        return kept

    def clear(self) -> None:
        """Drop all contexts."""
        self._kept.clear()
