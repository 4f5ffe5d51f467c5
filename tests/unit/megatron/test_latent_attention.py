"""Layers of a DeepSeek-V3 against transformers' own, for packed sequences: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import build_module
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3MoE,
    DeepseekV3RotaryEmbedding,
)

from megatron_dapo.megatron.attention import PackedSequences
from megatron_dapo.megatron.experts import GroupedSigmoidRouter
from megatron_dapo.megatron.layer_spec import own_layer_spec
from megatron_dapo.megatron.model_config import LatentGPTConfig
from megatron_dapo.megatron.parallel_state import initialize_parallel_state
from megatron_dapo.parallel.layout import ParallelLayout

HIDDEN, EXPERTS = 32, 8
BIAS = "mlp.router.expert_bias"
LENGTHS = (5, 17, 1, 30)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
ROPES = {
    "published": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "two factors": {
        **YARN,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "no factor": {**YARN, "factor": 8.0, "original_max_position_embeddings": 128},
    "default": {"rope_type": "default", "rope_theta": 50_000.0},
}


def published_config(rope: dict[str, Any], **fields: Any) -> DeepseekV3Config:
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 2,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    }
    config = DeepseekV3Config(rope_parameters=rope, attn_implementation="eager", **{**sizes, **fields})
    config.validate_rope = lambda: None  # the test's factors do not follow from its context lengths
    return config


def own_config(theirs: DeepseekV3Config) -> LatentGPTConfig:
    rope = theirs.rope_parameters
    scaling: dict[str, Any] = {"rope_type": "rope"}
    if rope["rope_type"] == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow")
        scaling = {"rope_type": "yarn", "rotary_scaling_factor": rope["factor"], **{name: rope[name] for name in names}}
        scaling |= {"mscale": rope.get("mscale", 1.0), "mscale_all_dim": rope.get("mscale_all_dim", 0.0)}
    return LatentGPTConfig(
        num_layers=theirs.num_hidden_layers,
        hidden_size=theirs.hidden_size,
        num_attention_heads=theirs.num_attention_heads,
        ffn_hidden_size=theirs.intermediate_size,
        layernorm_epsilon=theirs.rms_norm_eps,
        normalization="RMSNorm",
        q_lora_rank=theirs.q_lora_rank,
        kv_lora_rank=theirs.kv_lora_rank,
        qk_head_dim=theirs.qk_nope_head_dim,
        qk_pos_emb_head_dim=theirs.qk_rope_head_dim,
        v_head_dim=theirs.v_head_dim,
        rotary_base=rope["rope_theta"],
        **scaling,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=theirs.n_routed_experts,
        moe_router_topk=theirs.num_experts_per_tok,
        moe_ffn_hidden_size=theirs.moe_intermediate_size,
        moe_shared_expert_intermediate_size=theirs.moe_intermediate_size * theirs.n_shared_experts,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=theirs.n_group,
        moe_router_group_topk=theirs.topk_group,
        moe_router_topk_scaling_factor=theirs.routed_scaling_factor,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )


@pytest.fixture(scope="module", autouse=True)
def groups(single_process: None) -> Iterator[None]:
    initialize_parallel_state(ParallelLayout(1))
    yield


def pair_of_layers(theirs: DeepseekV3Config, layer: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return transformers' layer and ours with equal weights."""
    torch.manual_seed(3)
    reference, config = DeepseekV3DecoderLayer(theirs, layer), own_config(theirs)
    has_experts = layer >= theirs.first_k_dense_replace
    ours = build_module(own_layer_spec(config, has_experts), config=config, layer_number=layer + 1)
    with torch.no_grad():
        for parameter in reference.parameters():
            is_norm = parameter.dim() == 1
            parameter.copy_(torch.randn_like(parameter) * (0.1 if is_norm else 0.3) + is_norm)
        weights = tensors_of(reference, theirs, layer, lambda parameter: parameter)
        if has_experts:
            bias = reference.mlp.gate.e_score_correction_bias
            weights[BIAS] = bias.copy_(0.3 * torch.randn(EXPERTS))
            ours.mlp.router.normalize = bool(theirs.norm_topk_prob)
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights, f"ours has no {sorted(weights)}"
    return reference, ours


def tensors_of(
    reference: torch.nn.Module, theirs: DeepseekV3Config, layer: int, of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return our name of each parameter -> `of` transformers' parameters: themselves or their gradients."""
    attention, mlp = reference.self_attn, reference.mlp
    tensors = {
        "input_layernorm.weight": of(reference.input_layernorm.weight),
        "self_attention.linear_kv_down_proj.weight": of(attention.kv_a_proj_with_mqa.weight),
        "self_attention.linear_kv_up_proj.layer_norm_weight": of(attention.kv_a_layernorm.weight),
        "self_attention.linear_kv_up_proj.weight": of(attention.kv_b_proj.weight),
        "self_attention.linear_proj.weight": of(attention.o_proj.weight),
    }
    if theirs.q_lora_rank is None:
        tensors["self_attention.linear_q_proj.weight"] = of(attention.q_proj.weight)
    else:
        tensors["self_attention.linear_q_down_proj.weight"] = of(attention.q_a_proj.weight)
        tensors["self_attention.linear_q_up_proj.layer_norm_weight"] = of(attention.q_a_layernorm.weight)
        tensors["self_attention.linear_q_up_proj.weight"] = of(attention.q_b_proj.weight)
    if layer < theirs.first_k_dense_replace:
        tensors["mlp.linear_fc1.layer_norm_weight"] = of(reference.post_attention_layernorm.weight)
        tensors["mlp.linear_fc1.weight"] = torch.cat((of(mlp.gate_proj.weight), of(mlp.up_proj.weight)))
        return {**tensors, "mlp.linear_fc2.weight": of(mlp.down_proj.weight)}
    shared = mlp.shared_experts
    tensors["pre_mlp_layernorm.weight"] = of(reference.post_attention_layernorm.weight)
    tensors["mlp.router.weight"] = of(mlp.gate.weight)
    tensors["mlp.shared_experts.linear_fc1.weight"] = torch.cat(
        (of(shared.gate_proj.weight), of(shared.up_proj.weight))
    )
    tensors["mlp.shared_experts.linear_fc2.weight"] = of(shared.down_proj.weight)
    for expert in range(EXPERTS):
        prefix = f"mlp.experts.local_experts.{expert}."
        tensors[prefix + "linear_fc1.weight"] = of(mlp.experts.gate_up_proj)[expert]
        tensors[prefix + "linear_fc2.weight"] = of(mlp.experts.down_proj)[expert]
    return tensors


def one_by_one(reference: torch.nn.Module, theirs: DeepseekV3Config, hidden: torch.Tensor) -> torch.Tensor:
    """Return transformers' output for each sequence [P, h]."""
    rotary, rows = DeepseekV3RotaryEmbedding(theirs), []
    for part in hidden.split(list(LENGTHS)):
        positions = torch.arange(len(part))[None]
        mask = torch.full((len(part), len(part)), -torch.inf).triu(1)[None, None]
        rows.append(reference(part[None], attention_mask=mask, position_embeddings=rotary(part[None], positions))[0])
    return torch.cat(rows)


def packed(lengths: tuple[int, ...] = LENGTHS) -> PackedSequences:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return PackedSequences(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(lengths), position_ids=positions
    )


CASES = [
    *((rope, 1, {}) for rope in ROPES),
    ("published", 0, {}),
    ("two factors", 1, {"q_lora_rank": None}),
    ("published", 1, {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    ("published", 1, {"n_group": 1, "topk_group": 1}),
]


@pytest.mark.parametrize(("rope", "layer", "fields"), CASES, ids=str)
def test_a_layer_is_that_of_transformers(rope: str, layer: int, fields: dict[str, Any]) -> None:
    theirs = published_config(ROPES[rope], **fields)
    reference, ours = pair_of_layers(theirs, layer)
    hidden, weights = torch.randn(2, sum(LENGTHS), HIDDEN)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    want = one_by_one(reference, theirs, inputs[0])
    got = ours(inputs[1][:, None], attention_mask=None, packed_seq_params=packed())[0][:, 0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    gradients = {"input": inputs[0].grad, **tensors_of(reference, theirs, layer, lambda parameter: parameter.grad)}
    for name, parameter in (("input", inputs[1]), *ours.named_parameters()):
        if name == BIAS:
            assert parameter.grad is None, "the bias of the choice is not trained"
            continue
        scale = float(gradients[name].abs().max()) or 1.0  # an expert may get no token
        torch.testing.assert_close(parameter.grad / scale, gradients[name] / scale, rtol=0, atol=1e-5, msg=name)


def test_a_sample_changes_no_bit_of_another() -> None:
    """Gradients too: of the first sample's input, when only the others change."""
    _, ours = pair_of_layers(published_config(ROPES["two factors"]), layer=1)
    lengths, results = (9, 20, 6), []
    first, others = torch.randn(9, HIDDEN), torch.randn(2, 26, HIDDEN)
    for rest in others:
        inputs = torch.cat((first, rest)).requires_grad_()
        out, _ = ours(inputs[:, None], attention_mask=None, packed_seq_params=packed(lengths))
        out[:9].square().sum().backward()
        results.append((out[:9].detach(), inputs.grad))
    (one, one_gradient), (other, other_gradient) = results
    assert torch.equal(one, other) and torch.equal(one_gradient, other_gradient)
    assert one_gradient[:9].abs().min() > 0 and not one_gradient[9:].any()


@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (8, 3), (1, 1)])
@pytest.mark.parametrize("normalize", [True, False])
def test_choices_and_weights_are_those_of_transformers(groups: int, kept: int, normalize: bool) -> None:
    """For large logits too, whose scores underflow, and a bias that decides."""
    sizes = {"n_routed_experts": 16, "n_group": groups, "topk_group": kept, "num_experts_per_tok": 4}
    config = published_config(ROPES["default"], **sizes, norm_topk_prob=normalize)
    theirs, ours = DeepseekV3MoE(config), GroupedSigmoidRouter.__new__(GroupedSigmoidRouter)
    torch.nn.Module.__init__(ours)
    ours.config, ours.topk, ours.normalize = own_config(config), 4, normalize
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        theirs.gate.weight.copy_(torch.randn(16, HIDDEN, generator=generator))
        theirs.gate.e_score_correction_bias.copy_(torch.randn(16, generator=generator))
    ours.weight, ours.expert_bias = theirs.gate.weight, torch.nn.Parameter(theirs.gate.e_score_correction_bias, False)
    hidden = torch.randn(60, 1, HIDDEN, generator=generator) * torch.logspace(-2, 2, 60)[:, None, None]
    weights, chosen = ours(hidden)
    experts, expected = theirs.route_tokens_to_experts(theirs.gate(hidden))
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    torch.testing.assert_close(weights.gather(1, experts), expected, rtol=1e-6, atol=0)
    assert not weights[~chosen].any()
