"""`megatron-dapo eval` through SGLang servers: greedy answers are the embedded engine's, at any tensor-parallel size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.engines.sglang.server import SglangServer

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
RUN_S = 600.0
NUM_PROBLEMS = 12


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "heldout.jsonl"
    lines = (QUICKSTART / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:NUM_PROBLEMS]), encoding="utf-8")
    return path


def run(problems: Path, output: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    # Greedy: one response a problem, the same from every engine that computes the same logits.
    settings = [
        f'data.eval_paths=["{problems}"]',
        "evaluation.num_samples=1",
        "evaluation.temperature=0.0",
        "evaluation.top_p=1.0",
        'data.train_paths=["not/there.jsonl"]',
        *overrides,
    ]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "megatron_dapo.cli.main",
        "eval",
        str(QUICKSTART / "quickstart.toml"),
    ]
    command += ["--output", str(output), *(part for setting in settings for part in ("--set", setting))]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S, check=False)


def result(problems: Path, output: Path, *overrides: str) -> dict[str, Any]:
    done = run(problems, output, *overrides)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def expected(problems: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result(problems, tmp_path_factory.mktemp("embedded") / "result.json")


def served(python: Path, *overrides: str) -> tuple[str, ...]:
    return ('rollout.engine="sglang"', f'sglang.python="{python}"', "sglang.max_running_requests=8", *overrides)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("sglang.tp_size=1", "sglang.servers_per_node=2"), id="2x1", marks=pytest.mark.long),
        pytest.param(("sglang.tp_size=2",), id="tp2", marks=pytest.mark.long),
    ],
)
def test_servers_give_the_embedded_engines_answers(
    layout: tuple[str, ...], expected: dict[str, Any], problems: Path, tmp_path: Path, engine_python: Path
) -> None:
    found = result(problems, tmp_path / "result.json", *served(engine_python, *layout))
    assert found["problems"] == expected["problems"] and found["metrics"] == expected["metrics"]
    assert 0 < found["metrics"]["avg@1"]["value"] < 1
    version = found["protocol"].pop("engine_version")
    assert version.startswith("sglang 0.5.") and found["protocol"].pop("engine") == "sglang"
    assert found["protocol"].items() <= expected["protocol"].items()


@pytest.mark.long
def test_servers_that_run_already_are_used_and_left(
    expected: dict[str, Any],
    problems: Path,
    tmp_path: Path,
    engine_python: Path,
    server_factory: Callable[..., SglangServer],
) -> None:
    server = server_factory(QUICKSTART / "base_model", max_running_requests=8)
    attached = served(engine_python, f'sglang.urls=["{server.url}"]', f'sglang.api_key_file="{server.key_file}"')
    # A server of another seedless mode serves greedy requests as well.
    attached += ("sglang.enable_deterministic_inference=false",)
    found = result(problems, tmp_path / "result.json", *attached)
    assert found["problems"] == expected["problems"] and server.is_alive()
    other = shutil.copytree(QUICKSTART / "base_model", tmp_path / "other")
    refused = run(problems, tmp_path / "other.json", *attached, f'model.path="{other}"')
    last = refused.stderr.strip().splitlines()[-1]
    assert refused.returncode == 1 and f"serves {QUICKSTART / 'base_model'}, not {other}: start it from" in last
    assert "Traceback" not in refused.stderr and not (tmp_path / "other.json").exists()


def test_an_interpreter_that_is_not_there_is_one_line_before_anything_starts(problems: Path, tmp_path: Path) -> None:
    done = run(problems, tmp_path / "result.json", *served(tmp_path / "no-python"))
    first, *lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and first.endswith(": 1 problem") and len(lines) == 1, done.stderr
    assert lines[0].startswith("  - sglang.python: ") and "no-python does not run" in lines[0] and "Fix: " in lines[0]
