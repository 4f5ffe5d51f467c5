"""The embedded engine: transformers' own model in this process, with continuous batching, fed in place by the weight
bridge.

One tick is one forward pass that gives every active row its next token. A row that finishes is replaced at once (by the
last active row, then by a waiting request), so short responses never wait for long ones. All requests of a group share
one prompt, computed and kept once.

A prompt is prefilled without its last token; that one goes through the first ordinary tick. So there is one place where
tokens are drawn, and a request with the same prompt as a running one costs nothing to start. A request that continues
an aborted completion has its prompt and those tokens as its context, which is prefilled like a prompt. Random numbers are
keyed by the absolute position: under unchanged weights it becomes the response it would have been. The next turn of a
conversation (requests with one first `affinity`) finds its context's keys and values, if one policy version computed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from megatron_dapo.engines.base import (
    PrefixReuse,
    aborted,
    behind_prefix,
    check_request,
    check_request_ids,
    context_of,
    is_complete,
    max_new_tokens_of,
)
from megatron_dapo.engines.compiled_decoder import CompiledDecoder, compiled_for
from megatron_dapo.engines.embedded_model import (
    check_config,
    empty_model,
    has_recurrent_layers,
    weights_by_name,
    window_of,
)
from megatron_dapo.engines.kept_contexts import KeptContext, KeptContexts
from megatron_dapo.engines.prefill import Prefill
from megatron_dapo.engines.recurrent_states import RecurrentStates
from megatron_dapo.engines.row_state import COLUMN, PREFIX_SLOT, TOKEN, RowState
from megatron_dapo.engines.slot_cache import SlotCache
from megatron_dapo.engines.transformers_decoder import TransformersDecoder
from megatron_dapo.ops.bf16_products import prepare_bf16
from megatron_dapo.types import Completion, FinishReason, GenerationRequest, VersionRange

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class EmbeddedEngineSettings:
    """Sizes of the engine."""

    max_slots: int = 64  # sequences generated at the same time; more are faster until memory or cache runs out
    max_length: int = 2048  # positions of one sequence: prompt + response
    ticks_per_poll: int = 16  # tokens a row between two looks at finished responses
    prefill_tokens: int = 8192  # padded prompt tokens of one prefill forward pass, bounds its memory
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass
class _Prefix:
    """A context whose keys and values, without the last token, stand in prefix slot `index`, by one version."""

    tokens: tuple[int, ...]  # the whole context: the prompt, and for continued requests the tokens so far
    index: int = -1
    num_rows: int = 0

    @property
    def length(self) -> int:
        """Tokens in the slot."""
        return len(self.tokens) - 1


@dataclass
class _Row:
    """An active response: slot `index`; `starts` are (first response token, version) marks."""

    request: GenerationRequest
    index: int
    prefix: _Prefix
    starts: list[tuple[int, int]]


class EmbeddedEngine:
    """`RolloutEngine` over one transformers causal language model.

    The weights start as NaN: the owner of the engine writes every tensor of `parameters_by_name` and then calls
    `set_policy_version`, which refuses tensors that are not finite. Nothing is generated before that.
    """

    def __init__(
        self, config: PreTrainedConfig, settings: EmbeddedEngineSettings, lender: EmbeddedEngine | None = None
    ):
        """`lender`: an engine of the same model, whose weights this one shares."""
        config = config.get_text_config()  # the language part of a model with a vision tower
        check_config(config)
        self.settings = settings
        prepare_bf16(settings.dtype, settings.device)
        self._window = window_of(config)
        self._model: PreTrainedModel = (
            lender._model if lender else empty_model(config, settings.dtype, settings.device)
        )
        self._vocab_size = int(config.vocab_size)
        self._version = -1
        self._prefix_reuse = PrefixReuse()
        self._waiting: deque[GenerationRequest] = deque()
        self._request_ids: set[str] = set()
        self._complete: list[Completion] = []  # submitted with a prefix that needs no more
        self._rows: list[_Row] = []
        self._prefixes: list[_Prefix] = []  # indexed by slot
        self._current: dict[tuple[int, ...], _Prefix] = {}  # prefixes of the served policy version, by prompt
        self._kept = KeptContexts(settings.max_slots)  # the served policy version's
        self._allocate(config)

    @classmethod
    def from_directory(
        cls,
        model_directory: str | Path,
        settings: EmbeddedEngineSettings,
        *,
        trust_remote_code: bool = False,
        lender: EmbeddedEngine | None = None,
    ) -> EmbeddedEngine:
        """Return an engine with the architecture of a Hugging Face checkpoint. Its weights are not read: a weight sync
        brings them.
        """
        config = AutoConfig.from_pretrained(str(model_directory), trust_remote_code=trust_remote_code)
        return cls(config, settings, lender)

    def _allocate(self, config: PreTrainedConfig) -> None:
        settings, device = self.settings, self.settings.device
        # The head_dim of latent attention is that of the rotary part.
        head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        states = None
        if has_recurrent_layers(config):
            states = RecurrentStates(config, settings.max_slots, settings.dtype, device)
        self._cache = SlotCache(
            config.num_hidden_layers,
            settings.max_slots,
            config.num_key_value_heads,
            settings.max_length,
            head_dim,
            dtype=settings.dtype,
            device=device,
            states=states,
        )
        self._prefill = Prefill(self._model, self._cache, self._window, settings.prefill_tokens)
        self._state = RowState(settings.max_slots, settings.max_length, device)
        functions = compiled_for(self._model, self._cache)
        self._decoder = (
            TransformersDecoder(self._model, self._cache, self._state, self._window)
            if functions is None
            else CompiledDecoder(self._model, self._cache, self._state, functions)
        )

    # Weights

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        """Destination tensors by Hugging Face name, to be overwritten in place. A tied head is the embedding and has no
        separate name.
        """
        return weights_by_name(self._model)

    @property
    def policy_version(self) -> int:
        return self._version

    def set_policy_version(self, version: int) -> None:
        """Declare that the weights now in place are policy `version`; ValueError names tensors that are not finite.

        Running responses continue with the new weights (their earlier keys and values stay): their tokens from here on
        belong to the new version. No later request shares the prefill of the old one.
        """
        broken = [name for name, tensor in self.parameters_by_name().items() if not bool(torch.isfinite(tensor).all())]
        if broken:
            raise ValueError(
                f"policy version {version}: {len(broken)} of {len(self.parameters_by_name())} engine tensors "
                f"are not finite ({', '.join(broken[:4])}{', ...' if len(broken) > 4 else ''}): "
                "the weight synchronization left them out or the policy has diverged"
            )
        if version != self._version:
            self._current.clear()
            self._kept.clear()
            # Not strict: columns after the last row are free slots.
            for row, num_tokens in zip(self._rows, self._state.integers[COLUMN].tolist(), strict=False):
                row.starts.append((num_tokens, version))
        self._version = version

    # RolloutEngine

    @property
    def num_unfinished(self) -> int:
        return len(self._request_ids)

    @property
    def prefix_reuse(self) -> PrefixReuse:
        return self._prefix_reuse

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError if this engine could never serve `request`."""
        check_request(request, max_length=self.settings.max_length, vocab_size=self._vocab_size)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, first in first out. All are checked before any is queued."""
        check_request_ids(requests, self._request_ids)
        for request in requests:
            self.check(request)
        self._request_ids.update(request.request_id for request in requests)
        for request in requests:
            if is_complete(request):
                self._complete.append(aborted(request))
            else:
                self._waiting.append(request)

    def poll(self) -> list[Completion]:
        return self.advance(self.settings.ticks_per_poll)

    @torch.inference_mode()
    def advance(self, num_ticks: int) -> list[Completion]:
        """At most `num_ticks` tokens for every active row; what finished, in the order it did (then by slot)."""
        if self._version < 0 and self._request_ids:
            raise RuntimeError(
                "the engine has no weights yet: synchronize them and call set_policy_version before generating"
            )
        completions = self._take_complete()
        for _ in range(num_ticks):
            self._admit()
            if not self._rows:
                break
            try:
                finished = self._decoder.step()
            except FloatingPointError as error:
                raise RuntimeError(f"policy version {self._version} gave {error}: it has diverged") from error
            if finished is not None:
                completions.extend(self._release(finished))
        return completions

    @torch.inference_mode()
    def abort(self) -> list[Completion]:
        completions = self._take_complete()
        completions += [self._completion(row, "abort") for row in self._rows]
        completions += [aborted(request) for request in self._waiting]
        self._rows.clear()
        self._waiting.clear()
        self._prefixes.clear()
        self._current.clear()
        self._kept.clear()
        self._request_ids.clear()
        return completions

    def _take_complete(self) -> list[Completion]:
        completions, self._complete = self._complete, []
        self._request_ids.difference_update(completion.request_id for completion in completions)
        return completions

    # Finishing

    def _release(self, finished: torch.Tensor) -> list[Completion]:
        """Take finished rows out and move the last active rows into their slots."""
        indices = finished.nonzero().squeeze(-1).tolist()
        completions = [self._completion(self._rows[index], self._reason(index)) for index in indices]
        for index in indices:
            row = self._rows[index]
            self._request_ids.discard(row.request.request_id)
            self._keep(row)
            row.prefix.num_rows -= 1
        self._compact(set(indices))
        self._drop_prefixes()
        self._refresh()
        return completions

    def _keep(self, row: _Row) -> None:
        """Keep the context of a conversation for its next turn, unless an earlier version computed some of it."""
        if not row.request.affinity or len(row.starts) > 1:
            return
        num_tokens = int(self._state.integers[COLUMN, row.index])
        tokens = row.prefix.tokens + tuple(self._state.tokens[row.index, :num_tokens].tolist())
        stored = self._cache.context(row.prefix.index, row.prefix.length, row.index, num_tokens)
        states = self._cache.states.of_row(row.index) if self._cache.states is not None else ()
        self._kept.keep(row.request.affinity[0], KeptContext(tokens, stored, states))

    def _reason(self, index: int) -> FinishReason:
        """ "stop" if the last token is a stop id, also at the length limit."""
        last = int(self._state.integers[TOKEN, index])
        return "stop" if last in self._rows[index].request.sampling.stop_token_ids else "length"

    def _completion(self, row: _Row, reason: FinishReason) -> Completion:
        num_tokens = int(self._state.integers[COLUMN, row.index])
        new = Completion(
            request_id=row.request.request_id,
            token_ids=self._state.tokens[row.index, :num_tokens].to("cpu", torch.int32, copy=True).numpy(),
            logprobs=self._state.logprobs[row.index, :num_tokens].to("cpu", copy=True).numpy(),
            finish_reason=reason,
            versions=_version_ranges(row.starts, num_tokens),
            support=self._state.support(row.index),
        )
        return behind_prefix(row.request, new)

    def _compact(self, removed: set[int]) -> None:
        num_left = len(self._rows) - len(removed)
        holes = sorted(index for index in removed if index < num_left)
        # Rows of the slots to be given up, as many as there are holes.
        movers = [index for index in range(num_left, len(self._rows)) if index not in removed]
        if holes:
            self._state.move(holes, movers)
        for hole, mover in zip(holes, movers, strict=True):
            self._cache.move_response(mover, hole, int(self._state.integers[COLUMN, hole]))
            self._rows[hole] = self._rows[mover]
            self._rows[hole].index = hole
        del self._rows[num_left:]

    def _drop_prefixes(self) -> None:
        """Free the slots of prefixes without rows by moving the last ones into them."""
        for prefix in [prefix for prefix in self._prefixes if not prefix.num_rows]:
            if self._current.get(prefix.tokens) is prefix:
                del self._current[prefix.tokens]
            last = self._prefixes.pop()
            if last is not prefix:  # it may be free as well: then it is moved over in its own turn
                self._cache.move_prefix(last.index, prefix.index, last.length)
                last.index = prefix.index
                self._prefixes[last.index] = last

    def _refresh(self) -> None:
        """Tell the decoder about the set of active rows."""
        if not self._rows:
            return
        prefix_slots = torch.tensor([row.prefix.index for row in self._rows], device=self.settings.device)
        self._state.integers[PREFIX_SLOT, : len(self._rows)] = prefix_slots
        self._decoder.refresh(len(self._rows), [prefix.length for prefix in self._prefixes])

    # Admission

    def _admit(self) -> None:
        """Give free slots to waiting requests."""
        num_new = min(len(self._waiting), self.settings.max_slots - len(self._rows))
        if not num_new:
            return
        new: list[_Row] = []
        prefixes: list[_Prefix] = []
        kept: dict[tuple[int, ...], KeptContext] = {}
        for offset in range(num_new):
            request = self._waiting.popleft()
            context = context_of(request)
            prefix = self._current.get(context)
            if request.prefix is not None:
                self._prefix_reuse += PrefixReuse(len(context), prefix.length if prefix is not None else 0)
            if prefix is None:
                prefix = self._current[context] = _Prefix(context)
                prefixes.append(prefix)
                if request.affinity and (last := self._kept.take(request.affinity[0], context)) is not None:
                    kept[context] = last
            prefix.num_rows += 1
            new.append(_Row(request, len(self._rows) + offset, prefix, [(0, self._version)]))
        requests = [row.request for row in new]
        self._state.start(
            new[0].index,
            [row.prefix.tokens for row in new],
            [max_new_tokens_of(request) for request in requests],
            [request.seed for request in requests],
            [request.sampling for request in requests],
        )
        self._add_prefixes(prefixes, kept)
        if self._cache.states is not None:
            self._cache.states.start_rows(new[0].index, [row.prefix.index for row in new])
        self._rows.extend(new)
        self._refresh()

    def _add_prefixes(self, prefixes: list[_Prefix], kept: Mapping[tuple[int, ...], KeptContext]) -> None:
        """Give new prefixes their slots and fill them; those of similar length are computed together."""
        if not prefixes:
            return
        first = len(self._prefixes)
        self._prefixes += sorted(prefixes, key=lambda prefix: (prefix.tokens in kept, -prefix.length))
        new = self._prefixes[first:]
        for index, prefix in enumerate(new, first):
            prefix.index = index
        self._cache.reserve_prefixes(len(self._prefixes), max(prefix.length for prefix in new))
        self._prefill.fill(first, [prefix.tokens for prefix in new], [kept.get(prefix.tokens) for prefix in new])


def _version_ranges(starts: list[tuple[int, int]], num_tokens: int) -> tuple[VersionRange, ...]:
    """Marks (first token, version) as ranges that cover [0, num_tokens); versions that gave no token are left out."""
    ends = [start for start, _ in starts[1:]] + [num_tokens]
    return tuple(
        VersionRange(start, end, version) for (start, version), end in zip(starts, ends, strict=True) if end > start
    )
