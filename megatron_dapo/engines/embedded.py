"""The embedded engine: transformers' own model in this process, with continuous batching, fed in place by the weight
bridge.

One tick is one forward pass that gives every active row its next token. A row that finishes is replaced at once (by the
last active row, then by a waiting request), so short responses never wait for long ones. All requests of a group share
one prefill.

A prompt is prefilled without its last token; that one goes through the first ordinary tick. So there is one place where
tokens are drawn, and a request with the same prompt as a running one costs only a copy.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from megatron_dapo.engines.base import check_request, check_request_ids
from megatron_dapo.engines.sampling import RowSampling, draw, signed_seed, uniforms
from megatron_dapo.engines.slot_cache import SlotCache, register_attention
from megatron_dapo.types import Completion, FinishReason, GenerationRequest, VersionRange

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Rows of the integer state [5, slots].
_TOKEN, _POSITION, _LAST, _SEED, _TOP_K = range(5)
# Rows of the float state [2, slots].
_TEMPERATURE, _TOP_P = range(2)


@dataclass(frozen=True)
class EmbeddedEngineSettings:
    """Sizes of the engine."""

    max_slots: int = (
        64  # sequences generated at the same time; more give better throughput until memory or cache runs out
    )
    max_length: int = 2048  # positions of one sequence: prompt + response
    ticks_per_poll: int = 16  # tokens a row between two looks at finished responses
    prefill_tokens: int = 8192  # padded prompt tokens of one prefill forward pass, bounds its memory
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_length", "ticks_per_poll", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"embedded engine: {name} = {getattr(self, name)}, must be at least 1")


@dataclass
class _Prefix:
    """A prompt whose keys and values stand in the slots of these rows, all computed by one policy version."""

    rows: dict[int, _Row] = field(default_factory=dict)  # by id(row), in order of admission


@dataclass
class _Row:
    """An active sequence: slot `index`; `starts` are (first response token, version) marks."""

    request: GenerationRequest
    index: int
    prefix: _Prefix
    starts: list[tuple[int, int]]

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)


class EmbeddedEngine:
    """`RolloutEngine` over one transformers causal language model.

    The weights start as NaN: whoever owns the engine writes every tensor of `parameters_by_name` and then calls
    `set_policy_version`, which refuses tensors that are not finite. Nothing is generated before that.
    """

    def __init__(self, config: PreTrainedConfig, settings: EmbeddedEngineSettings):
        _check_config(config)
        self.settings = settings
        self._model = _empty_model(config, settings)
        self._vocab_size = int(config.vocab_size)
        self._version = -1
        self._waiting: deque[GenerationRequest] = deque()
        self._request_ids: set[str] = set()
        self._rows: list[_Row] = []
        self._prefixes: dict[tuple[int, ...], _Prefix] = {}
        self._allocate(config)

    @classmethod
    def from_folder(
        cls, model_folder: str | Path, settings: EmbeddedEngineSettings, *, trust_remote_code: bool = False
    ) -> EmbeddedEngine:
        """An engine with the architecture of a Hugging Face folder. Its weights are not read: they come through the
        bridge.
        """
        config = AutoConfig.from_pretrained(str(model_folder), trust_remote_code=trust_remote_code)
        return cls(config, settings)

    def _allocate(self, config: PreTrainedConfig) -> None:
        settings, device = self.settings, self.settings.device
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache = SlotCache(
            config.num_hidden_layers,
            settings.max_slots,
            config.num_key_value_heads,
            settings.max_length,
            head_dim,
            dtype=settings.dtype,
            device=device,
        )
        self._integers = torch.zeros(5, settings.max_slots, dtype=torch.int64, device=device)
        self._floats = torch.ones(2, settings.max_slots, dtype=torch.float32, device=device)
        self._stops = torch.full((settings.max_slots, 1), -1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(settings.max_slots, settings.max_length, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(settings.max_slots, settings.max_length, dtype=torch.float32, device=device)
        self._row_start = torch.arange(settings.max_slots, device=device) * settings.max_length
        self._columns = torch.arange(settings.max_length, device=device)
        self._visible = torch.zeros((), dtype=settings.dtype, device=device)
        self._hidden = torch.full((), float("-inf"), dtype=settings.dtype, device=device)
        self._span = 0  # columns in use by the longest active row
        self._sampling: RowSampling | None = None

    # Weights

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        """Destination tensors by Hugging Face name, to be overwritten in place. A tied head is the embedding and has no
        name of its own.
        """
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    @property
    def policy_version(self) -> int:
        return self._version

    def set_policy_version(self, version: int) -> None:
        """Declare that the weights now in place are policy `version`; ValueError names tensors that are not finite.

        Running responses go on with the new weights (their earlier keys and values stay): their tokens from here on
        belong to the new version. No later request shares the prefill of the old one.
        """
        broken = [name for name, tensor in self.parameters_by_name().items() if not bool(torch.isfinite(tensor).all())]
        if broken:
            raise ValueError(
                f"policy version {version}: {len(broken)} of {len(self.parameters_by_name())} engine tensors "
                f"are not finite ({', '.join(broken[:4])}{', ...' if len(broken) > 4 else ''}): "
                "the weight synchronisation left them out or the policy has diverged"
            )
        if version != self._version:
            self._prefixes.clear()
            for row, position in zip(self._rows, self._integers[_POSITION].tolist(), strict=False):
                row.starts.append((position + 1 - row.prompt_length, version))
        self._version = version

    # RolloutEngine

    @property
    def num_unfinished(self) -> int:
        return len(self._request_ids)

    @property
    def num_active(self) -> int:
        """Sequences that hold a slot."""
        return len(self._rows)

    def check(self, request: GenerationRequest) -> None:
        """ValueError where this engine could never serve `request`."""
        check_request(request, max_length=self.settings.max_length, vocab_size=self._vocab_size)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, first in first out. All are checked before any is queued."""
        check_request_ids(requests, self._request_ids)
        for request in requests:
            self.check(request)
        self._request_ids.update(request.request_id for request in requests)
        self._waiting.extend(requests)

    def poll(self) -> list[Completion]:
        return self.advance(self.settings.ticks_per_poll)

    @torch.inference_mode()
    def advance(self, num_ticks: int) -> list[Completion]:
        """At most `num_ticks` tokens for every active row; what finished, in the order it did (then by slot)."""
        if self._version < 0 and self._request_ids:
            raise RuntimeError(
                "the engine has no weights yet: synchronise them and call set_policy_version before generating"
            )
        completions: list[Completion] = []
        for _ in range(num_ticks):
            self._admit()
            if not self._rows:
                break
            finished = self._tick()
            if finished is not None:
                completions.extend(self._release(finished))
        return completions

    @torch.inference_mode()
    def abort(self) -> list[Completion]:
        completions = [self._completion(row, "abort") for row in self._rows]
        completions += [Completion(request.request_id, (), (), "abort", ()) for request in self._waiting]
        self._rows.clear()
        self._waiting.clear()
        self._prefixes.clear()
        self._request_ids.clear()
        self._span = 0
        return completions

    # One tick

    def _tick(self) -> torch.Tensor | None:
        """One token for every active row; the bool mask [B] of rows that finished, or None."""
        assert self._sampling is not None, "rows were admitted without sampling parameters"
        state = self._integers[:, : len(self._rows)]
        logits = self._forward(state[_TOKEN], state[_POSITION])
        position = state[_POSITION].add_(1)
        # Random numbers are keyed by the absolute position: a response resumed from its prefix continues the same
        # stream.
        tokens, logprobs = draw(logits, self._sampling, uniforms(state[_SEED], position))
        if not bool(torch.isfinite(logprobs).all()):
            raise RuntimeError(f"policy version {self._version} gave logits that are not finite: it has diverged")
        cells = self._row_start[: len(self._rows)] + position
        self._tokens.view(-1).index_copy_(0, cells, tokens)
        self._logprobs.view(-1).index_copy_(0, cells, logprobs)
        state[_TOKEN].copy_(tokens)
        self._span += 1
        done = (position >= state[_LAST]) | (tokens[:, None] == self._stops[: len(self._rows)]).any(-1)
        return done if bool(done.any()) else None

    def _forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after token tokens[r] at column position[r] of row r."""
        self._cache.begin_decode(position, self._span)
        hidden = self._columns[: self._span] > position[:, None]
        mask = torch.where(hidden, self._hidden, self._visible)[:, None, None, :]
        output = self._model(
            input_ids=tokens[:, None],
            position_ids=position[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    # Finishing

    def _release(self, finished: torch.Tensor) -> list[Completion]:
        """Take finished rows out and move the last active rows into their slots."""
        indices = finished.nonzero().squeeze(-1).tolist()
        completions = [self._completion(self._rows[index], self._reason(index)) for index in indices]
        for index in indices:
            row = self._rows[index]
            self._request_ids.discard(row.request.request_id)
            row.prefix.rows.pop(id(row))
            if not row.prefix.rows and self._prefixes.get(row.request.prompt_ids) is row.prefix:
                del self._prefixes[row.request.prompt_ids]
        self._compact(set(indices))
        self._refresh()
        return completions

    def _reason(self, index: int) -> FinishReason:
        """ "stop" where the last token is a stop id, also at the length limit."""
        last = int(self._integers[_TOKEN, index])
        return "stop" if last in self._rows[index].request.sampling.stop_token_ids else "length"

    def _completion(self, row: _Row, reason: FinishReason) -> Completion:
        start, end = row.prompt_length, int(self._integers[_POSITION, row.index]) + 1
        return Completion(
            request_id=row.request.request_id,
            token_ids=tuple(self._tokens[row.index, start:end].tolist()),
            logprobs=tuple(self._logprobs[row.index, start:end].tolist()),
            finish_reason=reason,
            versions=_version_ranges(row.starts, end - start),
        )

    def _compact(self, removed: set[int]) -> None:
        num_left = len(self._rows) - len(removed)
        holes = sorted(index for index in removed if index < num_left)
        movers = [index for index in range(num_left, len(self._rows)) if index not in removed]
        if holes:
            to, source = self._index(holes), self._index(movers)
            self._cache.move(source, to, self._span)
            for state in (self._integers, self._floats):
                state[:, to] = state[:, source]
            self._stops[to] = self._stops[source]
            self._tokens[to, : self._span + 1] = self._tokens[source, : self._span + 1]
            self._logprobs[to, : self._span + 1] = self._logprobs[source, : self._span + 1]
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
            self._rows[hole].index = hole
        del self._rows[num_left:]

    def _refresh(self) -> None:
        """Recompute what a tick keeps about the set of active rows."""
        num_rows = len(self._rows)
        if not num_rows:
            self._span = 0
            return
        self._span = int(self._integers[_POSITION, :num_rows].max()) + 1
        self._sampling = RowSampling.of(
            self._floats[_TEMPERATURE, :num_rows], self._floats[_TOP_P, :num_rows], self._integers[_TOP_K, :num_rows]
        )

    # Admission

    def _admit(self) -> None:
        """Give free slots to waiting requests."""
        num_new = min(len(self._waiting), self.settings.max_slots - len(self._rows))
        if not num_new:
            return
        new: list[_Row] = []
        to_prefill: list[_Row] = []
        to_copy: dict[int, tuple[_Row, list[int]]] = {}  # by id of the source row
        for offset in range(num_new):
            request = self._waiting.popleft()
            prefix = self._prefixes.setdefault(request.prompt_ids, _Prefix())
            row = _Row(request, len(self._rows) + offset, prefix, [(0, self._version)])
            if prefix.rows:
                source = next(iter(prefix.rows.values()))
                to_copy.setdefault(id(source), (source, []))[1].append(row.index)
            elif row.prompt_length > 1:
                to_prefill.append(row)
            prefix.rows[id(row)] = row
            new.append(row)
        self._write_state(new)
        for rows in _chunks(to_prefill, self.settings.prefill_tokens):
            self._prefill(rows)
        for source, indices in to_copy.values():
            self._cache.copy_prefix(source.index, self._index(indices), source.prompt_length - 1)
        self._rows.extend(new)
        self._refresh()

    def _prefill(self, rows: list[_Row]) -> None:
        """Fill columns [0, prompt length - 1) of these rows; padding on the right is never visible before it is
        overwritten.
        """
        width = max(row.prompt_length for row in rows) - 1
        tokens = self._tokens[self._index([row.index for row in rows]), :width]
        self._cache.begin_prefill(self._index([row.index for row in rows]))
        positions = self._columns[:width].expand(len(rows), -1)
        self._model.get_decoder()(input_ids=tokens, position_ids=positions, past_key_values=self._cache, use_cache=True)

    def _write_state(self, rows: list[_Row]) -> None:
        """Initial state of newly admitted rows, which stand in consecutive slots."""
        span = slice(rows[0].index, rows[-1].index + 1)
        device = self.settings.device
        requests = [row.request for row in rows]
        integers = [
            [
                request.prompt_ids[-1],
                len(request.prompt_ids) - 1,
                len(request.prompt_ids) + request.sampling.max_new_tokens - 1,
                signed_seed(request.seed),
                request.sampling.top_k,
            ]
            for request in requests
        ]
        self._integers[:, span] = torch.tensor(integers, dtype=torch.int64, device=device).T
        floats = [[request.sampling.temperature, request.sampling.top_p] for request in requests]
        self._floats[:, span] = torch.tensor(floats, dtype=torch.float32, device=device).T
        self._stops = _widen(self._stops, max(len(request.sampling.stop_token_ids) for request in requests))
        width = self._stops.shape[1]
        stops = [
            [*request.sampling.stop_token_ids, *[-1] * (width - len(request.sampling.stop_token_ids))]
            for request in requests
        ]
        self._stops[span] = torch.tensor(stops, dtype=torch.int64, device=device)
        longest = max(len(request.prompt_ids) for request in requests)
        prompts = [[*request.prompt_ids, *[0] * (longest - len(request.prompt_ids))] for request in requests]
        self._tokens[span, :longest] = torch.tensor(prompts, dtype=torch.int64, device=device)

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.settings.device)


def _check_config(config: PreTrainedConfig) -> None:
    """ValueError for attention that a cache of whole columns cannot serve."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"embedded engine: {config.model_type} uses layers of kind {sorted(kinds)}, "
            "only full_attention is supported; "
            "switch sliding windows off in config.json (use_sliding_window false) or use another engine"
        )
    missing = [
        name
        for name in ("num_hidden_layers", "num_key_value_heads", "vocab_size")
        if getattr(config, name, None) is None
    ]
    if missing:
        raise ValueError(f"embedded engine: the config of {config.model_type} has no {', '.join(missing)}")
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(
            f"embedded engine: attn_logit_softcapping = {config.attn_logit_softcapping} ({config.model_type}) "
            "is not supported"
        )


def _empty_model(config: PreTrainedConfig, settings: EmbeddedEngineSettings) -> torch.nn.Module:
    """The model with all weights NaN, in inference state."""
    own_config = copy.deepcopy(config)  # building a model writes its attention implementation into the config
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            own_config, dtype=settings.dtype, attn_implementation=register_attention()
        )
    model.tie_weights()
    model.to(settings.device).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    return model


def _chunks(rows: list[_Row], max_tokens: int) -> list[list[_Row]]:
    """Rows by falling prompt length, cut so that rows x longest stays within max_tokens (one row may exceed it)."""
    chunks: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: (-row.prompt_length, row.index)):
        if chunks and (len(chunks[-1]) + 1) * (chunks[-1][0].prompt_length - 1) <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _version_ranges(starts: list[tuple[int, int]], num_tokens: int) -> tuple[VersionRange, ...]:
    """Marks (first token, version) as ranges that cover [0, num_tokens); versions that gave no token are left out."""
    ends = [start for start, _ in starts[1:]] + [num_tokens]
    return tuple(
        VersionRange(start, end, version) for (start, version), end in zip(starts, ends, strict=True) if end > start
    )


def _widen(stops: torch.Tensor, width: int) -> torch.Tensor:
    """The stop table [slots, W] with at least `width` columns."""
    if width <= stops.shape[1]:
        return stops
    wider = torch.full((stops.shape[0], width), -1, dtype=stops.dtype, device=stops.device)
    wider[:, : stops.shape[1]] = stops
    return wider
