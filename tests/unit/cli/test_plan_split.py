"""`megatron-dapo plan split RUN_DIR` on directories of runs whose seconds follow a queue with known rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.memory import run_memory
from megatron_dapo.plan.overlap import Collection
from megatron_dapo.plan.rollout import engine_rates, running_at_once
from megatron_dapo.plan.split import Measured, Proposal, Split, SplitLimits, measured_lengths
from tests.made_runs import write_json, write_lines
from tests.unit.config.architectures import QWEN_7B, write_model
from tests.unit.plan.models import run_of

H100 = "TP1 PP1 CP1 DP4 on 4 processes, NVIDIA H100 80GB HBM3; node1, Linux, 96 CPUs"
UPDATE, MEAN, MOST = 2.0, 1500.0, 8000.0


def made_run(directory: Path, train: float, *, num_steps: int = 12, machine: str = H100, **sections: dict[str, Any]) -> Path:
    """Write the directory of a run whose four servers, of one GPU each, are as fast as a plan takes them; four GPUs train."""
    model = write_model(directory / "Qwen2.5-7B", QWEN_7B)
    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "recompute_granularity": "full"},
        "rollout": {
            "engine": "sglang", "prompts_per_step": 64, "max_response_tokens": 8192, "max_staleness": 1,
            "partial_rollout": True, "filter_groups": False,
        },
        "sglang": {"placement": "disaggregated", "servers_per_node": 4, "mem_fraction_static": 0.8},
        "algorithm": {"off_policy": {"correction": "tis"}},
        "parallel": {"num_processes": 4, "tp_size": 1},
        "training": {"micro_batch_tokens": 10240, "mini_batch_prompts": 16},
        "optimizer": {"on_host": True},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    config = run_of(**given)
    architecture, cluster = parse_architecture(QWEN_7B), Cluster(1, gpu_gib=GPUS["H100"].memory_gib)
    engine = run_memory(config, architecture, 4, cluster).engine_memory
    lengths = measured_lengths(8192, MEAN, MOST, 0.0, 64 * 16, 100.0)
    seconds = None
    if engine is not None and config.sglang.placement == "disaggregated":
        measured = Measured(0.0, 0.0, train, UPDATE, 0.0, 64 * 16, lengths)
        limits = SplitLimits(running_at_once(config, engine, lengths), 1, collection=Collection.of(config))
        rates = engine_rates(config, architecture, engine, GPUS["H100"])
        seconds = Proposal.of(rates, measured, Split(4, 4, train), limits, 1.0, 0.0).seconds
    row = {
        "time/step": 3.0 + train + UPDATE, "time/evaluate": 2.0, "time/checkpoint": 1.0, "time/generate": 0.0,
        "time/weight_sync": UPDATE, "throughput/generated_tokens": MEAN * 1024, "throughput/generated_tokens_per_s": 1e4,
        "rollout/groups_filtered_share": 0.0, "rollout/response_tokens_max": MOST, "rollout/truncated_share": 0.0,
        "rollout/prompt_tokens_mean": 100.0, "window/responses": 0, "window/per_finished": 0, "async/engine_idle": 0.125,
    }
    if seconds is not None:
        row |= {
            "time/step": 3.0 + seconds.step,
            "time/generate": seconds.wait,
            "throughput/generated_tokens_per_s": MEAN * 1024 / seconds.collect,
        }
    first = {**row, "time/step": 500.0, "time/generate": 400.0}  # it compiles
    write_json(directory / "config.json", {"version": 1, "config": config.model_dump(mode="json"), "origins": {}})
    write_json(directory / "provenance.json", {"machine": machine})
    steps = range(1, num_steps + 1)
    write_lines(directory / "metrics.jsonl", [{"train_step": n, **(first if n <= 5 else row)} for n in steps])
    return directory


def split(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", "split", *arguments])


@pytest.mark.parametrize(("train", "side"), [(5.0, "trainer"), (400.0, "engines")])
def test_the_side_that_waits_gives_devices_to_the_other(tmp_path: Path, train: float, side: str) -> None:
    result = split(str(made_run(tmp_path, train)), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["gpu"] == "H100" and report["steps"] == 7 and report["engine_factor"] == pytest.approx(1.0, abs=0.02)
    now, best = report["now"], report["proposals"][0]
    assert (now["trainer"], now["servers"], now["settings"], now["waits"]) == (4, 4, {}, side)
    assert now["step"] == pytest.approx(report["measured"]["step"], rel=0.02)
    assert report["measured"]["engine_idle"] == pytest.approx(report["measured"]["step"] / 8)
    assert {(one["trainer"], one["servers"]) for one in report["proposals"]} == {(n, 8 - n) for n in range(1, 8)}
    assert best["step"] < 0.95 * now["step"]
    assert best["trainer"] < 4 if side == "trainer" else best["trainer"] > 4
    lines = split(str(tmp_path)).stdout
    assert f"--set parallel.num_processes={best['trainer']} --set sglang.servers_per_node={best['servers']}" in lines
    assert "measured, mean of 7 steps" in lines and "proposed, " in lines


def test_a_run_that_streams_is_read_as_one(tmp_path: Path) -> None:
    whole, streamed = (
        json.loads(split(str(made_run(tmp_path / name, 5.0, **sections)), "--json").stdout)
        for name, sections in (("whole", {}), ("streamed", {"training": {"stream": "mini_batches", "shuffle": False}}))
    )
    assert streamed["engine_factor"] == pytest.approx(1.0, abs=0.02)
    assert streamed["now"]["step"] == pytest.approx(streamed["measured"]["step"], rel=0.02)
    assert streamed["now"]["step"] < whole["now"]["step"]




@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"sglang": {"placement": "colocated"}, "rollout": {"max_staleness": 0}}, (), "engines share the trainer's devices"),
        ({"num_steps": 7}, (), "7 steps, needs 8"),
        ({"machine": "TP1 PP1 CP1 DP4 on 4 processes, CPU; host, Linux, 2 CPUs"}, (), "ran on CPU, whose rates are unknown"),
        ({}, ("--gpu", "H1"), "--gpu H1: not known"),
    ],
)
def test_what_cannot_be_split_is_refused(
    tmp_path: Path, changes: dict[str, Any], arguments: tuple[str, ...], words: str
) -> None:
    result = split(str(made_run(tmp_path, 5.0, **changes)), *arguments)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    result = split(str(tmp_path))
    assert result.exit_code == 2 and "no config.json" in result.stderr
