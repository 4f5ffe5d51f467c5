"""The engine over fake servers: every request comes back exactly once, whatever happens to the servers."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_server import FakeServer

import megatron_dapo.engines.sglang.engine as engine_module
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.client import EngineHttpError, SglangClient, Timeouts
from megatron_dapo.engines.sglang.dispatcher import Attempt, Outcome
from megatron_dapo.engines.sglang.engine import (
    AllEnginesGone,
    RequestGivenUp,
    SglangEngine,
    SglangEngineSettings,
    versions_of,
)
from megatron_dapo.engines.sglang.wire import Generation, LabeledTokens
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams, VersionRange

TIMEOUTS = Timeouts(connect_s=5, generate_s=30, control_s=5, health_s=1)
LONG = {"max_new_tokens": 20, "stop_token_ids": ()}
MakeEngine = Callable[..., SglangEngine]


def client_of(server: FakeServer, timeouts: Timeouts = TIMEOUTS) -> SglangClient:
    return SglangClient(server.url, server.key, timeouts)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """make_engine(servers, **settings) -> an engine at policy version 0, labeled so on the servers."""
    engines: list[SglangEngine] = []

    def make(servers: list[FakeServer], timeouts: Timeouts = TIMEOUTS, **settings: object) -> SglangEngine:
        for server in servers:
            server.weight_version = "0"
        sizes = {"max_length": 512, "vocab_size": 100, "poll_wait_s": 0.1, "abort_s": 5.0, **settings}
        engine = SglangEngine([client_of(server, timeouts) for server in servers], SglangEngineSettings(**sizes))
        engines.append(engine)
        engine.set_policy_version(0)
        return engine

    yield make
    for engine in engines:
        engine.close()


def make_requests(num_groups: int, group_size: int = 4, **sampling: object) -> list[GenerationRequest]:
    rng = random.Random(num_groups)
    requests = []
    for group in range(num_groups):
        prompt = tuple(rng.randrange(100) for _ in range(rng.randint(1, 30)))
        for index in range(group_size):
            params = SamplingParams(**{"max_new_tokens": rng.randint(1, 40), "stop_token_ids": (2, 5), **sampling})
            requests.append(GenerationRequest(f"{group}/{index}", prompt, params, seed=100 * group + index))
    return requests


def drain(engine: SglangEngine, timeout_s: float = 90.0) -> list[Completion]:
    completions: list[Completion] = []
    end = time.monotonic() + timeout_s
    while engine.num_unfinished:
        assert time.monotonic() < end, f"{engine.num_unfinished} requests never came back; {engine.failed_servers}"
        completions += engine.poll()
    return completions


def check_all(requests: list[GenerationRequest], completions: list[Completion], server: FakeServer) -> None:
    """Exactly one completion a request, each the uninterrupted response."""
    assert sorted(done.request_id for done in completions) == sorted(request.request_id for request in requests)
    by_id = {done.request_id: done for done in completions}
    for request in requests:
        sampling, done = request.sampling, by_id[request.request_id]
        tokens, logprobs = server.expected(
            len(request.prompt_ids), request.seed, sampling.max_new_tokens, sampling.stop_token_ids
        )
        assert (done.token_ids.tolist(), done.logprobs.tolist()) == (tokens, logprobs)
        assert done.finish_reason == ("stop" if tokens[-1] in sampling.stop_token_ids else "length")
        assert [entry.start for entry in done.versions] == [0, *(entry.end for entry in done.versions[:-1])]
        assert done.versions[-1].end == len(tokens)


def num_generations(server: FakeServer) -> int:
    return server.paths().count("/generate")


def test_all_responses_come_back_once_in_the_order_of_submission(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    engine = make_engine(servers, max_in_flight=6)
    requests = make_requests(12)
    engine.submit(requests[:20])
    engine.submit(requests[20:])
    rank = {request.request_id: index for index, request in enumerate(requests)}
    completions = []
    while engine.num_unfinished:
        polled = engine.poll()
        assert [rank[done.request_id] for done in polled] == sorted(rank[done.request_id] for done in polled)
        completions += polled
    check_all(requests, completions, servers[0])
    assert all(done.versions == (VersionRange(0, len(done.token_ids), 0),) for done in completions)
    assert engine.poll() == [] and engine.statistics.num_completions == len(requests)
    assert min(num_generations(server) for server in servers) > 0
    with pytest.raises(ValueError, match="already in use"):
        engine.submit([requests[0], requests[0]])


def test_cached_tokens_of_continued_responses_are_counted(make_server, make_engine: MakeEngine) -> None:
    server = make_server()
    engine = make_engine([server])
    prompt = tuple(range(10, 30))
    whole = GenerationRequest("a", prompt, SamplingParams(max_new_tokens=30), seed=1)
    (first,) = generate(engine, [replace(whole, sampling=SamplingParams(max_new_tokens=12))])
    assert engine.prefix_reuse == PrefixReuse() and engine.statistics.num_prompt_tokens == 20
    window = replace(whole, prefix=replace(first, finish_reason="abort"))
    generate(engine, [window])
    assert engine.prefix_reuse == PrefixReuse(num_tokens=32, num_cached=31), "all but the last, which goes through"
    client_of(server).flush_cache()
    generate(engine, [window])
    assert engine.prefix_reuse == PrefixReuse(num_tokens=64, num_cached=31)
    assert engine.statistics.num_prompt_tokens == 20 and engine.statistics.num_cached_prompt_tokens == 0
    generate(engine, [replace(whole, request_id="b")])
    assert engine.statistics.num_prompt_tokens == 40 and engine.statistics.num_cached_prompt_tokens == 19
    assert (engine.prefix_reuse - PrefixReuse(32, 31)).cached_share == 0


def generate(engine: SglangEngine, requests: list[GenerationRequest]) -> list[Completion]:
    engine.submit(requests)
    completions = []
    while engine.num_unfinished:
        completions += engine.poll()
    return completions


def test_turns_of_an_episode_go_to_its_server_and_first_ones_to_their_group_s(make_server, make_engine: MakeEngine) -> None:
    """Each turn has another prompt, so what a server's cache holds is known by the episode, then by its group."""
    engine = make_engine([make_server(), make_server()])
    even, request = 1e9, make_requests(1)[0]

    def turn(name: str, number: int) -> GenerationRequest:
        prompt = (*request.prompt_ids, *range(number))
        return replace(request, request_id=f"{name}@{number}", prompt_ids=prompt, affinity=(name, name.partition("/")[0]))

    first, second = engine._servers
    engine._affinity.update({"0": first, "0/1": second})
    chosen = [engine._choose(turn(name, number), even) for name, number in (("0/0", 0), ("0/1", 3), ("0/0", 5))]
    assert chosen == [first, second, first]


def test_a_wait_for_responses_can_be_ended(make_server, make_engine: MakeEngine) -> None:
    engine = make_engine([make_server()], poll_wait_s=30.0)
    engine._dispatcher.wake()
    start = time.monotonic()
    assert engine._dispatcher.receive(30.0) == [] and time.monotonic() - start < 10
    threading.Timer(0.05, engine.wake).start()
    assert engine._dispatcher.receive(30.0) == [] and time.monotonic() - start < 10


def test_groups_stay_together_and_loads_even(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.freeze_after = 0
    engine = make_engine(servers)
    requests = make_requests(8, group_size=8, max_new_tokens=30)
    engine.submit(requests)
    for server in servers:
        server.wait_until_running(26)
    prompts = [{tuple(body["input_ids"]) for path, body in server.calls} for server in servers]
    assert len(prompts[0] & prompts[1]) <= 1, "at most one group is cut"
    loads = [sum(len(body["input_ids"]) + 30 for _, body in server.calls) for server in servers]
    assert max(loads) < 1.3 * min(loads)
    for server in servers:
        server.thaw()
    check_all(requests, drain(engine), servers[0])


def test_servers_that_draft_get_the_responses_of_their_prompts(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.draft_accepted = 2
        server.corpora["of the last attempt"] = ["1 2"]
    engine = make_engine(servers, draft_corpus_tokens=10_000)
    requests = make_requests(8)
    engine.submit(requests)
    done = {one.request_id: one for one in drain(engine)}
    verified = engine.prefix_reuse
    assert verified.num_verified == sum(one.num_tokens - 1 for one in done.values())
    assert verified.num_verifications == sum(one.num_tokens // 2 for one in done.values())
    asked = [{tuple(body["input_ids"]) for path, body in server.calls if path == "/generate"} for server in servers]
    engine.set_policy_version(1)
    assert engine._drafts is not None
    engine._drafts.wait(60)
    for index, server in enumerate(servers):
        server.weight_version = "1"
        [(name, documents)] = server.corpora.items()
        assert name.endswith(".1"), "the corpus of the last attempt is gone"
        own = [done[r.request_id] for r in requests if engine._drafts.history.server_of(r.prompt_ids) == index]
        assert sorted(documents) == sorted(" ".join(map(str, one.token_ids.tolist())) for one in own)
    # They come back to the server that has their past, whatever was sent before.
    engine.submit([replace(request, request_id=f"again {request.request_id}") for request in reversed(requests)])
    drain(engine)
    for index, server in enumerate(servers):
        again = {tuple(body["input_ids"]) for path, body in server.calls if path == "/generate"}
        assert again == asked[index]


def test_a_restarted_server_gets_its_corpus_again(make_server, make_engine: MakeEngine) -> None:
    server = make_server()
    engine = make_engine([server], draft_corpus_tokens=10_000)
    engine.submit(make_requests(2))
    drain(engine)
    engine.set_policy_version(1)
    assert engine._drafts is not None
    engine._drafts.wait(60)
    assert len(server.corpora) == 1
    fresh = make_server()
    engine.mark_failed(0, "killed")
    engine.restore(0, client_of(fresh))
    engine.set_policy_version(2)
    engine._drafts.wait(60)
    assert list(fresh.corpora.values()) == list(server.corpora.values())


def test_a_corpus_that_is_refused_costs_drafts_and_nothing_else(make_server, make_engine: MakeEngine) -> None:
    server = make_server()
    server.faults["/add_external_corpus"] = "400"
    engine = make_engine([server], draft_corpus_tokens=10_000)
    for version in (1, 2):
        requests = make_requests(2)
        engine.submit(requests)
        check_all(requests, drain(engine), server)
        engine.set_policy_version(version)
        server.weight_version = str(version)
        assert engine._drafts is not None
        engine._drafts.wait(60)
    assert not engine.failed_servers and not server.corpora


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_stay_over_an_update_and_each_token_has_its_version(mode: str, make_server, make_engine: MakeEngine) -> None:
    server = make_server(labels_tokens=True, version="0.5.23")
    server.freeze_after = 3
    engine = make_engine([server], update_pause=mode)
    client = SglangClient(server.url, server.key, TIMEOUTS, update_pause=mode)
    requests = make_requests(4, **LONG)
    engine.submit(requests)
    server.wait_until_running(len(requests))
    wait_until_frozen(server, 3)
    for version, num_tokens in ((1, 8), (2, 1 << 20)):
        client.pause()
        if mode == "retract":
            client.flush_cache()
        client.update_weight_version(version)
        client.resume()
        engine.set_policy_version(version)
        server.freeze_after = num_tokens
        with server.unlocked:
            server.unlocked.notify_all()
        if version == 1:
            wait_until_frozen(server, 8)
    completions = drain(engine)
    check_all(requests, completions, server)
    expected = (VersionRange(0, 3, 0), VersionRange(3, 8, 1), VersionRange(8, 20, 2))
    assert {done.versions for done in completions} == {expected}
    engine.submit([replace(requests[0], request_id="later")])
    assert drain(engine)[0].versions == (VersionRange(0, 20, 2),)
    # A trainer that is started again numbers other weights alike.
    make_engine([server], update_pause=mode).submit(requests[:1])
    server.wait_until_called("/generate", len(requests) + 2)
    keys = Counter(body.get("extra_key") for path, body in server.calls if path == "/generate")
    assert len(keys) == (3 if mode == "in_place" else 1) and (None in keys) == (mode == "retract")
    assert max(keys.values()) >= len(requests), "requests of one version share a key"


def wait_until_frozen(server: FakeServer, num_tokens: int) -> None:
    """Wait until every response has that many tokens."""
    end = time.monotonic() + 60
    while min(server.num_generated.get(rid, 0) for rid in server.running) < num_tokens:
        assert time.monotonic() < end, server.num_generated
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ((), "labels no tokens"),
        ((LabeledTokens(2, "default"),), "labeled 'default', not policy version"),
        ((LabeledTokens(2, "5"),), "labeled '5', not policy version"),  # newer than all
        ((LabeledTokens(2, "2"),), "labeled '2', not policy version"),  # older than the request
        ((LabeledTokens(1, "4"), LabeledTokens(2, "3")), "labeled '3', not policy version"),  # they went backwards
    ],
)
def test_labels_that_no_update_explains_are_refused(labels: tuple[LabeledTokens, ...], problem: str) -> None:
    generation = Generation(np.zeros(2, np.int32), np.zeros(2, np.float32), "length", "4", labels=labels)
    with pytest.raises(ValueError, match=problem):
        versions_of(generation, 3, 4)
    good = replace(generation, labels=(LabeledTokens(1, "3"), LabeledTokens(2, "4")))
    assert versions_of(good, 3, 4) == (VersionRange(0, 1, 3), VersionRange(1, 2, 4))
    assert versions_of(replace(generation, labels=()), 4, 4) == (VersionRange(0, 2, 4),)


def test_a_killed_servers_requests_are_served_by_the_other(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.freeze_after = 2
    engine = make_engine(servers)
    requests = make_requests(10, **LONG)
    engine.submit(requests)
    for server in servers:
        server.wait_until_running(5)
    servers[0].kill()
    servers[1].thaw()
    check_all(requests, drain(engine), servers[1])
    assert list(engine.failed_servers) == [0] and servers[0].url in engine.failed_servers[0]
    assert engine.statistics.num_deaths == 1 and engine.statistics.num_redispatched >= 5
    more = [replace(request, request_id="again" + request.request_id) for request in requests[:3]]
    engine.submit(more)
    check_all(more, drain(engine), servers[1])


@pytest.mark.parametrize("fault", ["500", "nan", "other_vocabulary", "no_json", "reset_mid_answer"])
def test_a_faulty_server_is_removed(fault: str, make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    servers[0].faults = {"/generate": fault, "/health": "500"}
    engine = make_engine(servers)
    requests = make_requests(6, **LONG)
    engine.submit(requests)
    check_all(requests, drain(engine), servers[1])
    assert list(engine.failed_servers) == [0]


def test_a_hanging_server_is_found_by_its_health_and_its_late_answers_are_dropped(
    make_server, make_engine: MakeEngine
) -> None:
    servers = [make_server(), make_server()]
    servers[0].freeze_after = 0
    servers[0].faults = {"/health": "hang"}
    engine = make_engine(servers, stall_s=0.3)
    requests = make_requests(6)
    engine.submit(requests)
    completions = drain(engine)
    servers[0].thaw()
    check_all(requests, completions, servers[1])
    assert "no answer within 1 s" in engine.failed_servers[0]
    assert engine.poll() == [] and engine.num_unfinished == 0


def test_a_slow_but_healthy_server_is_waited_for(make_server, make_engine: MakeEngine) -> None:
    server = make_server()
    server.freeze_after = 0
    engine = make_engine([server], stall_s=0.2)
    requests = make_requests(2)
    engine.submit(requests)
    end = time.monotonic() + 60
    while server.paths().count("/health") < 2 and time.monotonic() < end:
        assert engine.poll() == []
    server.thaw()
    check_all(requests, drain(engine), server)
    assert not engine.failed_servers and num_generations(server) == len(requests)


def test_a_lost_connection_to_a_healthy_server_costs_one_more_try(make_server, make_engine: MakeEngine) -> None:
    server = make_server()
    server.faults["/generate"] = "reset"
    engine = make_engine([server])
    requests = make_requests(1)
    engine.submit(requests)
    while num_generations(server) < len(requests):
        time.sleep(0.01)
    server.faults.clear()
    check_all(requests, drain(engine), server)
    assert not engine.failed_servers


def test_a_request_that_is_always_lost_is_given_up_and_kept(make_server, make_engine: MakeEngine) -> None:
    server = make_server()
    server.faults["/generate"] = "reset"
    engine = make_engine([server], max_tries=3)
    engine.submit(make_requests(1, group_size=1))
    with pytest.raises(RequestGivenUp, match="request '0/0' was lost 3 times .*connection lost"):
        drain(engine)
    assert engine.num_unfinished == 1 and num_generations(server) == 3


def test_all_gone_names_the_first_cause_and_a_restarted_server_takes_over(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.freeze_after = 1
    engine = make_engine(servers)
    requests = make_requests(5, **LONG)
    engine.submit(requests)
    for server in servers:
        server.wait_until_running(4)
    servers[1].kill()
    while not engine.failed_servers:
        assert engine.poll() == []
    servers[0].kill()
    with pytest.raises(AllEnginesGone, match=f"all 2 .* 20 requests wait.*first root cause: .*{servers[1].url}"):
        drain(engine)
    with pytest.raises(AllEnginesGone):
        engine.poll()
    assert engine.num_unfinished == len(requests)
    fresh = make_server(weight_version="0")
    engine.restore(1, client_of(fresh))
    check_all(requests, drain(engine), fresh)
    assert list(engine.failed_servers) == [0]
    with pytest.raises(ValueError, match="is alive"):
        engine.restore(1, client_of(fresh))


def test_the_owner_may_know_of_a_death_first(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.freeze_after = 1
    engine = make_engine(servers)
    requests = make_requests(4, **LONG)
    engine.submit(requests)
    for server in servers:
        server.wait_until_running(4)
    engine.mark_failed(0, "its process ended with code -9")
    servers[0].thaw()  # its answers come too late
    servers[1].thaw()
    check_all(requests, drain(engine), servers[1])
    assert "code -9" in engine.failed_servers[0]


def test_abort_keeps_partial_responses_and_a_prefix_continues_unchanged(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    engine = make_engine(servers, max_in_flight=6)
    requests = make_requests(5, max_new_tokens=40, stop_token_ids=())
    unfinished, finished = requests, []
    for version, length in enumerate((7, 15)):
        for server in servers:
            server.freeze_after, server.weight_version = length - 7 * version, str(version)
        engine.set_policy_version(version)
        engine.submit(unfinished)
        for server in servers:
            server.wait_until_running(6)
        partial = engine.abort()
        assert engine.num_unfinished == 0 and engine.poll() == []
        assert [done.request_id for done in partial] == [request.request_id for request in unfinished]
        assert {done.finish_reason for done in partial} == {"abort"}
        lengths = sorted(len(done.token_ids) for done in partial)
        assert lengths[:8] == [0, 7][version : version + 1] * 8 or version == 1
        assert lengths[-1] == length
        unfinished = [replace(r, prefix=done) for r, done in zip(unfinished, partial, strict=True)]
    for server in servers:
        server.thaw()
        server.weight_version = "2"
    engine.set_policy_version(2)
    engine.submit(unfinished)
    finished = drain(engine)
    check_all(requests, finished, servers[0])
    assert {tuple(entry.version for entry in done.versions) for done in finished} >= {(0, 1, 2), (2,)}


def test_an_abort_by_another_client_is_resubmitted(server: FakeServer, make_engine: MakeEngine) -> None:
    server.freeze_after = 3
    engine = make_engine([server])
    requests = make_requests(2, **LONG)
    engine.submit(requests)
    server.wait_until_running(8)
    client_of(server).abort()
    while num_generations(server) < 16:
        assert engine.poll() == []
    server.thaw()
    completions = drain(engine)
    check_all(requests, completions, server)
    bodies = [body for path, body in server.calls if path == "/generate"]
    assert {body["sampling_params"]["max_new_tokens"] for body in bodies[8:]} == {17}


def test_abort_of_a_dying_or_silent_server_still_returns_everything(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server(), make_server()]
    for server in servers:
        server.freeze_after = 2
    engine = make_engine(servers, abort_s=1.0)
    requests = make_requests(6, **LONG)
    engine.submit(requests)
    for server in servers:
        server.wait_until_running(4)
    servers[0].kill()
    servers[1].faults["/abort_request"] = "500"
    servers[2].answer_delay_s = 3.0
    partial = engine.abort()
    assert [done.request_id for done in partial] == [request.request_id for request in requests]
    assert engine.num_unfinished == 0 and sorted(engine.failed_servers) == [0, 1, 2]


class SlowAnswers:
    """A dispatcher whose answers to aborted requests arrive `seconds` apart, on a clock that only they move."""

    def __init__(self, seconds: float, num_answers: int, num_unrouted: int = 0) -> None:
        self.now, self._seconds, self._num_left = 1e4, seconds, num_answers
        self._answer = Generation(
            np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", "", num_unrouted=num_unrouted
        )
        self._numbers: list[int] = []

    def send(self, attempts: Sequence[Attempt]) -> None:
        self._numbers += [attempt[0] for attempt in attempts]

    def receive(self, wait_s: float) -> list[Outcome]:
        self.now += self._seconds if self._num_left else wait_s
        if not self._num_left:
            return []
        self._num_left -= 1
        return [Outcome(self._numbers.pop(0), self._answer)]

    def give_up(self, numbers: Sequence[int]) -> None:
        self._numbers = [number for number in self._numbers if number not in numbers]

    def forget(self, client: SglangClient) -> None:
        """It holds no connections."""

    def close(self) -> None:
        """It has no thread."""


@contextmanager
def stubbed_engine(answers: SlowAnswers, clients: list[SglangClient], **settings: object) -> Iterator[SglangEngine]:
    with SglangEngine(clients, SglangEngineSettings(512, 100, **settings)) as engine:
        engine._dispatcher.close()
        engine._dispatcher = answers
        engine.set_policy_version(0)
        yield engine


@pytest.mark.parametrize("num_answers", [500, 499])
def test_an_abort_waits_as_long_as_answers_arrive(num_answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 answers at 20 s each are far beyond abort_s, and no server is lost; one that never comes costs one."""
    clients = [SglangClient(f"http://127.0.0.1:{port}", None) for port in (1, 2)]
    monkeypatch.setattr(SglangClient, "abort", lambda client: None)
    answers = SlowAnswers(20.0, num_answers)
    with stubbed_engine(answers, clients, max_in_flight=250, abort_s=60.0) as engine:
        monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: answers.now))
        engine.submit(make_requests(125, **LONG))
        assert len(engine.abort()) == 500 and engine.num_unfinished == 0
        assert len(engine.failed_servers) == (num_answers < 500)
        for problem in engine.failed_servers.values():
            assert re.search(r"1 aborted requests .* for 60 s \(sglang.abort_timeout_seconds\)", problem)


def test_all_servers_are_asked_to_abort_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these answers only once the other has been asked, too."""
    both = threading.Barrier(2)
    monkeypatch.setattr(SglangClient, "abort", lambda client: both.wait(10))
    clients = [SglangClient(f"http://127.0.0.1:{port}", None) for port in (1, 2)]
    with stubbed_engine(SlowAnswers(0.0, 2), clients, max_in_flight=1) as engine:
        engine.submit(make_requests(1, **LONG)[:2])
        assert len(engine.abort()) == 2 and not engine.failed_servers


def test_an_abort_without_experts_keeps_the_prefix_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are generated again, not trained without experts."""
    monkeypatch.setattr(SglangClient, "abort", lambda client: None)
    numbers = {"token_ids": [1, 2], "logprobs": [-0.5, -0.5], "routing": np.zeros((4, 1, 1), np.uint8)}
    prefix = Completion("a", finish_reason="abort", versions=(VersionRange(0, 2, 0),), **numbers)
    request = GenerationRequest("a", (7, 8, 9), SamplingParams(max_new_tokens=20), 1, prefix, with_routing=True)
    with stubbed_engine(SlowAnswers(0.0, 1, num_unrouted=3), [SglangClient("http://127.0.0.1:1", None)]) as engine:
        engine.submit([request])
        assert engine.abort() == [prefix] and not engine.failed_servers
        assert engine.prefix_reuse.num_unrouted == 3


def test_a_complete_prefix_is_returned_unchanged(server: FakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine([server])
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(9,))
    cases = {"stop": (4, 9), "length": (4, 5, 6)}
    requests = [
        GenerationRequest(
            reason,
            (1, 2),
            sampling,
            seed=0,
            prefix=Completion(reason, ids, (-1.0,) * len(ids), "abort", (VersionRange(0, len(ids), 0),)),
        )
        for reason, ids in cases.items()
    ]
    engine.submit(requests)
    assert engine.num_unfinished == 2
    with pytest.raises(ValueError, match="already in use"):
        engine.submit(requests[:1])
    completions = engine.poll()
    assert {done.finish_reason: tuple(done.token_ids) for done in completions} == cases
    assert num_generations(server) == 0


def test_a_refused_request_is_named_and_the_others_continue(server: FakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine([server], vocab_size=200)
    requests = make_requests(2)
    engine.submit([*requests, replace(requests[0], request_id="alien", prompt_ids=(150,))])
    refusals = []  # a poll without a finished response repeats it
    for _ in range(1000):
        try:
            finished = {done.request_id for done in engine.poll()}
        except EngineHttpError as error:
            refusals.append(str(error))
            finished = set()
        requests = [request for request in requests if request.request_id not in finished]
        if refusals and not requests:
            break
    assert refusals and all(re.search("HTTP 400.*greater than the vocab size", text) for text in refusals)
    assert not requests and engine.num_unfinished == 1 and not engine.failed_servers


def test_weights_with_another_label_are_not_trained_on(make_server, make_engine: MakeEngine) -> None:
    servers = [make_server(), make_server()]
    engine = make_engine(servers)
    servers[0].weight_version = "default"  # restarted without our knowledge
    requests = make_requests(4)
    engine.submit(requests)
    check_all(requests, drain(engine), servers[1])
    assert "labeled 'default', not policy version 0" in engine.failed_servers[0]


def test_versions_never_go_backwards_nor_change_under_a_response(server: FakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine([server])
    engine.set_policy_version(4)
    with pytest.raises(ValueError, match="policy version 3 comes after 4"):
        engine.set_policy_version(3)
    server.freeze_after, server.weight_version = 1, "4"
    engine.submit(make_requests(1, **LONG))
    server.wait_until_running(4)
    with pytest.raises(RuntimeError, match="4 requests are being generated by version 4"):
        engine.set_policy_version(5)
    engine.abort()
    engine.set_policy_version(5)


def test_nothing_is_generated_without_weights(server: FakeServer) -> None:
    with SglangEngine([client_of(server)], SglangEngineSettings(max_length=512, vocab_size=100)) as engine:
        assert engine.policy_version == -1
        engine.submit(make_requests(1))
        with pytest.raises(RuntimeError, match="no verified weights yet"):
            engine.poll()
        assert num_generations(server) == 0
    with pytest.raises(ValueError, match="no server given"):
        SglangEngine([], SglangEngineSettings(max_length=512, vocab_size=100))


def test_servers_that_die_at_random_lose_nothing(make_server, make_engine: MakeEngine) -> None:
    rng = random.Random(5)
    servers = [make_server(token_s=0.002) for _ in range(3)]
    engine = make_engine(servers, max_in_flight=16, max_tries=1000)
    requests = make_requests(40, max_new_tokens=30)
    engine.submit(requests)
    completions: list[Completion] = []
    deaths = 0
    while engine.num_unfinished:
        try:
            completions += engine.poll()
        except AllEnginesGone:
            pass
        if deaths < 6 and rng.random() < 0.2:
            deaths += 1
            servers[rng.randrange(3)].kill()
        for index in engine.failed_servers:
            servers[index] = make_server(token_s=0.002, weight_version="0")
            engine.restore(index, client_of(servers[index]))
    check_all(requests, completions, servers[0])
    assert deaths > 2 and engine.statistics.num_deaths > 0
