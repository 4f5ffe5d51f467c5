"""A gated delta net in place of a layer's attention (arXiv:2412.06464, as in Qwen3-Next), for packed sequences.

Parameters have the names and the order of megatron-core's GatedDeltaNet: in_proj's rows on a rank are its heads' queries, keys,
values, gates, beta and alpha. One difference: `out_norm.weight` multiplies, and is not stored as its difference from 1.

Tensor parallelism cuts heads. Under context parallelism, an all-to-all gives each rank all tokens for its share of those
heads, because a state passes through its sequence in order; a second one returns the outputs to the ranks of their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module

from megatron_dapo.megatron.attention import PackedSequences
from megatron_dapo.megatron.context import context_token_index
from megatron_dapo.ops.gated_delta import (
    ChunkPlan,
    ConvolutionPlan,
    causal_convolution,
    gated_delta_rule,
    plan_chunks,
    plan_convolution,
)


@dataclass
class GatedDeltaSubmodules:
    """Classes of the linear layers: column-parallel with a norm of its input, and row-parallel."""

    in_proj: Any
    out_proj: Any


@dataclass(frozen=True)
class DeltaPlan:
    """Arrangement of a micro-batch's tokens, shared by all layers."""

    chunks: ChunkPlan
    convolution: ConvolutionPlan
    packed: torch.Tensor | None  # [P] int64: place of each token among the context ranks' tokens; None: the same
    by_rank: torch.Tensor | None  # [P] int64: the inverse


def plan_delta(packed: PackedSequences, kernel_size: int) -> DeltaPlan:
    """Arrange the whole sequences of a micro-batch."""
    bounds, size = packed.cu_seqlens_q, packed.context_size
    plans = plan_chunks(bounds), plan_convolution(bounds, kernel_size)
    if size == 1:
        return DeltaPlan(*plans, None, None)
    by_rank = torch.cat([context_token_index(bounds, rank, size) for rank in range(size)])
    return DeltaPlan(*plans, by_rank.argsort().to(bounds.device), by_rank.to(bounds.device))


class _ExchangeDims(torch.autograd.Function):
    """Send part r of dim 0 to rank r, and return the ranks' parts in rank order."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


class GatedOutputNorm(torch.nn.Module):
    """RMSNorm of each head's output, times SiLU of its gate; all heads share the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.eps, self.group = eps, group
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=torch.cuda.current_device()))

    def forward(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Map output and gate [..., size] to the same shape."""
        # A tensor rank sees only its heads: the backward pass of this copy adds up the ranks' gradients.
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        normed = F.rms_norm(output.float(), weight.shape, weight.float(), self.eps)
        return (normed * F.silu(gate.float())).type_as(output)


class GatedDeltaNet(MegatronModule):
    """Projections, causal convolution, gated delta rule, gated norm and output projection of one layer."""

    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        tensor, self.context_group = pg_collection.tp, pg_collection.cp
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": tensor}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            2 * (keys + values + self.value_heads),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **shared,
        )
        # Sizes of this rank's rows of in_proj, and of the convolution's channels.
        widths = keys, keys, values, values, self.value_heads, self.value_heads
        self.widths = [width // tensor.size() for width in widths]
        made = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        channels, kernel_size = sum(self.widths[:3]), config.linear_conv_kernel_dim
        # Only its weight is used.
        self.conv1d = torch.nn.Conv1d(channels, channels, kernel_size, groups=channels, bias=False, **made)
        self.dt_bias = torch.nn.Parameter(torch.empty(self.widths[-1], **made))
        self.A_log = torch.nn.Parameter(torch.empty(self.widths[-1], **{**made, "dtype": torch.float32}))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.out_norm = GatedOutputNorm(self.value_dim, config.layernorm_epsilon, config.params_dtype, tensor)
        self.out_proj = build_module(
            submodules.out_proj,
            values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **shared,
        )
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden_states [P or its sequence-parallel slice, 1, h] to the same shape, and a bias (None)."""
        assert isinstance(packed_seq_params, PackedSequences), "a gated delta net needs packed sequences"
        kernel_size = self.conv1d.weight.size(2)
        plan = packed_seq_params.once(("gated delta", kernel_size), lambda packed: plan_delta(packed, kernel_size))
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        mixed, gate, beta, alpha = projected.split([sum(self.widths[:3]), *self.widths[3:]], dim=1)
        if self.recomputes and self.training:
            output = checkpoint(partial(self._mix, plan), False, mixed, beta, alpha)
        else:
            output = self._mix(plan, mixed, beta, alpha)
        output = self.out_norm(output.unflatten(1, (-1, self.value_dim)), gate.unflatten(1, (-1, self.value_dim)))
        return self.out_proj(output.flatten(1).unsqueeze(1))

    def _mix(self, plan: DeltaPlan, mixed: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """Map queries, keys and values [P_local, channels], beta and alpha [P_local, heads] of this rank's tokens to outputs
        [P_local, heads * V]."""
        weight, a_log, dt_bias = self.conv1d.weight[:, 0], self.A_log, self.dt_bias
        widths, size = self.widths[:3], self.context_group.size()
        if size > 1:
            parts = [*mixed.split(widths, dim=1), beta, alpha]
            mixed, beta, alpha = self._to_heads(parts, plan)
            rank, widths = self.context_group.rank(), [width // size for width in widths]
            weight = torch.cat([part.chunk(size)[rank] for part in weight.split(self.widths[:3])])
            a_log, dt_bias = a_log.chunk(size)[rank], dt_bias.chunk(size)[rank]
        convolved, _ = causal_convolution(mixed, weight, plan.convolution)
        query, key, value = convolved.split(widths, dim=1)
        decay = -a_log.float().exp() * F.softplus(alpha.float() + dt_bias.float())
        output, _ = gated_delta_rule(
            query.unflatten(1, (-1, self.key_dim)),
            key.unflatten(1, (-1, self.key_dim)),
            value.unflatten(1, (-1, self.value_dim)),
            decay,
            beta.float().sigmoid(),
            plan.chunks,
        )
        output = output.flatten(1)
        return output if size == 1 else self._to_tokens(output, plan)

    def _to_heads(self, parts: list[torch.Tensor], plan: DeltaPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange each part [P_local, heads * x] for that of all tokens and this context rank's heads: the first three
        next to each other, beta, alpha."""
        assert plan.packed is not None
        size = self.context_group.size()
        rows = torch.cat([part.unflatten(1, (size, -1)) for part in parts], dim=2).transpose(0, 1)
        packed = _ExchangeDims.apply(rows, self.context_group).flatten(0, 1).index_select(0, plan.packed)
        heads = parts[-1].size(1) // size
        mixed, beta, alpha = packed.split([packed.size(1) - 2 * heads, heads, heads], dim=1)
        return mixed, beta, alpha

    def _to_tokens(self, output: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        """Exchange outputs of all tokens [P, heads * V] for those of this rank's tokens and all heads."""
        assert plan.by_rank is not None
        rows = output.index_select(0, plan.by_rank).unflatten(0, (self.context_group.size(), -1))
        return _ExchangeDims.apply(rows, self.context_group).transpose(0, 1).flatten(1)

