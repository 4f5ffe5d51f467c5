"""Presets `judge` and `remote` against a local server that answers, fails, is slow, writes nonsense or hangs up."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_dapo.config.reward_schema import JudgeRewardConfig, RewardConfig
from megatron_dapo.rewards.pool.pool import VerifierPool
from megatron_dapo.rewards.result import RewardSample
from megatron_dapo.rewards.verifiers.judge import DEFAULT_PATTERN, request_of, score_of

FIELDS = {
    "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"}],
    "data_source": "sums",
    "extra_info": {"level": 3},
    "finish_reason": "stop",
    "group_index": 0,
}


class Misbehaving(ThreadingHTTPServer):
    """Does what the text of a response says: the words after "do:", one a request, the last one again and again."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.keys: set[str | None] = set()
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Say nothing of connections that were closed."""


class Handler(BaseHTTPRequestHandler):
    server: Misbehaving
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        [plan] = re.findall(r"do:([a-z0-9,]+)", body)[:1] or ["ok"]
        with self.server.lock:
            self.server.requests.append({"path": self.path, "body": json.loads(body)})
            self.server.keys.add(self.headers["Authorization"])
            turn = self.server.seen[plan]
            self.server.seen[plan] += 1
        words = plan.split(",")
        self.reply(words[min(turn, len(words) - 1)], json.loads(body))

    def reply(self, word: str, body: dict) -> None:
        if word == "close":
            self.hang_up()
            return
        if word == "slow":
            time.sleep(30)
        if word in ("500", "429", "400"):
            self.send(int(word), b"no")
            return
        if word == "malformed":
            self.send(200, b"{")
        elif word == "half":
            self.send(200, b"{}", length=4000)
            self.hang_up()
        elif word == "other":
            self.send(200, b"[1, 2]")
        elif "samples" in body:
            results = [{"score": len(one["response"]), "is_correct": True, "parts": {}} for one in body["samples"]]
            results = results[1:] if word == "fewer" else ["text", *results[1:]] if word == "bad" else results
            self.send(200, json.dumps({"results": results}).encode())
        else:
            content = "I cannot say." if word == "silent" else "Good. Score: 1, no: **Score: 8**"
            self.send(200, json.dumps({"choices": [{"message": {"content": content}}]}).encode())

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def send(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    server = Misbehaving()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def items(*responses: str) -> list:
    return [(number, response, "4", False, FIELDS) for number, response in enumerate(responses)]


def judge(
    server: Misbehaving, timeout_s: float = 30.0, environment: tuple[str, ...] = (), **own: object
) -> VerifierPool:
    own = {"url": f"{server.url}/v1", **own}
    return VerifierPool("judge", RewardConfig(timeout_seconds=timeout_s, judge=own, environment=environment))


def test_a_verdict_is_asked_for_and_read(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k3y")
    own = {
        "template": "{messages}|{prompt}|{response}|{answer}|{data_source}",
        "model": "big",
        "key_variable": "JUDGE_KEY",
    }
    with judge(server, environment=("JUDGE_KEY",), system_prompt="Grade.", **own) as pool:
        score = pool.score_many(items("four {answer} {prompt}"))[0]
    assert (score.reward, score.accuracy, score.outcome) == (0.8, 1.0, "correct")
    [request] = server.requests
    assert (
        request["path"] == "/v1/chat/completions"
        and request["body"]["model"] == "big"
        and server.keys == {"Bearer k3y"}
    )
    system, user = request["body"]["messages"]
    assert system == {"role": "system", "content": "Grade."}
    # What looks like a placeholder in a response is text.
    assert user["content"] == "system: Be kind.\n\nuser: 2 + 2?|2 + 2?|four {answer} {prompt}|4|sums"


@pytest.mark.parametrize(
    ("plan", "outcome", "num_requests", "message"),
    [
        ("500,close,malformed,ok", "correct", 4, ""),
        ("429,half,ok", "correct", 3, ""),
        ("400", "error", 1, "status 400: 'no' (attempt 1 of 4)"),
        ("500", "error", 4, "status 500: 'no' (attempt 4 of 4)"),
        ("close", "error", 4, "attempt 4 of 4"),
        ("malformed", "error", 4, "no JSON"),
        ("other", "error", 1, "no chat completion: '[1, 2]'"),
        ("silent", "error", 1, "no score: 'I cannot say.'"),
    ],
)
def test_failures_are_tried_again_where_that_may_help(
    server: Misbehaving, plan: str, outcome: str, num_requests: int, message: str
) -> None:
    with judge(server, failure=-0.25) as pool:
        score = pool.score_many(items(f"do:{plan}"))[0]
    assert (score.outcome, len(server.requests)) == (outcome, num_requests)
    assert message in score.detail.get("error", "") and (score.reward == -0.25) == (outcome == "error")


def test_a_slow_server_times_out_and_costs_no_process(server: Misbehaving) -> None:
    with judge(server, timeout_s=2.0, request_seconds=1.0, retries=9) as pool:
        scores = pool.score_many(items("do:slow", "do:ok"))
    assert [scores[0].outcome, scores[1].outcome] == ["timeout", "correct"] and scores[0].reward == -1.0
    assert "in 1.5 s" in scores[0].detail["error"] and pool.counts["killed"] == 0


def test_no_server_is_an_error_not_a_hang() -> None:
    own = {"url": "http://127.0.0.1:9/v1", "retries": 1}
    with VerifierPool("judge", RewardConfig(timeout_seconds=30.0, judge=own)) as pool:
        score = pool.score_many(items("x"))[0]
    assert score.outcome == "error" and "ConnectError" in score.detail["error"]


def test_verdicts_are_cached_on_disk_by_what_was_asked(server: Misbehaving, tmp_path: Path) -> None:
    own = {"cache_dir": str(tmp_path / "cache")}
    for _ in range(2):
        with judge(server, **own) as pool:
            assert pool.score_many(items("a", "b", "do:silent"))[0].reward == 0.8
    # A verdict without a score is asked for again.
    assert len(server.requests) == 2 + 2
    with judge(server, score_pattern="(Good)|(Bad)", **own) as pool:
        assert pool.score_many(items("a"))[0].outcome == "error"  # another pattern, no other request
    with judge(server, model="other", **own) as pool:
        pool.score_many(items("a"))
    assert len(server.requests) == 5
    for path in (tmp_path / "cache").rglob("*.json"):
        path.write_text("{cut off")
    with judge(server, **own) as pool:
        assert pool.score_many(items("a"))[0].reward == 0.8
    assert len(server.requests) == 6


def test_settings_that_cannot_work_are_refused(server: Misbehaving) -> None:
    for own, message in (
        ({"url": ""}, "set reward.judge.url"),
        ({"score_pattern": "score"}, "has no group"),
        ({"key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY .* is not set"),
    ):
        with pytest.raises(ValueError, match=message):
            judge(server, **own)


@pytest.mark.parametrize(
    ("verdict", "key", "score"),
    [
        ("Score: 7", "", 7.0),
        ("score: 3 ... **Score:** 9.5", "", 9.5),
        ("no number", "", None),
        ('{"score": 4}', "score", 4.0),
        ('Thus:\n```json\n{"why": "{x}", "score": "7"}\n```', "score", 7.0),
        ('{"correct": true}', "correct", 1.0),
        ('{"verdict": "Incorrect"}', "verdict", 0.0),
        ('{"score": "NaN"}', "score", None),
        ('{"other": 1}', "score", None),
        ("{" * 10_000, "score", None),
    ],
)
def test_scores_of_verdicts(verdict: str, key: str, score: float | None) -> None:
    assert score_of(verdict, re.compile(DEFAULT_PATTERN), key) == score


def test_a_request_without_a_prompt() -> None:
    sample = RewardSample((), "r", "", "", {}, "stop", 0)
    assert request_of(sample, JudgeRewardConfig().model_dump(), "{prompt}-{response}")["messages"] == [
        {"role": "user", "content": "-r"}
    ]


def test_fields_of_the_endpoint_are_added_to_a_request() -> None:
    sample = RewardSample((), "r", "", "", {}, "stop", 0)
    fields = {"regex": "YES|NO", "max_tokens": 3}
    plain, own = (JudgeRewardConfig(extra_body=body).model_dump() for body in ({}, fields))
    assert request_of(sample, own, "{response}") == {**request_of(sample, plain, "{response}"), **fields}


def test_a_service_scores_batches(server: Misbehaving) -> None:
    own = {"url": f"{server.url}/score"}
    with VerifierPool("remote", RewardConfig(timeout_seconds=30.0, remote=own, batch_size=4, token_ids=True)) as pool:
        assert pool.takes_token_ids
        scores = pool.score_many(items(*["x" * number for number in range(8)]))
        assert [scores[number].reward for number in range(8)] == list(map(float, range(8)))
        assert all(score.accuracy == 1.0 for score in scores.values())
        bad = pool.score_many(items("do:bad", "x"))
        assert [bad[number].outcome for number in range(2)] == ["error", "correct"]
        fewer = pool.score_many(items("do:fewer", "x"))
        assert "2 samples need as many results; the reply has 1" in fewer[0].detail["error"]
        assert pool.score_many(items("do:500,close,ok"))[0].outcome == "correct"
    samples = [sample for request in server.requests for sample in request["body"]["samples"]]
    assert next(sample for sample in samples if not sample["response"]) == {
        **FIELDS,
        "response": "",
        "answer": "4",
        "token_ids": None,
    }
    assert max(len(request["body"]["samples"]) for request in server.requests) == 4
