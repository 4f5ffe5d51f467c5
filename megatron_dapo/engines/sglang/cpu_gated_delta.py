"""SGLang's operators for gated delta nets and gated attention on a CPU, in torch.

SGLang takes them from the CPU build of its kernel package, and has no plain torch layers for them. The functions have the
signatures of that package. Their caches are SGLang's: of a convolution [slots, channels, kernel size - 1], of a recurrence
[slots, heads, V, K].
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_dapo.ops.gated_delta import (
    causal_convolution,
    gated_delta_rule,
    gated_delta_step,
    plan_chunks,
    plan_convolution,
)


def module() -> types.ModuleType:
    """Return the module of the kernel package that SGLang imports three of the functions from."""
    made = types.ModuleType("sgl_kernel.mamba")
    functions = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
    vars(made).update({function.__name__: function for function in functions})
    return made


def define_operators() -> None:
    """Define the functions that SGLang calls as operators of torch."""
    functions: tuple[Callable[..., Any], ...] = (
        fused_gdn_gating_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_qkvzba_split_reshape_cat_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_rmsnorm_gated_cpu,
        fused_sigmoid_mul_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
    )
    for function in functions:
        if not hasattr(torch.ops.sgl_kernel, function.__name__):
            setattr(torch.ops.sgl_kernel, function.__name__, function)


def apply_to_sglang() -> None:
    """Let gated norms take the operator, and gated shared experts a function: without the kernel package they would take
    Triton's (imports sglang)."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    layernorm_gated._use_cpu = fused_norm_gate._use_cpu = True
    elementwise.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "silu",
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **unused: Any,
) -> torch.Tensor:
    """Convolve packed sequences x [channels, T], which continue their cached inputs if they have any."""
    assert bias is None and activation in ("silu", "swish"), f"a convolution with bias {bias} or {activation}"
    cached = conv_states[cache_indices].transpose(1, 2) * has_initial_state[:, None, None]
    out, last = causal_convolution(x.T, weight, plan_convolution(query_start_loc, weight.size(1)), cached)
    conv_states[cache_indices] = last.transpose(1, 2).to(conv_states.dtype)
    return out.T


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    conv_state_indices: torch.Tensor,
    **unused: Any,
) -> torch.Tensor:
    """Convolve the next token of each sequence, x [B, channels]."""
    assert bias is None and activation in ("silu", "swish"), f"a convolution with bias {bias} or {activation}"
    window = torch.cat((conv_states[conv_state_indices].to(x.dtype), x[..., None]), dim=-1)
    conv_states[conv_state_indices] = window[..., 1:].to(conv_states.dtype)
    return F.silu((window.float() * weight.float()).sum(-1)).to(x.dtype)


def fused_gdn_gating_cpu(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the decay and beta of each token and head, [1, T, heads] fp32."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **unused: Any,
) -> tuple[torch.Tensor, None, None]:
    """Apply the rule to packed sequences [1, T, heads, ...], which continue their cached states."""
    states = initial_state[initial_state_indices].transpose(-1, -2)
    out, last = gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], plan_chunks(cu_seqlens), states)
    initial_state[initial_state_indices] = last.transpose(-1, -2).to(initial_state.dtype)
    return out[None], None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **unused: Any,
) -> torch.Tensor:
    """Apply the rule to the next token of each sequence, q, k, v [1, B, heads, ...]."""
    decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states = initial_state_source[initial_state_indices].transpose(-1, -2)
    out, last = gated_delta_step(q[0], k[0], v[0], decay[0], beta[0], states)
    initial_state_source[initial_state_indices] = last.transpose(-1, -2).to(initial_state_source.dtype)
    return out[None]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split projections [T, ...] that have all queries, then all keys, values and gates: [queries, keys, values], gates [T,
    heads, V], b and a [T, heads]."""
    values = value_heads * value_dim
    mixed, z = qkvz.split((2 * key_heads * key_dim + values, values), dim=1)
    b, a = ba.chunk(2, dim=1)
    return mixed.contiguous(), z.unflatten(1, (value_heads, value_dim)).contiguous(), b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same for projections whose columns go from key head to key head."""
    ratio = value_heads // key_heads
    sizes = (key_dim, key_dim, ratio * value_dim, ratio * value_dim)
    q, k, v, z = (part.flatten(1) for part in qkvz.unflatten(1, (key_heads, -1)).split(sizes, dim=2))
    b, a = (part.flatten(1) for part in ba.unflatten(1, (key_heads, -1)).chunk(2, dim=2))
    return torch.cat((q, k, v), dim=1), z.unflatten(1, (value_heads, value_dim)), b, a


def fused_rmsnorm_gated_cpu(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize x [..., n] and multiply by SiLU of z."""
    return (F.rms_norm(x.float(), weight.shape, weight.float(), eps) * F.silu(z.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """Multiply x by the sigmoid of the gate, in place, and return it. SGLang 0.5.17 passes `inplace` and takes the answer."""
    assert inplace, "SGLang asks for nothing else"
    return x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


def fused_gate_sigmoid_mul_add(
    hidden: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, output: torch.Tensor
) -> None:
    """Add the shared expert's output, times the sigmoid of the gate of each token, in place."""
    output.add_(shared * (hidden.float() @ gate_weight.float()).sigmoid()[:, None].to(shared.dtype))


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize each head of queries and keys [T, heads * head_dim] -> [T * heads, head_dim]."""
    return _normalize(q.reshape(-1, head_dim), q_weight, eps), _normalize(k.reshape(-1, head_dim), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same for queries that have a gate after each head, and return the gates, too."""
    query, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, dim=1)
    q, k = fused_qk_gemma_rmsnorm_cpu(query, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.contiguous()


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm whose weight is stored as its difference from 1."""
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
