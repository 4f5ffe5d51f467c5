"""The arithmetic of the comparison with TRL, and that both sides get the recipe's values."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dapo_vs_trl", ROOT / "benchmarks" / "dapo_vs_trl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(seconds: float, trained: int, generated: int, evaluation: float = 0.0) -> dict[str, float]:
    shares = {"generate": 0.5, "logprobs": 0.1, "advantages": 0.0, "train": 0.3, "record": 0.1}
    return {
        "rollout/groups_trained": trained,
        "rollout/groups_generated": generated,
        "time/step": seconds + evaluation,
        "time/evaluate": evaluation,
        "time/checkpoint": 0.0,
        **{f"time/{name}": share * seconds for name, share in shares.items()},
    }


def test_ratios_of_known_runs(benchmark: ModuleType) -> None:
    evaluations = [{"train_step": number, "eval/avg_at_k": value} for number, value in ((0, 0.4), (1, 0.6), (2, 0.8))]
    steps = [step(2.0, 4, 5), step(4.0, 4, 7, evaluation=9.0), step(5.0, 4, 8)]
    ours = benchmark.ours_report(steps, evaluations, group_size=8)
    assert ours["batch_ends"] == [2.0, 6.0, 11.0]
    theirs = {
        "train_steps": 2,
        "batch_ends": [10.0, 20.0],
        "trained_samples": 80,
        "useful_samples": 60,
        "evaluations": [
            {"train_seconds": 0.0, "accuracy": 0.4},
            {"train_seconds": 10.0, "accuracy": 0.5},
            {"train_seconds": 30.0, "accuracy": 0.9},
        ],
    }
    result = benchmark.compare(ours, theirs, target=0.7)
    # of both, the second batch: 32 samples in 4 seconds against 40 in 10
    assert result["samples_per_s_ratio"] == pytest.approx(8 / 4)
    assert result["useful_samples_per_s"] == {"ours": pytest.approx(8), "trl": pytest.approx(3)}
    assert result["generated_samples_per_s"] == {"ours": pytest.approx(56 / 4), "trl": pytest.approx(4)}
    assert result["time_to_accuracy_ratio"] == pytest.approx(30 / 6)
    # halfway between 10 and 30 seconds, and halfway between 2 and 6
    assert result["time_to_accuracy_ratio_interpolated"] == pytest.approx(20 / 4)
    assert "50% of a step generates" in result["what_bounds_it"] and "40% of what is" in result["what_bounds_it"]
    assert benchmark.compare(ours, theirs, target=0.95)["time_to_accuracy_ratio"] is None


def test_the_peer_gets_the_recipe(benchmark: ModuleType, tmp_path: Path) -> None:
    config = benchmark.load_config(benchmark.RECIPE).config
    settings = {"processes": 2, "rows_per_pass": 32, "cache_implementation": "static"}
    specification = benchmark.peer_specification(config, tmp_path, settings, train_steps=3)
    assert specification["optimizer"]["learning_rate"] == config.optimizer.learning_rate
    assert (
        specification["optimizer_steps_per_batch"] * config.training.mini_batch_prompts
        == config.rollout.prompts_per_step
    )
    assert specification["settings"] == {"rows_per_pass": 32, "cache_implementation": "static"}
    assert (specification["threads"], specification["train_steps"], specification["stop_ids"]) == (1, 3, [2])
    changed = benchmark.load_config(benchmark.RECIPE, ["optimizer.schedule=cosine"]).config
    with pytest.raises(ValueError, match="constant learning rate"):
        benchmark.peer_specification(changed, tmp_path, settings)
