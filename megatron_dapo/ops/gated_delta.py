"""Gated delta rule and causal convolution over packed sequences, in torch.

A head's state S [K, V] maps keys to values. A token lets it decay by a_t and corrects the value that it returns for the
token's key (Gated DeltaNet, arXiv:2412.06464, eq. 10, transposed):

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t / sqrt(K)

`gated_delta_rule` computes it in chunks (section 3.3): products within a chunk are made for all chunks of all sequences at
once, and only the state passes from chunk to chunk. With G the sum of log a from the chunk's start, inclusive, and S its
first state,

    (I + strictly lower(b_i k_i.k_j exp(G_i - G_j))) [U W] = [b v, b exp(G) k],    V' = U - W S
    O = exp(G) Q S + lower(q_i.k_j exp(G_i - G_j)) V',    S' = exp(G_end) S + (exp(G_end - G) K)^T V'

No exponent is positive, so nothing overflows. Sequences share no state: one token's numbers depend only on the tokens before
it in its sequence. Sums are in fp32 (those of decays in fp64), or in fp64 for inputs in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_dapo.models.parts.gated_delta import CHUNK

NORM_EPS = 1e-6  # added to a query's and key's sum of squares


@dataclass(frozen=True)
class ChunkPlan:
    """Arrangement of packed sequences in zero-padded chunks, first chunks first, those of the longest sequence first."""

    chunk: int  # tokens of a chunk
    slots: torch.Tensor  # [T] int64: slot of a token in [num_chunks * chunk]
    active: tuple[int, ...]  # sequences that have a first, second, ... chunk
    order: torch.Tensor  # [N] int64: sequences by decreasing number of chunks
    ranks: torch.Tensor  # [N] int64: index of a sequence in `order`


@dataclass(frozen=True)
class ConvolutionPlan:
    """Arrangement of packed sequences in one row of tokens, with `context` rows before each sequence."""

    context: int  # tokens that a token sees before itself
    num_rows: int
    token_rows: torch.Tensor  # [T] int64
    context_rows: torch.Tensor  # [N, context] int64
    last_rows: torch.Tensor  # [N, context] int64: the last rows of each sequence


def plan_chunks(cu_seqlens: torch.Tensor, chunk: int = CHUNK) -> ChunkPlan:
    """Arrange the sequences delimited by `cu_seqlens` [N + 1] in chunks; a sequence may be empty."""
    lengths, sequence, position = _tokens(cu_seqlens)
    counts = (lengths + chunk - 1) // chunk
    order = torch.argsort(counts, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order))
    longest = int(counts.max()) if len(counts) else 0
    active = (counts[None] > torch.arange(longest)[:, None]).sum(1)
    row = (active.cumsum(0) - active)[position // chunk] + ranks[sequence]
    slots = row * chunk + position % chunk
    device = cu_seqlens.device
    return ChunkPlan(chunk, slots.to(device), tuple(active.tolist()), order.to(device), ranks.to(device))


def plan_convolution(cu_seqlens: torch.Tensor, kernel_size: int) -> ConvolutionPlan:
    """Arrange the sequences delimited by `cu_seqlens` [N + 1] for a convolution over `kernel_size` tokens."""
    lengths, sequence, position = _tokens(cu_seqlens)
    context, device = kernel_size - 1, cu_seqlens.device
    starts = (lengths + context).cumsum(0) - lengths - context
    first = starts[:, None] + torch.arange(context)
    rows = starts[sequence] + context + position
    num_rows = len(rows) + first.numel()
    last = first + lengths[:, None]
    return ConvolutionPlan(context, num_rows, rows.to(device), first.to(device), last.to(device))


def _tokens(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each sequence's length [N], and each token's sequence and its position there [T], on the CPU."""
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths = bounds[1:] - bounds[:-1]
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return lengths, sequence, torch.arange(len(sequence)) - bounds[:-1][sequence]


def causal_convolution(
    packed: torch.Tensor, weight: torch.Tensor, plan: ConvolutionPlan, context: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel over a token and those before it in its sequence, and apply SiLU.

    packed [T, channels], weight [channels, kernel_size] (the last column is the token's own), context [N, kernel_size - 1,
    channels]: what precedes each sequence (None: zeros) -> [T, channels], and the context that would follow each sequence.
    """
    wide = _accumulation_type(packed)
    rows = packed.new_zeros(plan.num_rows, packed.size(1)).index_copy(0, plan.token_rows, packed)
    if context is not None:
        rows = rows.index_copy(0, plan.context_rows.flatten(), context.flatten(0, 1).type_as(packed))
    length = plan.num_rows - plan.context
    terms = [rows[shift : shift + length] * weight[:, shift].to(wide) for shift in range(plan.context + 1)]
    # Row i of the sum belongs to row i + context; windows that begin in an earlier sequence are not selected.
    convolved = sum(terms[1:], terms[0]).index_select(0, plan.token_rows - plan.context)
    return F.silu(convolved).type_as(packed), rows[plan.last_rows]


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    plan: ChunkPlan,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule with queries and keys of norm 1 to packed sequences.

    query and key [T, groups, K], value [T, heads, V], log_decay (log a, at most 0) and beta [T, heads], state [N, heads, K,
    V] before each sequence (None: zeros) -> outputs [T, heads, V] in value's type, and the state after each sequence.
    heads is a multiple of groups, and head h has the keys of group h // (heads / groups).
    """
    wide, num_heads = _accumulation_type(value), value.size(1)
    key_size, value_size, num_sequences = key.size(2), value.size(2), len(plan.order)
    if state is None:
        state = value.new_zeros(num_sequences, num_heads, key_size, value_size, dtype=wide)
    if not plan.active:
        return torch.zeros_like(value), state.to(wide)
    parts = _unit(query.to(wide)) * key_size**-0.5, _unit(key.to(wide))
    q, k = (_in_chunks(part, plan).repeat_interleave(num_heads // part.size(1), dim=1) for part in parts)
    v, log_a, b = (_in_chunks(part.to(wide), plan) for part in (value, log_decay, beta))
    out, final = _chunk_outputs(q, k, v, log_a, b, plan.active, state.to(wide).index_select(0, plan.order))
    tokens = out.transpose(1, 2).flatten(0, 1).index_select(0, plan.slots)
    return tokens.type_as(value), final.index_select(0, plan.ranks)


def _in_chunks(packed: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Map [T, heads, ...] to [chunks, heads, tokens of a chunk, ...]; an empty slot has zeros and changes no state."""
    padded = packed.new_zeros(sum(plan.active) * plan.chunk, *packed.shape[1:]).index_copy(0, plan.slots, packed)
    return padded.unflatten(0, (-1, plan.chunk)).transpose(1, 2)


def _chunk_outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_a: torch.Tensor,
    b: torch.Tensor,
    active: tuple[int, ...],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [chunks, heads, C, V] and the sequences' last states, in the order of the first ones."""
    # A difference of sums in fp32 would lose the small decays after a token with a large one.
    total = log_a.double().cumsum(-1)
    lower = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).type_as(q).masked_fill(~lower, float("-inf")).exp()
    from_start = total.exp().type_as(q)[..., None]
    # The diagonal counts as 1 in the solution.
    corrections = (b[..., None] * (k @ k.mT) * decay).tril(-1)
    right = torch.cat((v, k * from_start), dim=-1) * b[..., None]
    solved = torch.linalg.solve_triangular(corrections, right, upper=False, unitriangular=True)
    u, w = solved.split((v.size(-1), k.size(-1)), dim=-1)
    scores, from_state = (q @ k.mT) * decay, q * from_start
    to_end, whole = k * decay[..., -1, :, None], from_start[..., -1:, :]
    outputs, finals = [], []
    for step, of_step in enumerate(zip(*(part.split(active) for part in (u, w, scores, from_state, to_end, whole)))):
        u_i, w_i, scores_i, from_state_i, to_end_i, whole_i = of_step
        if active[step] < len(state):
            finals.append(state[active[step] :])
            state = state[: active[step]]
        corrected = u_i - w_i @ state
        outputs.append(from_state_i @ state + scores_i @ corrected)
        state = whole_i * state + to_end_i.mT @ corrected
    return torch.cat(outputs), torch.cat([state, *reversed(finals)])


def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule of `gated_delta_rule` to one token of each of B sequences.

    query and key [B, groups, K], value [B, heads, V], log_decay and beta [B, heads], state [B, heads, K, V] -> output [B,
    heads, V] and the next state.
    """
    wide, num_heads = _accumulation_type(value), value.size(1)
    parts = _unit(query.to(wide)) * key.size(2) ** -0.5, _unit(key.to(wide))
    q, k = (part.repeat_interleave(num_heads // part.size(1), dim=1)[..., None] for part in parts)
    state = state.to(wide) * log_decay.to(wide).exp()[..., None, None]
    correction = (value.to(wide) - (state * k).sum(2)) * beta.to(wide)[..., None]
    state = state + k * correction[..., None, :]
    return (state * q).sum(2).type_as(value), state


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Scale vectors in the last dim to norm 1."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPS)


def _accumulation_type(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
