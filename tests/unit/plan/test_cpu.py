"""Estimates of a run on CPUs: their parts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config import config_from_dict
from megatron_dapo.config.schema import Config
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.cpu import SERVER_BYTES, duration, estimate, memory_bytes, problems
from megatron_dapo.plan.memory import run_memory
from megatron_dapo.rounding import GIB

MODEL = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "base_model"
ARCHITECTURE = read_architecture(MODEL)
PARAMETERS = 487_700  # the quickstart's model, counted in its checkpoints


def config_of(**sections: dict) -> Config:
    base = {"model": {"path": str(MODEL)}, "data": {"train_paths": ["a.jsonl"], "max_prompt_tokens": 64}}
    return config_from_dict({**base, **sections}, Path())


def test_a_step_costs_its_tokens() -> None:
    """Sampled tokens at 2 FLOPs a parameter and 0.1 ms, trained ones at 6 and 2 for the old log-probs, over all cores."""
    rollout = {"prompts_per_step": 4, "group_size": 8, "max_response_tokens": 32, "filter_groups": False}
    config = config_of(rollout=rollout, training={"mini_batch_prompts": 4}, run={"total_steps": 5})
    sampled = 32 * (32 + 64 / 8) * (2 * PARAMETERS / 25e9 + 1e-4)
    trained = 32 * (32 + 64) * (6 + 2) * PARAMETERS / 45e9
    found = estimate(config, ARCHITECTURE, cores=2, has_bf16=True)
    assert found.step == pytest.approx((sampled + trained) / 2, rel=1e-3)
    assert found.run == pytest.approx(5 * found.step)
    # 10 problems x 32 responses, before and after.
    with_evaluation = estimate(config, ARCHITECTURE, 2, True, num_problems=10)
    assert with_evaluation.run - found.run == pytest.approx(2 * 320 * 32 * (2 * PARAMETERS / 25e9 + 1e-4) / 2, rel=1e-3)


def test_cores_without_bfloat16_take_longer() -> None:
    config = config_of(model={"path": str(MODEL), "dtype": "bfloat16"})
    fast, slow = (estimate(config, ARCHITECTURE, 2, has_bf16).step for has_bf16 in (True, False))
    assert slow > fast


@pytest.mark.parametrize(
    ("free_gib", "steps", "expected"),
    [(16.0, 1, []), (0.5, 1, ["training.micro_batch_tokens"]), (16.0, 1_000_000, ["run.total_steps"])],
)
def test_what_does_not_fit_this_machine_is_refused(free_gib: float, steps: int, expected: list[str]) -> None:
    sizes = {
        "rollout": {"prompts_per_step": 4, "max_response_tokens": 32},
        "training": {"mini_batch_prompts": 4, "micro_batch_tokens": 512},
    }
    config = config_of(**sizes, run={"total_steps": steps})
    cluster = Cluster(1, 0, host_gib=free_gib, cores=2)
    found = list(problems(config, cluster, ARCHITECTURE, 1))
    assert [one.path for one in found] == expected
    assert all("run.ignore_estimates = true" in str(one) and "--gpus-per-node" in str(one) for one in found)
    ignored = config_of(**sizes, run={"total_steps": steps, "ignore_estimates": True})
    assert not list(problems(ignored, cluster, ARCHITECTURE, 1))
    # GPUs have other rules, and nothing is said of a machine whose cores are not known.
    for other in (Cluster(1, 8, cores=2), Cluster(1, 0, host_gib=free_gib)):
        assert not list(problems(config, other, ARCHITECTURE, 1))


def test_times_are_in_their_largest_unit() -> None:
    found = [duration(seconds) for seconds in (0.2, 40, 300, 7000, 90_000, 8.3e6)]
    assert found == ["1 s", "40 s", "5 min", "1.9 h", "25 h", "96 days"]


def test_a_server_on_cpus_takes_no_share_of_a_gpu() -> None:
    """Its cache holds max_running_requests responses of full length, not a share of a GPU's memory."""
    rollout = {"engine": "sglang", "prompts_per_step": 4, "max_response_tokens": 32}
    config = config_of(rollout=rollout, training={"mini_batch_prompts": 4, "micro_batch_tokens": 512})
    cluster = Cluster(1, 0, host_gib=16.0, cores=2)
    memory = run_memory(config, ARCHITECTURE, 1, cluster)
    assert SERVER_BYTES < memory_bytes(config, memory, 1) < 4 * GIB and not list(problems(config, cluster, ARCHITECTURE, 1))
