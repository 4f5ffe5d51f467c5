"""Fields of megatron-core's configuration that a recipe may set, in [megatron] and [critic.megatron].

A key is a field of TransformerConfig, DistributedDataParallelConfig or OptimizerConfig and is passed to each of them
that has it. Names and types are checked against a table for the locked versions (written by
`tools/megatron_fields.py`), so that a dry run on a laptop can check a recipe for GPUs. Fields that this project sets
itself are refused with the reason.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("megatron_fields.json")
SECTIONS = ("megatron", "critic.megatron")  # tables whose keys are megatron-core's

_ARCHITECTURE = "config.json of the model says it"
_LOSS = "it would change the loss, or make log-probs of the old policy and of training disagree"
_PRECISION = "set model.dtype and [precision], which the weight sync, exports and checkpoints follow"
_OPTIMIZER = "set [optimizer] or [critic.optimizer]"
_SCHEDULE = "it is set for each train step by what the micro-batches need"
_FUNCTION = "it is a function or object that the trainer sets"
_OTHER_OPTIMIZER = "checkpoints and resume know only AdamW"
_BUFFERS = "weight sync and checkpoints read the buffers of megatron-core's own data-parallel wrapper"
_INFERENCE = "SGLang or the embedded engine generates, not megatron-core"
_UNSUPPORTED_LAYER = "the layers, converters and engines of the supported families have none"
_INITIALIZATION = "weights come from model.path"
# Measured: 300 steps after gradients shrink to a tenth, a bf16 moment with beta2 = 0.999 is 1.34 times the fp32 one.
_MOMENTS = (
    "a second moment in 16 bits does not decay at beta2 = 0.999, whose steps are below its spacing; if memory is short, "
    "set optimizer.on_host = true"
)

# Pattern that matches whole names -> the reason for refusing them and, if there is one, the key to set instead.
DENIED: Mapping[str, str] = {
    "tensor_model_parallel_size": "set parallel.tp_size",
    "pipeline_model_parallel_size": "set parallel.pp_size",
    "virtual_pipeline_model_parallel_size": "set parallel.vpp_size",
    "(hierarchical_)?context_parallel_size|hybrid_context_parallel|max_seqlen_per_dp_cp_rank": "set parallel.cp_size",
    "expert_model_parallel_size": "set parallel.ep_size",
    "expert_tensor_parallel_size": "set parallel.etp_size",
    "sequence_parallel|use_distributed_optimizer": "set it in [parallel]",
    "hierarchical_context_parallel_sizes|(expert_)?gtp_.*|(expert_)?tensor_parallel_num_weight_shards": (
        "plans of weight sync and checkpoints know no such layout"
    ),
    "num_layers_in_first_pipeline_stage": "set parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "set parallel.last_stage_layers",
    "pipeline_model_parallel_layout|account_for_.*_in_pipeline_split": (
        "plans of weight sync and checkpoints know no such split; set parallel.first_stage_layers and last_stage_layers"
    ),
    "num_layers|hidden_size|num_attention_heads|num_query_groups|kv_channels|ffn_hidden_size": _ARCHITECTURE,
    "layernorm_epsilon|normalization|layernorm_zero_centered_gamma|gated_linear_unit|activation_func": _ARCHITECTURE,
    "add_bias_linear|add_qkv_bias|qk_layernorm|window_size|window_attn_skip_freq|softmax_scale": _ARCHITECTURE,
    "rotary_interleaved|num_moe_experts|moe_router_topk|moe_ffn_hidden_size|moe_layer_freq": _ARCHITECTURE,
    "moe_router_pre_softmax|moe_router_score_function|moe_router_num_groups|moe_router_group_topk": _ARCHITECTURE,
    "moe_router_topk_.*|moe_router_enable_expert_bias|moe_router_bias_update_rate|moe_shared_expert.*": _ARCHITECTURE,
    "qk_l2_norm|softmax_type|no_rope_freq|mrope_section|multi_latent_attention|attention_output_gate": _UNSUPPORTED_LAYER,
    "moe_latent_size|experimental_attention_variant.*|linear_.*|dsa_.*|mamba_.*|is_hybrid_model": _UNSUPPORTED_LAYER,
    "heterogeneous_block_specs|hetereogenous_dist_checkpoint|mtp_.*|mup_.*|use_mup|use_mamba_mem_eff_path": (
        _UNSUPPORTED_LAYER
    ),
    "apply_residual_connection_post_layernorm|apply_query_key_layer_scaling|glu_linear_offset": _UNSUPPORTED_LAYER,
    "activation_func_clamp_value|use_kitchen.*|kitchen_.*|moe_.*glu_interleave_size|use_fused_weighted_squared_relu": (
        _UNSUPPORTED_LAYER
    ),
    "transformer_impl|use_te_activation_func|use_transformer_engine_op_fuser": (
        "the layers are chosen by what is installed; `megatron-dapo doctor` says which"
    ),
    "hidden_dropout|attention_dropout|moe_input_jitter_eps|qk_clip.*|fp32_residual_connection": _LOSS,
    "calculate_per_token_loss|moe_aux_loss_coeff|moe_z_loss_coeff|moe_router_load_balancing_type": _LOSS,
    "moe_expert_capacity_factor|moe_expert_rank_capacity_factor|moe_token_drop.*|moe_pad_.*capacity": _LOSS,
    "moe_router_force_.*|moe_router_quantile_balancing_ema|average_in_collective|gradient_reduce_div_fusion": _LOSS,
    "cross_entropy_loss_fusion|cross_entropy_fusion_impl": "the log-prob head is this project's; set model.logprob_implementation",
    "grad_reduce_in_fp32|reduce_scatter_with_fp32_accumulation": "gradients are summed in fp32, so that no layout changes them",
    "bf16|fp16|(params|pipeline|autocast)_dtype|enable_autocast|first_last_layers_bf16|fp8.*|fp4.*": _PRECISION,
    "num_layers_at_(start|end)_in_bf16|tp_only_amax_red|keep_fp8_transpose_cache|quant_recipe": _PRECISION,
    "activation_func_fp8_input_store|moe_router_padding_for_.*|reuse_grad_buf_for_mxfp8_param_ag": _PRECISION,
    "lr|min_lr|decoupled_(min_)?lr|adam_.*|weight_decay|decoupled_weight_decay|clip_grad": _OPTIMIZER,
    "apply_wd_to_qk_layernorm|grad_norm_skip_threshold": _OPTIMIZER,
    "optimizer|sgd_.*|muon_.*|adaptive_muon_.*|soap_.*|lion_.*|use_layer_wise_distributed_optimizer": _OTHER_OPTIMIZER,
    "(initial_)?loss_scale|loss_scale_window|min_loss_scale|hysteresis": "they are for fp16, which is not supported",
    "use_precision_aware_optimizer|exp_avg(_sq)?_dtype": _MOMENTS,
    "main_(grads|params)_dtype|store_param_remainders": (
        "checkpoints, offloading and weight sync read main params and gradients in fp32; if memory is short, set "
        "optimizer.on_host = true, which takes all of them off the GPU"
    ),
    "optimizer_cpu_offload|optimizer_offload_fraction|use_torch_optimizer_for_cpu_offload|overlap_cpu_optimizer_.*|pin_cpu_.*": (
        "set optimizer.on_host = true: checkpoints follow it, and the update stays on the GPU"
    ),
    "optimizer_cuda_graph|overlap_param_gather_with_optimizer_step": "a step is made by all ranks or by none, after a check of the norm",
    ".*_func|timers|_cpu_offloading_context|(embedding_|output_layer_)?init_method": _FUNCTION,
    "recompute_granularity": "set model.recompute_granularity, which the memory rule reads",
    "deterministic_mode": "set run.deterministic",
    "variable_seq_lengths|deallocate_pipeline_outputs|batch_p2p_comm|overlap_p2p_comm": _SCHEDULE,
    "num_microbatches_with_partial_activation_checkpoints": _SCHEDULE,
    "perform_initialization|use_cpu_initialization|init_model_with_meta_device|(embedding_)?init_method_std": _INITIALIZATION,
    "use_megatron_fsdp|use_custom_fsdp|.*fsdp.*|data_parallel_sharding_strategy|outer_dp_sharding_strategy": _BUFFERS,
    "num_distributed_optimizer_instances|preserve_fp32_weights|check_for_nan_in_grad|check_for_large_grads": _BUFFERS,
    "param_name_patterns_for_fp32_local_accumulation": _BUFFERS,
    "flash_decode|.*inference.*|nccl_all_reduce_for_prefill|symmetric_ar_type|batch_invariant_mode": _INFERENCE,
    "moe_enable_routing_replay": "set rollout.routing_replay, which brings the engine's experts to the router",
    "moe_pad_experts_for_cuda_graph_inference|use_inference_optimized_layers": _INFERENCE,
    "moe_extended_tp|moe_use_legacy_grouped_gemm|moe_enable_deepep": "later versions of megatron-core have dropped it",
    "async_tensor_model_parallel_allreduce|enable_cuda_graph|external_cuda_graph": "later versions of megatron-core have dropped it",
    "moe_single_grouped_.*|use_grouped_gemm_.*": (
        "converters, weight sync and checkpoints have one matrix an expert; set moe_grouped_gemm, which keeps it"
    ),
    "moe_apply_probs_on_input": _LOSS,
    "defer_embedding_wgrad_compute|wgrad_deferral_limit": "the output layer is the log-prob head, which computes its own gradient",
    "overlap_moe_expert_parallel_comm|ep_overlap_.*|delay_wgrad_compute|overlap_dispatch_backward_.*": (
        "it needs a schedule of megatron-core that splits layers, which packed micro-batches do not run"
    ),
    "tp_comm_(split|atomic)_.*|tp_comm_overlap_rs_dgrad": "Transformer Engine's own choice of how to cut a product; set tp_comm_overlap",
    "moe_router_fusion": "the router is this project's own, which replays an engine's experts",
    "use_ring_exchange_p2p": "it needs a torch that NVIDIA builds",
    "use_te_rng_tracker": "there is no dropout, and checkpoints hold the states of megatron-core's own tracker",
    "suggested_communication_unit_size": _BUFFERS,
    "mlp_chunks_for_prefill": _INFERENCE,
    "cuda_graph_.*": "micro-batches differ in shape, and a graph is of one",
    "align_param_gather|param_sync_func": "stages gather when their own forward pass needs it; set overlap_param_gather",
    "test_mode|config_logger_dir|barrier_with_L1_time": "it is for megatron-core's own tests and training script",
}


@cache
def field_table() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of fields: for each, the `parts` that have it, `versions`, and the `kinds` of its values."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["fields"]


def reason_against(name: str) -> str:
    """Return why a recipe must not set the field, "" if it may."""
    return next((reason for pattern, reason in DENIED.items() if re.fullmatch(pattern, name)), "")


def settable() -> list[str]:
    """Return the names of all fields that a recipe may set."""
    return [name for name, entry in field_table().items() if entry["kinds"] and not reason_against(name)]


def problem_with(name: str, value: Any) -> tuple[str, str]:
    """Return what is wrong with a key and its value, and the fix; both empty if nothing is."""
    if reason := reason_against(name):
        return "a field that is the recipe's to set", f"remove it: {reason}"
    if name not in field_table():
        near = difflib.get_close_matches(name, settable(), n=1, cutoff=0.6)
        return "a field of megatron-core's configuration", f"did you mean {near[0]}?" if near else "remove it"
    kinds = field_table()[name]["kinds"]
    if not any(_is_of(kind, value) for kind in kinds):
        return " or ".join(map(_in_words, kinds)) or "nothing: it is not for recipes", "change the value"
    return "", ""


def _is_of(kind: Any, value: Any) -> bool:
    if isinstance(kind, Mapping):
        if "one of" in kind:
            return type(value) in (str, int) and value in kind["one of"]
        return isinstance(value, list | tuple) and all(
            any(_is_of(inner, one) for inner in kind["list"]) for one in value
        )
    if kind == "float":
        return type(value) in (int, float)
    return type(value).__name__ == kind  # a bool does not count as an int


def _in_words(kind: Any) -> str:
    if isinstance(kind, Mapping):
        if "one of" in kind:
            return "one of " + ", ".join(map(repr, kind["one of"]))
        return "a list of " + " or ".join(map(_in_words, kind["list"]))
    return {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}[kind]


def options_for(part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `options` that are fields of `part`: "model", "ddp" or "optimizer"."""
    return {name: value for name, value in options.items() if part in field_table()[name]["parts"]}
