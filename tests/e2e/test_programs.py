"""Benchmarks, tools and converters: all show their options, and each runs at its smallest size, with output that makes sense.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0
ENGINE_PYTHON = ".venv-sglang/bin/python"
LABELING_PYTHON = ".venv-sglang-0.5.23/bin/python"  # SGLang labels tokens from this version on
Check = Callable[[dict[str, Any]], bool]


def is_shipped(example: str) -> Callable[[str, Path], bool]:
    """Return the check that the data files of an example are what the tool makes with its seed."""
    root = ROOT / "examples" / example
    files = sorted(root.rglob("*.jsonl"))
    return lambda _, new: all(file.read_bytes() == (new / file.relative_to(root)).read_bytes() for file in files)


# Benchmark and arguments -> what holds for the JSON that its tiny run prints.
BENCHMARKS: dict[str, Check] = {
    "bf16_products.py": lambda r: len(r["speedup"]) == 6 and all(rate > 0 for one in r["gflops"].values() for kinds in one.values() for rate in kinds.values()),
    "rewards.py": lambda r: (
        0.2 < r["judge_concurrency_efficiency"] <= 1.0  # one answer after the other would be 1/16
        and r["hostile_escapes"] == r["hostile_hangs"] == 0
        and ({run["user"] for run in r["hostile"]} == {os.getuid(), 65534} or os.getuid() > 0)
    ),
    "changed_share.py": lambda r: (
        all(0 < row["share"] <= 1.1 * row["most"] for row in r["rows"])
        and r["rows"][0]["share"] < r["rows"][1]["share"]
    ),
    "drafting.py": lambda r: (
        # A larger draft never gives less, a repeated prompt more than a new one, and a past cannot give less than none.
        all(row["accepted"] >= 1.0 for row in r["rows"])
        and r["rows"][0]["accepted"] <= r["rows"][2]["accepted"]
        and {row["prompts"] for row in r["rows"]} == {"new", "repeated"}
    ),
    "collector_waste.py": lambda r: 0.5 < r["waste_ratio"] < 2.0,  # near 1; so few groups are off by chance
    "diversity.py": lambda r: r["seeds"][0]["diverse"]["examples"] == r["seeds"][0]["random"]["examples"] > 0,
    "episodes.py": lambda r: r["num_turns"] == 192 and r["concurrency_vs_bound"] > 0.9 and r["driver_ms_per_turn"] > 0,
    "episodes.py --chaos": lambda r: (
        r["episodes"] == 200 and sum(r["faults"].values()) > 10 and not any({**r["deviations"], **r["leftovers"]}.values())
    ),
    f"episodes.py --engine-python {ENGINE_PYTHON}": lambda r: (
        (r["turns"], r["agents"]) == (18, 4) and 0 < r["cached_share_with_update"] < r["cached_share"] and r["endpoint_vs_direct"] > 0
    ),
    f"episodes.py --chaos --engine-python {ENGINE_PYTHON}": lambda r: (
        r["episodes"] == 32 and r["server_kills"] > 0 and not any({**r["deviations"], **r["leftovers"]}.values())
    ),
    "length_bias.py": lambda r: r["length_bias"] <= 0.02 and r["discarded_share"] <= 0.05 and r["oldest_over_bound"] <= 0 and r["throughput"] > 1.5,
    "overlap.py": lambda r: (
        set(r["rows"]) == {"alternating", "streamed_1"} and r["rows"]["streamed_1"]["staleness"] > 0 < r["overlap_vs_max"]
    ),
    "asynchrony.py": lambda r: (
        0 < r["published_max_error"] < 0.5 and r["model_error"] < 0.1 and r["s2_seconds"] <= r["s1_seconds"] < 200
    ),
    "prompt_filter.py": lambda r: r["saved"] > 0 and r["precision"] > 0.7 and r["calibration_error"] < 0.2,
    "faulty_nodes.py": lambda r: (
        all(row["right"] + row["missed"] == r["num_tasks"] for row in r["rows"].values())
        and r["f1"] == r["rows"]["default"]["f1"] > r["rows"]["without continuity"]["f1"]
    ),
    "fp8_costs.py": lambda r: all(
        0.5 * row["expected"] < row["relative_error"] < 2 * row["expected"] for row in r["gradients"]
    ),
    "fp8_learning.py": lambda r: (
        r["runs"]["fp32"]["accuracy"] == r["runs"]["fp8_blockwise"]["accuracy"]  # the engine serves the same weights
        and r["runs"]["fp32"]["mismatch"][0] < 1e-4 < r["runs"]["fp8_blockwise"]["mismatch"][0] < 0.1
    ),
    "driver_throughput.py": lambda r: (
        (r["responses"], r["tokens"], r["servers"]) == (16, 8000, 3)
        and 0 < r["simdjson_vs_orjson"] < r["cpu_vs_orjson_without_gc"]
    ),
    "gae.py": lambda r: r["num_responses"] == 64 and min(r["vs_pass"], r["vs_loop"], r["vs_column_loop"]) > 0,
    "distillation_learning.py": lambda r: max(r["kl"].values()) < r["before"] and set(r["kl_difference"]) == {"top_k", "top_k_1"},
    "distillation_learning.py --on-policy": lambda r: max(r["kl"].values()) < r["before"] and len(r["rows"]) == 3,
    "distillation.py": lambda r: 0 < r["gradient_error"] <= 1e-6 and 0 < r["memory_ratio"] < 1,
    "head_memory.py": lambda r: r["time_ratio"] > 0 and 0 <= r["memory_ratio"] < 1,
    "plan_memory.py": lambda r: r["num_runs"] == 5 and r["max_relative_error"] <= 0.02,
    "plan_published.py": lambda r: 0 < r["max_relative_error"] < r["aim"] and len(r["rows"]) == 1,
    "plan_scale.py": lambda r: r["bytes_difference"] == 0,
    "checkpoint_plan_scale.py": lambda r: r["cases"][0]["written_ratio"] == 1 and r["cached_plan_ms"] <= 5,
    "checkpoints.py": lambda r: r["written_ratio"] <= 1.01 and r["read_ratio"] <= 1.05,
    "scale_start.py": lambda r: r["nodes_2"]["bytes_difference"] == r["nodes_2"]["connections_difference"] == 0,
    "rollout_throughput.py": lambda r: r["sglang_vs_embedded"] > 0 and r["num_responses_a_round"] == 16,
    "routing_replay.py": lambda r: r["mean_ratio"] < 0.8 and r["kl_ratio"] < 0.5 and r["bytes_per_token"] == 4,
    "tppo_efficiency.py": lambda r: r["speedup"] > 1 and 0 < r["idle_share_windows"] < r["idle_share_full"] < 1,
    "tppo_efficiency.py --measure-curve embedded": lambda r: (
        [point["running"] for point in r["embedded"]["points"]] == [1, 2, 4]
    ),
    "tppo_efficiency.py --measure-rollout embedded": lambda r: r["responses"] == 4 and r["measured_speedup"] > 0,
    "tppo_efficiency.py --train": lambda r: all(r[side]["train_steps"] == 2 for side in ("full", "windows")),
    "answers.py": lambda r: (
        r["pairs"] > 300 and r["false_positives"] == r["false_negatives"] == 0 < r["math_verify_false_negatives"]
    ),
    "train_step.py": lambda r: r["rows"][0]["num_sequences"] == 4 and min(r["step_ratio"], r["step_ratio_padded"]) > 0,
    "sao.py": lambda r: set(r["rows"]) == {"GRPO", "SAO"} and all(row["tokens"] > 1e4 for row in r["rows"].values()),
    "value_learning.py": lambda r: 0 < r["value_error"] < 2,  # values lie between -1 and 1
    "weight_sync.py": lambda r: all(
        abs(row["bytes_ratio"] - 1) < 0.01 and row["verified_vs_unverified"] > 0 and 0 < row["delta_bytes_ratio"] < 0.06
        for row in r["transports"].values()
    ),
    "window_state.py": lambda r: min(r["size_ratio"], r["write_ratio"], r["read_ratio"]) > 0,
    "gpu/head.py --rounds 1 --warm-up 1": lambda r: (
        len({round(row["loss"], 2) for row in r["cases"].values()}) <= 2 and not r["failed"]
    ),
    "gpu/step.py --rounds 1 --warm-up 1 --profile": lambda r: r["cases"] and not r["failed"],
    "gpu/slot.py a --only weight_sync": lambda r: (
        not r["failed"] and not r["not_run"] and "no CUDA device" in r["cases"]["weight_sync"]["skipped"]["gpu"]
    ),
    f"gpu/agents.py --engine-python {ENGINE_PYTHON}": lambda r: (
        (row := r["cases"]["episodes"])["lost"] == 0 < row["episodes_over_updates"] and row["mismatch"] < 1e-5 > row["mismatch_single"]
    ),
    f"update_pause.py --engine-python {LABELING_PYTHON}": lambda r: (
        r["modes"]["retract"]["again_tokens"] > r["modes"]["in_place"]["again_tokens"]
        and min(mode["syncs"] for mode in r["modes"].values()) > 0
    ),
    f"gpu/speculation.py --engine-python {ENGINE_PYTHON}": lambda r: r["cases"] and not r["failed"],
    f"gpu/streamed.py --engine-python {ENGINE_PYTHON}": lambda r: r["cases"] and not r["failed"],
    f"gpu/rollout.py --rounds 1 --engine-python {ENGINE_PYTHON}": lambda r: r["cases"] and not r["failed"],
    f"gpu/probes.py --engine-python {ENGINE_PYTHON}": lambda r: r["cases"] and not r["failed"],
    f"gpu/slot.py c --engine-python {ENGINE_PYTHON}": lambda r: (
        not r["failed"]
        and not r["not_run"]
        and r["cases"]["drafting"]["distribution.identical"]
        and r["cases"]["streamed"]["guarded.stale"] <= 1
    ),
}
# benchmarks/gpu/sync.py runs in a case of slot.py, tools/virtual_cluster/__main__.py in tests/cluster, and
# tools/fuzz_files.py in tests/unit/tools.
# Tool or converter -> arguments of its smallest run (`$NEW`: a path that does not exist yet), the directory of optional packages
# that it needs, and what it prints or writes.
TOOLS: dict[str, tuple[str, str, Callable[[str, Path], bool]]] = {
    "-m tools.megatron_fields": ("", "", lambda output, new: output.endswith("is as in the table\n")),
    "-m tools.make_quickstart": ("--output $NEW --num-steps 1 --num-corpus 50", "", is_shipped("quickstart")),
    "-m tools.make_text_tasks": ("--output $NEW", ".venv-tasks", is_shipped("smollm2")),
    "-m tools.make_agent_tasks": ("--output $NEW", "", is_shipped("agents")),
    "-m tools.make_node_models": ("$NEW --tiny", "", lambda output, new: "cpu_usage" in new.read_text()),
    "-m tools.make_smoke_model": ("$NEW --size tiny", "", lambda output, new: "Qwen2" in (new / "config.json").read_text()),
    "-m tools.make_smollm2": ("$NEW --source package", ".venv-smollm2", lambda output, new: "not the original weights" in output),
    "tools/kill_saves.py": ("--kills 8 --json", "", lambda output, new: json.loads(output)["wrong"] == 0),
    f"tools/prove_resume.py --algorithm episodes --engine-python {ENGINE_PYTHON}": (
        "--layout tp1 --set run.total_steps=3 --points 1 --json", "",
        lambda output, new: json.loads(output)["exact"] == 1 and json.loads(output)["tokens_again"] == 0,
    ),
    f"tools/prove_versions.py --engine-python {LABELING_PYTHON}": (
        "--tokens 3000 --json", LABELING_PYTHON.split("/")[0], lambda output, new: json.loads(output)["holds"] and json.loads(output)["versions"] > 2,
    ),
    "tools/prove_resume.py": (
        "--layout pp2 --to-layout dp2 --points 1 --json", "", lambda output, new: json.loads(output)["equal"] == 1,
    ),
    "-m megatron_dapo.cli.main quantize examples/quickstart/base_model": (
        "$NEW --format fp8 --prompts examples/quickstart/train.jsonl --num-calibration 4 --num-check 4 --response-tokens 8"
        " --device cpu --json", ".venv-modelopt", lambda output, new: json.loads(output)["format"] == "fp8",
    ),
}  # fmt: skip

# Runs each program of argv with --help in this one interpreter, as if it were started from the checkout's root.
HELP = """
import io, os, runpy, sys
from contextlib import redirect_stdout
for program in list(sys.argv[1:]):
    output, path = io.StringIO(), list(sys.path)
    sys.argv, sys.path[:0] = [program, "--help"], [os.path.dirname(program)]
    try:
        with redirect_stdout(output):
            runpy.run_path(program, run_name="__main__")
        sys.exit(f"{program} --help does not end")
    except SystemExit as end:
        assert not end.code and "--help" in output.getvalue(), (program, end.code, output.getvalue())
    sys.path[:] = path
"""
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
    directories = [packages and str(repository / packages), str(repository), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, directories))
    # A separate session, so that a program's workers can be killed with it.
    process = subprocess.Popen(
        command,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    shown = " ".join(map(str, arguments))[-500:]
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


def require(packages: Path) -> str:
    """Return the name of a directory of optional packages, or skip."""
    if not packages.exists():
        pytest.skip(f"make {packages.name} installs what this needs")
    return packages.name


def programs(*directories: str) -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix()
        for directory in directories
        for path in (ROOT / directory).rglob("*.py")
        if re.search(r'^if __name__ == "__main__"', path.read_text(encoding="utf-8"), re.MULTILINE)
        if "/peers/" not in path.as_posix()
    )


def test_every_program_is_run_here_and_shows_its_options(repository: Path) -> None:
    """A new program needs a line in this file, a benchmark the options that `test_benchmark` gives it."""
    known = Path(__file__).read_text(encoding="utf-8")
    for program in programs("benchmarks", "tools", "checkpoint_converters"):
        module = program.removesuffix(".py").replace("/", ".")
        assert program.removeprefix("benchmarks/") in known or module in known, f"{program}: no test here runs it"
    # One takes no options, and one imports packages that only make_text_tasks.py needs.
    without = {"tools/resume_proof/moved_state.py", "tools/make_text_tasks.py"}
    run_program(
        repository, ["-c", HELP, *sorted(set(programs("benchmarks", "tools", "checkpoint_converters")) - without)]
    )
    for program in programs("benchmarks"):
        text = (repository / program).read_text(encoding="utf-8")
        assert "options.parser(" in text or "/gpu/" in program, (
            f"{program}: --json and --tiny come from benchmarks/options.py"
        )


# ---- benchmarks


@pytest.mark.long
@pytest.mark.parametrize("case", BENCHMARKS)
def test_benchmark(case: str, repository: Path) -> None:
    program, *options = case.split()
    if LABELING_PYTHON in options:
        require(repository / LABELING_PYTHON.split("/")[0])
    result = run_json(repository, f"benchmarks/{program}", "--tiny", *options)
    assert BENCHMARKS[case](result), json.dumps(result, indent=1)[:5000]


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


@pytest.mark.long
def test_trl_recipe(repository: Path, tmp_path: Path) -> None:
    """A run of TRL leaves what a grid reads."""
    require(repository / ".venv-trl")
    found = run_json(repository, "benchmarks/trl_recipe.py", "--tiny", "--output-dir", tmp_path / "run")
    assert (found["train_steps"], found["stopped"]) == (2, "finished") and found["train_seconds"] > 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in rows] == [1, 2] and all(0 < row["actor/entropy"] < 10 for row in rows)
    assert all(row["throughput/generated_tokens"] == 16 * row["rollout/response_tokens_mean"] > 16 for row in rows)
    result = json.loads((tmp_path / "run/evaluations/step_000002.json").read_text())
    assert len(result["problems"]) == 128 and result["metrics"]["avg@1"]["value"] == found["accuracy_after"]
    assert result["protocol"]["engine"] == "embedded"


# ---- tools and converters


@pytest.mark.long
def test_programs_that_read_a_run(repository: Path, tmp_path: Path) -> None:
    """Three tiny steps of the quickstart, read by three programs."""
    run, picture = tmp_path / "run", tmp_path / "run.svg"
    overrides = [part for name, value in TINY_RUN.items() for part in ("--set", f"{name}={value}")]
    recipe = "examples/quickstart/quickstart.toml"
    arguments = ["-m", "megatron_dapo.cli.main", "train", recipe, "--layout", "tp1", "--output-dir", run]
    run_program(repository, [*arguments, *overrides])
    lines = run_program(repository, ["-m", "tools.check_smoke", run]).splitlines()
    names = ["actor/loss", "actor/grad_norm", "evaluation at step 3", "checkpoints", "exported"]
    assert [line.partition(":")[0] for line in lines] == names
    run_program(repository, ["tools/plot_run.py", run, picture])
    curves = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(curve.attrib["points"].split()) for curve in curves] == [3, 3]  # a point a step: length, accuracy
    score = ["tools/score_with_transformers.py", run / "huggingface", "examples/quickstart/heldout.jsonl"]
    result = json.loads(run_program(repository, [*score, "--num-samples", "1", "--max-new-tokens", "4"]))
    # 4 tokens are too few for an answer: every response is cut, and none is right.
    assert (result["num_problems"], result["num_samples"], result["accuracy"]) == (128, 1, 0.0)


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
def test_tool(tool: str, repository: Path, tmp_path: Path) -> None:
    arguments, packages, check = TOOLS[tool]
    name = require(repository / packages) if packages else ""
    new = tmp_path / "new"
    command = [*tool.split(), *(str(new) if one == "$NEW" else one for one in arguments.split())]
    output = run_program(repository, command, name)
    assert check(output, new), output[-5000:]


@pytest.mark.long  # tests/unit/converters/test_round_trip.py converts the same models
def test_converters_round_trip(repository: Path, tmp_path: Path) -> None:
    model = repository / "examples/quickstart/base_model"
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    first = ["checkpoint_converters/hf_to_megatron.py", model, cut, "--tensor", "2", "--pipeline", "2"]
    assert "4 files of" in run_program(repository, first)
    run_program(repository, ["checkpoint_converters/megatron_to_hf.py", cut, whole])
    assert run_program(repository, ["checkpoint_converters/verify.py", model, whole]).strip() == "identical"


def test_listening(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "tools.listening", str(os.getpid()), "--seconds", "1"]
        found = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=True)
        assert f"127.0.0.1:{server.getsockname()[1]}" in found.stdout


def test_chaos(repository: Path, tmp_path: Path) -> None:
    """Faults take root and Slurm (`make chaos-tiny`); here they are listed, and results summed up."""
    listed = run_program(repository, ["tools/chaos.py", "--list"])
    assert "105 cells" in listed and "disk-full x score: no rank writes" in listed
    result = run_json(repository, "tools/chaos.py", "--faults", "0", "--results", tmp_path / "none.jsonl")
    assert (result["num_faults"], result["num_cells_of_table"], result["culprit_named_share"]) == (0, 105, None)
