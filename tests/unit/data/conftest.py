from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
SHA = "0123456789abcdef0123456789abcdef01234567"
MODEL = {path.name: path.read_bytes() for path in (QUICKSTART / "base_model").iterdir()}
DATA = {
    "README.md": b"# sums",
    "data/train.jsonl": (QUICKSTART / "train.jsonl").read_bytes(),
    "data/test.jsonl": (QUICKSTART / "heldout.jsonl").read_bytes(),
}
AIME = "".join(json.dumps({"problem": f"Problem {number}?", "answer": "7"}) + "\n" for number in range(30)).encode()


@pytest.fixture(scope="session")
def make_tokenizer():
    """A byte-level tokenizer with a chat template, made here: one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(chat_template: str | None = CHAT_TEMPLATE):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {symbol: index for index, symbol in enumerate(["<eos>", "<user>", "<assistant>", *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<eos>", "<user>", "<assistant>"])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
        )
        fast.chat_template = chat_template
        return fast

    return make


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def row():
    """A row in the DAPO-Math-17k schema."""

    def make(problem: str, answer: str, index: int | str = 0):
        return {
            "data_source": "math_dapo",
            "prompt": [{"content": problem, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(index)},
        }

    return make


def _write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow by itself takes the first row's
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path
    )


WRITERS = {".jsonl": _write_json_lines, ".ndjson": _write_json_lines, ".parquet": _write_parquet}


@pytest.fixture
def write(tmp_path):
    """Write rows to a file of the kind its name says; returns the path."""

    def write_rows(name, rows):
        path = tmp_path / name
        WRITERS[path.suffix](path, rows)
        return path

    return write_rows


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's protocol that a download uses."""

    def do_HEAD(self) -> None:
        self._answer(sends_body=False)

    def do_GET(self) -> None:
        self._answer(sends_body=True)

    def _answer(self, sends_body: bool) -> None:
        path, kind = self.path.partition("?")[0], "models"
        if path.startswith(("/datasets/", "/api/datasets/")):
            path, kind = path.replace("/datasets/", "/" if path.startswith("/datasets/") else "/models/", 1), "datasets"
        files = {
            "models": {"own/tiny": MODEL},
            "datasets": {"own/sums": DATA, "math-ai/aime25": {"test.jsonl": AIME}},
        }[kind]
        repository = next((name for name in files if f"/{name}" in path), None)
        if repository is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, sends_body)
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in files[repository].items()
            ]
            return self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, sends_body)
        if path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in files[repository]]
            document = {"id": repository, "_id": "1", "sha": SHA, "private": False, "siblings": siblings}
            return self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"}, sends_body)
        body = files[repository][path.split("/resolve/")[1].partition("/")[2]]
        return self._send(200, body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": SHA}, sends_body)

    def _send(self, code: int, body: bytes, headers: dict[str, str], sends_body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if sends_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Address of a stand-in of the Hub on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
