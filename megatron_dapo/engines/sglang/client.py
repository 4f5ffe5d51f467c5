"""HTTP client of one stock SGLang server.

Every call has a deadline and ends in an answer or in an EngineError that names the server, the endpoint and the fix.

Retries: control calls that change nothing when repeated are tried again after a lost connection, a few times within
their deadline. Weight updates never are: the weight sync decides about a repetition. A generation is
not either: the server may still be working on the first try and refuses its rid until it notices the closed connection;
send it again under another rid.

Generations share connections in the engine's event loop. A control call blocks, and takes a loop and a connection for
itself: a whole call can then have one deadline, however slowly bytes come, and any thread may make it.

The API key goes into one header and nowhere else: no message, log line or repr shows it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from megatron_dapo.engines.sglang.wire import (
    AnswerError,
    Generation,
    generate_body,
    parse_generation,
    parse_prompt_logprobs,
    parse_token_texts,
    sampling_body,
)
from megatron_dapo.types import GenerationRequest, RoutingShape, SamplingParams

if TYPE_CHECKING:
    from megatron_dapo.config.sglang_schema import UpdatePause
    from megatron_dapo.engines.sglang.versions import ApiVersion

# Idle connections are closed well before SGLang closes them (5 s): a request never meets a closing connection.
_KEEPALIVE_S = 2.0
_READ_BYTES = 1 << 18  # an answer arrives in a few pieces
_RETRY_PAUSE_S = 0.2
_NUM_RETRIES = 3
_MAX_QUOTED = 600  # characters of a server's message in an error
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds."""

    connect_s: float = 10.0  # TCP connection
    generate_s: float = 3600.0  # no answer to any request of the server
    control_s: float = 60.0  # abort, pause, resume, server_info, version, begin and end of an update
    flush_s: float = 60.0  # all tries together
    update_s: float = 600.0  # one call that moves weights
    health_s: float = 30.0  # SGLang itself waits 20 s for a sign of life


class EngineError(RuntimeError):
    """A call to a server failed. `server` and `endpoint` say where."""

    def __init__(self, server: str, endpoint: str, problem: str):
        super().__init__(f"SGLang server {server}, {endpoint}: {problem}")
        self.server = server
        self.endpoint = endpoint


class EngineGone(EngineError):
    """The connection was refused, reset or closed before the answer: the server has ended, or is not there yet."""


class EngineTimeout(EngineError):
    """No answer within the deadline."""


class EngineAnswerError(EngineError):
    """The answer does not fit the request."""


class EngineHttpError(EngineError):
    """An HTTP status other than 200, or `success: false`."""

    def __init__(self, server: str, endpoint: str, status: int, problem: str):
        super().__init__(server, endpoint, problem)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """The server is well and refuses this very request: another server would as well."""
        return 400 <= self.status < 500


_HINTS = {
    400: "the request does not fit this server (vocabulary, context_length, options); see the message",
    401: "the API key is not this server's: give the client the key file the server was started with",
    403: "the API key is not this server's: give the client the key file the server was started with",
    404: "this is no SGLang server of a supported version: check the URL",
    500: "the server failed; the first root cause is in its log",
    503: "the server is overloaded or shutting down; see its log",
}


class SglangClient:
    """One server. Control calls block; `generate` is a coroutine for the engine's thread.

    Args:
        url: http://host:port of the server.
        key: its API key; None if it has none.
        api_version: what its version needs, see `versions.api_version_of`; None: no update session.
        name: how errors call the server; the URL by default.
        update_pause: what `pause` does with running requests.
        adapter: name of the LoRA adapter that generates; "": none.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        timeouts: Timeouts | None = None,
        api_version: ApiVersion | None = None,
        *,
        name: str = "",
        update_pause: UpdatePause = "abort",
        adapter: str = "",
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"SGLang server URL {url!r}: give it as http://host:port")
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.timeouts = timeouts or Timeouts()
        self.api_version = api_version
        self.update_pause: UpdatePause = update_pause
        self._adapter = {"lora_path": adapter} if adapter else {}
        self._has_adapter = False  # loaded by `replace_adapter`
        self._key = key

    def __repr__(self) -> str:
        return f"SglangClient({self.name})"

    # Generation

    def open_async(self, max_connections: int) -> aiohttp.ClientSession:
        """Connections to the server, to be opened and closed in the event loop that uses them."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=_KEEPALIVE_S),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BYTES,
        )

    async def generate(
        self,
        http: aiohttp.ClientSession,
        request: GenerationRequest,
        rid: str,
        *,
        vocab_size: int,
        routing: RoutingShape | None = None,
        cache_key: str = "",
    ) -> Generation:
        """Generate one response (or the rest of one, after a prefix).

        Requests share keys and values only with those of their `cache_key`.
        `rid` names it on the server, among those running and for `abort`; aborting a rid aborts every rid that begins
        with it, so no rid may begin another. The caller bounds the wait. Raises EngineError.
        """
        # Any other timeout would cut off a request that waits in the server's queue.
        timeout = aiohttp.ClientTimeout(sock_connect=self.timeouts.connect_s)
        status, _, body = await self._exchange(
            http,
            "POST /generate",
            self.timeouts.generate_s,
            timeout,
            json={**generate_body(request, rid, cache_key), **self._adapter},
        )
        if status == 499:  # aborted before it reached the scheduler: nothing was generated
            return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", "")
        with self._errors("POST /generate", self.timeouts.generate_s):
            self._check_status("POST /generate", status, body.decode(errors="replace") if status != 200 else "")
            return parse_generation(body, request, vocab_size=vocab_size, routing=routing)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[t] | token_ids[:t]) for t = 1 .. N-1 at temperature 1: what the parity probe compares."""
        sampling = sampling_body(SamplingParams(temperature=1.0), max_new_tokens=1, seed=0)
        ids = list(token_ids)
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = self._call("POST /generate", {**body, **self._adapter}, self.timeouts.generate_s)
        with self._errors("POST /generate", self.timeouts.generate_s):
            return parse_prompt_logprobs(answer, token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return what the server's tokenizer calls these ids."""
        sampling = sampling_body(SamplingParams(temperature=1.0), max_new_tokens=1, seed=0)
        ids = list(token_ids)
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = self._call("POST /generate", {**body, "return_text_in_logprobs": True}, self.timeouts.generate_s)
        with self._errors("POST /generate", self.timeouts.generate_s):
            return parse_token_texts(answer, len(ids))

    def abort(self, rid: str | None = None) -> None:
        """Stop one request, or all. Their calls of `generate` return what they have, with finish_reason "abort"."""
        body: dict[str, Any] = {"abort_all": True} if rid is None else {"rid": rid, "abort_all": False}
        self._call("POST /abort_request", body, self.timeouts.control_s, retries=_NUM_RETRIES)

    # State

    def health(self) -> None:
        """Return when the server gives a sign of life within health_s; EngineError otherwise. A paused server gives
        none.
        """
        self._call("GET /health", None, self.timeouts.health_s)

    async def probe(self, http: aiohttp.ClientSession) -> None:
        """`health` in an event loop."""
        await self.get(http, "/health", self.timeouts.health_s)

    async def get(self, http: aiohttp.ClientSession, path: str, seconds: float) -> bytes:
        """Return the answer to GET `path` in an event loop; EngineError if it is not 200 within `seconds`."""
        timeout = aiohttp.ClientTimeout(seconds, sock_connect=min(self.timeouts.connect_s, seconds))
        status, _, body = await self._exchange(http, f"GET {path}", seconds, timeout)
        self._check_status(f"GET {path}", status, body.decode(errors="replace"))
        return body

    def server_info(self) -> dict[str, Any]:
        """The server's arguments and sizes; `version` is SGLang's."""
        return self._call("GET /server_info", None, self.timeouts.control_s, retries=_NUM_RETRIES)

    def model_info(self) -> dict[str, Any]:
        """The model it serves: model_path, model_type, architectures, weight_version."""
        return self._call("GET /model_info", None, self.timeouts.control_s, retries=_NUM_RETRIES)

    def max_length(self) -> int:
        """Most tokens (prompt + response) of one request: SGLang shortens longer responses silently."""
        info = self.server_info()
        longest_input, cache = info.get("max_req_input_len"), info.get("max_total_num_tokens")
        if not isinstance(longest_input, int) or not isinstance(cache, int):
            problem = f"max_req_input_len and max_total_num_tokens are {[longest_input, cache]}, not two sizes"
            raise EngineAnswerError(self.name, "GET /server_info", problem)
        # max_req_input_len is 5 below the longest sequence, of which one token stays free; one page stays free as well.
        return min(longest_input + 4, cache - int(info.get("page_size") or 1) - 2)

    @property
    def weight_version(self) -> str:
        """The label last set with `update_weight_version` ("default" in a fresh server)."""
        return str(self.model_info().get("weight_version") or "")

    # Pausing

    def pause(self) -> None:
        """Stop generating; new requests wait until `resume`. What runs is answered with what it has (update_pause
        "abort"), queued again without its cache ("retract"), or kept with it ("in_place").
        """
        # In the last two modes SGLang answers before its scheduler has paused; later commands take the same way there.
        body = {"mode": self.update_pause}
        self._call("POST /pause_generation", body, self.timeouts.control_s, retries=_NUM_RETRIES)

    def resume(self) -> None:
        """Generate again, after a pause."""
        self._call("POST /continue_generation", {}, self.timeouts.control_s, retries=_NUM_RETRIES)

    def flush_cache(self) -> None:
        """Drop all cached keys and values. The server refuses while it has work: tried until flush_s is over."""
        end = time.monotonic() + self.timeouts.flush_s
        pause = 0.05
        refusal: EngineHttpError | None = None
        while True:
            left = max(0.1, end - time.monotonic())
            try:
                self._call("POST /flush_cache", None, left, retries=_NUM_RETRIES)
                return
            except EngineHttpError as error:
                if error.status != 400 or time.monotonic() + pause >= end:
                    raise
                refusal = error
            except EngineTimeout:  # the last attempt has little time: what the server said before is the reason
                if refusal is None:
                    raise
                raise refusal from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    # Memory

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory back to the device: "kv_cache", "weights". What was in it is lost."""
        self._call("POST /release_memory_occupation", {"tags": list(tags)}, self.timeouts.update_s)

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again that was released; its content is undefined."""
        self._call("POST /resume_memory_occupation", {"tags": list(tags)}, self.timeouts.update_s)

    # Weights

    def update_weights_from_tensor(self, payloads: Sequence[bytes | str], load_format: str | None = None) -> None:
        """Hand one serialized payload to each engine rank. Payloads as bytes are sent in base64, strings as they are.

        Never repeated. Success says that the loader ran; what it did is in its own report.
        """
        encoded = [p if isinstance(p, str) else base64.b64encode(p).decode("ascii") for p in payloads]
        body = {"serialized_named_tensors": encoded, "load_format": load_format, "flush_cache": False}
        self._call("POST /update_weights_from_tensor", body, self.timeouts.update_s)

    def update_weights_from_disk(self, directory: str) -> None:
        """Load a Hugging Face checkpoint by its path on the server's node. Never repeated."""
        # The format by name: a server started with random weights would make some again.
        body = {
            "model_path": str(directory),
            "load_format": "auto",
            "flush_cache": self.update_pause != "in_place",
            "abort_all_requests": False,
        }
        self._call("POST /update_weights_from_disk", body, self.timeouts.update_s)

    def replace_adapter(
        self, config: Mapping[str, Any], payloads: Sequence[bytes], checksums: Mapping[str, str]
    ) -> None:
        """Load the adapter that generates, in place of the one before; call it between `pause` and `resume`.

        config: its adapter_config.json. payloads: its tensors for each engine rank, see `bridge.transports.adapters`.
        checksums: SHA-256 of each tensor, which every rank compares before it loads. Never repeated.
        """
        name = self._adapter["lora_path"]
        if self._has_adapter:
            self._has_adapter = False
            self._require_success("POST /unload_lora_adapter", {"lora_name": name})
        body = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": [base64.b64encode(payload).decode("ascii") for payload in payloads],
            "expected_checksums": dict(checksums),
        }
        self._require_success("POST /load_lora_adapter_from_tensors", body)
        self._has_adapter = True

    def _require_success(self, endpoint: str, body: dict[str, Any]) -> None:
        answer = self._call(endpoint, body, self.timeouts.update_s)
        if not answer.get("success"):
            raise EngineError(self.name, endpoint, str(answer.get("error_message") or "it failed without a reason"))

    def begin_weight_update(self) -> None:
        """Open the session that newer versions want around updates; nothing to do for older ones."""
        if self.api_version is not None and self.api_version.needs_update_session:
            self._call("POST /begin_weight_update", {}, self.timeouts.control_s)

    def end_weight_update(self) -> None:
        """Close the session of `begin_weight_update`."""
        if self.api_version is not None and self.api_version.needs_update_session:
            self._call("POST /end_weight_update", {}, self.timeouts.update_s)

    def update_weight_version(self, version: int) -> None:
        """Label the weights; every later answer carries the label."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._call("POST /update_weight_version", body, self.timeouts.control_s, retries=_NUM_RETRIES)

    # Drafting

    def replace_corpus(self, corpus_id: str, documents: Sequence[str]) -> None:
        """Make documents the only corpus that drafts are looked up in; none without documents."""
        if documents:
            body = {"corpus_id": corpus_id, "documents": list(documents)}
            self._call("POST /add_external_corpus", body, self.timeouts.update_s)
        found = self._call("GET /list_external_corpora", None, self.timeouts.control_s)
        for other in found.get("corpus_token_counts") or {}:
            if other != corpus_id:
                self._call("POST /remove_external_corpus", {"corpus_id": other}, self.timeouts.control_s)

    # HTTP

    def _call(self, endpoint: str, body: dict[str, Any] | None, deadline: float, retries: int = 0) -> Any:
        """One call within `deadline`, repeated up to `retries` times if the connection is lost."""
        end = time.monotonic() + deadline
        while True:
            try:
                return asyncio.run(self._control(endpoint, body, deadline, max(0.1, end - time.monotonic())))
            except EngineGone:
                retries -= 1
                if retries < 0 or time.monotonic() + _RETRY_PAUSE_S >= end:
                    raise
            time.sleep(_RETRY_PAUSE_S)

    async def _control(self, endpoint: str, body: dict[str, Any] | None, deadline: float, left: float) -> Any:
        # A stream: aiohttp warns of a message with megabytes of commands that is given as a whole.
        content = {} if body is None else {"data": io.BytesIO(json.dumps(body).encode()), "headers": _JSON}
        timeout = aiohttp.ClientTimeout(left, sock_connect=min(self.timeouts.connect_s, left))
        async with self.open_async(1) as http:
            status, kind, answer = await self._exchange(http, endpoint, deadline, timeout, **content)
        with self._errors(endpoint, deadline):
            return self._answer(endpoint, status, kind, answer)

    async def _exchange(
        self,
        http: aiohttp.ClientSession,
        endpoint: str,
        deadline: float,
        timeout: aiohttp.ClientTimeout,
        **options: Any,
    ) -> tuple[int, str, bytes]:
        """Return the status, the content type and the whole body of one answer, in an event loop."""
        method, path = endpoint.split()
        with self._errors(endpoint, deadline):
            async with http.request(
                method, self.url + path, timeout=timeout, allow_redirects=False, **options
            ) as response:
                return response.status, response.content_type, await response.read()

    def _check_status(self, endpoint: str, status: int, text: str) -> None:
        if status != 200:
            hint = _HINTS.get(status, "see the server's log")
            problem = f"HTTP {status}: {self._quoted(text)}; {hint}"
            raise EngineHttpError(self.name, endpoint, status, problem)

    def _answer(self, endpoint: str, status: int, content_type: str, body: bytes) -> Any:
        """Return the JSON of a good answer (None if it has no body of JSON); EngineHttpError otherwise."""
        self._check_status(endpoint, status, body.decode(errors="replace") if status != 200 else "")
        if content_type != "application/json" or not body:
            return None
        answer = json.loads(body)
        if isinstance(answer, dict) and answer.get("success") is False:
            problem = f"success: false: {self._quoted(str(answer.get('message')))}; see the server's log"
            raise EngineHttpError(self.name, endpoint, status, problem)
        return answer

    def _quoted(self, text: str) -> str:
        """A server's message, shortened, without the key."""
        text = text.strip() or "(no message)"
        return (text.replace(self._key, "<key>") if self._key else text)[:_MAX_QUOTED]

    @contextmanager
    def _errors(self, endpoint: str, deadline: float) -> Iterator[None]:
        """Turn what aiohttp and the parsers raise into EngineError. The chain is cut: it adds nothing but noise."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            problem = f"no connection within {min(self.timeouts.connect_s, deadline):g} s; is the host reachable?"
            raise EngineTimeout(self.name, endpoint, problem) from None
        except asyncio.TimeoutError:
            problem = f"no answer within {deadline:g} s: it hangs or is overloaded; see its log, or raise the deadline"
            raise EngineTimeout(self.name, endpoint, problem) from None
        except aiohttp.ClientConnectorError as error:
            problem = f"connection refused ({error}): the server has ended or never came up; see its log"
            raise EngineGone(self.name, endpoint, problem) from None
        except aiohttp.ClientError as error:
            lost = f"connection lost before the answer ({type(error).__name__}: {error})"
            raise EngineGone(self.name, endpoint, f"{lost}: the server has ended; see its log") from None
        except (AnswerError, UnicodeDecodeError) as error:
            raise EngineAnswerError(self.name, endpoint, f"unexpected answer: {self._quoted(str(error))}") from None
        except ValueError as error:  # the JSON document is broken
            raise EngineAnswerError(self.name, endpoint, f"the answer is no JSON: {error}") from None


WEIGHTS, CACHE = "weights", "kv_cache"


class ColocatedClient(SglangClient):
    """Client of a server that shares its device with the trainer and sleeps while the trainer works.

        generate | sleep: paused, cache and weights released | trainer's step | begin update: memory of the weights resumed
                 | weight sync, verified | resume: cache resumed, then generation

    Weights come back first and the cache only after the weight sync, so that both are never there with the buckets of
    the sync and the trainer's own peak. Needs a server started with its memory saver (CUDA only).
    """

    _released: frozenset[str] = frozenset()  # SGLang crashes if memory is resumed that was not released
    # Told of every change to it, with None before: for a supervisor that keeps the server beyond this process.
    remember: Callable[[Sequence[str] | None], None] = staticmethod(lambda tags: None)

    def sleep(self) -> None:
        """Release cache and weights, what of them is there. The server must have no request, and runs none until `resume`."""
        tags = tuple(tag for tag in (CACHE, WEIGHTS) if tag not in self._released)
        if tags:
            # A stray request, such as a monitor's GET /health, which generates a token, would run on memory that is gone.
            # SGLang holds it back in this mode; a scheduler paused in one of the other modes would spin on its core.
            self.pause()
            self.flush_cache()
            self._change(self.release_memory, tags, self._released | set(tags))

    def begin_weight_update(self) -> None:
        """Bring the memory of the weights back, then open the session."""
        self._resume_memory(WEIGHTS)
        super().begin_weight_update()

    def resume(self) -> None:
        """Bring the cache back, then generate again."""
        self._resume_memory(CACHE)
        super().resume()

    def _resume_memory(self, tag: str) -> None:
        if tag in self._released:
            self._change(self.resume_memory, (tag,), self._released - {tag})

    def _change(self, call: Callable[[Sequence[str]], None], tags: Sequence[str], released: frozenset[str]) -> None:
        self.remember(None)
        call(tags)
        self._released = released
        self.remember(sorted(released))
