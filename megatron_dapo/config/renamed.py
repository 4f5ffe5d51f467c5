"""Old configuration keys and the names they have now: an old key is refused with the line to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_PARALLEL = {
    "tensor": "tp_size",
    "pipeline": "pp_size",
    "virtual_pipeline": "vpp_size",
    "context": "cp_size",
    "expert": "ep_size",
    "expert_tensor": "etp_size",
    # What Megatron calls them.
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "virtual_pipeline_model_parallel_size": "vpp_size",
    "context_parallel_size": "cp_size",
    "expert_model_parallel_size": "ep_size",
    "expert_tensor_parallel_size": "etp_size",
}
# A critic has no etp_size of its own.
_NOT_OF_CRITICS = ("expert_tensor", "expert_tensor_parallel_size")

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "run.folder": "run.output_dir",
        "checkpoint.folder": "checkpoint.output_dir",
        "model.recompute": "model.recompute_granularity",
        **{f"parallel.{old}": f"parallel.{new}" for old, new in _PARALLEL.items()},
        **{
            f"critic.parallel.{old}": f"critic.parallel.{new}"
            for old, new in _PARALLEL.items()
            if old not in _NOT_OF_CRITICS
        },
        "parallel.distributed_optimizer": "parallel.use_distributed_optimizer",
        "precision.bf16_first_layers": "precision.num_layers_at_start_in_bf16",
        "precision.bf16_last_layers": "precision.num_layers_at_end_in_bf16",
        "precision.fp8_parameters": "precision.fp8_param",
        "rollout.accept_bias": "rollout.allow_biased_sampling",
        "rollout.max_generation_rounds": "rollout.max_num_gen_batches",
        "rollout.partial": "rollout.partial_rollout",
        "sglang.tensor": "sglang.tp_size",
        "sglang.expert": "sglang.ep_size",
        "sglang.key_file": "sglang.api_key_file",
        "sglang.transport": "sglang.weight_sync_transport",
        "sglang.bucket_mb": "sglang.weight_sync_bucket_mb",
        "sglang.update_timeout_seconds": "sglang.weight_sync_timeout_seconds",
        "sglang.accept_quantization_bias": "sglang.allow_quantization_bias",
        "sglang.memory_fraction": "sglang.mem_fraction_static",
        "sglang.seeded": "sglang.enable_deterministic_inference",
        "sglang.restart_budget": "sglang.max_restarts",
        "reward.confirm_both_overlong": "reward.allow_overlong_filter_and_punishment",
        "algorithm.policy_loss": "algorithm.loss.name",
        "algorithm.clip_ratio_low": "algorithm.loss.clip_ratio_low",
        "algorithm.clip_ratio_high": "algorithm.loss.clip_ratio_high",
        "algorithm.dual_clip": "algorithm.loss.dual_clip",
        "algorithm.aggregation": "algorithm.loss.aggregation",
        "algorithm.aggregation_length": "algorithm.loss.aggregation_length",
        "algorithm.grpo_std": "algorithm.advantage.std",
        "algorithm.off_policy.normalise": "algorithm.off_policy.batch_normalize",
        "algorithm.off_policy.normalize": "algorithm.off_policy.batch_normalize",
        "advantage_estimation.limit": "advantage_estimation.clip",
        "window.train_items": "window.windows_per_step",
    }
)

# Values that changed with their key: new key -> old value -> new value.
RENAMED_VALUES: Mapping[str, Mapping[Any, Any]] = MappingProxyType(
    {
        "algorithm.loss.name": {"clip_higher": "ppo_clip", "grpo": "ppo_clip"},
        "algorithm.loss.dual_clip": {0: "off"},
        "rollout.partial_rollout": {"continue": True, "restart": False},
        "sglang.weight_sync_transport": {"memory": "shared_memory", "peer": "p2p"},
    }
)


# Names that other frameworks and papers have for a choice of ours: key -> name -> what it is here.
FOREIGN_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "algorithm.loss.name": {
            "grpo": 'ppo_clip with algorithm.advantage = "grpo"',
            "dapo": "ppo_clip with clip_ratio_high above clip_ratio_low",
            "clip_higher": "ppo_clip with clip_ratio_high above clip_ratio_low",
            "ppo": "ppo_clip with clip_ratio_high = clip_ratio_low",
            "vanilla": "ppo_clip",
        },
        "algorithm.advantage.name": {
            "reinforce_plus_plus": "reinforce_pp",
            "reinforce_plus_plus_baseline": "reinforce_baseline",
            "gae": 'algorithm.name = "ppo", which has a critic',
        },
    }
)


def renamed_value(path: str, value: Any) -> Any:
    """Return the value that the key `path` has now for an old `value`; most values have not changed."""
    known = RENAMED_VALUES.get(path, {})
    # Lists cannot be looked up, and none was renamed.
    return known.get(value, value) if isinstance(value, str | int | float) else value
