"""Worker of test_gated_delta.py: one gated delta net on several layouts against transformers in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from actor_checks import largest_over_ranks, wide_rule
from megatron.core.tensor_parallel.layers import RowParallelLinear

from megatron_dapo.megatron.attention import PackedSequences
from megatron_dapo.megatron.context import context_token_index
from megatron_dapo.megatron.gated_delta import GatedDeltaNet, GatedDeltaSubmodules
from megatron_dapo.megatron.layers import NormColumnParallelLinear
from megatron_dapo.megatron.model_config import GPTConfig
from megatron_dapo.megatron.parallel_state import initialize_parallel_state
from megatron_dapo.parallel.layout import ParallelLayout

HIDDEN, KERNEL, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 24, 4, 4, 8, 6, 5
LENGTHS = (16, 80, 8, 136)  # multiples of 2C for C = 4; more than a chunk, and less
SIZES = {
    "linear_conv_kernel_dim": KERNEL,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY_DIM,
    "linear_value_head_dim": VALUE_DIM,
}


def transformers_layer(seed: int = 3) -> torch.nn.ModuleDict:
    """Norm and gated delta net of a Qwen3.5 layer, in fp64 with random weights."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5RMSNorm

    config = Qwen3_5TextConfig(hidden_size=HIDDEN, num_hidden_layers=4, rms_norm_eps=1e-6, **SIZES)
    net = Qwen3_5GatedDeltaNet(config, 0)
    net.chunk_gated_delta_rule = wide_rule
    layer = torch.nn.ModuleDict({"norm": Qwen3_5RMSNorm(HIDDEN), "net": net}).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if name == "net.norm.weight" else 0.3 * noise)
    return layer


def of_rank(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Cut Qwen3.5's tensors, or their gradients, into the parameters of tensor rank `rank`."""

    def cut(tensor: torch.Tensor, heads: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
        parts = tensor.split([count * dim for count, dim in zip(heads, dims, strict=True)])
        rows = [part.unflatten(0, (count, -1)).chunk(size)[rank] for part, count in zip(parts, heads, strict=True)]
        return torch.cat([part.flatten(0, 1) for part in rows])

    heads, dims = (KEY_HEADS, KEY_HEADS, VALUE_HEADS), (KEY_DIM, KEY_DIM, VALUE_DIM)
    names = ("in_proj_z", "in_proj_b", "in_proj_a")
    others = [
        cut(tensors[f"net.{name}.weight"], [VALUE_HEADS], [dim])
        for name, dim in zip(names, (VALUE_DIM, 1, 1), strict=True)
    ]
    columns = tensors["net.out_proj.weight"].T
    return {
        "in_proj.layer_norm_weight": tensors["norm.weight"],
        "in_proj.weight": torch.cat((cut(tensors["net.in_proj_qkv.weight"], heads, dims), *others)),
        "conv1d.weight": cut(tensors["net.conv1d.weight"], heads, dims),
        "dt_bias": cut(tensors["net.dt_bias"], [VALUE_HEADS], [1]),
        "A_log": cut(tensors["net.A_log"], [VALUE_HEADS], [1]),
        "out_norm.weight": tensors["net.norm.weight"],
        "out_proj.weight": cut(columns, [VALUE_HEADS], [VALUE_DIM]).T,
    }


def delta_layouts(arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Worker: the largest errors over ranks of outputs, parameter gradients and input gradients, relative to their norm."""
    layer, total = transformers_layer(), sum(LENGTHS)
    generator = torch.Generator().manual_seed(11)
    hidden, upstream = (torch.randn(total, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    hidden.requires_grad_()
    expected = torch.cat([layer["net"](layer["norm"](part[None]))[0] for part in hidden.split(LENGTHS)])
    (expected * upstream).sum().backward()
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert hidden.grad is not None
    wanted = expected.detach(), hidden.grad
    return [one_layout(case, hidden.detach(), upstream, weights, gradients, wanted) for case in arguments["cases"]]


def one_layout(
    case: dict[str, Any],
    hidden: torch.Tensor,
    upstream: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
) -> dict[str, float]:
    layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
    groups = initialize_parallel_state(layout).groups
    here, sequence_parallel = layout.coordinates(dist.get_rank()), layout.sequence_parallel
    config = GPTConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        layernorm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        sequence_parallel=sequence_parallel,
        **({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]} if case.get("recompute") else {}),
        **SIZES,
    )
    linears = GatedDeltaSubmodules(NormColumnParallelLinear, RowParallelLinear)
    net = GatedDeltaNet(config, linears, 1, SimpleNamespace(tp=groups.tensor, cp=groups.context)).train()
    with torch.no_grad():
        for name, tensor in of_rank(weights, here.tensor, layout.tensor).items():
            net.get_parameter(name).copy_(tensor)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    index = context_token_index(bounds, here.context, layout.context)
    if sequence_parallel:
        index = index.chunk(layout.tensor)[here.tensor]
    local = hidden[index, None].float().requires_grad_()
    packed = PackedSequences(cu_seqlens_q=bounds, context_rank=here.context, context_size=layout.context)
    output, bias = net(local, packed_seq_params=packed)
    assert bias is None
    (output * upstream[index, None].float()).sum().backward()
    errors = {"output": relative(output[:, 0], wanted[0][index]), "input": relative(local.grad[:, 0], wanted[1][index])}
    for name, right in of_rank(gradients, here.tensor, layout.tensor).items():
        gradient = net.get_parameter(name).grad.clone()
        dist.all_reduce(gradient, group=groups.context)
        if sequence_parallel and getattr(net.get_parameter(name), "sequence_parallel", False):
            dist.all_reduce(gradient, group=groups.tensor)
        errors[name] = relative(gradient, right)
    return largest_over_ranks(errors)


def relative(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours.double() - right).norm() / right.norm())
