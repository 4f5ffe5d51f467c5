"""The chunks of megatron-core's GPTModel that this rank holds, with an output layer that does not form logits.

The last chunk of a policy returns hidden states; log-probs and entropy are computed from them and the output weight by
`megatron_dapo.ops.logprob`, which never holds the logits of all tokens. That of a critic returns values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.models.gpt.gpt_model import GPTModel
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

from megatron_dapo.checkpoints.architecture import LANGUAGE_MODEL, TOKEN_VALUE, ModelArchitecture
from megatron_dapo.checkpoints.megatron_layout import padded_vocabulary
from megatron_dapo.megatron.experts import normalize_probabilities
from megatron_dapo.megatron.layer_spec import block_spec
from megatron_dapo.megatron.model_config import GPTConfig, describe_precision
from megatron_dapo.megatron.rotary import inverse_frequencies
from megatron_dapo.megatron.value_head import ValueHead
from megatron_dapo.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)

# Which dim of a parallel layer's weight is sharded over tensor ranks.
SHARDED_DIM = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}


class DeferredOutputLayer(torch.nn.Module):
    """Stands in GPTModel's place of the output layer: hands the hidden states on and keeps the weight for the head.

    The hidden states leave the tensor-parallel region here, so that the partial gradients which the head returns on
    every tensor rank are summed (and scattered again under sequence parallelism).
    """

    def __init__(self, weight: torch.nn.Parameter | None, sequence_parallel: bool, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.sequence_parallel = sequence_parallel
        self.group = group

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """[P or its sequence-parallel part, 1, h] -> [P, 1, h]."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.group
            ), None
        return copy_to_tensor_model_parallel_region(hidden, group=self.group), None


def _deferred_output(chunk: GPTModel, config: TransformerConfig) -> torch.nn.Module:
    return DeferredOutputLayer(chunk.output_layer.weight, config.sequence_parallel, chunk.pg_collection.tp)


def _value_output(chunk: GPTModel, config: TransformerConfig) -> torch.nn.Module:
    return ValueHead(config, chunk.pg_collection.tp)


# Head of an architecture -> what takes the place of GPTModel's output layer.
OUTPUT_LAYERS: Mapping[str, Callable[[GPTModel, TransformerConfig], torch.nn.Module]] = MappingProxyType(
    {LANGUAGE_MODEL: _deferred_output, TOKEN_VALUE: _value_output}
)


def build_chunks(
    architecture: ModelArchitecture, layout: ParallelLayout, config: GPTConfig, rank: int
) -> list[GPTModel]:
    """This rank's model chunks, one a virtual pipeline stage, in training mode; weights are NaN until loaded."""
    logger.info("precision: %s", describe_precision(config))
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
    frequencies = inverse_frequencies(architecture.head_dim, architecture.rope_theta, architecture.rope_scaling)
    chunk.rotary_pos_emb.inv_freq = frequencies.to(torch.cuda.current_device())
    mark_sharded_parameters(chunk)
    if architecture.experts is not None:
        normalize_probabilities(chunk, architecture.experts.normalize)
    if chunk.post_process:
        chunk.output_layer = OUTPUT_LAYERS[architecture.head](chunk, config)
    with torch.no_grad():
        for parameter in chunk.parameters():
            if not is_float8tensor(parameter):
                parameter.fill_(torch.nan)
    return chunk.train()


def mark_sharded_parameters(chunk: torch.nn.Module) -> None:
    """Mark the weights that tensor ranks hold different parts of.

    megatron-core does so while it initializes weights, which is skipped here; without the marks the gradient norm would
    count only the first tensor rank's parts.
    """
    for module in chunk.modules():
        for kind, dim in SHARDED_DIM.items():
            if (
                isinstance(module, kind)
                and module.weight is not None
                and not hasattr(module.weight, "tensor_model_parallel")
            ):
                set_tensor_model_parallel_attributes(module.weight, True, dim, getattr(module, "stride", 1))


def output_weight(chunk: GPTModel) -> torch.Tensor:
    """[V_padded / tensor, h]: this rank's rows of the output matrix, which is the embedding where the two are tied."""
    weight = (
        chunk.shared_embedding_or_output_weight()
        if chunk.share_embeddings_and_output_weights
        else chunk.output_layer.weight
    )
    assert weight is not None, "the chunk holds no output weight"
    return weight


def named_local_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by "{virtual pipeline stage}.{path inside that chunk}", wrapped or not."""
    return {
        f"{stage}.{name}": parameter
        for stage, chunk in enumerate(chunks)
        for name, parameter in unwrap(chunk).named_parameters()
    }


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside megatron-core's wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
