"""Real SGLang servers in FP8: every sync brings the values of quantizing whole tensors."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))
from fp8_world import Fp8World, in_fp8, save_model, transformers_logprobs, weights_of
from sync_simulation import World, run_ranks

from megatron_dapo.bridge.served_parameters import served_parameters
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport, default_directory
from megatron_dapo.bridge.weight_sync import SyncReport, SyncTimeouts
from megatron_dapo.checkpoints.layouts.fp8 import SCALES, expected_parameters, read_parameters
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

TOKENS = [5, 6, 7, 250, 9, 31, 100, 5, 5, 17, 300, 44, 3]
PATIENT = SyncTimeouts(120, 120, 120, 120, 200, 120, 60)
VERSIONS = iter(range(1, 1000))
BUCKET_BYTES = 64 << 10
# Model, engine ranks, element type of activations, trainer layout, largest gap to the same weights in transformers. The
# trainer's tensor parallel size 4 cuts every block of a projection. The attention of Qwen2 and Gemma 3 has scales of a cache.
CASES = {
    "one rank": ("qwen2", 1, "float32", ParallelLayout(4, tensor=2, pipeline=2), 2e-5),
    "two ranks, cut blocks": ("qwen3", 2, "float32", ParallelLayout(4, tensor=4), 2e-5),
    "experts on two ranks": ("qwen3_moe", 2, "float32", ParallelLayout(4, pipeline=2, expert=2), 2e-5),
    "local and global layers": ("gemma3_text", 1, "float32", ParallelLayout(4, tensor=4), 2e-5),
    "one rank, bfloat16": ("qwen3", 1, "bfloat16", ParallelLayout(4, tensor=2, pipeline=2), 0.1),
}


@dataclass
class Setup:
    """A server in FP8 with random weights, and the model to sync."""

    client: SglangClient
    directory: Path
    scratch: Path
    world: Fp8World
    tolerance: float

    def update(
        self, scale: float, *, world: World | None = None, transport_of: Any = SharedMemoryTransport
    ) -> SyncReport:
        """Run one update by all ranks, in FP8 or by a `world` without it."""
        chosen = world or self.world
        arguments = (PATIENT,)
        updates = chosen.updates(
            [self.client],
            default_directory(),
            *arguments,
            message_timeout_s=100.0,
            transport_of=transport_of,
            session="t",
        )
        state, version = weights_of(self.directory, scale), next(VERSIONS)
        sources = self.world.sources(state) if world is None else [chosen.shards(state, r) for r in range(chosen.size)]
        outcomes = run_ranks(chosen.size, lambda rank: updates[rank].update(version, sources[rank]), 280)
        assert all(isinstance(outcome, SyncReport) for outcome in outcomes), outcomes
        return outcomes[0]

    def gap(self, scale: float, *, rounded: bool = True) -> float:
        """Mean difference of log-probs between the server and transformers with the weights in FP8, or as trained."""
        weights = weights_of(self.directory, scale)
        expected = transformers_logprobs(self.directory, in_fp8(weights) if rounded else weights, TOKENS, self.scratch)
        served = self.client.prompt_logprobs(TOKENS)
        return sum(abs(a - b) for a, b in zip(served, expected, strict=True)) / len(expected)


QUICK = ("one rank, bfloat16",)  # test_fp8_training.py has experts


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def setup(request, server_factory, tmp_path_factory) -> Setup:
    family, tensor_parallel, dtype, parallel, tolerance = CASES[request.param]
    directory = save_model(tmp_path_factory.mktemp("fp8_model"), family)
    server = server_factory(
        directory, tensor_parallel=tensor_parallel, dtype=dtype, quantization="fp8", random_weights=True, seeded=True,
        max_total_tokens=4096,
    )  # fmt: skip
    client = SglangClient(server.url, read_key(server.key_file), Timeouts(generate_s=60.0), server.info.api_version)
    world = Fp8World(
        read_architecture(directory),
        parallel,
        tensor_parallel=tensor_parallel,
        dtype=getattr(torch, dtype),
        bucket_bytes=BUCKET_BYTES,
        described=served_parameters(client, tensor_parallel),
    )
    return Setup(client, directory, tmp_path_factory.mktemp("scratch"), world, tolerance)


def test_the_server_describes_its_quantized_parameters(setup):
    """The server's layer types decide, and agree with plans made without a server."""
    size = setup.world.layout.tensor_parallel
    described = served_parameters(setup.client, size)
    plain = sglang_layout(setup.world.source.architecture, size, setup.world.layout.engines.dtype, device="cpu")
    assert read_parameters(plain, described).quantized == expected_parameters(plain).quantized
    has_cache_scales = setup.world.source.architecture.model_type in ("qwen2", "gemma3_text")
    assert any(name.endswith("k_scale") for name in described[0]) == has_cache_scales
    for specs, rank in zip(described, range(size), strict=True):
        assert specs == setup.world.layout.local_specs(rank)


def test_every_sync_brings_quantized_whole_tensors(setup):
    assert setup.gap(1.0) > 0.1  # it serves noise
    for scale in (1.0, 0.7):
        report = setup.update(scale)
        assert report.is_complete, report.describe()
        assert setup.gap(scale) < setup.tolerance
    # Quantization shows, but is no larger than rounding.
    if setup.tolerance < 1e-3:
        assert 10 * setup.tolerance < setup.gap(0.7, rounded=False) < 0.5
    ranks = setup.world.plan.ranks_of(0)
    shard = sum(spec.num_bytes for rank in ranks for spec in setup.world.layout.local_specs(rank).values())
    assert 0.9 * shard < report.engines[0].num_bytes <= shard
    assert report.peak_bytes < 2 * BUCKET_BYTES + (2 << 20)


class CorruptedScale(SharedMemoryTransport):
    """One bit of the first scale changes between the trainer's write and the engine's read."""

    def _announce(self, state, bucket) -> None:
        for write in self.plan.writes(bucket, self.rank):
            if write.chunk.name.endswith("layers.0.self_attn.qkv_proj.weight" + SCALES) and bucket.engine_rank == 0:
                state.memory.slots[0][bucket.index % 2][write.chunk.byte_offset] ^= 1
        super()._announce(state, bucket)


def test_a_corrupted_scale_is_not_served(setup):
    report = setup.update(0.9, transport_of=CorruptedScale)
    assert "1 of " in report.failures[0] and "qkv_proj.weight_scale_inv" in report.failures[0]
    assert setup.update(0.9).is_complete
    assert setup.gap(0.9) < setup.tolerance


def test_a_trainer_that_does_not_quantize_is_refused(setup):
    """The trainer's plan lacks the scales."""
    plain = World(
        setup.world.source.architecture,
        ParallelLayout(4, tensor=2, pipeline=2),
        tensor_parallel=setup.world.layout.tensor_parallel,
        dtype=setup.world.layout.engines.dtype,
        bucket_bytes=BUCKET_BYTES,
    )
    report = setup.update(1.0, world=plain)
    assert "nothing is sent for the engine's parameters" in report.failures[0]
    assert setup.update(1.1).is_complete
    assert setup.gap(1.1) < setup.tolerance
