"""Steps of published systems, and their phases."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.config import config_from_dict
from megatron_dapo.config.cluster import Cluster
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.step import StepPlan, plan_step
from tests.unit.config.architectures import facts_of
from tests.unit.plan.models import MODELS, QWEN_7B, QWEN_32B

LLAMA_8B = {
    **QWEN_7B,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN3_32B = {
    **QWEN_32B,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
    "vocab_size": 151936,
}
# NeMo-RL v0.4, docs/about/performance-summary.md: GRPO on policy on DGX H100, bf16, Megatron-core. Model, GPUs, mean sequence,
# ranks of a server, layout of training, seconds of a step.
PUBLISHED: dict[str, tuple[Any, int, int, int, dict[str, Any], float]] = {
    "Llama3.1-8B": (LLAMA_8B, 16, 1060, 1, {"pp_size": 2}, 97.7),
    "Qwen3-32B": (QWEN3_32B, 32, 3206, 4, {"tp_size": 4, "pp_size": 4, "sequence_parallel": True}, 393),
    "Qwen3-30B-A3B": (
        MODELS["30B-A3B"],
        32,
        3154,
        4,
        {"tp_size": 2, "ep_size": 8, "etp_size": 1, "sequence_parallel": True},
        225,
    ),
}


def published(name: str) -> tuple[StepPlan, float]:
    document, gpus, mean, server, parallel, seconds = PUBLISHED[name]
    config = config_from_dict(
        {
            "model": {"path": "/m", "dtype": "bfloat16", "offload": "all"},
            "data": {"train_paths": ["/t"], "max_prompt_tokens": 800},
            "training": {"micro_batch_tokens": 4096, "mini_batch_prompts": 16},
            "rollout": {
                "engine": "sglang",
                "prompts_per_step": 64,
                "group_size": 32,
                "max_response_tokens": 3996,
                "filter_groups": False,
            },
            "sglang": {
                "placement": "colocated",
                "mem_fraction_static": 0.6,
                "tp_size": server,
                "servers_per_node": 8 // server,
            },
            "parallel": {**parallel, "num_processes": gpus},
            "algorithm": {"kl_loss_coefficient": 0.01},
        }
    )
    cluster = Cluster(gpus // 8, 8, 79.0, 2000.0)
    return plan_step(config, facts_of(document), gpus, cluster, GPUS["H100"], mean - 100), seconds


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_planned_step_is_no_slower_than_a_published_one_and_of_its_order(name: str) -> None:
    """The plan has no rewards, no driver and no waits: observed 0.4 to 0.8 of the published seconds."""
    plan, seconds = published(name)
    assert 0.35 < plan.total / seconds < 1
    assert plan.peak < plan.cluster.gpu_bytes


def test_phases_are_those_of_the_step() -> None:
    plan, _ = published("Qwen3-32B")
    assert list(plan.seconds) == ["generate", "log_probs", "train", "offload", "weight_update"]
    assert plan.total == pytest.approx(sum(plan.of_phase(phase) for phase in plan.seconds))
    assert [one.phase for one in plan.memory.phases] == [
        *("generate", "log_probs", "train", "weight_update", "checkpoint", "evaluation")
    ]
    assert plan.checkpoint_bytes == pytest.approx(32.8e9 * 14, rel=0.01)
    assert plan.sync_bytes == pytest.approx(8 * 65.6e9, rel=0.02)
