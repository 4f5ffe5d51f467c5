"""A planned step and its phases."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.step import StepPlan, plan_step
from tests.unit.config.architectures import QWEN_32B
from tests.unit.plan.models import colocated, run_of

QWEN3_32B = {
    **QWEN_32B,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
    "vocab_size": 151936,
}


def planned(others: dict[str, Any] | None = None, **rollout: Any) -> StepPlan:
    """A step of Qwen3-32B on four nodes. `others`: further sections."""
    sections = colocated(0.6, tp_size=4, servers_per_node=2)
    sections["rollout"] |= {"prompts_per_step": 64, "group_size": 32, "max_response_tokens": 3996, "filter_groups": False}
    sections["rollout"] |= rollout
    sections |= {"data": {"max_prompt_tokens": 800}, "training": {"micro_batch_tokens": 4096, "mini_batch_prompts": 16}}
    config = run_of(
        model={"offload": "all"},
        parallel={"tp_size": 4, "pp_size": 4, "sequence_parallel": True, "num_processes": 32},
        **sections | (others or {}),
    )
    return plan_step(config, parse_architecture(QWEN3_32B), 32, Cluster(4), GPUS["H100"], 3000)


def test_phases_are_those_of_the_step() -> None:
    plan = planned()
    assert list(plan.seconds) == ["generate", "log_probs", "train", "offload", "weight_update"]
    assert plan.total == pytest.approx(sum(plan.of_phase(phase) for phase in plan.seconds))
    assert [one.phase for one in plan.memory.phases] == [
        *("generate", "log_probs", "train", "weight_update", "checkpoint", "evaluation")
    ]
    assert plan.checkpoint_bytes == pytest.approx(32.8e9 * 14, rel=0.01)
    assert plan.sync.num_bytes == pytest.approx(8 * 65.6e9, rel=0.02)


def test_carried_responses_are_read_again() -> None:
    whole, carried = planned(), planned(partial_rollout=True, max_staleness=1, oversample=2.0)
    prompts, again = (plan.seconds["generate"]["prefill"] for plan in (whole, carried))
    queue = carried.queue
    assert queue is not None
    # As many as run at once, each with its prompt and half of its tokens or more: long ones run longer.
    tokens = queue.running * (100 + 3000 / 2)
    assert again - prompts > 2 * 32.0e9 * tokens / (4 * GPUS["H100"].flops)
    assert prompts > 0


def test_a_teacher_reads_the_share_of_its_sources_in_every_epoch() -> None:
    def log_probs(teachers: list[dict[str, Any]], epochs: int = 1) -> float:
        sources = [{"path": "math.jsonl", "weight": 3.0}, {"path": "chat.jsonl", "weight": 1.0}]
        others = {"distillation": {"teachers": teachers}, "training": {"micro_batch_tokens": 4096, "mini_batch_prompts": 16, "epochs": epochs}}
        others["data"] = {"max_prompt_tokens": 800, "train_paths": [], "sources": sources}
        return sum(planned(others).seconds["log_probs"].values())

    alone = log_probs([])
    whole, math, twice = (log_probs([one], epochs) - alone for one, epochs in (({}, 1), ({"sources": ["math"]}, 1), ({}, 2)))
    assert whole == pytest.approx(alone, rel=1e-6), "the policy's size"
    assert math == pytest.approx(0.75 * whole, rel=0.05) and twice == pytest.approx(2 * whole)
