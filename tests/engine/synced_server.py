"""A real SGLang server, and trainer ranks as threads that bring it the weights of a Hugging Face directory at any scale."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sync_simulation import Tensors, World, run_ranks
from transformers import AutoModelForCausalLM

from megatron_dapo.bridge.transports.shared_memory import default_directory
from megatron_dapo.bridge.weight_sync import SyncReport, SyncTimeouts, WeightSync
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.types import Completion

TOKENS = [5, 6, 7, 250, 9, 31, 100, 5, 5, 17, 298, 44, 3, 8, 8, 120]
PATIENT = SyncTimeouts(120, 120, 120, 120, 200, 120, 60)
# Tests share servers, in which the versions of a session only grow.
VERSIONS = itertools.count(1)


def connect(server: SglangServer, **timeouts: float) -> SglangClient:
    assert server.info is not None
    return SglangClient(server.url, read_key(server.key_file), Timeouts(**timeouts), server.info.api_version)


@contextmanager
def serving(server: SglangServer, deadline_s: float, **fields: Any) -> Iterator[SglangEngine]:
    """An engine over a server, as version 1 of the policy."""
    client = connect(server, generate_s=deadline_s)
    client.update_weight_version(1)
    settings = SglangEngineSettings(client.max_length(), 300, poll_wait_s=0.2, abort_s=deadline_s, **fields)
    with SglangEngine([client], settings) as engine:
        engine.set_policy_version(1)
        yield engine


def drain(engine: SglangEngine, deadline_s: float) -> list[Completion]:
    """Every completion that is outstanding."""
    completions, end = [], time.monotonic() + deadline_s
    while engine.num_unfinished:
        assert time.monotonic() < end, f"{engine.num_unfinished} requests never came back; {engine.failed_servers}"
        completions += engine.poll()
    return completions


def weights_of(directory: Path, scale: float = 1.0) -> Tensors:
    """The tensors of a directory; `scale` on all of them makes another version."""
    return {name: tensor * scale for name, tensor in load_file(directory / "model.safetensors").items()}


def transformers_logprobs(
    directory: Path, weights: Tensors, tokens: Sequence[int], model_class: Any = AutoModelForCausalLM
) -> list[float]:
    """Return the log-probs of all tokens but the first, by transformers with these weights in the model of `directory`."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_bytes((directory / "config.json").read_bytes())
        save_file(weights, Path(scratch, "model.safetensors"), metadata={"format": "pt"})
        model = model_class.from_pretrained(scratch, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(logprobs[t, token]) for t, token in enumerate(tokens[1:])]


@dataclass
class SyncedServer:
    """A server with random weights, the directory to sync to it, and the layouts of trainer and engine ranks."""

    server: SglangServer
    directory: Path
    world: World

    def __post_init__(self) -> None:
        self.client = connect(self.server, generate_s=120.0)

    def sources(self, scale: float) -> Sequence[Any]:
        """What each trainer rank sends."""
        weights = weights_of(self.directory, scale)
        return [self.world.shards(weights, rank) for rank in range(self.world.size)]

    def syncs(self, control: Any = None, **fields: Any) -> list[WeightSync]:
        """Return one WeightSync a rank, through `control` if given. All of them share a session in the server."""
        fields = {"message_timeout_s": 100.0, "session": "test", **fields}
        return self.world.updates([control or self.client], default_directory(), PATIENT, **fields)

    def run(self, syncs: Sequence[WeightSync], version: int, scale: float) -> SyncReport:
        """Sync a version by all ranks, which must agree on the outcome."""
        sources = self.sources(scale)
        outcomes = run_ranks(len(syncs), lambda rank: syncs[rank].update(version, sources[rank]), 280)
        for outcome in outcomes:
            assert isinstance(outcome, SyncReport), outcome
            assert outcome.failures == outcomes[0].failures
        return outcomes[0]

    def update(self, version: int, scale: float, control: Any = None, **fields: Any) -> SyncReport:
        """Sync a version from a newly started trainer."""
        return self.run(self.syncs(control, **fields), version, scale)

    def expected(self, scale: float) -> list[float]:
        return transformers_logprobs(self.directory, weights_of(self.directory, scale), TOKENS)

    def gap(self, scale: float) -> float:
        """Largest difference of log-probs between the server and transformers."""
        served = self.client.prompt_logprobs(TOKENS)
        return max(abs(a - b) for a, b in zip(served, self.expected(scale), strict=True))
