"""LoRA adapters (arXiv:2106.09685) on the linear layers of megatron-core's model chunks.

A linear layer with frozen weight W computes y = W x + scale B A x. Its adapter is a submodule, so the layer may be one of
ours, megatron-core's or Transformer Engine's. Tensor-parallel ranks exchange only A x, which has r numbers a token:

| layer | A | B | A x |
|---|---|---|---|
| column-parallel (linear_qkv, linear_fc1, ...) | whole | rows of the rank | gathered under sequence parallelism |
| row-parallel (linear_proj, linear_fc2, out_proj) | columns of the rank | whole | summed (and scattered) over tensor ranks |
| on every rank (compressions of latent attention) | whole | whole | not exchanged: each rank maps its tokens |

A grouped layer, which computes all experts of a rank in one call, holds the parameters of its experts' adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.checkpoints.layouts.lora import AdapterBuffers, LoraLayout
from megatron_dapo.checkpoints.layouts.state import EXPERTS
from megatron_dapo.megatron.experts import ExpertWeights, grouped_layer
from megatron_dapo.megatron.layers import PostNorm, rms_norm
from megatron_dapo.megatron.model import unwrap
from megatron_dapo.models.lora import DUPLICATED, ROW_PARALLEL, matrix_name


class Adapter(torch.nn.Module):
    """The adapter of one linear layer on one rank: maps the layer's input to what is added to its output."""

    places: torch.Tensor | None  # see `_places`
    is_on = True  # False: the layer computes as without the adapter

    def __init__(
        self,
        layer: torch.nn.Module,
        buffers: AdapterBuffers,
        scale: float,
        config: TransformerConfig,
        group: dist.ProcessGroup,
    ) -> None:
        """`layer`: the linear layer, or the grouped layer that it is a part of. `group`: the ranks over which it is cut, tensor
        ranks or those of an expert."""
        super().__init__()
        settings: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.a = torch.nn.Parameter(torch.full(buffers.a.shape, torch.nan, **settings))
        self.b = torch.nn.Parameter(torch.full(buffers.b.shape, torch.nan, **settings))
        self.scale, self.config, self.group = scale, config, group
        self.is_duplicated = matrix_name(buffers.layer) in DUPLICATED
        self.is_column_parallel = not self.is_duplicated and matrix_name(buffers.layer) not in ROW_PARALLEL
        self.is_expert = EXPERTS in buffers.layer
        # In a tuple, so that it is not a parameter of this module as well.
        self._norm = (getattr(layer, "layer_norm_weight", None),)
        self.register_buffer("places", _places(buffers, settings), persistent=False)
        self._mark(layer)

    def _mark(self, layer: torch.nn.Module) -> None:
        """Tell megatron-core which gradients it must sum over tensor ranks, and which count once in the gradient's norm."""
        dim = 0 if self.is_column_parallel else 1
        cut = None if self.is_duplicated else self.a if dim else self.b
        for parameter in (self.a, self.b):
            parameter.allreduce = getattr(next(layer.parameters()), "allreduce", True)  # type: ignore[attr-defined]
            if parameter is cut:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            elif not self.is_expert:
                # Each rank has seen only its tokens.
                parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
            elif self.group.rank() == 0:
                # Unmarked parameters count on tensor rank 0, but other tensor ranks hold other experts.
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def add_to(self, output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for this input, with the adapter."""
        return output + self(hidden) if self.is_on else output

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [tokens, ..., this rank's inputs] to [tokens, ..., this rank's outputs]."""
        if self.is_expert:
            return self._expert(hidden)
        if self._norm[0] is not None:
            settings = self.config.layernorm_epsilon, self.config.layernorm_zero_centered_gamma
            hidden = rms_norm(hidden, self._norm[0], *settings)
        small = F.linear(hidden, self.a)
        if self.is_duplicated:
            return F.linear(self.scale * small, self.b)
        if self.is_column_parallel and self.config.sequence_parallel:
            small = gather_from_sequence_parallel_region(small, tensor_parallel_output_grad=True, group=self.group)
        elif self.is_column_parallel:
            small = copy_to_tensor_model_parallel_region(small, group=self.group)
        elif self.config.sequence_parallel:
            small = reduce_scatter_to_sequence_parallel_region(small, group=self.group)
        else:
            small = reduce_from_tensor_model_parallel_region(small, group=self.group)
        return F.linear(self.scale * small, self._wide())

    def _expert(self, hidden: torch.Tensor) -> torch.Tensor:
        # The dispatcher sums outputs, and the gradients of inputs, over the ranks that an expert is cut over: each returns
        # its share of what they all compute.
        share = 1 / self.group.size()
        if self.is_column_parallel:
            small = F.linear(_Scaled.apply(hidden, 1.0, share), self.a)
            return F.linear(self.scale * copy_to_tensor_model_parallel_region(small, group=self.group), self._wide())
        small = reduce_from_tensor_model_parallel_region(F.linear(hidden, self.a), group=self.group)
        return _Scaled.apply(F.linear(self.scale * small, self._wide()), share, 1.0)

    def _wide(self) -> torch.Tensor:
        """Return B as [rows, m r]: a row multiplies only its matrix's numbers."""
        if self.places is None:
            return self.b
        return (self.b[:, None] * self.places[:, :, None]).flatten(1)


def _places(buffers: AdapterBuffers, settings: dict[str, Any]) -> torch.Tensor | None:
    """Return [rows, m] with 1 if a row belongs to a matrix; None if all rows belong to one."""
    places = torch.zeros(buffers.b.shape[0], len(buffers.matrices), **settings)
    stack = {shard.tensor: place for place, shard in enumerate(buffers.a.shards)}
    for shard in buffers.b.shards:
        first, matrix = shard.local_offset[0], shard.tensor.replace(".lora_B.", ".lora_A.")
        places[first : first + shard.shape[0], stack[matrix]] = 1
    return None if places.shape[1] == 1 and bool(places.all()) else places


class _Scaled(torch.autograd.Function):
    """Multiply the values by one number and their gradient by another."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.factor = backward
        return values.view_as(values) if forward == 1 else values * forward

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient if ctx.factor == 1 else gradient * ctx.factor, None, None


def attach_adapters(chunks: Sequence[torch.nn.Module], layout: LoraLayout, scale: float, rank: int) -> None:
    """Freeze the chunks and add the adapters of `layout`, whose weights are NaN until loaded."""
    for chunk in map(unwrap, chunks):
        if getattr(chunk.config, "use_transformer_engine_op_fuser", False):
            raise ValueError("LoRA needs each linear layer by itself: set megatron.use_transformer_engine_op_fuser = false")
        chunk.requires_grad_(False)
        if chunk.pre_process and chunk.config.recompute_granularity is not None:
            # Recomputation passes no gradient to the parameters of a layer whose input needs none.
            chunk.embedding.register_forward_hook(_require_gradient)
    grouped: dict[torch.nn.Module, list[Adapter]] = {}
    for buffers in layout.adapters(rank):
        stage, _, path = buffers.layer.partition(".")
        chunk, is_expert = unwrap(chunks[int(stage)]), EXPERTS in buffers.layer
        is_grouped = is_expert and chunk.config.moe_grouped_gemm
        layer = chunk.get_submodule(grouped_layer(path) if is_grouped else path)
        groups = chunk.pg_collection
        adapter = Adapter(layer, buffers, scale, chunk.config, groups.expt_tp if is_expert else groups.tp)
        if is_grouped:
            grouped.setdefault(layer, []).append(adapter)
        else:
            _attach(layer, adapter)
    for layer, adapters in grouped.items():
        attach_to_grouped(layer, adapters)


def _attach(layer: torch.nn.Module, adapter: Adapter) -> None:
    layer.adapter = adapter
    if not isinstance(layer, PostNorm):  # it adds the adapter before its norm
        layer.register_forward_hook(_add_adapter)


def attach_to_grouped(layer: torch.nn.Module, adapters: Sequence[Adapter]) -> None:
    """Add the adapters of all experts of a rank, in their order."""
    layer.adapters = tuple(adapters)  # type: ignore[assignment]
    # In the order of `one_name_an_expert`, and in the layer: its hooks gather them with its weights.
    for kind in ("a", "b"):
        for index, adapter in enumerate(adapters):
            layer.register_parameter(f"adapter_{kind}{index}", getattr(adapter, kind))
    if isinstance(layer, ExpertWeights):
        for part, adapter in zip(layer.layers, adapters, strict=True):
            _attach(part, adapter)
    else:
        layer.register_forward_hook(_add_grouped)


@contextmanager
def without_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let the chunks compute as before training inside the block."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    adapters = [module for module in modules if isinstance(module, Adapter)]
    adapters += [adapter for module in modules for adapter in getattr(module, "adapters", ())]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _add_adapter(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    assert isinstance(layer.adapter, Adapter)
    return (layer.adapter.add_to(output[0], inputs[0]), *output[1:])


def _add_grouped(layer: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the adapters to the output [tokens, outputs] of Transformer Engine's grouped layer, whose inputs are the tokens of one
    expert after another and their numbers."""
    hidden, counts = inputs
    parts = zip(layer.adapters, output[0].split(counts), hidden.split(counts), strict=True)
    return (torch.cat([adapter.add_to(out, tokens) for adapter, out, tokens in parts]), *output[1:])


def _require_gradient(embedding: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
