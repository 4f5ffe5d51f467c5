"""`RolloutEngine` over several SGLang servers, for the rank that drives the rollout.

    submit -> waiting -> in flight on one server -> validated -> poll
                 ^            |  lost connection, hang, 5xx, nonsense
                 +------------+

A request is at any time waiting, in flight on one server under one attempt number, or ready: so it comes back exactly
once. When a server dies its attempts are given up (a late answer has a number that is no longer known) and their requests
wait again. A dying server loses its partial output, so a response starts over from what was
handed in: from its prefix if it has one. On a server started with `seeded` sampling it then becomes the same
response; otherwise it is a fresh draw, which favors short responses a little (long ones are likelier to be hit).

With update_pause "retract" or "in_place" requests stay in flight when the weights change, and servers label each token.

Requests go to the server with the fewest tokens in flight (prompt + expected response); those with one prompt stay
together while that leaves loads even, so that the server computes the prompt once.
"""

from __future__ import annotations

import heapq
import logging
import resource
import secrets
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from megatron_dapo.config.sglang_schema import UpdatePause
from megatron_dapo.device_thread import device_thread_pool
from megatron_dapo.engines.base import (
    PrefixReuse,
    aborted,
    behind_prefix,
    check_request,
    check_request_ids,
    context_length,
    is_complete,
)
from megatron_dapo.engines.sglang.client import (
    EngineAnswerError,
    EngineError,
    EngineGone,
    EngineHttpError,
    EngineTimeout,
    SglangClient,
)
from megatron_dapo.engines.sglang.corpora import Drafts
from megatron_dapo.engines.sglang.dispatcher import Attempt, HttpDispatcher, Outcome, Probed
from megatron_dapo.engines.sglang.wire import Generation, LabeledTokens
from megatron_dapo.types import Completion, GenerationRequest, RoutingShape, VersionRange

logger = logging.getLogger(__name__)

_SPARE_CONNECTIONS = 4  # connections per server for health probes, besides those of requests
_RESERVED_FILES = 256  # data, logs, sockets of process groups
# Weight of one response in the running mean of response lengths.
_LENGTH_MEMORY = 1 / 32


@dataclass(frozen=True)
class SglangEngineSettings:
    """Sizes and deadlines of the engine."""

    max_length: int  # tokens of one sequence, prompt + response; see SglangClient.max_length
    vocab_size: int  # the trained model's; an answer with other ids is an error
    max_in_flight: int = 256  # requests at one server, each with a connection; the rest waits here
    max_tries: int = 5  # tries per request before poll raises
    poll_wait_s: float = 0.5  # longest wait of one poll for something to happen
    stall_s: float = 120.0  # A server's health is probed after this silence.
    abort_s: float = 60.0  # longest silence while answers of aborted requests are awaited
    routing: RoutingShape | None = None  # the trained model's, for requests that want it; None: it has no experts
    update_pause: UpdatePause = "abort"  # the mode that the servers were started for
    draft_corpus_tokens: int = 0  # tokens of earlier responses in a server's corpus; 0: no drafts
    draft_age: int = 100  # policy versions after which those are dropped


@dataclass
class EngineStatistics:
    """Counts since the engine began."""

    num_deaths: int = 0
    num_redispatched: int = 0  # attempts that were lost and made again
    num_late_answers: int = 0  # answers to attempts given up, dropped
    num_completions: int = 0
    num_tokens: int = 0  # generated, prefixes not counted
    num_prompt_tokens: int = 0  # read by requests without a prefix
    num_cached_prompt_tokens: int = 0  # tokens found in the prefix caches, as by the other responses of a group
    prefix_reuse: PrefixReuse = field(default_factory=PrefixReuse)


class AllEnginesGone(RuntimeError):
    """No server is left. Unfinished requests are kept: `restore` one and poll on."""


class RequestGivenUp(RuntimeError):
    """A request was lost too often. It is kept."""


@dataclass(eq=False)
class _Server:
    index: int
    client: SglangClient
    problem: EngineError | None = None  # reason it is dead
    is_suspect: bool = False  # its health is being probed
    last_sign: float = 0.0  # last sign of life, on the monotonic clock
    in_flight: set[int] = field(default_factory=set)  # numbers of attempts
    num_tokens: int = 0  # tokens in flight

    @property
    def is_alive(self) -> bool:
        return self.problem is None


@dataclass(eq=False)
class _Job:
    """An unfinished request, in the order of submission: it waits, or its latest attempt is in flight."""

    order: int
    request: GenerationRequest
    num_tries: int = 0
    problem: EngineError | None = None
    # The latest attempt:
    server: _Server = field(init=False)
    version: int = field(init=False)  # policy version that serves it
    num_tokens: int = field(init=False)  # expected in the server's cache


class SglangEngine:
    """See the module. Not thread-safe: one thread drives it. Close it (or use it in `with`) to end its own thread.

    Nothing is generated before `set_policy_version`, which the owner calls once an update has been verified.
    """

    def __init__(self, clients: Sequence[SglangClient], settings: SglangEngineSettings):
        if not clients:
            raise ValueError("SGLang engine: no server given; start at least one or name its URL")
        self.settings = settings
        self.statistics = EngineStatistics()
        self._servers = [_Server(index, client) for index, client in enumerate(clients)]
        self._max_in_flight = min(settings.max_in_flight, _affordable_connections(len(clients)))
        if self._max_in_flight < settings.max_in_flight:
            logger.warning(
                "%d servers with %d requests in flight each need more connections than the limit of open files allows: "
                "%d each; raise the hard limit (ulimit -Hn)",
                len(clients),
                settings.max_in_flight,
                self._max_in_flight,
            )
        self._dispatcher = HttpDispatcher(
            settings.vocab_size, self._max_in_flight + _SPARE_CONNECTIONS, settings.routing
        )
        self._name = secrets.token_hex(8)
        self._version = -1
        self._num_submitted = 0
        self._num_attempts = 0
        self._jobs: dict[str, _Job] = {}  # waiting or in flight
        self._waiting: list[tuple[int, str]] = []  # heap of (order, request id)
        self._in_flight: dict[int, _Job] = {}  # attempt number -> job
        self._ready: list[tuple[int, Completion]] = []
        self._affinity: dict[Hashable, _Server] = {}  # server that a prompt, or a request of an affinity, was last sent to
        self._mean_length = 0.0  # mean over responses, 0 before the first
        self._drafts: Drafts | None = None
        if settings.draft_corpus_tokens:
            self._drafts = Drafts(len(clients), settings.draft_corpus_tokens, settings.draft_age, self._name)
        self._refusal: EngineError | None = None
        self._first_problem: EngineError | None = None

    def __enter__(self) -> SglangEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the background thread. Servers keep running."""
        self._dispatcher.close()

    # Versions

    @property
    def policy_version(self) -> int:
        return self._version

    def set_policy_version(self, version: int) -> None:
        """All servers that live now serve policy `version`, verified. ValueError for one below the last;
        RuntimeError while requests are in flight and servers do not keep them over an update: abort them first.
        """
        if version < self._version:
            raise ValueError(f"policy version {version} comes after {self._version}: versions never go backwards")
        if self._in_flight and version != self._version and self.settings.update_pause == "abort":
            raise RuntimeError(
                f"policy version {version}: {len(self._in_flight)} requests are being generated by version "
                f"{self._version}; abort them before the weights change"
            )
        self._version = version
        for server in self._servers:  # They answered nothing while they were paused.
            server.last_sign = time.monotonic()
            if self._drafts is not None and server.is_alive:
                self._drafts.renew(server.index, server.client, version)

    # Servers

    @property
    def failed_servers(self) -> dict[int, str]:
        """Reasons of the failed servers, by index."""
        return {server.index: str(server.problem) for server in self._servers if not server.is_alive}

    def mark_failed(self, index: int, reason: str) -> None:
        """Record a failure that the owner sees first, e.g. that a server's process has ended."""
        server = self._servers[index]
        if server.is_alive:
            self._fail(server, EngineGone(server.client.name, "process", reason))

    def restore(self, index: int, client: SglangClient) -> None:
        """Server `index` is back, perhaps at another URL, and serves the current policy version (the caller has verified
        that).
        """
        if self._servers[index].is_alive:
            raise ValueError(f"server {index} ({self._servers[index].client.name}) is alive; mark it dead first")
        self._servers[index] = _Server(index, client)
        if self._drafts is not None:
            self._drafts.history.forget_loaded(index)
        if not self.failed_servers:
            self._first_problem = None

    # RolloutEngine

    @property
    def num_unfinished(self) -> int:
        return len(self._jobs) + len(self._ready)

    @property
    def prefix_reuse(self) -> PrefixReuse:
        return self.statistics.prefix_reuse

    @property
    def busy_s(self) -> float:
        """Seconds in which a server had a request, the mean of the servers. Any thread may read it."""
        return self._dispatcher.busy_s / len(self._servers)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests and send what fits. All are checked before any is queued."""
        check_request_ids(requests, self._jobs.keys() | {completion.request_id for _, completion in self._ready})
        for request in requests:
            check_request(request, max_length=self.settings.max_length, vocab_size=self.settings.vocab_size)
        for request in requests:
            self._accept(request)
        self._dispatch()

    def poll(self) -> list[Completion]:
        """Return what finished, in the order of submission; wait up to poll_wait_s for something.

        Raises AllEnginesGone, RequestGivenUp, or the EngineHttpError of a request that a server refused. Nothing is
        lost by any of them.
        """
        if self._jobs and self._version < 0:
            raise RuntimeError("the SGLang servers have no verified weights yet: synchronize them before generating")
        self._dispatch()
        if not self._ready and self._expects_news:
            self._handle(self._dispatcher.receive(self.settings.poll_wait_s))
            self._look_after_stalls()
        if not self._ready:
            self._raise_if_stuck()
        return self._take_ready()

    def wake(self) -> None:
        """End the wait of a poll, for news from elsewhere. Any thread may call it."""
        self._dispatcher.wake()

    def abort(self) -> list[Completion]:
        """See `RolloutEngine.abort`. Never raises: once no server has answered for abort_s, those with answers left are
        dead, and their requests come back with what was known of them when they were handed in.
        """
        # Not a deadline for all: tens of thousands of answers with routing take minutes to arrive, whichever server is read first.
        last_answer = time.monotonic()
        while self._expects_news:
            self._send_aborts()
            # A request may have reached its server after the abort did: so abort again until all have answered. A look
            # at a server's health is waited for as well: once the server is paused, it would fail.
            self._receive_until(time.monotonic() + min(1.0, self.settings.abort_s))
            last_answer = max(last_answer, *(server.last_sign for server in self._servers))
            if self._expects_news and time.monotonic() - last_answer >= self.settings.abort_s:
                self._fail_silent()
        for job in self._jobs.values():
            self._ready.append((job.order, aborted(job.request)))
        self._jobs.clear()
        self._waiting.clear()
        self._refusal = None
        return self._take_ready()

    # Sending

    def _accept(self, request: GenerationRequest) -> None:
        """Queue a request; one that is complete already is ready."""
        job = _Job(self._num_submitted, request)
        self._num_submitted += 1
        if is_complete(request):
            self._ready.append((job.order, aborted(request)))
            return
        self._jobs[request.request_id] = job
        self._wait(job)

    def _wait(self, job: _Job) -> None:
        heapq.heappush(self._waiting, (job.order, job.request.request_id))

    def _dispatch(self) -> None:
        """Send waiting requests, first come first served, while servers have room."""
        if self._version < 0 or not self._waiting or self._refusal or not self._with_room():
            return
        alive = [server for server in self._servers if server.is_alive]
        costs = sum(self._cost(self._jobs[name].request) for _, name in self._waiting)
        even = (sum(server.num_tokens for server in alive) + costs) / max(1, len(alive))
        attempts = []
        while self._waiting and (server := self._choose(self._jobs[self._waiting[0][1]].request, even)):
            job = self._jobs[self._waiting[0][1]]
            if job.num_tries >= self.settings.max_tries:
                break  # poll says so
            heapq.heappop(self._waiting)
            attempts.append(self._launch(job, server))
        if attempts:
            self._dispatcher.send(attempts)

    def _choose(self, request: GenerationRequest, even: float) -> _Server | None:
        """The server for a request: its prompt's, unless that would carry over 1/8 more than `even` tokens; then the
        least loaded one. None: no room anywhere.
        """
        has_room = self._with_room()
        for key in _affinity_of(request):
            preferred = self._affinity.get(key) or self._with_past(request)
            if preferred in has_room and preferred.num_tokens + self._cost(request) <= even * 9 / 8:
                return preferred
        return min(has_room, key=lambda server: server.num_tokens, default=None)

    def _with_past(self, request: GenerationRequest) -> _Server | None:
        """Return the server whose drafts know a request's prompt."""
        index = self._drafts.history.server_of(request.prompt_ids) if self._drafts is not None else None
        return None if index is None else self._servers[index]

    @property
    def _expects_news(self) -> bool:
        return bool(self._in_flight) or any(server.is_suspect for server in self._servers)

    def _with_room(self) -> list[_Server]:
        return [
            server
            for server in self._servers
            if server.is_alive and not server.is_suspect and len(server.in_flight) < self._max_in_flight
        ]

    def _cost(self, request: GenerationRequest) -> int:
        """Tokens a request is expected to keep in a server's cache when it ends."""
        longest = request.sampling.max_new_tokens
        so_far = request.prefix.num_tokens if request.prefix else 0
        expected = min(longest, max(so_far + 1, self._mean_length)) if self._mean_length else longest
        return len(request.prompt_ids) + int(expected)

    def _launch(self, job: _Job, server: _Server) -> Attempt:
        number = self._num_attempts
        self._num_attempts += 1
        self.statistics.num_redispatched += job.num_tries > 0
        job.num_tries += 1
        job.server, job.version, job.num_tokens = server, self._version, self._cost(job.request)
        if not server.in_flight:  # an idle server's last sign may be long ago
            server.last_sign = time.monotonic()
        self._in_flight[number] = job
        server.in_flight.add(number)
        server.num_tokens += job.num_tokens
        self._affinity.update(dict.fromkeys(_affinity_of(job.request), server))
        return number, server.client, job.request, self._cache_key

    @property
    def _cache_key(self) -> str:
        """Name of the cache of the version that is served, which no flush parts from others if update_pause is "in_place".

        A server that outlives the trainer gets the same versions from the next one, with other weights.
        """
        return f"{self._name}.{self._version}" if self.settings.update_pause == "in_place" else ""

    # Receiving

    def _handle(self, arrived: Sequence[Outcome | Probed]) -> None:
        for event in arrived:
            if isinstance(event, Probed):
                self._handle_probe(event)
            elif (job := self._take(event.number)) is None:
                self.statistics.num_late_answers += 1
            elif isinstance(event.result, Generation):
                self._handle_generation(job, event.result)
            else:
                self._handle_error(job, event.result)

    def _take(self, number: int) -> _Job | None:
        """Remove an attempt from the engine's state and return its job; None if the attempt was given up."""
        job = self._in_flight.pop(number, None)
        if job is not None:
            job.server.in_flight.remove(number)
            job.server.num_tokens -= job.num_tokens
            job.server.last_sign = time.monotonic()
        return job

    def _handle_generation(self, job: _Job, generation: Generation) -> None:
        try:
            versions = versions_of(generation, job.version, self._version)
        except ValueError as error:
            problem = EngineAnswerError(job.server.client.name, "POST /generate", str(error))
            self._requeue(job, problem)
            self._fail(job.server, problem)
            return
        completion = join(job.request, generation, versions)
        self._count(job.request, generation)
        if completion.finish_reason == "abort":
            # Somebody's abort; in `abort` itself the request ends here, with this prefix.
            job.request = replace(job.request, prefix=completion)
            self._wait(job)
            return
        self._mean_length += (len(completion.token_ids) - self._mean_length) * (
            _LENGTH_MEMORY if self._mean_length else 1.0
        )
        self.statistics.num_completions += 1
        # The turns of an episode have separate contexts, which do not come again.
        if self._drafts is not None and not job.request.affinity:
            self._drafts.history.note(job.request.prompt_ids, completion.token_ids, job.server.index, self._version)
        del self._jobs[completion.request_id]
        self._ready.append((job.order, completion))

    def _count(self, request: GenerationRequest, generation: Generation) -> None:
        counts, num_read = self.statistics, context_length(request)
        counts.num_tokens += len(generation.token_ids)
        counts.prefix_reuse += PrefixReuse(num_unrouted=generation.num_unrouted)
        if generation.num_verifications:
            # The first token comes from the pass that reads the prompt.
            num_new, num_steps = len(generation.token_ids) - 1, generation.num_verifications
            counts.prefix_reuse += PrefixReuse(num_verified=num_new, num_verifications=num_steps)
        if request.prefix is not None:
            counts.prefix_reuse += PrefixReuse(num_read, generation.num_cached)
        else:
            counts.num_prompt_tokens += num_read
            counts.num_cached_prompt_tokens += generation.num_cached

    def _handle_error(self, job: _Job, error: EngineError) -> None:
        self._requeue(job, error)
        server = job.server
        if isinstance(error, EngineHttpError) and error.is_refusal:
            self._refusal = self._refusal or error
        elif isinstance(error, (EngineGone, EngineTimeout)):
            self._suspect(server)
        elif server.is_alive:
            self._fail(server, error)

    def _requeue(self, job: _Job, problem: EngineError) -> None:
        job.problem = problem
        self._wait(job)

    def _suspect(self, server: _Server) -> None:
        """Probe a server's health; it gets no new requests until the answer is there."""
        if server.is_alive and not server.is_suspect:
            server.is_suspect = True
            self._dispatcher.probe(server.client)

    def _handle_probe(self, probed: Probed) -> None:
        for server in self._servers:
            if server.client is probed.client and server.is_alive:
                server.is_suspect = False
                server.last_sign = time.monotonic()
                if probed.problem is not None:
                    self._fail(server, probed.problem)

    def _fail(self, server: _Server, problem: EngineError) -> None:
        """Mark a server dead: its requests wait again, their old attempts are given up."""
        logger.warning("%s; %d requests go to other servers", problem, len(server.in_flight))
        server.problem, server.is_suspect = problem, False
        self._first_problem = self._first_problem or problem
        self.statistics.num_deaths += 1
        numbers = sorted(server.in_flight)
        for number in numbers:
            job = self._take(number)
            assert job is not None, f"attempt {number} is in flight on a server but unknown to the engine"
            self._requeue(job, problem)
        self._affinity = {prompt: preferred for prompt, preferred in self._affinity.items() if preferred is not server}
        self._dispatcher.give_up(numbers)
        self._dispatcher.forget(server.client)

    def _look_after_stalls(self) -> None:
        now = time.monotonic()
        for server in self._servers:
            if server.in_flight and now - server.last_sign > self.settings.stall_s:
                self._suspect(server)

    def _raise_if_stuck(self) -> None:
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal
        if self._jobs and not any(server.is_alive for server in self._servers):
            raise AllEnginesGone(
                f"all {len(self._servers)} SGLang servers are gone, {len(self._jobs)} requests wait for one to be "
                f"restarted; the first root cause: {self._first_problem}"
            )
        job = self._jobs[self._waiting[0][1]] if self._waiting else None
        if job is not None and job.num_tries >= self.settings.max_tries:
            raise RequestGivenUp(
                f"request {job.request.request_id!r} was lost {job.num_tries} times (max_tries); last: {job.problem}"
            )

    def _take_ready(self) -> list[Completion]:
        ready = sorted(self._ready, key=lambda entry: entry[0])
        self._ready = []
        if not self._jobs:
            self._affinity.clear()
        return [completion for _, completion in ready]

    # Aborting

    def _send_aborts(self) -> None:
        """Ask all servers at once: one that does not answer costs its deadline, and the others none of it."""
        busy = [server for server in self._servers if server.in_flight]
        with device_thread_pool(max(1, len(busy)), "sglang-abort") as threads:
            calls = [threads.submit(server.client.abort) for server in busy]
        for server, call in zip(busy, calls):
            error = call.exception()
            if isinstance(error, EngineError):
                self._fail(server, error)
            elif error is not None:
                raise error

    def _receive_until(self, end: float) -> None:
        while self._expects_news and (left := end - time.monotonic()) > 0:
            self._handle(self._dispatcher.receive(left))

    def _fail_silent(self) -> None:
        for server in self._servers:
            if server.in_flight or server.is_suspect:
                problem = (
                    f"{len(server.in_flight)} aborted requests are not answered, and no server has answered any for "
                    f"{self.settings.abort_s:g} s (sglang.abort_timeout_seconds)"
                )
                self._fail(server, EngineTimeout(server.client.name, "POST /abort_request", problem))


def _affinity_of(request: GenerationRequest) -> tuple[Hashable, ...]:
    """Return what a server's cache is kept for, the first before others: an episode's turns have other prompts each."""
    return request.affinity or (request.prompt_ids,)


def _affordable_connections(num_servers: int) -> int:
    """Return how many requests may be in flight at each server within this process's limit of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, (limit - _RESERVED_FILES) // num_servers - _SPARE_CONNECTIONS)


def versions_of(generation: Generation, sent: int, served: int) -> tuple[VersionRange, ...]:
    """Return the policy versions that sampled the new tokens, by the labels of `update_weight_version`.

    The request was sent when version `sent` was served, and `served` is now. ValueError for any other label.
    """
    num_tokens = len(generation.token_ids)
    ends = [*generation.labels] or [LabeledTokens(num_tokens, generation.weight_version)]
    if not generation.labels and sent != served:
        raise ValueError(f"it labels no tokens, and policy versions {sent} to {served} were served meanwhile")
    known = {str(version): version for version in range(sent, served + 1)}
    ranges: list[VersionRange] = []
    for tokens in ends:
        start, oldest = (ranges[-1].end, ranges[-1].version) if ranges else (0, sent)
        version = known.get(tokens.label)
        if num_tokens and (version is None or version < oldest):
            raise ValueError(
                f"it serves weights labeled {tokens.label!r}, not policy version {served if sent == served else (sent, served)}: "
                "it was restarted or updated by somebody else; synchronize it again"
            )
        ranges.append(VersionRange(start, tokens.end, served if version is None else version))
    return tuple(ranges)


def join(request: GenerationRequest, generation: Generation, versions: tuple[VersionRange, ...]) -> Completion:
    """The whole response: the request's prefix, then the new tokens, which `versions` generated."""
    rest = Completion(
        request_id=request.request_id,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        finish_reason=generation.finish_reason,
        versions=versions,
        routing=generation.routing,
        support=generation.support,
    )
    return behind_prefix(request, rest)
