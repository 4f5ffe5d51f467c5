"""Weight syncs into real SGLang servers: filled from random weights, verified, and never served after a failure.

Trainer ranks are threads that hold Megatron shards (TP2 x PP2) of a Hugging Face model; everything else is real: HTTP,
the server's scheduler processes, the weight loader in them, and the memory they share.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_simulation import World, run_ranks
from transformers import AutoModelForCausalLM

from megatron_dapo.bridge.protocol.arena import PREFIX
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport, default_directory
from megatron_dapo.bridge.weight_sync import EngineState, SyncReport, SyncTimeouts
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

NUM_RANKS = 4
TOKENS = [5, 6, 7, 250, 9, 31, 100, 5, 5, 17, 299 - 1, 44, 3]
TOLERANCE = 1e-5
PATIENT = SyncTimeouts(120, 120, 120, 120, 200, 120, 60)
# All tests share one session per server, in which versions only grow.
VERSIONS = iter(range(1, 1000))


@dataclass
class Setup:
    """A server with random weights, and the model to sync."""

    server: SglangServer
    client: SglangClient
    model: torch.nn.Module
    world: World

    def shards(self, scale: float) -> list[dict[str, torch.Tensor]]:
        """Buffers of every trainer rank; `scale` on all weights makes another version."""
        state = {name: tensor.detach() * scale for name, tensor in self.model.named_parameters()}
        return [self.world.shards(state, rank) for rank in range(NUM_RANKS)]

    def update(
        self,
        version: int,
        scale: float,
        *,
        control: Any = None,
        transport_of: Any = SharedMemoryTransport,
        timeouts: SyncTimeouts = PATIENT,
        message_timeout_s: float = 100.0,
    ) -> SyncReport:
        """Run one update by all ranks, through `control` if given; all must agree on the outcome."""
        updates = self.world.updates(
            [control or self.client],
            default_directory(),
            timeouts,
            message_timeout_s=message_timeout_s,
            transport_of=transport_of,
            session="test",
        )
        shards = self.shards(scale)
        outcomes = run_ranks(NUM_RANKS, lambda rank: updates[rank].update(version, shards[rank]), 280)
        for outcome in outcomes:
            assert isinstance(outcome, SyncReport), outcome
            assert outcome.failures == outcomes[0].failures
        return outcomes[0]

    def gap(self, scale: float) -> float:
        """Largest difference of log-probs between the server and transformers."""
        with torch.no_grad():
            state = {name: tensor.clone() for name, tensor in self.model.named_parameters()}
            for parameter in self.model.parameters():
                parameter.mul_(scale)
            logprobs = self.model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name])
        expected = [float(logprobs[t, token]) for t, token in enumerate(TOKENS[1:])]
        served = self.client.prompt_logprobs(TOKENS)
        return max(abs(a - b) for a, b in zip(served, expected, strict=True))


@pytest.fixture(scope="module", params=[pytest.param("tied, one rank", marks=pytest.mark.long), "untied, two ranks"])
def setup(request, filled_server, tiny_model, tiny_model_untied) -> Setup:
    tied = request.param == "tied, one rank"
    directory, tensor_parallel = (tiny_model, 1) if tied else (tiny_model_untied, 2)
    server = filled_server(directory, tensor_parallel)
    client = SglangClient(server.url, read_key(server.key_file), Timeouts(generate_s=60.0), server.info.api_version)
    world = World(
        read_architecture(directory),
        ParallelLayout(NUM_RANKS, tensor=2, pipeline=2),
        tensor_parallel=tensor_parallel,
        bucket_bytes=64 << 10,
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Setup(server, client, model, world)


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


class CountingControl:
    """Counts the messages with weights."""

    def __init__(self, client: SglangClient) -> None:
        self._client, self.num_messages = client, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        self.num_messages += 1
        self._client.update_weights_from_tensor(payloads, load_format)


def test_one_message_brings_all_buckets_through_reused_memory(setup):
    control = CountingControl(setup.client)
    updates = setup.world.updates([control], default_directory(), PATIENT, message_timeout_s=100.0, session="test")
    for scale, num_messages in ((1.3, 2), (0.7, 3), (1.1, 4)):
        version, shards = next(VERSIONS), setup.shards(scale)
        outcomes = run_ranks(NUM_RANKS, lambda r, v=version, s=shards: updates[r].update(v, s[r]), 280)
        assert all(isinstance(outcome, SyncReport) and outcome.is_complete for outcome in outcomes), outcomes
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


def _check_it_serves_nothing(setup: Setup) -> None:
    """A paused server takes requests and answers none."""
    hasty = SglangClient(setup.server.url, read_key(setup.server.key_file), Timeouts(generate_s=2.0))
    with pytest.raises(RuntimeError, match="no whole answer|within 2 s|deadline"):
        hasty.prompt_logprobs(TOKENS)


def test_a_version_that_went_backwards_is_refused_by_the_engine(setup):
    newest = next(VERSIONS)
    assert setup.update(newest, 1.0).is_complete
    report = setup.update(newest - 1, 1.0)  # a trainer that does not know the newest version
    assert f"version {newest - 1} is older than version {newest}" in report.failures[0]
    assert setup.update(newest, 1.1).is_complete  # the same version may be sent again
    assert setup.gap(1.1) < TOLERANCE


class TruncatingControl:
    """Cuts a command of the last rank in message `number`."""

    def __init__(self, client: SglangClient, number: int) -> None:
        self._client, self._left = client, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        if self._left == 0:
            *others, (text, tensor) = pickle.loads(payloads[-1])
            payloads = [*payloads[:-1], pickle.dumps([*others, (text[: len(text) // 2], tensor)])]
        self._left -= 1
        self._client.update_weights_from_tensor(payloads, load_format)


@pytest.mark.parametrize("number", [0, 1], ids=["the first", "the one with all buckets"])
def test_a_truncated_message_to_one_rank_does_not_end_the_server(number, setup):
    report = setup.update(next(VERSIONS), 1.2, control=TruncatingControl(setup.client, number))
    last = setup.world.layout.tensor_parallel - 1
    assert f"rank {last} of the engine" in report.failures[0] and "left no reply" in report.failures[0]
    assert setup.server.is_alive()
    assert setup.update(next(VERSIONS), 1.2).is_complete
    assert setup.gap(1.2) < TOLERANCE


def test_another_model_is_refused_and_nothing_is_written(setup, tiny_model, tiny_model_untied):
    """The trainer's plan has an lm_head that the engine lacks, or lacks one that the engine has."""
    tied = setup.world.layout.tensor_parallel == 1
    other = World(
        read_architecture(tiny_model_untied if tied else tiny_model),
        ParallelLayout(NUM_RANKS, tensor=2, pipeline=2),
        tensor_parallel=setup.world.layout.tensor_parallel,
        bucket_bytes=64 << 10,
    )
    directory = tiny_model_untied if tied else tiny_model
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    report = Setup(setup.server, setup.client, model, other).update(next(VERSIONS), 1.0)
    assert "lm_head.weight" in report.failures[0]
    assert ("no parameters" if tied else "keep old weights") in report.failures[0]
    assert setup.update(next(VERSIONS), 1.0).is_complete
    assert setup.gap(1.0) < TOLERANCE


class KillingControl:
    """A control that kills a scheduler of the server when the second message arrives."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._num_messages = setup, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._setup.client, name)

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        self._num_messages += 1
        if self._num_messages == 2:
            os.kill(_scheduler(self._setup.server), signal.SIGKILL)
        self._setup.client.update_weights_from_tensor(payloads, load_format)


def _scheduler(server: SglangServer) -> int:
    """Process id of the last scheduler."""
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.pids()}
    return max(pid for pid, command in named.items() if b"scheduler" in command)


def test_a_killed_scheduler_ends_the_update_in_time(setup):
    """The last test: it leaves the server dead."""
    start = time.monotonic()
    report = setup.update(next(VERSIONS), 1.0, control=KillingControl(setup), message_timeout_s=10.0)
    assert report.engines[0].state is EngineState.UNSERVED and report.failures[0]
    assert time.monotonic() - start < 120.0
    hasty = SglangClient(setup.server.url, read_key(setup.server.key_file), Timeouts(generate_s=3.0))
    with pytest.raises(RuntimeError):
        hasty.prompt_logprobs(TOKENS)
    assert not list(default_directory().glob(f"{PREFIX}{os.getpid()}-*"))
