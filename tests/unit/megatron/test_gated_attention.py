"""Attention with an output gate, partial rotary embedding and zero-centered norms against transformers' Qwen3.5."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5TextRotaryEmbedding

from megatron_dapo.megatron.attention import PackedSelfAttention, PackedSequences
from megatron_dapo.megatron.layer_spec import own_layer_spec
from megatron_dapo.megatron.model_config import GPTConfig
from megatron_dapo.megatron.parallel_state import initialize_parallel_state
from megatron_dapo.parallel.layout import ParallelLayout

HIDDEN, HEADS, GROUPS, HEAD_DIM = 24, 6, 2, 16
LENGTHS = (5, 17, 1, 30)


@pytest.fixture
def theirs() -> Qwen3_5Attention:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        rope_parameters=rope,
    )
    config._attn_implementation = "sdpa"
    attention, generator = Qwen3_5Attention(config, 3), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return attention.double()


def our_attention(theirs: Qwen3_5Attention) -> PackedSelfAttention:
    """Fused as megatron-core does: the query heads of a key-value head, their gates, key and value."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    initialize_parallel_state(ParallelLayout(world_size=1))
    config = GPTConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        layernorm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        normalization="RMSNorm",
        qk_layernorm=True,
        attention_output_gate=True,
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    spec = own_layer_spec(config, experts=False).submodules.self_attention
    ours = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    query, gate = theirs.q_proj.weight.unflatten(0, (HEADS, 2, HEAD_DIM)).unbind(1)
    key, value = (part.weight.unflatten(0, (GROUPS, 1, HEAD_DIM)) for part in (theirs.k_proj, theirs.v_proj))
    parts = [part.unflatten(0, (GROUPS, -1)) for part in (query, gate)]
    with torch.no_grad():
        ours.linear_qkv.weight.copy_(torch.cat((*parts, key, value), dim=1).flatten(0, 2))
        ours.linear_qkv.layer_norm_weight.zero_()
        ours.linear_proj.weight.copy_(theirs.o_proj.weight)
        ours.q_layernorm.weight.copy_(theirs.q_norm.weight)
        ours.k_layernorm.weight.copy_(theirs.k_norm.weight)
    return ours


@pytest.mark.usefixtures("single_process")
def test_outputs_and_gradients_are_those_of_transformers(theirs: Qwen3_5Attention) -> None:
    ours, generator = our_attention(theirs), torch.Generator().manual_seed(4)
    hidden, upstream = (torch.randn(sum(LENGTHS), HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    hidden.requires_grad_()
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    rotary = Qwen3_5TextRotaryEmbedding(theirs.config)
    rows = []
    for part in normed.split(LENGTHS):
        positions = torch.arange(len(part))[None]
        mask = torch.full((len(part), len(part)), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        rows.append(theirs(part[None], rotary(part[None], positions), mask)[0][0])
    expected = torch.cat(rows)
    (expected * upstream).sum().backward()

    local = hidden.detach().float()[:, None].requires_grad_()
    frequencies = rotary.inv_freq
    angles = torch.outer(torch.arange(max(LENGTHS)).float(), frequencies).repeat(1, 2)[:, None, None]
    packed = PackedSequences(
        cu_seqlens_q=torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]),
    )
    output, _ = ours(local, rotary_pos_emb=angles, packed_seq_params=packed)
    (output[:, 0] * upstream.float()).sum().backward()
    torch.testing.assert_close(output[:, 0].double(), expected, rtol=0, atol=1e-5)
    assert hidden.grad is not None and local.grad is not None
    torch.testing.assert_close(local.grad[:, 0].double(), hidden.grad, rtol=0, atol=2e-5)
    gates = ours.linear_qkv.weight.grad.unflatten(0, (GROUPS, 2 * HEADS // GROUPS + 2, HEAD_DIM))
    gates = gates[:, HEADS // GROUPS : 2 * HEADS // GROUPS].flatten(0, 1)
    right = theirs.q_proj.weight.grad.unflatten(0, (HEADS, 2, HEAD_DIM))[:, 1]
    torch.testing.assert_close(gates.double(), right, rtol=0, atol=1e-4)
