"""Models and data sets of the Hub, from a stand-in of it on loopback; without a network, what to do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dapo.data.hub import HubReference, hub_reference, marked_model
from tests.unit.data.conftest import DATA, MODEL, SHA

RECIPE = """
[model]
path = "{model}"
[data]
train_paths = ["hf://own/sums"]
eval_paths = ["hf://own/sums/data/test.jsonl"]
"""
COPIES = """
import json, sys
from megatron_dapo.config import load_config
from megatron_dapo.doctor.hub_inputs import local_copies
copies, problems = local_copies(load_config(sys.argv[1]))
print(json.dumps([copies, [str(problem) for problem in problems]]))
"""


def copies(tmp_path: Path, endpoint: str, model: str, **variables: str) -> tuple[list[str], list[str]]:
    """Return the result of `local_copies` in a process of its own: the Hub's client reads its environment once."""
    (tmp_path / "own.toml").write_text(RECIPE.format(model=model))
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    environment |= variables
    command = [sys.executable, "-c", COPIES, str(tmp_path / "own.toml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def test_a_model_and_a_data_set_are_downloaded_and_their_commit_is_on_record(tmp_path: Path, endpoint: str) -> None:
    found, problems = copies(tmp_path, endpoint, "own/tiny")
    assert not problems
    values = dict(override.split("=", 1) for override in found)
    model, train, held_out = (
        json.loads(values[name]) for name in ("model.path", "data.train_paths", "data.eval_paths")
    )
    assert f"snapshots/{SHA}" in model
    assert {path.name: path.read_bytes() for path in Path(model).iterdir()}["model.safetensors"] == MODEL[
        "model.safetensors"
    ]
    assert [Path(path).read_bytes() for path in (*train, *held_out)] == [
        DATA["data/train.jsonl"],
        DATA["data/test.jsonl"],
    ]
    # Without the network the copy of the earlier run serves.
    again, problems = copies(tmp_path, "http://127.0.0.1:9", "own/tiny")
    assert (again, problems) == (found, [])


def made_cache(home: Path, kind: str, repository: str, files: dict[str, bytes]) -> Path:
    """Write a copy as other programs leave it in the Hub's cache; return the directory of its files."""
    own = home / "hub" / f"{kind}s--{repository.replace('/', '--')}"
    snapshot = own / "snapshots" / SHA
    for directory in ("refs", "blobs"):
        (own / directory).mkdir(parents=True)
    (own / "refs" / "main").write_text(SHA)
    for name, body in files.items():
        blob, path = own / "blobs" / hashlib.sha1(body).hexdigest(), snapshot / name
        blob.write_bytes(body)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(blob, path.parent))
    return snapshot


@pytest.mark.parametrize("revision", ["", "@main", f"@{SHA}"])
def test_a_copy_that_another_program_left_is_used_offline(revision: str, tmp_path: Path, endpoint: str) -> None:
    """With HF_HUB_OFFLINE=1 the Hub is not asked, though it could be."""
    model = made_cache(tmp_path / "hub", "model", "own/tiny", {**MODEL, "config.json": b"{}"})
    data = made_cache(tmp_path / "hub", "dataset", "own/sums", DATA)
    marker = "hf://" if revision else ""
    found, problems = copies(tmp_path, endpoint, f"{marker}own/tiny{revision}", HF_HUB_OFFLINE="1")
    assert problems == []
    values = {name: json.loads(value) for name, value in (override.split("=", 1) for override in found)}
    assert values == {
        "model.path": str(model),
        "data.train_paths": [str(data / "data" / "train.jsonl")],
        "data.eval_paths": [str(data / "data" / "test.jsonl")],
    }
    assert (model / "config.json").read_bytes() == b"{}", "the copy is as it was"


def test_a_revision_that_is_not_in_the_cache_is_refused_offline(tmp_path: Path, endpoint: str) -> None:
    made_cache(tmp_path / "hub", "model", "own/tiny", MODEL)
    made_cache(tmp_path / "hub", "dataset", "own/sums", DATA)
    _, [problem] = copies(tmp_path, endpoint, "own/tiny@v2", HF_HUB_OFFLINE="1")
    assert problem.startswith("model.path: there is no own/tiny@v2 here, and the Hub cannot be reached (OfflineMode")
    assert "hf download own/tiny --local-dir DIR" in problem


def test_a_repository_that_is_not_there_is_named(tmp_path: Path, endpoint: str) -> None:
    found, problems = copies(tmp_path, endpoint, "own/tinny")
    assert [line for line in problems if line.startswith("model.path: model own/tinny of the Hub: ")]
    assert not [override for override in found if override.startswith("model.path")]


def test_without_a_network_it_says_what_to_do_in_seconds(tmp_path: Path) -> None:
    start = time.perf_counter()
    found, problems = copies(tmp_path, "http://127.0.0.1:9", "own/tiny")
    assert not found and time.perf_counter() - start < 60  # mostly imports of a busy machine
    assert "hf download own/tiny --local-dir DIR" in problems[0]
    assert "hf download own/sums --repo-type dataset --local-dir DIR" in problems[1]


@pytest.mark.parametrize(
    ("text", "is_model", "reference"),
    [
        ("Qwen/Qwen2.5-0.5B", True, HubReference("Qwen/Qwen2.5-0.5B")),
        ("hf:/Qwen/Qwen2.5-0.5B@main", True, HubReference("Qwen/Qwen2.5-0.5B", "main")),
        ("hf:/openai/gsm8k/main/train.parquet", False, HubReference("openai/gsm8k", None, "main/train.parquet")),
        ("hf:/datasets/openai/gsm8k", False, HubReference("openai/gsm8k")),
        ("openai/gsm8k", False, None),  # Data needs the mark: "data/train" is a path.
        ("models/qwen/base", True, None),
        ("there/base", True, None),
        ("base", True, None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(
    text: str, is_model: bool, reference: HubReference | None, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    assert hub_reference(tmp_path / text, tmp_path, is_model) == reference


def test_a_marked_name_means_the_same_from_every_directory(tmp_path: Path) -> None:
    reference = HubReference("Qwen/Qwen2.5-0.5B", "main")
    assert hub_reference(tmp_path / "hf:" / str(reference), tmp_path / "runs" / "own" / "inputs", True) == reference


def test_a_model_s_name_is_marked_unless_it_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert marked_model("Qwen/Qwen2.5-0.5B") == marked_model("hf://Qwen/Qwen2.5-0.5B") == "hf://Qwen/Qwen2.5-0.5B"
    for path in ("model", "models/own", "runs/models/own", str(tmp_path / "own" / "model" / "deep")):
        assert marked_model(path) == path
