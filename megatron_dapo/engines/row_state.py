"""What the embedded engine keeps of its running responses in tensors: one column or row a slot, active rows first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dapo.engines.sampling import RowSampling, signed_seed
from megatron_dapo.types import SamplingParams

# Rows of the integer state [7, slots]: the token that goes through the next tick; how many response tokens there are
# (its column) and at most will be; how many tokens of the prompt are in the prefix, and its slot; what sampling needs.
TOKEN, COLUMN, LIMIT, PREFIX, PREFIX_SLOT, SEED, TOP_K = range(7)
# Rows of the float state [2, slots].
TEMPERATURE, TOP_P = range(2)


class RowState:
    """State of `num_slots` slots with room for `max_length` response tokens each."""

    def __init__(self, num_slots: int, max_length: int, device: str):
        # int64 for all of them: a seed takes 64 bits.
        self.integers = torch.zeros(7, num_slots, dtype=torch.int64, device=device)
        self.floats = torch.ones(2, num_slots, dtype=torch.float32, device=device)
        self.stops = torch.full((num_slots, 1), -1, dtype=torch.int64, device=device)  # -1: no token's id
        self.tokens = torch.zeros(num_slots, max_length, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_slots, max_length, dtype=torch.float32, device=device)
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
            [context[-1], 0, limit, len(context) - 1, 0, signed_seed(seed), sampling.top_k]
            for context, limit, seed, sampling in zip(contexts, limits, seeds, samplings, strict=True)
        ]
        self.integers[:, span] = torch.tensor(integers, dtype=torch.int64, device=self._device).T
        floats = [[sampling.temperature, sampling.top_p] for sampling in samplings]
        self.floats[:, span] = torch.tensor(floats, dtype=torch.float32, device=self._device).T
        stops = [sampling.stop_token_ids for sampling in samplings]
        if (missing := max(map(len, stops)) - self.stops.shape[1]) > 0:
            self.stops = torch.nn.functional.pad(self.stops, (0, missing), value=-1)
        padded = [[*ids, *[-1] * (self.stops.shape[1] - len(ids))] for ids in stops]
        self.stops[span] = torch.tensor(padded, dtype=torch.int64, device=self._device)

    def move(self, to: Sequence[int], source: Sequence[int]) -> None:
        """Overwrite slots `to` by slots `source`."""
        targets, sources = (torch.tensor(slots, dtype=torch.int64, device=self._device) for slots in (to, source))
        width = int(self.integers[COLUMN, sources].max())
        for state in (self.integers, self.floats):
            state[:, targets] = state[:, sources]
        self.stops[targets] = self.stops[sources]
        for response in (self.tokens, self.logprobs):
            response[targets, :width] = response[sources, :width]

    def sampling(self, num_rows: int) -> RowSampling:
        """Return the sampling parameters of the active rows."""
        floats = self.floats[:, :num_rows]
        return RowSampling.of(floats[TEMPERATURE], floats[TOP_P], self.integers[TOP_K, :num_rows])

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor | None:
        """Append a token [B] to each active row; return the bool mask [B] of rows that finished, or None.

        FloatingPointError if a log-probability is not finite.
        """
        if not bool(torch.isfinite(logprobs).all()):
            raise FloatingPointError("logits that are not finite")
        num_rows = tokens.numel()
        column = self.integers[COLUMN, :num_rows]
        cells = self._row_start[:num_rows] + column
        self.tokens.view(-1).index_copy_(0, cells, tokens)
        self.logprobs.view(-1).index_copy_(0, cells, logprobs)
        self.integers[TOKEN, :num_rows] = tokens
        column.add_(1)
        done = (column >= self.integers[LIMIT, :num_rows]) | (tokens[:, None] == self.stops[:num_rows]).any(-1)
        return done if bool(done.any()) else None
