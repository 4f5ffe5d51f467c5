"""What the embedded engine keeps of its running responses in tensors: one column or row a slot, active rows first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_dapo.engines.sampling import RowSampling, signed_seed
from megatron_dapo.token_support import join_supports
from megatron_dapo.types import SamplingParams

# Rows of the integer state [8, slots]: the token that goes through the next tick; how many response tokens there are
# (its column) and at most will be; how many tokens of the prompt are in the prefix, and its slot; what sampling needs.
TOKEN, COLUMN, LIMIT, PREFIX, PREFIX_SLOT, SEED, TOP_K, RECORDED = range(8)
# Rows of the float state [2, slots].
TEMPERATURE, TOP_P = range(2)


class RowState:
    """State of `num_slots` slots with room for `max_length` response tokens each."""

    def __init__(self, num_slots: int, max_length: int, device: str):
        # int64 for all of them: a seed takes 64 bits.
        self.integers = torch.zeros(8, num_slots, dtype=torch.int64, device=device)
        self.floats = torch.ones(2, num_slots, dtype=torch.float32, device=device)
        self.stops = torch.full((num_slots, 1), -1, dtype=torch.int64, device=device)  # -1: no token's id
        self.tokens = torch.zeros(num_slots, max_length, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_slots, max_length, dtype=torch.float32, device=device)
        self._supports: list[list[np.ndarray]] = [[] for _ in range(num_slots)]  # one array a token of recorded rows
        self._row_start = torch.arange(num_slots, device=device) * max_length
        self._device = device

    def start(
        self,
        first: int,
        contexts: Sequence[tuple[int, ...]],
        limits: Sequence[int],
        seeds: Sequence[int],
        samplings: Sequence[SamplingParams],
    ) -> None:
        """Write the initial state of rows in consecutive slots from `first` on: each one's context, whose last token goes
        through the next tick, most new tokens, seed and sampling parameters.
        """
        span = slice(first, first + len(contexts))
        integers = [
            [context[-1], 0, limit, len(context) - 1, 0, signed_seed(seed), sampling.top_k, sampling.with_support]
            for context, limit, seed, sampling in zip(contexts, limits, seeds, samplings, strict=True)
        ]
        self.integers[:, span] = torch.tensor(integers, dtype=torch.int64, device=self._device).T
        floats = [[sampling.temperature, sampling.top_p] for sampling in samplings]
        self.floats[:, span] = torch.tensor(floats, dtype=torch.float32, device=self._device).T
        stops = [sampling.stop_token_ids for sampling in samplings]
        if (missing := max(map(len, stops)) - self.stops.shape[1]) > 0:
            self.stops = torch.nn.functional.pad(self.stops, (0, missing), value=-1)
        padded = [[*ids, *[-1] * (self.stops.shape[1] - len(ids))] for ids in stops]
        self._supports[span] = [[] for _ in contexts]
        self.stops[span] = torch.tensor(padded, dtype=torch.int64, device=self._device)

    def move(self, to: Sequence[int], source: Sequence[int]) -> None:
        """Overwrite slots `to` by slots `source`."""
        targets, sources = (torch.tensor(slots, dtype=torch.int64, device=self._device) for slots in (to, source))
        width = int(self.integers[COLUMN, sources].max())
        for state in (self.integers, self.floats):
            state[:, targets] = state[:, sources]
        self.stops[targets] = self.stops[sources]
        for target, slot in zip(to, source, strict=True):
            self._supports[target] = self._supports[slot]
        for response in (self.tokens, self.logprobs):
            response[targets, :width] = response[sources, :width]

    def sampling(self, num_rows: int) -> RowSampling:
        """Return the sampling parameters of the active rows."""
        floats, integers = self.floats[:, :num_rows], self.integers[:, :num_rows]
        return RowSampling.of(floats[TEMPERATURE], floats[TOP_P], integers[TOP_K], integers[RECORDED] > 0)

    def support(self, slot: int) -> np.ndarray | None:
        """Return what the tokens of the row were drawn from, see `token_support`; None if that is not recorded."""
        return np.concatenate(self._supports[slot]) if self._supports[slot] else None

    def append(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, support: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Append a token [B] to each active row, and bool [B, V] what recorded rows drew theirs from; return the bool mask
        [B] of rows that finished, or None.

        FloatingPointError if a log-probability is not finite.
        """
        if not bool(torch.isfinite(logprobs).all()):
            raise FloatingPointError("logits that are not finite")
        num_rows = tokens.numel()
        if support is not None:
            ids, sizes = support.nonzero()[:, 1].cpu().numpy(), support.sum(-1).cpu().numpy()
            for slot, end in enumerate(sizes.cumsum().tolist()):
                if size := sizes[slot]:
                    self._supports[slot].append(join_supports(sizes[slot : slot + 1], ids[end - size : end]))
        column = self.integers[COLUMN, :num_rows]
        cells = self._row_start[:num_rows] + column
        self.tokens.view(-1).index_copy_(0, cells, tokens)
        self.logprobs.view(-1).index_copy_(0, cells, logprobs)
        self.integers[TOKEN, :num_rows] = tokens
        column.add_(1)
        done = (column >= self.integers[LIMIT, :num_rows]) | (tokens[:, None] == self.stops[:num_rows]).any(-1)
        return done if bool(done.any()) else None
