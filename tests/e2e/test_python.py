"""Runs from Python: a script, and a notebook with hooks of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import ROOT, RUN_TIMEOUT_S, lines_of

pytestmark = pytest.mark.slow

MODEL = ROOT / "examples" / "quickstart" / "base_model"

# Executes the cells of a notebook as IPython does: in one namespace of __main__, their lines in the line cache alone.
CELLS = """
import json, linecache, sys
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        text, name = "".join(cell["source"]), f"<ipython-input-{number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), globals())
print(json.dumps({"metrics": result.metrics, "stopped": result.summary.stopped, "model": str(result.model),
                  "texts": [[one.text, one.finish_reason, len(one.token_ids), len(one.logprobs)] for one in responses]}))
"""


def run(code: str | Path, *arguments: str, cwd: Path, **variables: str) -> str:
    """A Python program to its end; its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *((str(code),) if isinstance(code, Path) else ("-c", code)), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_trains_on_rows_and_a_reward_of_its_own(tmp_path: Path) -> None:
    script = Path(shutil.copy(ROOT / "examples" / "python" / "own_run.py", tmp_path))
    printed = run(script, str(MODEL), "run", cwd=tmp_path).splitlines()[-1]
    assert printed.startswith("2 steps, mean reward ") and printed.endswith("run/huggingface")
    assert (tmp_path / "run" / "huggingface" / "config.json").is_file()
    samples = lines_of(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 2 * 8 * 4
    # The same script again finds the run finished, and reads the same result.
    assert run(script, str(MODEL), "run", cwd=tmp_path).splitlines()[-1] == printed


def test_a_notebook_trains_evaluates_and_generates(tmp_path: Path) -> None:
    notebook = ROOT / "examples" / "python" / "own_run.ipynb"
    variables = {"MODEL": str(MODEL), "OUTPUT_DIR": str(tmp_path / "run")}
    printed = run(CELLS, str(notebook), cwd=tmp_path, **variables).splitlines()
    outcome = json.loads(printed[-1])
    assert outcome["stopped"] == "finished" and len(outcome["metrics"]) == 2
    assert sum(line.startswith("step ") for line in printed) == 2, "the callback of the notebook prints on rank 0"
    assert len(outcome["texts"]) == 2
    for _, reason, num_tokens, num_logprobs in outcome["texts"]:
        assert reason in ("stop", "length") and 1 <= num_tokens == num_logprobs <= 32
    written = sorted(path.name for path in (tmp_path / "run" / "inputs").iterdir())
    assert {"recipe.toml", "train.jsonl", "eval.jsonl", "reward_verifier_0.py"} <= set(written)
