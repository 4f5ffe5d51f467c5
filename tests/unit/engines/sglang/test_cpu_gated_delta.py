"""The operators that SGLang calls on a CPU: pieces of a sequence continue in the caches, and split as checkpoints do."""

from __future__ import annotations

import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_dapo.engines.sglang import cpu_gated_delta as ops

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 4, 5, 3, 4
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
SLOTS, LENGTH = 4, 70


class Net:
    """One layer with its caches, called as SGLang does."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.weight = torch.randn(2 * KEYS + VALUES, KERNEL, generator=draw)
        self.a_log, self.dt_bias = (torch.randn(VALUE_HEADS, generator=draw) for _ in range(2))
        self.conv = torch.full((SLOTS, 2 * KEYS + VALUES, KERNEL - 1), 7.0)
        self.states = torch.full((SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM), 7.0)

    def heads(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        parts = mixed.split((KEYS, KEYS, VALUES), dim=1)
        counts = (KEY_HEADS, KEY_HEADS, VALUE_HEADS)
        return [part.unflatten(1, (count, -1))[None] for part, count in zip(parts, counts, strict=True)]

    def extend(self, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slot: int, continues: bool) -> torch.Tensor:
        index, bounds = torch.tensor([slot]), torch.tensor([0, len(mixed)])
        if not continues:
            self.states[slot] = 0  # SGLang clears a slot that it hands out
        out = ops.causal_conv1d_fn_cpu(
            mixed.T,
            self.weight,
            None,
            conv_states=self.conv,
            has_initial_state=torch.tensor([continues]),
            cache_indices=index,
            query_start_loc=bounds,
        )
        decay, beta = ops.fused_gdn_gating_cpu(self.a_log, a, b, self.dt_bias)
        states = {"initial_state": self.states, "initial_state_indices": index, "cu_seqlens": bounds}
        return ops.chunk_gated_delta_rule_cpu(*self.heads(out.T), decay, beta, **states)[0][0]

    def decode(self, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slot: int) -> torch.Tensor:
        index = torch.tensor([slot])
        out = ops.causal_conv1d_update_cpu(mixed, self.conv, self.weight, conv_state_indices=index)
        q, k, v = self.heads(out)
        return ops.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            initial_state_source=self.states,
            initial_state_indices=index,
        )[0]


def test_pieces_and_single_tokens_continue_a_sequence_in_its_slot() -> None:
    draw = torch.Generator().manual_seed(4)
    mixed = torch.randn(LENGTH, 2 * KEYS + VALUES, generator=draw)
    a, b = (torch.randn(LENGTH, VALUE_HEADS, generator=draw) for _ in range(2))
    whole = Net().extend(mixed, a, b, slot=0, continues=False)
    net = Net()
    pieces = [net.extend(mixed[:5], a[:5], b[:5], slot=2, continues=False)]
    pieces.append(net.extend(mixed[5:66], a[5:66], b[5:66], slot=2, continues=True))
    pieces += [net.decode(mixed[t : t + 1], a[t : t + 1], b[t : t + 1], slot=2) for t in range(66, LENGTH)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=2e-6)
    others = [0, 1, 3]
    assert (net.conv[others] == 7).all() and (net.states[others] == 7).all()


def test_fused_projections_split_as_in_transformers() -> None:
    config = Qwen3NextConfig(
        hidden_size=8,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
    )
    layer, draw = Qwen3NextGatedDeltaNet(config, 0), torch.Generator().manual_seed(5)
    qkvz, ba = (torch.randn(6, width, generator=draw) for width in (2 * (KEYS + VALUES), 2 * VALUE_HEADS))
    mixed, z, b, a = ops.fused_qkvzba_split_reshape_cat_cpu(qkvz, ba, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    query, key, value, *others = layer.fix_query_key_value_ordering(qkvz[None], ba[None])
    assert torch.equal(mixed, torch.cat([part[0].flatten(1) for part in (query, key, value)], dim=1))
    assert all(torch.equal(ours, theirs[0]) for ours, theirs in zip((z, b, a), others, strict=True))


def test_gates_norms_and_the_shared_expert() -> None:
    draw = torch.Generator().manual_seed(6)
    q_gate, k = torch.randn(3, 2 * 2 * 8, generator=draw), torch.randn(3, 8, generator=draw)
    weight = 0.1 * torch.randn(8, generator=draw)
    q, key, gate = ops.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, weight, weight, 1e-6, 8, 2)
    heads = q_gate.view(3, 2, 2, 8)
    normed = heads[:, :, 0] / (heads[:, :, 0].square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)
    torch.testing.assert_close(q.view(3, 2, 8), normed)
    assert torch.equal(gate.view(3, 2, 8), heads[:, :, 1]) and key.shape == (3, 8)
    x = torch.ones(3, 16)
    ops.fused_sigmoid_mul_cpu(x, gate.view(3, 16))
    torch.testing.assert_close(x, gate.view(3, 16).sigmoid())
    output, shared = torch.ones(3, 8), torch.randn(3, 8, generator=draw)
    ops.fused_gate_sigmoid_mul_add(k, weight, shared, output)
    torch.testing.assert_close(output, 1 + (k @ weight).sigmoid()[:, None] * shared)
