"""A stand-in for a stock SGLang server: real HTTP over loopback, in threads of the test, with faults to order.

Its "model" is a hash: token and log-prob at a position depend on only (seed, position of the last input token), as in
SGLang's seeded sampler, so `expected` knows every response beforehand.

    with FakeServer() as server:
        server.faults["/generate"] = "reset"          # starts now; see FAULTS
        server.freeze_after = 5                       # responses stop after 5 tokens until `thaw`, an abort or a kill
        server.kill()                                 # like kill -9: connections are reset, the port refuses
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_dapo.engines.sglang.server_settings import WEIGHT_LOADER

KEY = "a-key-that-must-not-be-seen"

FAULTS = (
    "hang",  # accept the call, answer only when the server stops
    "hang_mid_answer",  # send half the answer, then hang
    "reset",  # reset the connection instead of an answer
    "reset_mid_answer",  # send half the answer, then reset
    "400",
    "401",
    "500",
    "503",
    "no_json",
    "missing_logprob",  # one log-prob fewer than tokens
    "missing_token",  # one token fewer than log-probs
    "other_ids",  # log-probs of other tokens
    "nan",  # a log-prob that is null, as JSON shows not-a-number
    "positive",  # a log-prob above 0
    "other_vocabulary",  # ids beyond the vocabulary
    "unknown_reason",
    "nan_stop",  # SGLang's report of logits that are not numbers
    "short",  # finish reason length before the length
    "behind_stop",  # tokens after a stop id
    "unsuccessful",  # HTTP 200, success: false
)


def token_at(seed: int, position: int, vocab_size: int) -> tuple[int, float]:
    """The token drawn after position `position` and its log-prob."""
    digest = hashlib.blake2b(f"{seed},{position}".encode(), digest_size=8).digest()
    high, low = struct.unpack("<II", digest)
    (logprob,) = struct.unpack("<f", struct.pack("<f", -(low % 4000 + 1) / 1000))  # float32, as SGLang reports them
    return high % vocab_size, logprob


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def ranges_of(labels: Sequence[str], num_tokens: int) -> list[dict[str, Any]]:
    """SGLang's weight_versions: runs of tokens with one label."""
    starts = [place for place, label in enumerate(labels) if not place or label != labels[place - 1]]
    ends = [*starts[1:], num_tokens]
    return [{"version": labels[start], "start": start, "end": end} for start, end in zip(starts, ends, strict=True)]


_NAMES = str.maketrans("/.", "__")
# Endpoints of SGLang 0.5.23 and, of their bodies, the fields that a trainer may care for.
ENDPOINTS: dict[str, list[str]] = {
    "GET /health": [],
    "GET /server_info": [],
    "GET /model_info": [],
    "POST /generate": ["text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "rid"]
    + ["top_logprobs_num", "token_ids_logprob", "return_hidden_states", "return_routed_experts", "routed_experts_start_len"]
    + ["extra_key"],
    "POST /abort_request": ["rid", "abort_all", "finished_reason", "abort_message"],
    "POST /pause_generation": ["mode"],
    "POST /continue_generation": ["torch_empty_cache"],
    "GET /flush_cache": [],
    "POST /flush_cache": [],
    "POST /release_memory_occupation": ["tags"],
    "POST /resume_memory_occupation": ["tags"],
    "POST /begin_weight_update": ["selector"],
    "POST /end_weight_update": [],
    "POST /update_weights_from_tensor": ["serialized_named_tensors", "load_format", "flush_cache", "weight_version"]
    + ["abort_all_requests", "selector", "torch_empty_cache"],
    "POST /update_weights_from_disk": ["model_path", "load_format", "abort_all_requests", "weight_version"]
    + ["is_async", "flush_cache", "recapture_cuda_graph", "torch_empty_cache"],
    "POST /update_weights_from_distributed": ["names", "dtypes", "shapes", "group_name", "flush_cache"],
    "POST /update_weight_version": ["new_version", "abort_all_requests"],
}


def openapi_of(endpoints: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The part of FastAPI's document that describes endpoints and the fields of their bodies."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for endpoint, fields in endpoints.items():
        method, path = endpoint.split()
        name = path.strip("/")
        operation: dict[str, Any] = {"operationId": name}
        if fields:
            schemas[name] = {"type": "object", "properties": {field: {"title": field} for field in fields}}
            schema = {"$ref": f"#/components/schemas/{name}"}
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}, "required": True}
        paths.setdefault(path, {})[method.lower()] = operation
    return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}


class FakeServer:
    """One server. Attributes may be changed while it runs."""

    def __init__(
        self,
        *,
        key: str | None = KEY,
        vocab_size: int = 100,
        context_length: int = 4096,
        weight_version: str = "default",
        version: str = "0.5.17",
        token_s: float = 0.0,
        needs_session: bool = False,
        labels_tokens: bool = False,
    ):
        self.key = key
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.weight_version = weight_version
        self.version = version
        self.token_s = token_s
        self.needs_session = needs_session
        self.labels_tokens = labels_tokens
        self.endpoints = dict(ENDPOINTS)  # listed in its description
        self.faults: dict[str, str] = {}  # path -> fault
        self.answer_delay_s = 0.0  # a finished answer is held back
        self.freeze_after: int | None = None
        self.is_paused, self.pause_mode = False, ""
        self.in_session = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.on_update: Callable[[str, dict[str, Any]], None] = lambda path, body: None
        self.released: set[str] = set()  # memory
        self.forwards: list[str] = []  # health checks: the memory that was released then
        self.unlocked = threading.Condition()
        self.running: dict[str, str] = {}  # rid -> "run" or "abort"
        self.num_generated: dict[str, int] = {}  # tokens of each rid
        self.corpora: dict[str, list[str]] = {}  # documents that drafts come from
        self.draft_accepted = 0  # tokens that a verification gives; 0: nothing is drafted
        self._cache: list[list[int]] = []  # sequences served since the last flush
        self._ended = False
        self._connections: set[socket.socket] = set()
        self._http: ThreadingHTTPServer | None = None
        self._port = 0

    # Life

    def start(self) -> FakeServer:
        """Listen; on the same port again after a kill."""
        self._ended = False
        fake = self

        class Handler(_Handler):
            server_of = fake

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512
            allow_reuse_address = True

            def get_request(self) -> tuple[socket.socket, Any]:
                connection, address = super().get_request()
                fake._connections.add(connection)
                return connection, address

            def shutdown_request(self, request: socket.socket) -> None:
                fake._connections.discard(request)
                super().shutdown_request(request)

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore errors: connections end abruptly here by design."""

        self._http = Server(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """End at once: every connection is reset."""
        if self._http is None:
            return
        self._ended = True
        http, self._http = self._http, None
        http.shutdown()
        http.server_close()
        for connection in list(self._connections):
            reset(connection, socket.SHUT_RDWR)
        self._connections.clear()
        with self.unlocked:
            self.running.clear()
            self.unlocked.notify_all()

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()

    def thaw(self) -> None:
        with self.unlocked:
            self.freeze_after = None
            self.unlocked.notify_all()

    def wait_until_running(self, count: int, timeout_s: float = 60.0) -> None:
        with self.unlocked:
            assert self.unlocked.wait_for(lambda: len(self.running) >= count, timeout_s), (
                f"{len(self.running)} of {count} requests arrived"
            )

    def wait_until_called(self, path: str, count: int, timeout_s: float = 60.0) -> None:
        with self.unlocked:
            assert self.unlocked.wait_for(lambda: self.paths().count(path) >= count, timeout_s), self.paths()

    def paths(self) -> list[str]:
        """Paths called so far."""
        return [path for path, _ in self.calls]

    # What the model would say

    def expected(
        self, prompt_length: int, seed: int, max_new_tokens: int, stops: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of an uninterrupted response."""
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stops):
            token, logprob = token_at(seed, prompt_length - 1 + len(tokens), self.vocab_size)
            tokens.append(token)
            logprobs.append(logprob)
        return tokens, logprobs

    # What the server does; each returns (status, answer)

    def serve(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append((path, body))
        return getattr(self, "_serve" + path.translate(_NAMES), self._not_found)(body)

    def _not_found(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 404, {"detail": "Not Found"}

    def _serve_health(self, body: dict[str, Any]) -> tuple[int, Any]:
        """An idle server generates one token; a paused one gives up after a while, here at once."""
        if self.is_paused:
            return 503, None
        if not self.running:
            self.forwards.append(",".join(sorted(self.released)))
        return 200, None

    def _serve_release_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.released |= set(body["tags"])
        return 200, None

    def _serve_resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.released -= set(body["tags"])
        return 200, None

    def _serve_server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {
            "version": self.version,
            "max_req_input_len": self.context_length - 6,
            "max_total_num_tokens": 1 << 20,
            "page_size": 1,
            "dtype": "float32",
            "tp_size": 1,
            "custom_weight_loader": [WEIGHT_LOADER],
        }

    def _serve_model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {
            "model_path": "fake",
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "weight_version": self.weight_version,
        }

    def _serve_openapi_json(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, openapi_of(self.endpoints)

    def _serve_generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids, params, rid = body["input_ids"], body["sampling_params"], body.get("rid", "")
        if max(body.get("token_ids_logprob") or [0]) >= self.vocab_size:
            return 400, {"error": {"message": f"token_ids_logprob; valid range is [0, {self.vocab_size})."}}
        if max(ids) >= self.vocab_size:
            return 400, {"error": {"message": "The input_ids contain values greater than the vocab size"}}
        if len(ids) + params["max_new_tokens"] > self.context_length:
            return 400, {"error": {"message": "Requested token count exceeds the model's maximum context length"}}
        with self.unlocked:
            if rid in self.running:
                return 400, {"error": {"message": f"Duplicate request ID detected: {rid}"}}
            self.running[rid] = "run"
            self.unlocked.notify_all()
        labels: list[str] = []
        try:
            tokens, logprobs, reason = self._generate(ids, params, rid, labels)
        finally:
            with self.unlocked:
                self.running.pop(rid, None)
                self.unlocked.notify_all()
        time.sleep(self.answer_delay_s)
        num_cached = max((num_equal(ids[:-1], cached) for cached in self._cache), default=0)
        self._cache.append([*ids, *tokens])
        meta = {
            "id": rid,
            "cached_tokens": num_cached,
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "completion_tokens": len(tokens),
            "weight_version": self.weight_version,
            "output_token_logprobs": [[value, token, None] for token, value in zip(tokens, logprobs, strict=True)],
        }
        if self.draft_accepted:
            meta["spec_verify_ct"] = -(-(len(tokens) - 1) // self.draft_accepted)
        if self.labels_tokens:
            meta["weight_versions"] = ranges_of(labels or [self.weight_version], len(tokens))
        if body.get("logprob_start_len") == 0:
            values = [None] + [-0.001 * token for token in ids[1:]]
            meta["input_token_logprobs"] = [[value, token, None] for value, token in zip(values, ids, strict=True)]
        return 200, {"text": "never read", "output_ids": tokens, "meta_info": meta}

    def _generate(
        self, ids: list[int], params: dict[str, Any], rid: str, labels: list[str]
    ) -> tuple[list[int], list[float], dict[str, Any]]:
        stops = [] if params["ignore_eos"] else params["stop_token_ids"]
        tokens: list[int] = []
        logprobs: list[float] = []
        while True:
            with self.unlocked:
                self.unlocked.wait_for(lambda: self._may_go_on(rid, len(tokens)))
                if self.running.get(rid) != "run":
                    return tokens, logprobs, {"type": "abort", "message": "Aborted", "status_code": None}
            token, logprob = token_at(params["sampling_seed"], len(ids) - 1 + len(tokens), self.vocab_size)
            tokens.append(token)
            logprobs.append(logprob)
            labels.append(self.weight_version)
            self.num_generated[rid] = len(tokens)
            if len(tokens) >= params["max_new_tokens"]:
                return tokens, logprobs, {"type": "length", "length": len(tokens)}
            if token in stops:
                return tokens, logprobs, {"type": "stop", "matched": token}
            if self.token_s:
                time.sleep(self.token_s)

    def _may_go_on(self, rid: str, num_tokens: int) -> bool:
        if self._ended or self.running.get(rid) != "run":
            return True
        return not self.is_paused and (self.freeze_after is None or num_tokens < self.freeze_after)

    def _serve_abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.unlocked:
            for rid in self.running:
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    self.running[rid] = "abort"
            self.unlocked.notify_all()
        return 200, None

    def _serve_pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["mode"] == "abort":
            self._serve_abort_request({"abort_all": True})
        self.is_paused, self.pause_mode = True, body["mode"]
        return 200, {"status": "ok"}

    def _serve_continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.unlocked:
            self.is_paused = False
            self.unlocked.notify_all()
        return 200, {"status": "ok"}

    def _serve_flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.running and not (self.is_paused and self.pause_mode == "retract"):
            return 400, "Flush cache failed: requests are running"
        self._cache.clear()
        return 200, "Cache flushed."

    def _serve_add_external_corpus(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["corpus_id"] in self.corpora:
            return 400, {"success": False, "message": "it exists"}
        self.corpora[body["corpus_id"]] = body["documents"]
        return 200, {"success": True, "corpus_id": body["corpus_id"], "message": "", "loaded_token_count": 1}

    def _serve_remove_external_corpus(self, body: dict[str, Any]) -> tuple[int, Any]:
        del self.corpora[body["corpus_id"]]
        return 200, {"success": True, "message": ""}

    def _serve_list_external_corpora(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"success": True, "corpus_token_counts": dict.fromkeys(self.corpora, 1), "message": ""}

    def _serve_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        return self._update("/update_weights_from_tensor", body)

    def _serve_update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        return self._update("/update_weights_from_disk", body)

    def _update(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.needs_session and not self.in_session:
            return 400, {"success": False, "message": "no weight update session is open"}
        self.on_update(path, body)
        return 200, {"success": True, "message": "Success"}

    def _serve_begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.needs_session:
            return self._not_found(body)
        self.in_session = True
        return 200, {"success": True, "message": ""}

    def _serve_end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.in_session:
            return 400, {"success": False, "message": "no weight update session is open"}
        self.in_session = False
        return 200, {"success": True, "message": ""}

    def _serve_update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.weight_version = body["new_version"]
        return 200, {"success": True, "message": "", "new_version": self.weight_version}


def reset(connection: socket.socket, direction: int = socket.SHUT_RD) -> None:
    """Close so that the peer sees a reset (or at least an end)."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(direction)
    except OSError:
        pass
    connection.close()


# Faults that only change an answer of /generate.
_SPOILED: dict[str, Callable[[dict[str, Any]], None]] = {
    "missing_logprob": lambda answer: answer["meta_info"]["output_token_logprobs"].pop(),
    "missing_token": lambda answer: answer["output_ids"].pop(),
    "other_ids": lambda answer: answer["output_ids"].__setitem__(0, (answer["output_ids"][0] + 1) % 50),
    "nan": lambda answer: answer["meta_info"]["output_token_logprobs"][0].__setitem__(0, None),
    "positive": lambda answer: answer["meta_info"]["output_token_logprobs"][0].__setitem__(0, 0.5),
    "unknown_reason": lambda answer: answer["meta_info"].update(finish_reason={"type": "tired"}),
    "nan_stop": lambda answer: answer["meta_info"].update(finish_reason={"type": "stop", "matched": "NaN happened"}),
    "unsuccessful": lambda answer: answer.update(success=False, message="the loader refused"),
}


def _cut(answer: dict[str, Any]) -> None:
    """Return two tokens as if they were the requested length."""
    answer["output_ids"] = answer["output_ids"][:2]
    answer["meta_info"].update(
        output_token_logprobs=answer["meta_info"]["output_token_logprobs"][:2],
        completion_tokens=2,
        finish_reason={"type": "length", "length": 2},
    )


def _renumber(answer: dict[str, Any]) -> None:
    """Ids of a larger vocabulary."""
    answer["output_ids"] = [token + 100_000 for token in answer["output_ids"]]
    for entry in answer["meta_info"]["output_token_logprobs"]:
        entry[1] += 100_000


_SPOILED["short"] = _cut
_SPOILED["other_vocabulary"] = _renumber


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._respond({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._respond(json.loads(self.rfile.read(length)) if length else {})

    def _respond(self, body: dict[str, Any]) -> None:
        fake, path = self.server_of, self.path.split("?")[0]
        fault = fake.faults.get(path, "")
        if fault == "hang":
            fake.calls.append((path, body))
            return self._hang()
        if fault == "reset":
            fake.calls.append((path, body))
            return self._reset()
        if fault.isdigit():
            fake.calls.append((path, body))
            return self._send(int(fault), {"error": {"message": f"fault {fault} to order {fake.key}"}})
        authorized = fake.key is None or path == "/health"
        if not authorized and self.headers.get("Authorization") != f"Bearer {fake.key}":
            return self._send(401, {"error": "Unauthorized"})
        if fault == "behind_stop":
            body["sampling_params"]["stop_token_ids"].clear()
        status, answer = fake.serve(path, body)
        if fake._ended:
            return None
        if fault in _SPOILED and status == 200:
            answer = answer if isinstance(answer, dict) else {}
            _SPOILED[fault](answer)
        return self._send(status, "{not json" if fault == "no_json" else answer, fault)

    def _send(self, status: int, answer: Any, fault: str = "") -> None:
        is_text = isinstance(answer, str) and not answer.startswith("{")
        text = (
            answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, separators=(",", ":"))
        )
        data = text.encode()
        self.send_response(status)
        if data:
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault in ("hang_mid_answer", "reset_mid_answer"):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            return self._hang() if fault == "hang_mid_answer" else self._reset()
        self.wfile.write(data)

    def _hang(self) -> None:
        while not self.server_of._ended:
            time.sleep(0.02)
        self.close_connection = True

    def _reset(self) -> None:
        self.close_connection = True
        reset(self.connection)
