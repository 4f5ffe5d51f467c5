"""Real SGLang servers in FP8: every sync brings the values of quantizing whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fp8_world import Fp8World, in_fp8, save_model
from sync_simulation import World
from synced_server import TOKENS, VERSIONS, SyncedServer, connect, transformers_logprobs, weights_of

from megatron_dapo.bridge.served_parameters import served_parameters
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.checkpoints.layouts.fp8 import SCALES, expected_parameters, read_parameters
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

BUCKET_BYTES = 64 << 10
# Model, engine ranks, element type of activations, trainer layout, largest gap to the same weights in transformers. The
# trainer's tensor parallel size 4 cuts every block of a projection.
CASES = {
    "one rank": ("qwen2", 1, "float32", ParallelLayout(4, tensor=2, pipeline=2), 2e-5),
    "two ranks, cut blocks": ("qwen3", 2, "float32", ParallelLayout(4, tensor=4), 2e-5),
    "experts on two ranks": ("qwen3_moe", 2, "float32", ParallelLayout(4, pipeline=2, expert=2), 2e-5),
    "local and global layers": ("gemma3_text", 1, "float32", ParallelLayout(4, tensor=4), 2e-5),
    "latent attention": (
        *("deepseek_v3", 1, "float32"),
        *(ParallelLayout(4, tensor=2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True), 2e-5),
    ),
    "latent attention on two ranks": ("deepseek_v3", 2, "float32", ParallelLayout(4, expert=2, pipeline=2), 2e-5),
    "GLM-4.7-Flash": ("glm4_moe_lite", 1, "float32", ParallelLayout(4, expert=2, pipeline=2), 2e-5),
    "GLM on two ranks": ("glm4_moe", 2, "float32", ParallelLayout(4, expert=2, pipeline=2), 2e-5),
    "delta nets": ("qwen3_5_text", 1, "float32", ParallelLayout(4, tensor=2, pipeline=2), 2e-5),
    "delta nets on two ranks": ("qwen3_5_text", 2, "float32", ParallelLayout(2, tensor=2), 2e-5),
    "delta nets, experts": (
        *("qwen3_next", 2, "float32"),
        *(ParallelLayout(4, tensor=2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True), 2e-5),
    ),
    "one rank, bfloat16": ("qwen3", 1, "bfloat16", ParallelLayout(4, tensor=2, pipeline=2), 0.1),
}


@dataclass
class Fp8Server(SyncedServer):
    """A server in FP8."""

    world: Fp8World
    tolerance: float

    def sources(self, scale: float) -> Sequence[Any]:
        return self.world.sources(weights_of(self.directory, scale))

    def mean_gap(self, scale: float, *, rounded: bool = True) -> float:
        """Mean difference of log-probs between the server and transformers with the weights in FP8, or as trained."""
        weights = weights_of(self.directory, scale)
        expected = transformers_logprobs(self.directory, in_fp8(weights) if rounded else weights, TOKENS)
        served = self.client.prompt_logprobs(TOKENS)
        return sum(abs(a - b) for a, b in zip(served, expected, strict=True)) / len(expected)


CACHE_SCALES = ("qwen2", "gemma3_text", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_text")
QUICK = ("one rank, bfloat16",)  # test_fp8_training.py has experts


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def setup(request, server_factory, tmp_path_factory) -> Fp8Server:
    family, tensor_parallel, dtype, parallel, tolerance = CASES[request.param]
    directory = save_model(tmp_path_factory.mktemp("fp8_model"), family)
    server = server_factory(
        directory, tensor_parallel=tensor_parallel, dtype=dtype, quantization="fp8", random_weights=True, seeded=True,
        max_total_tokens=4096,
    )  # fmt: skip
    world = Fp8World(
        read_architecture(directory),
        parallel,
        tensor_parallel=tensor_parallel,
        dtype=getattr(torch, dtype),
        bucket_bytes=BUCKET_BYTES,
        described=served_parameters(connect(server), tensor_parallel),
    )
    return Fp8Server(server, directory, world, tolerance)


def test_the_server_describes_its_quantized_parameters(setup):
    """The server's layer types decide, and agree with plans made without a server."""
    size = setup.world.layout.tensor_parallel
    described = served_parameters(setup.client, size)
    plain = sglang_layout(setup.world.source.architecture, size, setup.world.layout.engines.dtype, device="cpu")
    assert read_parameters(plain, described).quantized == expected_parameters(plain).quantized
    has_cache_scales = setup.world.source.architecture.model_type in CACHE_SCALES
    assert any(name.endswith("k_scale") for name in described[0]) == has_cache_scales
    for specs, rank in zip(described, range(size), strict=True):
        assert specs == setup.world.layout.local_specs(rank)


def test_every_sync_brings_quantized_whole_tensors(setup):
    assert setup.mean_gap(1.0) > 0.1  # it serves noise
    for scale in (1.0, 0.7):
        report = setup.update(next(VERSIONS), scale)
        assert report.is_complete, report.describe()
        assert setup.mean_gap(scale) < setup.tolerance
    # Quantization shows, but is no larger than rounding.
    if setup.tolerance < 1e-3:
        assert 10 * setup.tolerance < setup.mean_gap(0.7, rounded=False) < 0.5
    ranks = setup.world.plan.ranks_of(0)
    shard = sum(spec.num_bytes for rank in ranks for spec in setup.world.layout.local_specs(rank).values())
    assert 0.9 * shard < report.engines[0].num_bytes <= shard
    assert report.peak_bytes < 2 * BUCKET_BYTES + (2 << 20)


class CorruptedScale(SharedMemoryTransport):
    """One bit of a scale changes between the trainer's write and the engine's read."""

    def _announce(self, state, bucket) -> None:
        for write in self.plan.writes(bucket, self.rank):
            if self._is_output(write.chunk.name) and bucket.engine_rank == 0:
                state.memory.slots[0][bucket.index % 2][write.chunk.byte_offset] ^= 1
        super()._announce(state, bucket)

    @staticmethod
    def _is_output(name: str) -> bool:
        return "layers.1." in name and name.endswith(".o_proj.weight" + SCALES)


def test_a_corrupted_scale_is_not_served(setup):
    report = setup.update(next(VERSIONS), 0.9, transport_of=CorruptedScale)
    assert "1 of " in report.failures[0] and "o_proj.weight_scale_inv" in report.failures[0]
    assert setup.update(next(VERSIONS), 0.9).is_complete
    assert setup.mean_gap(0.9) < setup.tolerance


def test_a_trainer_that_does_not_quantize_is_refused(setup):
    """The trainer's plan lacks the scales."""
    plain = World(
        setup.world.source.architecture,
        ParallelLayout(4, tensor=2, pipeline=2),
        tensor_parallel=setup.world.layout.tensor_parallel,
        dtype=setup.world.layout.engines.dtype,
        bucket_bytes=BUCKET_BYTES,
    )
    report = SyncedServer(setup.server, setup.directory, plain).update(next(VERSIONS), 1.0)
    assert "nothing is sent for the engine's parameters" in report.failures[0]
    assert setup.update(next(VERSIONS), 1.1).is_complete
    assert setup.mean_gap(1.1) < setup.tolerance
