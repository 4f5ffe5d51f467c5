"""A dry run refuses what cannot run: every line names the thing, and nothing was started."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.config.schema import Config
from megatron_dapo.doctor.inputs import input_problems

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The quickstart's recipe, model and data in a directory that a test may damage."""
    for name in ("quickstart.toml", "train.jsonl", "heldout.jsonl"):
        shutil.copy(QUICKSTART / name, tmp_path / name)
    shutil.copytree(QUICKSTART / "base_model", tmp_path / "base_model")
    return tmp_path


def config_of(own: Path, *overrides: str) -> Config:
    # The recipe writes below the working directory.
    given = [override.replace("OWN", str(own)) for override in overrides]
    return load_config(own / "quickstart.toml", [f"run.output_dir={own / 'run'}", *given]).config


def rows_of(own: Path) -> list[dict]:
    return [json.loads(line) for line in (own / "train.jsonl").read_text().splitlines()]


def write_rows(own: Path, rows: list[dict]) -> None:
    (own / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def changed_row(number: int, **columns: object) -> Callable[[Path], None]:
    def change(own: Path) -> None:
        rows = rows_of(own)
        rows[number].update(columns)
        write_rows(own, rows)

    return change


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda own: write_rows(own, [{new if k == old else k: v for k, v in row.items()} for row in rows_of(own)])


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda own: (own / name).write_bytes(data) and None


def removed(*names: str) -> Callable[[Path], None]:
    return lambda own: [(own / name).unlink() for name in names] and None


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(own: Path) -> None:
        content = (own / name).read_bytes()
        (own / name).write_bytes(content[: int(len(content) * share)])

    return damage


def model_config(**fields: object) -> Callable[[Path], None]:
    def change(own: Path) -> None:
        path = own / "base_model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def nothing(own: Path) -> None:
    pass


WEIGHTS = "base_model/model.safetensors"
# (what is done to the directory, overrides, field that is named, words of the line)
BAD: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str, tuple[str, ...]]] = {
    "empty data": (written("train.jsonl", ""), (), "data.train_paths", ("has no rows",)),
    "blank data": (written("train.jsonl", "\n\n"), (), "data.train_paths", ("has no rows",)),
    "no JSON": (written("train.jsonl", "hello\n"), (), "data.train_paths", ("line 1 is not valid JSON",)),
    "a list a line": (written("train.jsonl", "[1]\n"), (), "data.train_paths", ("line 1", "JSON object")),
    "bad UTF-8": (written("train.jsonl", b'{"prompt": "\xff"}\n'), (), "data.train_paths", ("line 1",)),
    "a cut line": (cut("train.jsonl", 0.99), (), "data.train_paths", ("is not valid JSON",)),
    "wrong columns": (renamed("prompt", "question"), (), "data.train_paths", ("missing column(s) prompt", "question")),
    "no answers": (renamed("reward_model", "gold"), (), "data.train_paths", ("missing column(s) reward_model",)),
    "an empty answer": (changed_row(3, reward_model={"ground_truth": " "}), (), "data.train_paths", ("line 4", "gold")),
    "an answer that is no text": (
        changed_row(2, reward_model={"ground_truth": 1.5}),
        (),
        "data.train_paths",
        ("line 3", "1.5"),
    ),
    "no ground truth": (changed_row(0, reward_model={"style": "rule"}), (), "data.train_paths", ("ground_truth",)),
    "an empty prompt": (changed_row(5, prompt=[]), (), "data.train_paths", ("line 6", "prompt must be")),
    "a message without content": (changed_row(5, prompt=[{"role": "user"}]), (), "data.train_paths", ("line 6",)),
    "images": (changed_row(0, images=["a.png"]), (), "data.train_paths", ("images", "only text is trained")),
    "a damaged held-out file": (written("heldout.jsonl", "{}\n"), (), "data.eval_paths", ("heldout.jsonl", "line 1")),
    "parquet that is none": (
        written("train.parquet", "PAR1"),
        ("data.train_paths=['OWN/train.parquet']",),
        "data.train_paths",
        ("train.parquet",),
    ),
    "another kind of file": (
        written("train.xlsx", "PK"),
        ("data.train_paths=['OWN/train.xlsx']",),
        "data.train_paths",
        ("unknown kind of data file '.xlsx'",),
    ),
    "prompts that are too long": (nothing, ("data.max_prompt_tokens=8",), "data.max_prompt_tokens", ("raise it to",)),
    "no weights": (removed(WEIGHTS), (), "model.path", ("base_model",)),
    "cut weights": (cut(WEIGHTS, 0.5), (), "model.path", ("model.safetensors",)),
    "weights that are none": (written(WEIGHTS, b"\0" * 64), (), "model.path", ("model.safetensors",)),
    "an empty weights file": (written(WEIGHTS, b""), (), "model.path", ("model.safetensors",)),
    "weights of a deeper model": (model_config(num_hidden_layers=40), (), "model.path", ("missing", "do not fit")),
    "weights of a wider model": (model_config(intermediate_size=4096), (), "model.path", ("of another shape",)),
    "another family": (model_config(model_type="mistral"), (), "model.path", ("mistral",)),
    "no tokenizer": (
        removed("base_model/tokenizer.json", "base_model/tokenizer_config.json"),
        (),
        "model.path",
        ("tokenizer",),
    ),
    "a damaged tokenizer": (written("base_model/tokenizer.json", "{"), (), "model.path", ("base_model",)),
    "a verifier of no module": (
        nothing,
        ("reward.verifier=no_such_module:score",),
        "reward.verifier",
        ("cannot import module 'no_such_module'",),
    ),
    "a verifier of no function": (
        nothing,
        ("reward.verifier=json:score",),
        "reward.verifier",
        ("has no function 'score'",),
    ),
    "an unknown verifier": (nothing, ("reward.verifier=dappo",), "reward.verifier", ("unknown verifier 'dappo'",)),
    "a shadow verifier of no module": (
        nothing,
        ("reward.shadow_verifier=no_such_module:score",),
        "reward.shadow_verifier",
        ("cannot import module",),
    ),
    "prompts that ask for another format": (
        nothing,
        ("reward.answer_format=boxed",),
        "reward.verifier",
        ("disagrees with the format",),
    ),
    "a run directory that is a file": (written("run", "x"), (), "run.output_dir", ("is a file",)),
    "an engine without an interpreter": (
        nothing,
        ("rollout.engine=sglang", "sglang.python=/no/such/python"),
        "sglang.python",
        ("no such file",),
    ),
    "an engine without SGLang": (
        nothing,
        ("rollout.engine=sglang", f"sglang.python={sys.executable}"),
        "sglang.python",
        ("not installed",),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_run_is_refused_in_one_line(case: str, own: Path) -> None:
    damage, overrides, field, words = BAD[case]
    damage(own)
    problems = input_problems(config_of(own, *overrides))
    assert problems, "it would have started"
    lines = [str(problem) for problem in problems if problem.path == field]
    assert lines, [str(problem) for problem in problems]
    for word in words:
        assert word in lines[0]


def test_a_recipe_that_runs_has_no_problem(own: Path) -> None:
    assert input_problems(config_of(own)) == []


def test_all_problems_are_in_one_list(own: Path) -> None:
    written("train.jsonl", "hello\n")(own)
    cut(WEIGHTS, 0.5)(own)
    recipe = str(own / "quickstart.toml")
    overrides = ["--set", "training.mini_batch_prompts=7", "--output-dir", str(own / "run")]
    result = CliRunner().invoke(app, ["train", recipe, *overrides, "--dry-run"])
    assert result.exit_code == 2 and not (own / "run").exists()
    for word in ("training.mini_batch_prompts", "line 1 is not valid JSON", "model.safetensors"):
        assert word in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_large_files_are_read_in_places(kind: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged row at the end of a large file is found, and what lies between the places is not read."""
    from megatron_dapo.data import files

    rows = rows_of(own)[:1000]
    damaged = len(rows) - (1 if kind == "jsonl" else 100)  # the last one; of parquet the first of the last row group
    if kind == "jsonl":
        path = own / "large.jsonl"
        monkeypatch.setattr(files, "_SMALL_FILE_BYTES", 1000)
        monkeypatch.setattr(files, "_TAIL_BYTES", 5000)
    else:
        path = own / "large.parquet"
    write_table(path, rows)
    read = sum(1 for _ in files.sampled_rows(path, places=4, rows=50))
    assert 150 < read <= 200 < len(rows) // 2
    rows[damaged] = {**rows[damaged], "prompt": []}
    write_table(path, rows)
    with pytest.raises(ValueError, match="prompt must be a list"):
        list(files.sampled_rows(path, places=4, rows=50))


def write_table(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
        for part in (table.slice(0, len(rows) - 100), table.slice(len(rows) - 100)):
            writer.write_table(part, row_group_size=100)
