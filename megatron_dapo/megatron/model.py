"""This rank's chunks of megatron-core's GPTModel, with an output layer that computes no logits.

The last chunk of a policy returns hidden states: `megatron_dapo.ops.logprob` computes log-probs and entropy from them and
the output weight, without holding the logits of all tokens in memory. The last chunk of a critic returns values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_dapo.checkpoints.layouts.state import is_frozen
from megatron_dapo.megatron.experts import forget_dispatched_tokens, normalize_probabilities, one_name_an_expert
from megatron_dapo.megatron.layer_spec import block_spec
from megatron_dapo.megatron.model_config import GPTConfig, describe_precision, uses_transformer_engine
from megatron_dapo.megatron.rotary import rotary_frequencies
from megatron_dapo.models.architecture import TOKEN_VALUE, ModelArchitecture
from megatron_dapo.ops.value import token_values
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan.memory import padded_vocabulary

logger = logging.getLogger(__name__)

# The dim of a parallel layer's weight that is sharded over tensor ranks.
SHARDED_DIM = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}


class DeferredOutputLayer(torch.nn.Module):
    """Replaces GPTModel's output layer: returns the hidden states and keeps the weight for the log-prob head."""

    def __init__(self, weight: torch.nn.Parameter | None, sequence_parallel: bool, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.sequence_parallel = sequence_parallel
        self.group = group

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """Map [P or its sequence-parallel slice, 1, h] to [P, 1, h]."""
        # The hidden states leave the tensor-parallel region here: the head returns partial gradients on every tensor rank, and
        # the backward pass of these two sums them (and scatters them again under sequence parallelism).
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
        # GPTModel transposes what it gets, so gradients come back with another stride in dimension 1, which all layers below keep.
        # torch multiplies such a tensor by a frozen weight (LoRA) token by token, with a copy of the weight for each. In the
        # backward pass these two restore the stride.
        return hidden.squeeze(1).unsqueeze(1), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight to megatron-core's checkpoints as the replaced layer would: its rows are sharded."""
        # Without this, megatron-core treats every tensor rank's rows as copies of the first rank's.
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class ValueHead(torch.nn.Module):
    """Replaces GPTModel's output layer in a critic: weight [1, h] and bias [1], whole on every tensor rank.

    Without sequence parallelism every tensor rank computes the same values and gradients from all hidden states. With it
    a rank computes the values of its tokens, and these are gathered: [P] numbers, not hidden states.
    """

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        settings = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, **settings))
        self.bias = torch.nn.Parameter(torch.empty(1, **settings))
        for parameter in (self.weight, self.bias):
            # Under sequence parallelism a rank has the gradients of its tokens; the mark makes megatron-core sum them.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel
        self.group = group

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """Map [P or its sequence-parallel slice, 1, h] to fp32 [P, 1, 1]."""
        values = token_values(hidden[:, 0], self.weight, self.bias)[:, None, None]
        if self.sequence_parallel:
            # Every tensor rank computes the same loss, so the gradient of the gather is a slice, not a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.group)
        return values, None


def build_chunks(
    architecture: ModelArchitecture, layout: ParallelLayout, config: GPTConfig, rank: int
) -> list[GPTModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, in training mode; weights are NaN until
    loaded."""
    logger.debug("precision: %s", describe_precision(config))
    stages = range(layout.virtual_pipeline)
    pipeline_rank = layout.coordinates(rank).pipeline
    chunks = [_build_chunk(architecture, layout, config, pipeline_rank, stage) for stage in stages]
    for stage, chunk in enumerate(chunks):
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        expected = list(layout.layers_of(pipeline_rank, stage, architecture.num_layers))
        assert numbers == expected, (
            f"stage {stage} of pipeline rank {pipeline_rank}: megatron-core holds {numbers}, the layout {expected}"
        )
    return chunks


def _build_chunk(
    architecture: ModelArchitecture, layout: ParallelLayout, config: GPTConfig, pipeline_rank: int, stage: int
) -> GPTModel:
    vp_stage = stage if layout.virtual_pipeline > 1 else None
    with _output_layer_without_apex():
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, layout.layers_of(pipeline_rank, stage, architecture.num_layers)),
            vocab_size=padded_vocabulary(architecture.vocab_size, layout.tensor),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=pipeline_rank == 0 and stage == 0,
            post_process=pipeline_rank == layout.pipeline - 1 and stage == layout.virtual_pipeline - 1,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            vp_stage=vp_stage,
        )
    if architecture.latent is None:  # its layers compute their angles
        chunk.rotary_pos_emb.inv_freq = rotary_frequencies(architecture).to(torch.cuda.current_device())
    if architecture.scales_embedding and chunk.pre_process:
        # Round to the model's type, as in the models' training.
        scale = torch.tensor(architecture.hidden_size**0.5, dtype=config.params_dtype).item()
        chunk.embedding.register_forward_hook(lambda embedding, inputs, output: output * scale)
    mark_sharded_parameters(chunk)
    if architecture.experts is not None:
        normalize_probabilities(chunk, architecture.experts.normalize)
        forget_dispatched_tokens(chunk)
    if chunk.post_process:
        group = chunk.pg_collection.tp
        if architecture.head == TOKEN_VALUE:
            chunk.output_layer = ValueHead(config, group)
        else:
            chunk.output_layer = DeferredOutputLayer(chunk.output_layer.weight, config.sequence_parallel, group)
    with torch.no_grad():
        for parameter in chunk.parameters():
            # FP8 storage with a scale cannot hold NaN; loading checks its fp32 buffers instead.
            if not is_float8tensor(parameter):
                parameter.fill_(torch.nan)
    return chunk.train()


@contextmanager
def _output_layer_without_apex() -> Iterator[None]:
    """Let megatron-core build its output layer without apex if Transformer Engine's layers fuse weight gradients
    themselves. The output layer would need apex's kernel, but is replaced before it computes anything."""
    available = megatron_layers._grad_accum_fusion_available
    megatron_layers._grad_accum_fusion_available = available or uses_transformer_engine()
    try:
        yield
    finally:
        megatron_layers._grad_accum_fusion_available = available


def mark_sharded_parameters(chunk: torch.nn.Module) -> None:
    """Mark the weights that are sharded over tensor ranks."""
    # megatron-core marks them while it initializes weights, which is skipped here. Without the marks, the gradient norm
    # would only count the first tensor rank's shards.
    for module in chunk.modules():
        for kind, dim in SHARDED_DIM.items():
            if (
                isinstance(module, kind)
                and module.weight is not None
                and not hasattr(module.weight, "tensor_model_parallel")
            ):
                set_tensor_model_parallel_attributes(module.weight, True, dim, getattr(module, "stride", 1))


def output_weight(chunk: GPTModel) -> torch.Tensor:
    """Return this rank's rows [V_padded / tensor, h] of the output matrix, which is the embedding if the two are
    tied."""
    weight = (
        chunk.shared_embedding_or_output_weight()
        if chunk.share_embeddings_and_output_weights
        else chunk.output_layer.weight
    )
    assert weight is not None, "the chunk holds no output weight"
    return weight


def freeze(chunks: Sequence[torch.nn.Module], parts: Sequence[str]) -> None:
    """Let the parameters of these parts (`critic.freeze`) keep their weights. Call before the optimizer is built."""
    for name, parameter in named_local_parameters(chunks).items():
        if is_frozen(name, parts):
            parameter.requires_grad_(False)


def named_local_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters by "{virtual pipeline stage}.{path inside that chunk}", wrapped or not, experts grouped
    or not, in the order of the modules."""
    return {
        f"{stage}.{one_name_an_expert(name)}": parameter
        for stage, chunk in enumerate(chunks)
        for name, parameter in unwrap(chunk).named_parameters()
    }


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside megatron-core's wrappers."""
    module: Any = chunk
    while not isinstance(module, GPTModel):
        module = module.module
    return module
