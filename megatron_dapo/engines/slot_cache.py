"""A transformers key/value cache whose responses share their prompts, and the attention that reads it.

    prefixes   one slot a distinct prompt: its keys and values, without the last token
    responses  one slot a running response: last prompt token at column 0, response token t at column t + 1

Decoding is bound by reading keys and values from memory. A group of G responses has one prompt, which is read once a
tick for all of them by a matrix product of G queries; only the responses' own columns are read a row at a time. Nothing
is padded on the left and positions are given explicitly. Active slots are always the first ones, so a tick reads views,
never copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache

from megatron_dapo.engines.recurrent_states import LayerState, RecurrentStates
from megatron_dapo.ops.sinks import attend_with_sinks, softmax_with_sinks

ATTENTION_NAME = "slot_rows"
WIDTH_STEP = 64  # columns the prefix slots grow by
FEW_COLUMNS = 512  # total of all slots of a run: reading them in vain costs less than another product


@dataclass(frozen=True)
class SlotRange:
    """Consecutive prefix slots [start, stop), each with places for as many rows: R, the most that any of them has. Of
    their columns the first `width` are in use.

    Places without a row point at row 0 and are never read back.
    """

    start: int
    stop: int
    members: torch.Tensor  # [(stop - start) * R] int64: row at each place
    width: int

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, kv_heads, r, n] -> [stop - start, kv_heads, R * r, n]."""
        places = rows.index_select(0, self.members).unflatten(0, (self.stop - self.start, -1))
        return places.transpose(1, 2).flatten(2, 3)

    def spread(self, grouped: torch.Tensor, repeats: int) -> torch.Tensor:
        """[stop - start, kv_heads, R * r, n] -> [(stop - start) * R, kv_heads, r, n]."""
        return grouped.unflatten(2, (-1, repeats)).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Sharing:
    """The rows that share each prefix. Rows that continue their own tokens share with no other and have long prefixes;
    those of a fresh group all share one short prompt. Runs of slots keep the one from being padded to the other, in
    rows and in columns.
    """

    runs: tuple[SlotRange, ...]  # cover the prefix slots in order
    places: torch.Tensor  # [B] int64: place of each row, counted over all runs

    @classmethod
    def of(cls, prefix_of_row: Sequence[int], lengths: Sequence[int], device: str) -> Sharing:
        """Build it from the prefix slot of every row and the columns in use of every slot."""
        members: list[list[int]] = [[] for _ in lengths]
        for row, prefix in enumerate(prefix_of_row):
            members[prefix].append(row)
        places, runs, num_places = [0] * len(prefix_of_row), [], 0
        for start, stop, most, width in _runs([len(rows) for rows in members], lengths):
            padded: list[int] = []
            for rows in members[start:stop]:
                for turn, row in enumerate(rows):
                    places[row] = num_places + len(padded) + turn
                padded += rows + [0] * (most - len(rows))
            num_places += len(padded)
            runs.append(SlotRange(start, stop, torch.tensor(padded, device=device), width))
        return cls(tuple(runs), torch.tensor(places, device=device))

    @property
    def num_prefixes(self) -> int:
        return self.runs[-1].stop

    def scores(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Each row [B, kv_heads, r, d] times the keys of its prefix [num_prefixes, kv_heads, P, d] ->
        [B, kv_heads, r, P], 0 in columns that none of its run uses.
        """
        parts = []
        for run in self.runs:
            grouped = run.gather(queries) @ keys[run.start : run.stop, :, : run.width].transpose(-1, -2)
            spread = run.spread(grouped, queries.shape[2])
            unused = keys.shape[2] - run.width
            parts.append(F.pad(spread, (0, unused)) if unused else spread)
        return self._rows(parts)

    def sums(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Each row [B, kv_heads, r, P] times the values of its prefix [num_prefixes, kv_heads, P, d] ->
        [B, kv_heads, r, d].
        """
        parts = []
        for run in self.runs:
            grouped = run.gather(weights[..., : run.width]) @ values[run.start : run.stop, :, : run.width]
            parts.append(run.spread(grouped, weights.shape[2]))
        return self._rows(parts)

    def _rows(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Each row from its place, of the places of all runs."""
        return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).index_select(0, self.places)


def _runs(counts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(first slot, slot after the last, rows of the fullest, columns of the longest) of runs of slots with `counts`
    rows and `lengths` columns. What little is empty in each costs less than another product: half as many places as
    there are rows, and a quarter of its columns or a few.
    """
    max_places = sum(counts) // 2
    runs: list[tuple[int, int, int, int]] = []
    start, most, width, num_rows, num_columns = 0, 1, 0, 0, 0
    for slot, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        size = slot + 1 - start
        places = size * max(most, count) - num_rows - count
        columns = size * max(width, length) - num_columns - length
        if size > 1 and (places > max_places or columns > max(FEW_COLUMNS, num_columns // 4)):
            runs.append((start, slot, most, width))
            start, most, width, num_rows, num_columns = slot, 1, 0, 0, 0
        most, width = max(most, count), max(width, length)
        num_rows, num_columns = num_rows + count, num_columns + length
    return [*runs, (start, len(counts), most, width)]


@dataclass(frozen=True)
class Stored:
    """Keys or values one layer reads in a tick: views [num_prefixes, kv_heads, P, d] and [B, kv_heads, S, d]."""

    prefixes: torch.Tensor
    responses: torch.Tensor
    sharing: Sharing


@dataclass(frozen=True)
class _Extension:
    """Where the tokens of `SlotCache.begin_extend` go: token places[i] of row rows[i] to column columns[i] of its slot."""

    slots: slice
    width: int  # columns that attention reads
    rows: torch.Tensor
    places: torch.Tensor
    columns: torch.Tensor

    def write(self, prefixes: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Store states [n, kv_heads, L, d] in prefixes [slots, kv_heads, P, d]; return the slots' columns in use."""
        slots = prefixes[self.slots]
        slots[self.rows, :, self.columns] = states[self.rows, :, self.places]
        return slots[:, :, : self.width]


class SlotCache(Cache):
    """Buffers [layers, 2, slots, kv_heads, columns, head_dim] for responses and for prefixes; three modes of writing.
    `states`: of the layers without keys and values, which the buffers leave out.

    `begin_decode`: one new token a row for rows [0, B), each at its own response column.
    `begin_prefill`: whole prompts for some prefix slots; attention sees just the prompts.
    `begin_extend`: the rest of contexts that begin in their prefix slots; attention sees the slots.
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
        states: RecurrentStates | None = None,
    ):
        super().__init__(layers=[])
        self.states = states
        self._visible: dict[int, LayerState] = {}
        without = states.layers if states is not None else []
        with_keys = [layer for layer in range(num_layers) if layer not in without]
        self._places = {layer: place for place, layer in enumerate(with_keys)}  # layer -> place in the buffers
        num_layers = len(self._places)
        # Zeros, not empty: a masked column still enters 0 x value, which must not be NaN. On a CPU untouched pages cost
        # no memory.
        self.responses = torch.zeros(
            num_layers, 2, num_slots, num_kv_heads, max_length, head_dim, dtype=dtype, device=device
        )
        self.prefixes = self.responses.new_zeros(num_layers, 2, 0, num_kv_heads, 0, head_dim)
        flat = self.responses.view(num_layers, 2, -1, head_dim)
        self._flat = [(flat[layer, 0], flat[layer, 1]) for layer in range(num_layers)]
        self._stored: list[tuple[Stored, Stored]] = []
        self._first_column = (
            torch.arange(num_slots * num_kv_heads, device=device).view(num_slots, num_kv_heads) * max_length
        )
        self._cells: torch.Tensor | None = None  # decode: [B * kv_heads] rows of `_flat` to write
        self._prefill_slots = slice(0, 0)
        self._extension: _Extension | None = None

    def reserve_prefixes(self, num_prefixes: int, width: int) -> None:
        """Have at least `num_prefixes` prefix slots of `width` columns; what they hold is kept."""
        layers, two, slots, heads, columns, head_dim = self.prefixes.shape
        if self.states is not None:
            self.states.reserve_prefixes(num_prefixes)
        if num_prefixes <= slots and width <= columns:
            return
        if num_prefixes > slots:
            slots = min(self.responses.shape[2], max(num_prefixes, 2 * slots))
        width = max(columns, -(-width // WIDTH_STEP) * WIDTH_STEP)
        grown = self.prefixes.new_zeros(layers, two, slots, heads, width, head_dim)
        grown[:, :, : self.prefixes.shape[2], :, :columns] = self.prefixes
        self.prefixes = grown

    def begin_decode(self, columns: torch.Tensor, span: int, sharing: Sharing, prefix_span: int) -> None:
        """Row r writes its next token at response column columns[r] (int64 [B]).

        Attention reads columns [0, span) of responses and [0, prefix_span) of prefixes.
        """
        num_rows = columns.numel()
        self._extension = None
        if self.states is not None:
            self._show(self.states.show_rows(num_rows))
        self._cells = (self._first_column[:num_rows] + columns[:, None]).view(-1)
        responses = self.responses[:, :, :num_rows, :, :span].unbind(0)
        prefixes = self.prefixes[:, :, : sharing.num_prefixes, :, :prefix_span].unbind(0)
        self._stored = [
            (Stored(prefix[0], response[0], sharing), Stored(prefix[1], response[1], sharing))
            for prefix, response in zip(prefixes, responses, strict=True)
        ]

    def begin_prefill(self, slots: slice) -> None:
        """The next forward pass holds whole prompts (padded on the right) for these prefix slots."""
        self._cells = self._extension = None
        if self.states is not None:
            self._show(self.states.show_prefixes(slots, continues=False))
        self._prefill_slots = slots

    def begin_extend(self, slots: slice, columns: torch.Tensor, in_use: torch.Tensor) -> None:
        """The next forward pass holds tokens [n, L] for these prefix slots at `columns` (int64 [n, L]); those outside the
        bool mask `in_use` [n, L] are padding, which is not stored. Attention reads columns up to the last one in use.
        """
        self._cells = None
        if self.states is not None:
            self._show(self.states.show_prefixes(slots, continues=True))
        rows, places = in_use.nonzero(as_tuple=True)
        written = columns[rows, places]
        self._extension = _Extension(slots, int(written.max()) + 1, rows, places, written)

    def update(  # type: ignore[override] # `slot_attention` reads `Stored` as well
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[Stored, Stored]:
        """Store [B, kv_heads, L, head_dim] and return what attention has to read. Values may have fewer dims than keys: what
        is read has zeros for the rest."""
        if value_states.shape[-1] < key_states.shape[-1]:
            value_states = F.pad(value_states, (0, key_states.shape[-1] - value_states.shape[-1]))
        layer_idx = self._places[layer_idx]
        if self._extension is not None:
            return (
                self._extension.write(self.prefixes[layer_idx, 0], key_states),
                self._extension.write(self.prefixes[layer_idx, 1], value_states),
            )
        if self._cells is None:
            length = key_states.shape[2]
            self.prefixes[layer_idx, 0, self._prefill_slots, :, :length] = key_states
            self.prefixes[layer_idx, 1, self._prefill_slots, :, :length] = value_states
            return key_states, value_states
        keys, values = self._flat[layer_idx]
        keys.index_copy_(0, self._cells, key_states.reshape(self._cells.numel(), -1))
        values.index_copy_(0, self._cells, value_states.reshape(self._cells.numel(), -1))
        return self._stored[layer_idx]

    def _show(self, states: dict[int, LayerState]) -> None:
        self._visible = states
        self.layers = states  # type: ignore[assignment] # transformers' layers index it by their number

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        """Return True if the next forward pass continues states."""
        return self.states is not None and self.states.continues

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **kwargs: object) -> torch.Tensor:
        """Store the last inputs [n, channels, kernel size] of a layer's convolution."""
        return self._visible[layer_idx].conv_states.copy_(conv_states)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: object) -> torch.Tensor:
        """Store the states [n, heads, K, V] of a layer."""
        return self._visible[layer_idx].recurrent_states.copy_(recurrent_states)

    def context(self, slot: int, prefix_length: int, row: int, num_tokens: int) -> torch.Tensor:
        """Return a copy [layers, 2, kv_heads, prefix_length + num_tokens, head_dim] of a prefix and the response after it."""
        prefix = self.prefixes[:, :, slot, :, :prefix_length]
        return torch.cat((prefix, self.responses[:, :, row, :, :num_tokens]), dim=3)

    def write_prefix(self, slot: int, stored: torch.Tensor) -> None:
        """Write a context [layers, 2, kv_heads, length, head_dim] to the first columns of a prefix slot."""
        self.prefixes[:, :, slot, :, : stored.shape[3]] = stored

    def move_response(self, source: int, slot: int, length: int) -> None:
        """Overwrite columns [0, length) of response slot `slot` by those of `source`."""
        self.responses[:, :, slot, :, :length] = self.responses[:, :, source, :, :length]
        if self.states is not None:
            self.states.move_row(source, slot)

    def move_prefix(self, source: int, slot: int, length: int) -> None:
        """Overwrite columns [0, length) of prefix slot `slot` by those of `source`."""
        self.prefixes[:, :, slot, :, :length] = self.prefixes[:, :, source, :, :length]
        if self.states is not None:
            self.states.move_prefix(source, slot)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given explicitly

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | Stored,
    value: torch.Tensor | Stored,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface over a `SlotCache`: query [B, heads, L, d] -> [B, L, heads, d], or the dims of the
    module's values, if it says that they are fewer.

    Tensors as keys and values [B, kv_heads, L, d]: causal over whole prompts, over the last `sliding_window` tokens if
    that is given; with a bool mask [B, 1, L, P] of what each query sees, keys and values are [B, kv_heads, P, d]. `Stored`
    ones: one query a row, and an additive mask [B, 1, 1, P + S] over prefix and response columns. `s_aux` [heads]: sinks.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    value_dim = getattr(module, "v_head_dim", None)
    if isinstance(key, Stored) or isinstance(value, Stored):
        assert isinstance(key, Stored) and isinstance(value, Stored), "keys and values are stored together"
        assert attention_mask is not None, "decoding needs the mask of visible columns"
        return _attend_stored(query * scale, key, value, attention_mask, s_aux)[..., :value_dim], None
    attend, length = F.scaled_dot_product_attention, query.shape[2]
    seen = attention_mask
    if seen is None and sliding_window is not None and sliding_window < length:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < sliding_window)
    if s_aux is not None:
        return attend_with_sinks(query, key, value, s_aux, seen, scale).transpose(1, 2).contiguous(), None
    shared = key.shape[1] != query.shape[1]
    output = attend(query, key, value, attn_mask=seen, scale=scale, is_causal=seen is None, enable_gqa=shared)
    return output[..., :value_dim].transpose(1, 2).contiguous(), None


def _attend_stored(
    query: torch.Tensor, keys: Stored, values: Stored, mask: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One softmax over a row's prefix and response columns; query [B, heads, 1, d], scaled -> [B, 1, heads, d]."""
    num_rows, num_heads, _, head_dim = query.shape
    sharing, width = keys.sharing, keys.prefixes.shape[2]
    # The heads that share a kv head stand side by side: [B, kv_heads, repeats, d].
    query = query.reshape(num_rows, keys.responses.shape[1], -1, head_dim)
    of_prefixes = sharing.scores(query, keys.prefixes)
    of_responses = query @ keys.responses.transpose(-1, -2)
    scores = torch.cat((of_prefixes, of_responses), dim=-1) + mask
    # In float32, as transformers' own attention does.
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    else:
        weights = softmax_with_sinks(scores.flatten(1, 2)[:, :, None], sinks).view_as(scores).to(query.dtype)
    output = weights[..., width:] @ values.responses
    output += sharing.sums(weights[..., :width], values.prefixes)
    return output.view(num_rows, 1, num_heads, head_dim)


def register_attention() -> str:
    """Make `slot_attention` known to transformers; returns the name for `attn_implementation`."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    return ATTENTION_NAME
