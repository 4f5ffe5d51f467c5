"""Runs from Python: a script, a notebook with its hooks, and hooks that fail."""

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
HOOKS = ROOT / "examples" / "hooks"

HOOKED = """
from megatron_dapo import Callback, Recipe, TrainingError, train

rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)]


def reward(sample):
    return len(set(sample.response)) / 100


class Fails(Callback):
    def on_step_end(self, step, metrics):
        if step == 2:
            raise KeyError("the tracker's table")


recipe = Recipe(
    MODEL, rows, reward, output_dir=DIRECTORY,
    algorithm={"loss": f"{HOOKS}/policy_loss.py:loss", "advantage": f"{HOOKS}/advantage.py:advantage"},
    run={"total_steps": 3, "callbacks": [f"{HOOKS}/callbacks.py:EventLog", Fails]},
    rollout={"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 16, "group_filter": f"{HOOKS}/group_filter.py:keep"},
    training={"mini_batch_prompts": 4},
    checkpoint={"interval": 1},
    settings={
        "model.family": f"{HOOKS}/model_family.py:MISTRAL",
        "data.order": f"{HOOKS}/prompt_order.py:easy_first",
        "data.max_prompt_tokens": 64,
    },
)
try:
    train(recipe, check=False)
except TrainingError as error:
    print(f"exit code {error.exit_code}: {error}")
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


IN_A_KERNEL = """
import json, os, sys
import nbformat
from nbclient import NotebookClient
del os.environ["PYTEST_CURRENT_TEST"]  # It would hide the output of processes that a cell starts.
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
texts = [[output.get("text") or output["data"]["text/plain"] for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]
print(json.dumps(texts))
"""


@pytest.mark.long
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    """Cells get their names and sources from IPython, whose processes have a separate __main__."""
    packages = ROOT / ".venv-notebook"
    if not packages.exists():
        pytest.skip("ipykernel and nbclient are not installed; make .venv-notebook/.installed installs them")
    kernels = tmp_path / "share" / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "own", "language": "python"}))
    variables = {
        "MODEL": str(MODEL),
        "OUTPUT_DIR": str(tmp_path / "run"),
        "PYTHONPATH": f"{ROOT}:{packages}",
        "JUPYTER_PATH": str(tmp_path / "share" / "jupyter"),
        **{name: str(tmp_path / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")},
    }
    printed = run(IN_A_KERNEL, str(ROOT / "examples" / "python" / "own_run.ipynb"), cwd=tmp_path, **variables)
    *_, trained, evaluated, responses = json.loads(printed.splitlines()[-1])
    assert trained[-1].startswith("('finished', [") and evaluated[-1].startswith("{'avg@2': Estimate("), printed
    assert all(f"step {step}: mean reward " in "".join(trained) for step in (1, 2)), (
        "the callback prints in the notebook"
    )
    assert responses[-1].count("'stop'") + responses[-1].count("'length'") == 2
    written = {path.name for path in (tmp_path / "run" / "inputs").iterdir()}
    assert {"recipe.toml", "train.jsonl", "eval.jsonl", "reward_verifier_0.py"} <= written


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    """A random Mistral of the shipped model's sizes, with its tokenizer."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    directory, config = tmp_path / "mistral", json.loads((MODEL / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    torch.manual_seed(0)
    fields = {name: config[name] for name in (*sizes, *more)}
    MistralForCausalLM(MistralConfig(**fields, sliding_window=None)).save_pretrained(directory)
    for file in (*MODEL.glob("*token*"), *MODEL.glob("*.jinja")):
        shutil.copy(file, directory)
    return directory


@pytest.mark.long  # Each kind of hook is in tests/unit/test_hooks.py.
def test_hooks_of_every_kind_work_together_and_a_failing_one_names_itself(tmp_path: Path, mistral: Path) -> None:
    script = tmp_path / "hooked.py"
    directory = tmp_path / "run"
    script.write_text(f"MODEL, DIRECTORY, HOOKS = {str(mistral)!r}, {str(directory)!r}, {str(HOOKS)!r}\n{HOOKED}")
    printed = run(script, cwd=tmp_path).splitlines()[-1]
    assert printed.startswith("exit code 1: first failure: attempt 1, rank 0")
    assert "run_callbacks_1.py:Fails' (run.callbacks, on_step_end) raised KeyError" in printed
    failure = json.loads((directory / "failure.json").read_text())
    assert "HookError: hook" in failure["entries"][0]["message"]
    events = lines_of(directory / "events.jsonl")
    # A tenth of the rows is held out, and evaluated before the first step.
    order = [event["event"] for event in events if event["event"] != "checkpoint"]
    assert order == ["start", "evaluation", "step", "step"]
    # Megatron-core has the model that transformers generates with.
    rows = lines_of(directory / "metrics.jsonl")
    assert len(rows) == 2 and max(row["mismatch/abs_logprob_diff_mean"] for row in rows) < 1e-4
    # Only groups whose rewards differ are trained.
    first = [sample for sample in lines_of(directory / "samples.jsonl") if sample["train_step"] == 1]
    assert len(first) == 16
