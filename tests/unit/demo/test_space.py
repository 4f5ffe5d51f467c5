"""Files of a demo: settings from a run's directory, modules that are enough, and a Space whose models are copied."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.config.loader import read_resolved, write_resolved
from megatron_dapo.data.dataset import prompt_id_of
from megatron_dapo.data.sources import eval_sources
from megatron_dapo.demo.modules import imported_files
from megatron_dapo.demo.space import GRADIO_VERSION, write_demo, write_space
from megatron_dapo.evaluation.estimators import ProblemRecord
from megatron_dapo.telemetry.summary import RunSummary
from tests.made_runs import an_evaluation

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "examples" / "quickstart"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of the quickstart, as far as a demo reads it."""
    return make_run(tmp_path / "run")


def make_run(directory: Path, *overrides: str) -> Path:
    write_resolved(load_config(QUICKSTART / "quickstart.toml", overrides), directory / "config.json")
    (directory / "huggingface").symlink_to(QUICKSTART / "base_model")
    scores = {
        step: {"eval/avg_at_k": value, "eval/avg_at_k_low": value - 0.05, "eval/avg_at_k_high": value + 0.05}
        for step, value in (("0", 0.41), ("24", 0.87), ("6", 0.6))
    }
    summary = RunSummary(
        "quickstart", "TP2", "finished", 24, 48, 0.41, 0.87, 1.0, 1.0, 1.0, 1.0, extra={"evaluations": scores}
    )
    (directory / "summary.json").write_text(json.dumps(asdict(summary)))
    return directory


def heldout(number: int) -> tuple[str, str]:
    row = json.loads((QUICKSTART / "heldout.jsonl").read_text().splitlines()[number])
    return row["prompt"][0]["content"], row["reward_model"]["ground_truth"]


def settings_of(directory: Path) -> dict:
    return json.loads((directory / "demo.json").read_text())


def test_settings_are_the_runs(run: Path, tmp_path: Path) -> None:
    write_demo(run, tmp_path / "demo")
    settings = settings_of(tmp_path / "demo")
    assert settings["base"] == settings["trained"] == str((QUICKSTART / "base_model").resolve())
    assert "avg@8: 0.410 [0.360, 0.460] before, 0.870 [0.820, 0.920] after" in settings["text"]
    assert (settings["examples"][0]["prompt"], settings["examples"][0]["answer"]) == heldout(0)
    assert settings["sampling"]["max_new_tokens"] > 0 and settings["reward"]["verifier"] == "dapo"


def test_the_page_begins_with_a_problem_that_only_the_trained_model_solves(run: Path, tmp_path: Path) -> None:
    (run / "evaluations").mkdir()
    for step, right in ((0, 0.0), (24, 1.0)):
        columns = ((None,) * 8, ("wrong",) * 8, (False,) * 8, (9,) * 8)
        records = []
        for number in range(12):
            text, answer = heldout(number)
            name = prompt_id_of([{"role": "user", "content": text}], answer)
            records.append(ProblemRecord(name, answer, 1, (right if number == 9 else 0.5,) * 8, *columns))
        result = replace(an_evaluation(0.5), problems=tuple(records))
        (run / "evaluations" / f"step_{step:06d}.json").write_text(result.to_json())
    write_demo(run, tmp_path / "demo")
    examples = settings_of(tmp_path / "demo")["examples"]
    assert [(one["prompt"], one["answer"]) for one in examples] == [heldout(number) for number in (9, 0, 1, 2, 3)]
    labels = [one["label"] for one in examples]
    assert len(set(labels)) == 5 and all("step by step" not in label for label in labels), "not the common instruction"


def test_the_page_begins_with_problems_that_the_run_held_out(tmp_path: Path) -> None:
    """Those of the training file that were never trained, the one first whose accuracy has risen."""
    run = make_run(tmp_path / "run", "data.eval_paths=[]")
    (source,) = eval_sources(read_resolved(run / "config.json").config.data)
    held_out = {row.messages[-1]["content"]: row for row in source.rows()}
    risen = list(held_out.values())[3]
    (run / "evaluations").mkdir()
    for step, accuracy in ((0, 0.0), (24, 1.0)):
        columns = ((None,) * 8, ("wrong",) * 8, (False,) * 8, (9,) * 8)
        record = ProblemRecord(prompt_id_of(risen.messages, risen.answer), risen.answer, 1, (accuracy,) * 8, *columns)
        result = replace(an_evaluation(0.5), problems=(record,))
        (run / "evaluations" / f"step_{step:06d}.json").write_text(result.to_json())
    write_demo(run, tmp_path / "demo")
    examples = settings_of(tmp_path / "demo")["examples"]
    assert len(examples) == 5 and {one["prompt"] for one in examples} <= held_out.keys()
    assert (examples[0]["prompt"], examples[0]["answer"]) == (risen.messages[-1]["content"], risen.answer)


def test_examples_keep_the_turns_before_their_problem(tmp_path: Path) -> None:
    """Rows of one's own may show the form of an answer by a solved problem; a visitor's problem follows it, too."""
    shown = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "Answer: 4"}]
    rows = [{"question": [*shown, {"role": "user", "content": f"What is {number} + 1?"}], "answer": str(number + 1)} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("data.columns.prompt=question", "data.columns.answer=answer", "data.system_prompt=One line.")
    overrides = ("data.eval_paths=[]", f'data.train_paths=["{tmp_path}/rows.jsonl"]', *columns)
    write_demo(make_run(tmp_path / "run", *overrides), tmp_path / "demo")
    settings = settings_of(tmp_path / "demo")
    turns = [{"role": "system", "content": "One line."}, *shown]
    assert settings["turns"] == turns and [one["turns"] for one in settings["examples"]] == [turns] * 4
    assert all(one["prompt"].endswith(" + 1?") for one in settings["examples"])


OWN = """
from helper import LIMIT
def reward(sample):
    import math
    return {"score": min(LIMIT, len(sample.response)) / 2, "parts": {"length": 1.0, "style": 1.0}, "is_correct": True}
"""


def isolated(directory: Path, code: str) -> str:
    """Run code that sees the directory and installed packages, but neither this checkout nor the environment."""
    start = f"import sys; sys.path.insert(0, {str(directory)!r}); "
    command = [sys.executable, "-I", "-c", start + code]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


JUDGED = """
import json, os, types
sys.modules["gradio"] = types.ModuleType("gradio")
import app, megatron_dapo, numpy
assert os.path.dirname(megatron_dapo.__file__) == os.path.join(os.getcwd(), "megatron_dapo"), megatron_dapo.__file__
for name in NAMES: __import__(name)
settings = json.load(open("demo.json"))
completion = app.Completion("demo/0", numpy.zeros(3), numpy.zeros(3), "stop", ())
with app.open_verifier_pool(app.reward_of(settings)) as pool:
    prompt = app.prompt_of("2 + 2", "4", settings)
    print(app.judge(pool, prompt, "Answer: 4", completion))
"""


def test_an_exported_space_scores_with_the_runs_reward_in_isolation(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.mkdir()
    (own / "score.py").write_text(OWN)
    (own / "helper.py").write_text("LIMIT = 4\n")
    mixture = f'reward.mix=[{{verifier="dapo"}}, {{verifier="{own}/score.py:reward", weight=0.5}}]'
    space = tmp_path / "space"
    write_space(make_run(tmp_path / "run", "reward.verifier=mix", mixture), space)
    for file in own.iterdir():
        file.unlink()  # the Space has copies
    modules = sorted(
        str(file.relative_to(space).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for file in (space / "megatron_dapo").rglob("*.py")
        if file.name not in ("app.py", "kernel.py", "runner.py")  # programs
    )
    verdict = isolated(space, JUDGED.replace("NAMES", repr(modules))).strip()
    assert verdict == "correct, read as '4'; reward 2 (dapo 1, reward/length 0.5, reward/style 0.5); 3 tokens"


def test_imports_are_followed_through_packages_functions_and_relative_names(tmp_path: Path) -> None:
    files = {
        "top.py": "import a.b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import unused\n",
        "a/__init__.py": "",
        "a/b.py": "from . import c\ndef late():\n    from a.d import x\n",
        "a/c.py": "import json\n",
        "a/d.py": "x = 1\n",
        "unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = imported_files(tmp_path, [tmp_path / "top.py"])
    assert {str(file.relative_to(tmp_path.resolve())) for file in found} == files.keys() - {"unused.py"}


def test_a_space_is_whole(run: Path, tmp_path: Path) -> None:
    space = tmp_path / "space"
    result = CliRunner().invoke(app, ["export", str(run), "--space", str(space), "--base", "org/base-model"])
    assert result.exit_code == 0, result.output
    settings = settings_of(space)
    assert (settings["base"], settings["trained"]) == ("org/base-model", "trained")
    assert (space / "trained" / "config.json").is_file() and not (space / "base").exists()
    head = (space / "README.md").read_text().split("---")[1]
    assert "sdk: gradio" in head and f"sdk_version: {GRADIO_VERSION}" in head and "app_file: app.py" in head
    assert "math-verify" in (space / "requirements.txt").read_text()
    again = CliRunner().invoke(app, ["export", str(run), "--space", str(space)])
    assert again.exit_code == 2 and "is not empty" in again.stderr


def test_the_card_names_what_a_judge_needs(tmp_path: Path) -> None:
    judge = ["reward.verifier=judge", "reward.judge.url=http://127.0.0.1:9/v1", "reward.judge.key_variable=JUDGE_KEY"]
    write_space(make_run(tmp_path / "run", *judge), tmp_path / "space", "org/base", "org/trained")
    assert "Set JUDGE_KEY in the Space's settings" in (tmp_path / "space" / "README.md").read_text()


def test_gradios_version_is_the_locks() -> None:
    lock = (ROOT / "requirements" / "demo-cpu-py311.txt").read_text()
    assert f"\ngradio=={GRADIO_VERSION}\n" in lock


def test_runs_that_cannot_be_shown_are_one_line(run: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    write_resolved(load_config(QUICKSTART / "quickstart.toml"), unfinished / "config.json")
    other = make_run(tmp_path / "own", "reward.verifier=gone.py:score")
    for directory, message in (
        (tmp_path, "is no run's directory"),
        (tmp_path / "nope", "does not exist"),
        (unfinished, "has no exported model"),
        (other, "gone.py is not there; call this where the run was started"),
    ):
        with pytest.raises(ValueError, match=message):
            write_space(directory, tmp_path / f"space_{directory.name}")
    # The run comes first: what is wrong with it is no matter of packages.
    missing = CliRunner().invoke(app, ["demo", str(tmp_path / "nope")])
    assert missing.exit_code == 2 and re.search(r"nope does\s+not exist", missing.stderr)
    result = CliRunner().invoke(app, ["demo", str(run), "--packages", str(tmp_path)])
    assert result.exit_code == 2 and f"pip install gradio=={GRADIO_VERSION}" in result.stderr
