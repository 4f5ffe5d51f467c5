"""Weight syncs into real SGLang servers: filled from random weights, verified, and never served after a failure.

Trainer ranks are threads that hold Megatron shards (TP2 x PP2) of a Hugging Face model; everything else is real: HTTP,
the server's scheduler processes, the weight loader in them, and the memory they share.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from message_faults import HARMLESS_AT_TIMES, PAYLOAD_FAULTS, Strike, payload_of, texts_of
from sync_simulation import World
from synced_server import VERSIONS, SyncedServer, connect

from megatron_dapo.bridge.protocol.arena import PREFIX
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport, default_directory
from megatron_dapo.bridge.weight_sync import EngineState
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

TOLERANCE = 1e-5
LONGEST_S = 100.0  # limit of an update with a fault, which need not wait for any deadline
TOKENS = [5, 6, 7]


def world_of(directory: Path, tensor_parallel: int) -> World:
    layout = ParallelLayout(4, tensor=2, pipeline=2)
    return World(read_architecture(directory), layout, tensor_parallel=tensor_parallel, bucket_bytes=64 << 10)


@pytest.fixture(scope="module", params=[pytest.param("tied, one rank", marks=pytest.mark.long), "untied, two ranks"])
def setup(request, filled_server, tiny_model, tiny_model_untied) -> SyncedServer:
    directory, size = (tiny_model, 1) if request.param == "tied, one rank" else (tiny_model_untied, 2)
    return SyncedServer(filled_server(directory, size), directory, world_of(directory, size))


def test_an_engine_full_of_random_weights_serves_what_it_is_given(setup):
    assert setup.gap(1.0) > 0.1  # it serves noise
    for scale in (1.0, 0.8):
        version = next(VERSIONS)
        report = setup.update(version, scale)
        assert report.is_complete, report.describe()
        assert report.engines[0].version == version and setup.client.weight_version == str(version)
        assert setup.gap(scale) < TOLERANCE
        rank_bytes = [setup.world.plan.num_bytes(rank) for rank in setup.world.plan.ranks_of(0)]
        assert 0.95 * sum(rank_bytes) < report.engines[0].num_bytes <= sum(rank_bytes)
    assert report.peak_bytes < 2 * (64 << 10) + (2 << 20)
    assert not list(default_directory().glob(f"{PREFIX}{os.getpid()}-*"))


class Control:
    """The client of a server, whose messages with weights subclasses count and change."""

    def __init__(self, client: SglangClient) -> None:
        self.client, self.num_messages = client, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        self.num_messages += 1
        self.client.update_weights_from_tensor(self.changed(payloads), load_format)

    def changed(self, payloads):
        return payloads


def test_one_message_brings_all_buckets_through_reused_memory(setup):
    control = Control(setup.client)
    syncs = setup.syncs(control)
    for scale, num_messages in ((1.3, 2), (0.7, 3), (1.1, 4)):
        assert setup.run(syncs, next(VERSIONS), scale).is_complete
        assert control.num_messages == num_messages and setup.world.plan.num_buckets(0) > 3
        assert setup.gap(scale) < TOLERANCE


class CorruptedTransport(SharedMemoryTransport):
    """One bit of the second bucket changes between the trainer's write and the engine's read."""

    def _announce(self, state, bucket) -> None:
        own = self.plan.writes(bucket, self.rank)
        if (bucket.engine_rank, bucket.index) == (0, 1) and own:
            state.memory.slots[0][1][own[0].chunk.byte_offset] ^= 1
        super()._announce(state, bucket)


def test_a_corrupted_bucket_is_not_served(setup):
    report = setup.update(next(VERSIONS), 0.9, transport_of=CorruptedTransport)
    assert "parameters of its rank 0 differ from the trainer's" in report.failures[0]
    _check_it_serves_nothing(setup)
    assert setup.update(next(VERSIONS), 0.9).is_complete
    assert setup.gap(0.9) < TOLERANCE


def _check_it_serves_nothing(setup: SyncedServer) -> None:
    """A paused server takes requests and answers none."""
    hasty = connect(setup.server, generate_s=2.0)
    with pytest.raises(RuntimeError, match="no whole answer|within 2 s|deadline"):
        hasty.prompt_logprobs(TOKENS)


def test_a_version_that_went_backwards_is_refused_by_the_engine(setup):
    newest = next(VERSIONS)
    assert setup.update(newest, 1.0).is_complete
    report = setup.update(newest - 1, 1.0)  # a trainer that does not know the newest version
    assert f"version {newest - 1} is older than version {newest}" in report.failures[0]
    assert setup.update(newest, 1.1).is_complete  # the same version may be sent again
    assert setup.gap(1.1) < TOLERANCE


class TruncatingControl(Control):
    """Cuts a command of the last rank in message `number`."""

    def __init__(self, client: SglangClient, number: int) -> None:
        super().__init__(client)
        self.number = number

    def changed(self, payloads):
        if self.num_messages != self.number:
            return payloads
        *others, (text, tensor) = pickle.loads(payloads[-1])
        return [*payloads[:-1], pickle.dumps([*others, (text[: len(text) // 2], tensor)])]


@pytest.mark.parametrize("number", [1, 2], ids=["the first", "the one with all buckets"])
def test_a_truncated_message_to_one_rank_does_not_end_the_server(number, setup):
    report = setup.update(next(VERSIONS), 1.2, TruncatingControl(setup.client, number))
    last = setup.world.layout.tensor_parallel - 1
    assert f"rank {last} of the engine" in report.failures[0] and "left no reply" in report.failures[0]
    assert setup.server.is_alive()
    assert setup.update(next(VERSIONS), 1.2).is_complete
    assert setup.gap(1.2) < TOLERANCE


def test_another_model_is_refused_and_nothing_is_written(setup, tiny_model, tiny_model_untied):
    """The trainer's plan has an lm_head that the engine lacks, or lacks one that the engine has."""
    tied = setup.world.layout.tensor_parallel == 1
    directory = tiny_model_untied if tied else tiny_model
    other = SyncedServer(setup.server, directory, world_of(directory, setup.world.layout.tensor_parallel))
    report = other.update(next(VERSIONS), 1.0)
    assert "lm_head.weight" in report.failures[0]
    assert ("no parameters" if tied else "keep old weights") in report.failures[0]
    assert setup.update(next(VERSIONS), 1.0).is_complete
    assert setup.gap(1.0) < TOLERANCE


@dataclass
class ServerStrike(Strike):
    """A fault that strikes a message to a server."""

    client: SglangClient
    load_format: str | None

    def carry_out(self) -> None:
        self.client.update_weights_from_tensor([payload_of(texts) for texts in self.texts], self.load_format)


class FaultyControl(Control):
    """A client one of whose messages a fault strikes."""

    def __init__(self, client: SglangClient) -> None:
        super().__init__(client)
        self.kind = ""
        self.random = random.Random(0)

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        kind, self.kind = self.kind, ""
        texts = [texts_of(payload) for payload in payloads]
        rank = self.random.randrange(len(texts))
        at = self.random.randrange(len(texts[rank]))
        strike = ServerStrike(texts, rank, at, self.random, self.client, load_format)
        (PAYLOAD_FAULTS[kind] if kind else ServerStrike.carry_out)(strike)


@pytest.mark.parametrize("num_faults", [12, pytest.param(30, marks=pytest.mark.long)])
def test_a_server_survives_every_fault_and_only_serves_whole_versions(setup, num_faults: int) -> None:
    control = FaultyControl(setup.client)
    syncs = setup.syncs(control, session=f"{num_faults} faults")

    def check_served(version: int) -> None:
        assert setup.gap(1 + 0.01 * version) < TOLERANCE
        assert setup.client.weight_version == str(version)

    failed: Counter[str] = Counter()
    kinds = [kind for _ in range(num_faults) for kind in PAYLOAD_FAULTS][:num_faults]
    for version, kind in enumerate(kinds, start=1):
        control.kind = kind
        start = time.monotonic()
        report = setup.run(syncs, version, 1 + 0.01 * version)
        assert time.monotonic() - start < LONGEST_S, (kind, report.failures)
        failed[kind] += not report.is_complete
        if report.is_complete:
            check_served(version)
        elif version % 2:  # half recover at once; the others leave it to the next update
            assert setup.run(syncs, version, 1 + 0.01 * version).is_complete, kind
            check_served(version)
    assert setup.server.is_alive()
    assert all(failed[kind] == kinds.count(kind) for kind in PAYLOAD_FAULTS if kind not in HARMLESS_AT_TIMES), failed
    version = num_faults + 1
    assert setup.run(syncs, version, 1 + 0.01 * version).is_complete
    check_served(version)


class KillingControl(Control):
    """Kills a scheduler of the server when the second message arrives."""

    def __init__(self, setup: SyncedServer) -> None:
        super().__init__(setup.client)
        self._server = setup.server

    def changed(self, payloads):
        if self.num_messages == 2:
            os.kill(_scheduler(self._server), signal.SIGKILL)
        return payloads


def _scheduler(server: SglangServer) -> int:
    """Process id of the last scheduler."""
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.pids()}
    return max(pid for pid, command in named.items() if b"scheduler" in command)


def test_a_killed_scheduler_ends_the_update_in_time(setup):
    """The last test of all that share the server: it leaves the server dead."""
    start = time.monotonic()
    report = setup.update(next(VERSIONS), 1.0, KillingControl(setup), message_timeout_s=10.0)
    assert report.engines[0].state is EngineState.UNSERVED and report.failures[0]
    assert time.monotonic() - start < 120.0
    with pytest.raises(RuntimeError):
        connect(setup.server, generate_s=3.0).prompt_logprobs(TOKENS)
    assert not list(default_directory().glob(f"{PREFIX}{os.getpid()}-*"))
