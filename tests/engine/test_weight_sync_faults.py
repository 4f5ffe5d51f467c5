"""Faults in messages to a real server: it only ever serves one whole version, and it survives every fault."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from message_faults import HARMLESS_AT_TIMES, PAYLOAD_FAULTS, Strike, payload_of, texts_of
from sync_simulation import World, run_ranks
from transformers import AutoModelForCausalLM

from megatron_dapo.bridge.transports.shared_memory import default_directory
from megatron_dapo.bridge.weight_sync import SyncReport, SyncTimeouts
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

NUM_RANKS = 2
PATIENT = SyncTimeouts(120, 120, 120, 120, 200, 120, 60)
LONGEST_S = 100.0  # limit of an update with a fault, which need not wait for any deadline
TOKENS = [5, 6, 7, 250, 9, 31]


@dataclass
class ServerStrike(Strike):
    """A fault that strikes a message to a server."""

    client: SglangClient
    load_format: str | None

    def carry_out(self) -> None:
        self.client.update_weights_from_tensor([payload_of(texts) for texts in self.texts], self.load_format)


class FaultyControl:
    """A client one of whose messages a fault strikes."""

    def __init__(self, client: SglangClient) -> None:
        self._client = client
        self.kind = ""
        self.random = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        kind, self.kind = self.kind, ""
        texts = [texts_of(payload) for payload in payloads]
        rank = self.random.randrange(len(texts))
        at = self.random.randrange(len(texts[rank]))
        strike = ServerStrike(texts, rank, at, self.random, self._client, load_format)
        (PAYLOAD_FAULTS[kind] if kind else ServerStrike.carry_out)(strike)


@pytest.mark.parametrize(
    ("tensor_parallel", "num_faults"), [(2, 12), *(pytest.param(ranks, 30, marks=pytest.mark.long) for ranks in (1, 2))]
)
def test_faults_on_the_way_to_a_server(
    tensor_parallel: int, num_faults: int, filled_server, tiny_model_untied: Path
) -> None:
    server = filled_server(tiny_model_untied, tensor_parallel)
    client = SglangClient(server.url, read_key(server.key_file), Timeouts(generate_s=60.0), server.info.api_version)
    architecture = read_architecture(tiny_model_untied)
    parallel = ParallelLayout(NUM_RANKS, tensor=2)
    world = World(architecture, parallel, tensor_parallel=tensor_parallel, bucket_bytes=64 << 10)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_untied, dtype=torch.float32)
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    control = FaultyControl(client)
    updates = world.updates([control], default_directory(), PATIENT, message_timeout_s=100.0, session="faults")

    def update(version: int) -> SyncReport:
        weights = {name: tensor * (1 + 0.01 * version) for name, tensor in state.items()}
        shards = [world.shards(weights, rank) for rank in range(NUM_RANKS)]
        outcomes = run_ranks(NUM_RANKS, lambda rank: updates[rank].update(version, shards[rank]), 250)
        assert all(isinstance(outcome, SyncReport) for outcome in outcomes), outcomes
        assert outcomes[0].failures == outcomes[1].failures
        return outcomes[0]

    def check_served(version: int) -> None:
        """Compare the served log-probs with those that transformers computes at the version."""
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(state[name] * (1 + 0.01 * version))
            logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
        expected = [float(logprobs[t, token]) for t, token in enumerate(TOKENS[1:])]
        assert client.prompt_logprobs(TOKENS) == pytest.approx(expected, abs=1e-5)
        assert client.weight_version == str(version)

    failed: Counter[str] = Counter()
    kinds = [kind for _ in range(num_faults) for kind in PAYLOAD_FAULTS][:num_faults]
    for number, kind in enumerate(kinds, start=1):
        control.kind = kind
        start = time.monotonic()
        report = update(number)
        assert time.monotonic() - start < LONGEST_S, (kind, report.failures)
        failed[kind] += not report.is_complete
        if report.is_complete:
            check_served(number)
        elif number % 2:  # half recover at once; the others leave it to the next update
            assert update(number).is_complete, kind
            check_served(number)
    assert server.is_alive()
    assert all(failed[kind] == kinds.count(kind) for kind in PAYLOAD_FAULTS if kind not in HARMLESS_AT_TIMES), failed
    assert update(num_faults + 1).is_complete
    check_served(num_faults + 1)
