"""Causal attention over packed sequences with torch's own kernels, rotary embedding included.

Tokens arrive packed, [P, heads, head_dim]. One call of torch's flash attention takes all sequences (`flash_attention`), on a
GPU and on request. One call of `scaled_dot_product_attention` per sequence is slow for many short ones, so
sequences of similar length are gathered into right-padded batches [n, longest, heads, head_dim] and scattered back.
Causality already keeps real queries from the padding on the right, so no mask is needed unless a window hides the start
of a sequence.

Under context parallelism each sequence is cut into 2C equal chunks and rank r holds chunks r and 2C - 1 - r (Transformer
Engine's convention: every rank has the same causal work). Queries stay on their rank, keys and values are gathered from
all ranks, and a mask hides the keys in a query's future.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_dapo.megatron.experts import EngineRouting
from megatron_dapo.ops.sinks import attend_with_sinks

# A batch may mix lengths L with longest - L up to max(SLACK_TOKENS, SLACK_FRACTION * longest): a kernel call costs about as
# much as that much padding.
SLACK_TOKENS = 32
SLACK_FRACTION = 0.25

Made = TypeVar("Made")
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY = (8, 0)
MAX_FLASH_HEAD_DIM = 256


@dataclass(frozen=True)
class PaddedBatch:
    """One padded batch: its sizes and, under context parallelism or with a window, the mask [n or 1, 1, queries, keys] of
    visible keys."""

    num_sequences: int
    num_queries: int
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class GatherIndex:
    """Maps between packed tokens and padded slots. Padding slots point at token 0."""

    tokens: torch.Tensor  # [slots] int64: token in a slot
    slots: torch.Tensor  # [tokens] int64: slot of a token
    padding: torch.Tensor  # [pads] int64: slots without a token


@dataclass(frozen=True)
class AttentionPlan:
    """Arrangement of packed tokens in padded batches. An index is None if it would change nothing."""

    batches: tuple[PaddedBatch, ...]
    queries: GatherIndex | None
    keys: GatherIndex | None


def batch_sequences(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of the sequences in each padded batch, longest first, with waste bounded by the slack."""
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    for index in order:
        longest = lengths[batches[-1][0]] if batches else -1
        if longest - lengths[index] > max(SLACK_TOKENS, SLACK_FRACTION * longest) or not batches:
            batches.append([])
        batches[-1].append(index)
    return batches


def plan_attention(
    cu_seqlens: torch.Tensor, context_rank: int, context_size: int, window: int | None = None
) -> AttentionPlan:
    """Arrange the sequences delimited by the unsliced `cu_seqlens` [N + 1], for rank `context_rank`. A token sees the
    last `window` tokens, itself included (None: all)."""
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths = (bounds[1:] - bounds[:-1]).tolist()
    batches, query_rows, key_rows = [], [], []
    for members in batch_sequences(lengths):
        starts, sizes = bounds[:-1][members], torch.tensor([lengths[index] for index in members])
        query_slots, query_positions = _local_slots(starts, sizes, context_rank, context_size)
        key_slots = _global_slots(starts, sizes, context_size, int(bounds[-1]) // context_size)
        mask, num_keys = None, key_slots.size(1)
        if context_size > 1 or (window is not None and window < num_keys):
            # Without context parallelism all sequences of a batch use the positions of the longest.
            positions = query_positions if context_size > 1 else torch.arange(num_keys)[None]
            distance = positions[:, :, None] - torch.arange(num_keys)
            mask = distance >= 0
            if window is not None and window < num_keys:
                mask &= distance < window
            mask = mask[:, None].to(cu_seqlens.device)
        batches.append(PaddedBatch(len(members), query_slots.size(1), key_slots.size(1), mask))
        query_rows.append(query_slots.flatten())
        key_rows.append(key_slots.flatten())
    num_tokens = int(bounds[-1])
    queries = _gather_index(torch.cat(query_rows), num_tokens // context_size, cu_seqlens.device)
    keys = queries if context_size == 1 else _gather_index(torch.cat(key_rows), num_tokens, cu_seqlens.device)
    return AttentionPlan(tuple(batches), queries, keys)


def _local_slots(
    starts: torch.Tensor, sizes: torch.Tensor, rank: int, context_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's token in each query slot (padding: -1) and its position in its sequence, both [n, longest]."""
    if context_size == 1:
        offset = torch.arange(int(sizes.max()))
        real = offset < sizes[:, None]
        return torch.where(real, starts[:, None] + offset, -1), torch.where(real, offset, 0)
    chunk = (sizes // (2 * context_size))[:, None]
    offset = torch.arange(2 * int(chunk.max()))
    real = offset < 2 * chunk
    position = torch.where(offset < chunk, rank * chunk + offset, (2 * context_size - 2 - rank) * chunk + offset)
    return torch.where(real, starts[:, None] // context_size + offset, -1), torch.where(real, position, 0)


def _global_slots(starts: torch.Tensor, sizes: torch.Tensor, context_size: int, num_local: int) -> torch.Tensor:
    """Return the token in each key slot [n, longest] (padding: -1); tokens are the ranks' chunks in rank order."""
    position = torch.arange(int(sizes.max()))
    real = position < sizes[:, None]
    if context_size == 1:
        return torch.where(real, starts[:, None] + position, -1)
    chunk = (sizes // (2 * context_size))[:, None]
    index = position // chunk
    second = index >= context_size
    owner = torch.where(second, 2 * context_size - 1 - index, index)
    local = starts[:, None] // context_size + position % chunk + second * chunk
    return torch.where(real, owner * num_local + local, -1)


def _gather_index(tokens: torch.Tensor, num_tokens: int, device: torch.device) -> GatherIndex | None:
    real = tokens >= 0
    slots = torch.empty(num_tokens, dtype=torch.int64)
    slots[tokens[real]] = torch.arange(tokens.numel())[real]
    if tokens.numel() == num_tokens and torch.equal(slots, torch.arange(num_tokens)):
        return None
    padding = (~real).nonzero().flatten()
    return GatherIndex(tokens.clamp(min=0).to(device), slots.to(device), padding.to(device))


class _Pad(torch.autograd.Function):
    """Map [tokens, ...] to [slots, ...]."""

    # Padding slots repeat token 0. No real query sees them: they are on the right of a causal mask.

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, index: GatherIndex) -> torch.Tensor:
        ctx.index = index
        return packed.index_select(0, index.tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.index.slots), None


class _Unpad(torch.autograd.Function):
    """Map [slots, ...] to [tokens, ...]; padding slots get no gradient."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, index: GatherIndex) -> torch.Tensor:
        ctx.index = index
        return padded.index_select(0, index.slots)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.index.tokens).index_fill_(0, ctx.index.padding, 0), None


class _GatherRanks(torch.autograd.Function):
    """Map [P, ...] to [ranks * P, ...] in rank order; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = local.new_empty(group.size() * local.size(0), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        local = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, grad.contiguous(), group=ctx.group)
        return local, None


class _Rotate(torch.autograd.Function):
    """Rotation x * cos + rotate_half(x) * sin over the last dim (arXiv:2104.09864, eq. 34); its two halves are the pairs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, 1), None, None


def rotate_first(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dims of x [P, heads, head_dim], as many as there are angles; the others carry no position."""
    size = cos.size(-1)
    if size == x.size(-1):
        return _Rotate.apply(x, cos, sin)
    return torch.cat((_Rotate.apply(x[..., :size], cos, sin), x[..., size:]), dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate by (cos, sin), or for sign = 1 by the transpose."""
    half = x.size(-1) // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=-sign)
    return out


@dataclass
class PackedSequences(PackedSeqParams):
    """A packed micro-batch in megatron-core's form, plus what our layers compute once and share.

    The attention plan and the rotary tables are made by the first layer that asks. Transformer Engine's layers never
    ask: they only read `cu_seqlens`.
    """

    context_rank: int = 0
    context_size: int = 1
    position_ids: torch.Tensor | None = None  # [P_local]
    routing: EngineRouting | None = None  # routes of this rank's tokens, in models that replay them
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict, init=False)  # keyed by window
    _rotary: dict[bool, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)  # is_local -> table
    _shared: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def once(self, key: Hashable, make: Callable[[PackedSequences], Made]) -> Made:
        """Return `make(self)`, computed by the first layer that asks."""
        if key not in self._shared:
            self._shared[key] = make(self)
        return self._shared[key]

    def attention_plan(self, window: int | None = None) -> AttentionPlan:
        """Return the padded batches in which our attention computes this rank's queries."""
        # The masks of a plan are large: 254 MB for 22 K tokens under context parallel 2.
        if window not in self._plans:
            self._plans[window] = plan_attention(self.cu_seqlens_q, self.context_rank, self.context_size, window)
        return self._plans[window]

    def rotary_tables(
        self, angles: torch.Tensor, dtype: torch.dtype, is_local: bool = False, factor: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, times a factor, of every token, both [P_local, 1, head_dim], from every position's angles
        [longest, 1, 1, head_dim] in global or in local layers."""
        if is_local not in self._rotary:
            assert self.position_ids is not None, "packed sequences without position_ids"
            table = angles[:, 0]
            # Round after cos and sin: an angle of 30,000 radians in bf16 has no correct digit.
            tables = (table.cos() * factor, table.sin() * factor)
            cos, sin = (part.to(dtype).index_select(0, self.position_ids) for part in tables)
            self._rotary[is_local] = cos, sin
        return self._rotary[is_local]


def own_window(config: Any, layer_number: int) -> int | None:
    """Return how many tokens a token of this layer sees, itself included; None: all before it."""
    is_local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return config.window_size[0] + 1 if is_local else None


def angles_of(angles: torch.Tensor, config: Any, is_local: bool) -> torch.Tensor:
    """Select a layer's rotary angles [longest, 1, 1, head_dim] from those of all layers. In a model with local layers,
    the latter are [longest, 1, 1, 2 head_dim], whose halves are the angles of global and of local layers."""
    if config.window_size is None:
        return angles
    return angles.unflatten(-1, (2, 2, -1))[..., int(is_local), :].flatten(-2)


def check_flash_attention(dtype: torch.dtype, head_dim: int, context_size: int) -> None:
    """Raise ValueError with the reason if torch's flash attention over packed sequences cannot compute this here."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        obstacle = f"torch is {torch.__version__}, and packed sequences need 2.10"
    elif not torch.cuda.is_available():
        obstacle = "there is no CUDA device"
    elif torch.cuda.get_device_capability() < FLASH_CAPABILITY:
        obstacle = (
            f"the device has compute capability {torch.cuda.get_device_capability()}, it needs {FLASH_CAPABILITY}"
        )
    elif dtype not in FLASH_DTYPES:
        obstacle = f"the model is in {dtype}, it needs bfloat16 or float16"
    elif head_dim % 8 or head_dim > MAX_FLASH_HEAD_DIM:
        obstacle = f"heads have {head_dim} dimensions, it needs a multiple of 8 up to {MAX_FLASH_HEAD_DIM}"
    elif context_size > 1:
        obstacle = f"parallel.cp_size is {context_size}, it needs 1"
    else:
        return
    raise ValueError(f'model.attention_implementation = "flash" cannot run: {obstacle}; set "auto"')


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedSequences,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend within each sequence (FlashAttention-2, arXiv:2307.08691): query [P, heads, head_dim], key and value [P, groups,
    head_dim] -> [P, heads * head_dim]. Its backward pass is bit for bit reproducible if torch's deterministic
    algorithms are on."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    seen = (-1 if window is None else window - 1, 0)
    # torch 2.10 and 2.11 accept grouped queries without this argument.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=seen, **grouped)
    assert isinstance(out, torch.Tensor), "varlen_attn returned more than the output"
    return out.flatten(1)


class PackedAttention(torch.nn.Module):
    """Core attention for packed sequences only, with grouped queries and no dropout."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.window = own_window(config, layer_number)
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.is_flash = config.attention_implementation == "flash"
        # Under megatron-core's name: a learned logit of each head of this rank.
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            settings = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, **settings))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Map query [P, heads, head_dim], key and value [P, groups, head_dim] to [P, heads * head_dim]."""
        assert isinstance(packed_seq_params, PackedSequences), "attention needs packed sequences"
        if self.is_flash:
            return flash_attention(query, key, value, packed_seq_params, self.window, self.scale)
        plan = packed_seq_params.attention_plan(self.window)
        if self.context_group is not None:
            # One collective gathers both.
            key, value = _GatherRanks.apply(torch.cat((key, value), dim=1), self.context_group).chunk(2, dim=1)
        padded_query = query if plan.queries is None else _Pad.apply(query, plan.queries)
        padded_key, padded_value = (part if plan.keys is None else _Pad.apply(part, plan.keys) for part in (key, value))
        padded = self._attend(padded_query, padded_key, padded_value, plan.batches)
        return padded if plan.queries is None else _Unpad.apply(padded, plan.queries)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batches: tuple[PaddedBatch, ...]
    ) -> torch.Tensor:
        query_sizes = [batch.num_sequences * batch.num_queries for batch in batches]
        key_sizes = [batch.num_sequences * batch.num_keys for batch in batches]
        outputs = []
        for batch, q, k, v in zip(
            batches, query.split(query_sizes), key.split(key_sizes), value.split(key_sizes), strict=True
        ):
            q, k, v = (part.unflatten(0, (batch.num_sequences, -1)).transpose(1, 2) for part in (q, k, v))
            if self.softmax_offset is not None:
                out = attend_with_sinks(q, k, v, self.softmax_offset, batch.mask, self.scale)
            else:
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=batch.mask,
                    is_causal=batch.mask is None,
                    scale=self.scale,
                    enable_gqa=q.size(1) != k.size(1),
                )
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class PackedSelfAttention(SelfAttention):
    """megatron-core's self-attention for packed sequences, with rotary tables shared by all layers."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden_states [P or its sequence-parallel slice, 1, h] to the same shape, and a bias (None)."""
        assert packed_seq_params is not None and rotary_pos_emb is not None, (
            "packed self-attention needs packed sequences and rotary angles"
        )
        gated = {"output_gate": True} if self.config.attention_output_gate else {}
        projected = self.get_query_key_value_tensors(hidden_states, **gated)
        query, key, value, *gate = (part.squeeze(1) for part in projected)
        is_local = own_window(self.config, self.layer_number) is not None
        angles = angles_of(rotary_pos_emb, self.config, is_local)
        cos, sin = packed_seq_params.rotary_tables(angles, query.dtype, is_local)
        query, key = rotate_first(query, cos, sin), rotate_first(key, cos, sin)
        if self.checkpoint_core_attention and self.training:
            context = self._checkpointed_attention_forward(query, key, value, None, packed_seq_params=packed_seq_params)
        else:
            context = self.core_attention(query, key, value, packed_seq_params=packed_seq_params)
        if gate:
            context = context * self._gate_of_rank(gate[0], query.size(1)).float().sigmoid().type_as(context)
        return self.linear_proj(context.unsqueeze(1))

    def _gate_of_rank(self, gate: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Select this rank's heads [P, num_heads * head_dim] from those [P, heads, head_dim] of its key-value heads."""
        # With more tensor ranks than key-value heads, megatron-core cuts the query, but not the gate.
        part = self.pg_collection.tp.rank() % (gate.size(1) // num_heads)
        return gate.narrow(1, part * num_heads, num_heads).flatten(1)


class LocalGlobalSelfAttention(SelfAttention):
    """megatron-core's self-attention in a model whose local layers have separate rotary angles."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden_states [P or its sequence-parallel slice, 1, h] to the same shape, and a bias (None)."""
        assert rotary_pos_emb is not None, "a model with local layers has rotary angles"
        is_local = own_window(self.config, self.layer_number) is not None
        angles = angles_of(rotary_pos_emb, self.config, is_local)
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=angles, **others)
