"""Experts from expert-parallel trainer ranks into a real SGLang server: the served Qwen3-MoE is transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sync_simulation import World, run_ranks

from megatron_dapo.bridge.transports.shared_memory import default_directory
from megatron_dapo.bridge.weight_sync import SyncTimeouts
from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.parallel.layout import ParallelLayout

TOKENS = [5, 6, 7, 250, 9, 31, 100, 5, 5, 17, 298, 44, 3]
PATIENT = SyncTimeouts(120, 120, 120, 120, 200, 120, 60)


@pytest.mark.parametrize("tensor_parallel", [2])
def test_experts_arrive(server_factory: Callable[..., SglangServer], moe_model: Path, tensor_parallel: int) -> None:
    from transformers import AutoModelForCausalLM

    server = server_factory(moe_model, tensor_parallel=tensor_parallel, random_weights=True, max_total_tokens=4096)
    client = SglangClient(server.url, read_key(server.key_file), Timeouts(generate_s=120.0), server.info.api_version)
    layout = ParallelLayout(4, pipeline=2, expert=2)
    world = World(
        ModelArchitecture.from_directory(moe_model), layout, tensor_parallel=tensor_parallel, bucket_bytes=64 << 10
    )
    state = load_file(moe_model / "model.safetensors")
    updates = world.updates([client], default_directory(), PATIENT, message_timeout_s=100.0, session="moe")
    reports = run_ranks(4, lambda rank: updates[rank].update(1, world.shards(state, rank)), 280)
    assert all(report.is_complete for report in reports), reports
    model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    expected = [float(logprobs[t, token]) for t, token in enumerate(TOKENS[1:])]
    assert client.prompt_logprobs(TOKENS) == pytest.approx(expected, abs=1e-5)
