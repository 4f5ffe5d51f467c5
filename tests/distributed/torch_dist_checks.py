"""Worker: a plain GPTModel of megatron-core, built from a model's config.json, saves and loads its own `torch_dist` checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.load import load_from_huggingface
from megatron_dapo.megatron.model import build_chunks
from megatron_dapo.megatron.model_config import ModelSettings, transformer_config
from megatron_dapo.megatron.platform import install_cpu_platform
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan.memory import padded_vocabulary


def run(arguments: Mapping[str, Any]) -> list[str]:
    """Save the model of a Hugging Face directory, or load a checkpoint; return the parameters that differ from the directory's."""
    install_cpu_platform()
    directory, layout = arguments["model"], ParallelLayout(dist.get_world_size(), **arguments["layout"])
    mpu.initialize_model_parallel(
        layout.tensor, layout.pipeline, expert_model_parallel_size=layout.expert, create_gloo_process_groups=False
    )
    architecture, rank = read_architecture(directory), dist.get_rank()
    if arguments["is_plain"]:
        model = plain_model(architecture, layout)
    else:
        config = transformer_config(architecture, layout, ModelSettings())
        [model] = build_chunks(architecture, layout, config, rank)
    parameters = {own_name(f"0.{name}", architecture): each.detach() for name, each in model.named_parameters()}
    expected = {name: torch.full_like(each, torch.nan) for name, each in parameters.items()}
    load_from_huggingface(directory, megatron_layout(architecture, layout, torch.float32), rank, expected)
    if arguments["action"] == "save":
        for name, parameter in parameters.items():
            parameter.copy_(expected[name])
        target = Path(arguments["checkpoint"])
        target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({"iteration": 12, **model.sharded_state_dict()}, str(target))
        return []
    for parameter in parameters.values():
        parameter.fill_(torch.nan)
    loaded = dist_checkpointing.load(model.sharded_state_dict(), arguments["checkpoint"])
    model.load_state_dict({name: value for name, value in loaded.items() if name in model.state_dict()}, strict=False)
    differing = [name for name, each in parameters.items() if not torch.equal(each, expected[name])]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, differing)
    return sorted({name for names in found for name in names})


def own_name(name: str, architecture: ModelArchitecture) -> str:
    """Return the name of a parameter under Transformer Engine's module names, which have the norm inside the layer after it."""
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    layer = name.split(".")[3] if "decoder.layers." in name else ""
    offset = (
        mpu.get_pipeline_model_parallel_rank() * architecture.num_layers // mpu.get_pipeline_model_parallel_world_size()
    )
    if layer and not architecture.has_experts(offset + int(layer)):
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return name


def plain_model(architecture: ModelArchitecture, layout: ParallelLayout) -> GPTModel:
    """Build this rank's chunk with megatron-core's own modules."""
    experts = architecture.experts
    is_mixed = experts is not None and len(experts.layers) < architecture.num_layers
    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.intermediate_size,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        num_moe_experts=experts.num_experts if experts else None,
        moe_router_topk=experts.num_experts_per_token if experts else 2,
        moe_ffn_hidden_size=experts.intermediate_size if experts else None,
        moe_layer_freq=[int(architecture.has_experts(i)) for i in range(architecture.num_layers)] if is_mixed else 1,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        ),
        vocab_size=padded_vocabulary(architecture.vocab_size, layout.tensor),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
    )
