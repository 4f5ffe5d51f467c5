"""The functions of docs/rewards.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dapo.config import load_config, validate
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.schema import leaf_fields, section_types
from megatron_dapo.rewards.pool.pool import VerifierPool

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|toml)\n(.*?)```", PAGE, re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
FIELDS = {
    "messages": [{"role": "user", "content": "Write four words."}],
    "data_source": "",
    "extra_info": {"words": 4},
    "finish_reason": "stop",
    "group_index": 0,
}


def score(code: str, tmp_path: Path, response: str, answer: str = "", **options: object):
    (tmp_path / "documented.py").write_text(code)
    with VerifierPool(f"{tmp_path / 'documented.py'}:reward", RewardConfig(**options)) as pool:
        return pool.score_many([("a", response, answer, False, FIELDS)])["a"]


def test_the_function_of_a_column(tmp_path: Path) -> None:
    assert score(PYTHON[0], tmp_path, "one two three").reward == 0.75


def test_the_function_with_parts(tmp_path: Path) -> None:
    found = score(PYTHON[1], tmp_path, "It is 4.", "4")
    assert found.accuracy == 1.0 and found.reward == pytest.approx(1.1)
    assert found.detail["parts"] == {"answer": 1.0, "short": 0.1}


def test_the_function_of_batches(tmp_path: Path) -> None:
    assert score(PYTHON[2], tmp_path, "one two three").reward == 1.0


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "toml" and "[reward]" in text])
def test_recipes_have_no_contradictions(text: str, tmp_path: Path) -> None:
    base = "" if "[model]" in text else '[model]\npath = "m"\n[data]\ntrain_paths = ["t.jsonl"]\n'
    (tmp_path / "own.toml").write_text(base + text)
    config = load_config(tmp_path / "own.toml", []).config
    assert [str(one) for one in validate(config) if one.path.startswith("reward")] == []


def test_every_setting_of_a_preset_that_the_page_names_exists() -> None:
    names = set(re.findall(r"`(reward\.[a-z_.]+)`", PAGE))
    shown = {*leaf_fields(), *section_types()}
    assert names and not {name for name in names if name not in shown and not hasattr(RewardConfig(), name[7:])}


def test_the_judge_asks_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            is_known = self.headers["Authorization"] == "Bearer secret"
            content = "Yes." if is_known and "four" in question else "No."
            body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1/chat/completions")
    try:
        options = {"environment": ("JUDGE_KEY", "JUDGE_URL")}
        assert score(PYTHON[3], tmp_path, "four", **options).accuracy == 1.0
        assert score(PYTHON[3], tmp_path, "five", **options).accuracy == 0.0
    finally:
        server.shutdown()
        server.server_close()


def test_the_recipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(next(text for kind, text in BLOCKS if kind == "toml"))
    config = load_config(tmp_path / "own.toml", []).config
    assert (config.data.columns.prompt, config.reward.verifier) == ("question", "my_reward.py:reward")
