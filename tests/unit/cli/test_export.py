"""`export --push`: the card and the commit that a stand-in of the Hub gets, and refusals in one line."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import yaml
from safetensors.torch import load, load_file
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.config.loader import write_resolved
from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.telemetry.summary import RunSummary
from tests.made_runs import an_evaluation
from tests.unit.checkpoints.saved_states import random_state, save_states
from tests.unit.cli.conftest import QUICKSTART

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_ann"


class WritableHub(BaseHTTPRequestHandler):
    """The part of the Hub's protocol that an upload uses. Ann's token may write to ann and to team, not to read-only."""

    repositories: dict[str, dict[str, Any]]  # name -> {"private": ..., "files": {path: bytes}}
    objects: dict[str, bytes]

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        if self.path == "/api/whoami-v2":
            orgs = [{"name": "team"}, {"name": "read-only"}]
            return self._send(200, {"name": "ann", "type": "user", "orgs": orgs})
        name = self.path.partition("/api/models/")[2].partition("?")[0]
        if name == "lab/base":
            return self._send(200, {"id": name, "private": False, "siblings": [], "cardData": {"license": "mit"}})
        if name not in self.repositories:
            return self._send(404, {"error": "Repository not found"})
        private = self.repositories[name]["private"]
        return self._send(200, {"id": name, "_id": "1", "sha": SHA, "private": private, "siblings": []})

    def do_PUT(self) -> None:
        body = self._body()
        self.objects[hashlib.sha256(body).hexdigest()] = body
        self._send(200, {})

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path.endswith("/lfs/objects/batch"):
            address = f"http://{self.headers['Host']}/object"
            objects = [{**one, "actions": {"upload": {"href": address}}} for one in json.loads(body)["objects"]]
            return self._send(200, {"transfer": "basic", "objects": objects})
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            mode = {True: "lfs", False: "regular"}
            files = [
                {"path": one["path"], "uploadMode": mode[one["path"].endswith(".safetensors")], "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._send(200, {"files": files})
        assert "/commit/" in path, path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.repositories[name]["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repositories[name]["files"][value["path"]] = self.objects[value["oid"]]
        self._send(200, {"success": True, "commitOid": SHA, "commitUrl": f"http://{self.headers['Host']}/{name}/commit/{SHA}"})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization'] or 'ann'}/{wanted['name']}"
        if wanted["organization"] == "read-only":
            return self._send(403, {"error": "You don't have the rights to create a model under the namespace"})
        if name in self.repositories:
            return self._send(409, {"error": "You already created this model repo", "url": f"https://huggingface.co/{name}"})
        self.repositories[name] = {"private": wanted.get("visibility") == "private", "files": {}, **wanted}
        self._send(200, {"url": f"https://huggingface.co/{name}", "name": name, "id": "1"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Repositories of a stand-in of the Hub, which this process takes for the Hub, logged in as Ann."""
    handler = type("Handler", (WritableHub,), {"repositories": {}, "objects": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield handler.repositories
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of the quickstart: config, two evaluations with their tables, summary, exported model."""
    directory = tmp_path / "run"
    write_resolved(load_config(QUICKSTART / "quickstart.toml"), directory / "config.json")
    (directory / "huggingface").symlink_to(QUICKSTART / "base_model")
    (directory / "evaluations").mkdir()
    rows = []
    for step, score in ((0, 0.25), (24, 0.75)):
        result = an_evaluation(score, step)
        (directory / "evaluations" / f"step_{step:06d}.json").write_text(result.to_json())
        edges = {"eval/avg_at_k_low": score - 0.0625, "eval/avg_at_k_high": score + 0.0625}
        rows.append({"train_step": step, "eval/avg_at_k": score, **edges})
    (directory / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "metrics.jsonl").write_text(json.dumps({"train_step": 24}) + "\n")
    (directory / "provenance.json").write_text(json.dumps({"versions": {"megatron_dapo": "0.1.0", "torch": "2.13.0"}}))
    summary = RunSummary("quickstart", "TP2", "finished", 24, 48, 0.25, 0.75, 1.0, 1.0, 1.0, 1.0)
    (directory / "summary.json").write_text(json.dumps(asdict(summary)))
    return directory


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_run_is_pushed_with_a_card(run: Path, hub: dict[str, dict[str, Any]]) -> None:
    before = {path.name: path.read_bytes() for path in (run / "huggingface").iterdir()}
    code, output = export(run, "--push", "bookkeeper", "--base", "lab/base")
    assert (code, output.split()) == (0, [f"{huggingface_hub.constants.ENDPOINT}/ann/bookkeeper"])
    pushed = hub["ann/bookkeeper"]
    assert not pushed["private"]
    card = pushed["files"].pop("README.md").decode()
    assert pushed["files"] == before, "the model as the run exported it"
    assert {path.name: path.read_bytes() for path in (run / "huggingface").iterdir()} == before
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["base_model"] == "lab/base" and metadata["license"] == "mit" and "dapo" in metadata["tags"]
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-generation"
    assert "[lab/base](https://huggingface.co/lab/base), trained with DAPO" in card
    assert "| before training | 0.250 | 0.188 to 0.312 |" in card and "| after 24 steps | 0.750 | 0.688 to 0.812 |" in card
    means = [
        [sum(problem.accuracies) / len(problem.accuracies) for problem in EvaluationResult.from_json(file.read_text()).problems]
        for file in sorted((run / "evaluations").iterdir())
    ]
    change = (sum(means[1]) - sum(means[0])) / len(means[0])
    assert f"| difference, paired by problem | {change:+.3f} | +" in card
    assert "| data | `train.jsonl` |" in card and "| held out | `heldout.jsonl` |" in card and "| reward | `dapo` |" in card
    assert "| library | megatron_dapo 0.1.0, torch 2.13.0 |" in card and "megatron-dapo train quickstart.toml" in card
    assert "| `optimizer.learning_rate` | " in card
    assert str(QUICKSTART) not in card, "nobody else has the directories of this machine"


def test_a_checkpoint_is_pushed_with_the_evaluation_of_its_step(run: Path, hub: dict[str, dict[str, Any]]) -> None:
    stored = load_file(QUICKSTART / "base_model" / "model.safetensors")
    names = read_architecture(QUICKSTART / "base_model").shapes()
    state = random_state({name: stored[name] + 1 for name in names})
    save_states(run / "checkpoints", 3, {"policy": state})
    assert export(run / "checkpoints" / "step_000003", "--push", "own")[0] == 0
    files = hub["ann/own"]["files"]
    pushed = load(files["model.safetensors"])
    assert all(torch.equal(pushed[name], tensor) for name, tensor in state["parameter"].items())
    card = files["README.md"].decode()
    assert "(3 train steps)" in card and "| before training | 0.250 " in card and "after" not in card


def test_a_space_is_pushed(run: Path, tmp_path: Path, hub: dict[str, dict[str, Any]]) -> None:
    code, output = export(run, "--space", tmp_path / "space", "--push", "page")
    assert code == 0 and output.split() == [f"{huggingface_hub.constants.ENDPOINT}/ann/page"]
    pushed = hub["ann/page"]
    assert (pushed["type"], pushed["sdk"]) == ("space", "gradio")
    assert {"app.py", "README.md", "requirements.txt", "trained/model.safetensors"} <= pushed["files"].keys()


def test_a_base_that_is_no_repository_is_named_without_a_license(run: Path, hub: dict[str, dict[str, Any]]) -> None:
    assert export(run, "--push", "team/own", "--private")[0] == 0
    assert hub["team/own"]["private"]
    card = hub["team/own"]["files"]["README.md"].decode()
    metadata = yaml.safe_load(card.split("---")[1])
    assert "base_model" not in metadata and "license" not in metadata
    assert "base_model, trained with DAPO" in card and "The license of the weights is that of the base model." in card


def test_a_second_push_to_ones_own_repository_is_another_commit(run: Path, hub: dict[str, dict[str, Any]]) -> None:
    assert export(run, "--push", "ann/own")[0] == 0
    hub["ann/own"]["files"].clear()
    assert export(run, "--push", "ann/own")[0] == 0
    assert "model.safetensors" in hub["ann/own"]["files"]


def test_a_private_model_does_not_go_to_a_public_repository(run: Path, hub: dict[str, dict[str, Any]]) -> None:
    hub["ann/open"] = {"private": False, "files": {}}
    code, output = export(run, "--push", "ann/open", "--private")
    assert code == 2 and output.startswith("error: ann/open exists and is public: ") and output.count("\n") == 1
    assert not hub["ann/open"]["files"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bob/own", "bob is not an account of this token (ann, team, read-only): push to ann/own"),
        ("read-only/own", "the token may not write there: "),
        ("a/b/c", "'a/b/c' is no name of a Hub repository (OWNER/NAME)"),
    ],
)
def test_a_repository_that_cannot_be_written_is_refused(
    name: str, words: str, run: Path, hub: dict[str, dict[str, Any]]
) -> None:
    code, output = export(run, "--push", name)
    assert code == 2 and words in output and output.count("\n") == 1, output
    assert not hub


def test_a_wrong_token_and_none(run: Path, hub: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    code, output = export(run, "--push", "own")
    assert code == 2 and "the token is not valid: run `hf auth login`" in output and output.count("\n") == 1, output
    monkeypatch.delenv("HF_TOKEN")
    code, output = export(run, "--push", "own")
    assert code == 2 and "there is no token of the Hub here: run `hf auth login`" in output and output.count("\n") == 1


def test_without_a_network(run: Path, hub: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    code, output = export(run, "--push", "own")
    assert code == 2 and "the Hub cannot be reached (ConnectError" in output and output.count("\n") == 1, output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--critic", "--push", "own"), "--critic and --push: "),
        ((), "export: give a checkpoint and the directory to write, a run and --space DIRECTORY, or either and --push"),
        (("out", "--format", "torch_dist", "--push", "own"), "is not pushed"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], words: str, run: Path) -> None:
    code, output = export(run, *arguments)
    assert code == 2 and words in output


def test_a_run_without_an_export_is_refused(run: Path, hub: dict[str, dict[str, Any]]) -> None:
    (run / "huggingface").unlink()
    code, output = export(run, "--push", "own")
    assert code == 2 and "has no exported model (huggingface/)" in output and not hub
