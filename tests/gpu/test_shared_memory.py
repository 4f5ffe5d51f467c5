"""GPU memory that two processes share, and a weight sync through it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("real_gpu")]

ROOT = Path(__file__).resolve().parents[2]
READER = """
import json, sys, torch
torch.cuda.init()
from megatron_dapo.bridge.protocol.cuda_memory import open_shared
memory = open_shared(json.loads(sys.stdin.readline()))
print(int(memory.view(torch.int64).sum()), flush=True)
sys.stdin.readline()
memory.fill_(7)
torch.cuda.synchronize()
print("filled", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def reader(device: str):
    """A process that opens shared memory, prints its sum, and fills it with sevens when told to continue."""
    command = [sys.executable, "-c", READER]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def _say(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_both_processes_see_the_same_bytes(reader) -> None:
    from megatron_dapo.bridge.protocol.cuda_memory import share

    memory = torch.arange(1 << 17, device="cuda").view(torch.uint8)
    expected = int(memory.view(torch.int64).sum())
    torch.cuda.synchronize()
    assert _say(reader, json.dumps(share(memory))) == str(expected)
    assert _say(reader, "") == "filled"
    torch.cuda.synchronize()
    assert bool((memory == 7).all())


def test_a_view_of_a_larger_storage_is_shared_whole(reader) -> None:
    from megatron_dapo.bridge.protocol.cuda_memory import share

    storage = torch.ones(4096, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    assert _say(reader, json.dumps(share(storage[1024:].view(torch.uint8)))) == "4096"


def test_a_gpu_that_is_not_visible_is_named() -> None:
    from megatron_dapo.bridge.protocol.cuda_memory import open_shared, share

    shared = share(torch.zeros(8, dtype=torch.uint8, device="cuda"))
    with pytest.raises(ValueError, match="GPU unknown-uuid is not visible in this process"):
        open_shared({**shared, "device": "unknown-uuid"})


@pytest.fixture
def colocated(tmp_path: Path):
    """The trainer of benchmarks/gpu/sync.py and the weight loader in another process, both on this GPU."""
    import sync
    from step import MODELS, QWEN

    (tmp_path / "model").mkdir()
    config: dict[str, Any] = {**QWEN, **MODELS["tiny"], "torch_dtype": "bfloat16"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        control = sync.start_loader(tmp_path, torch.device("cuda"), stack)
        yield sync.Trainer(tmp_path, torch.device("cuda"), 1 << 18, control)
    dist.destroy_process_group()


@pytest.mark.parametrize("slots", ["gpu", "host"])
def test_weights_arrive_bit_for_bit_through_slots(colocated, slots) -> None:
    """The update compares checksums of all parameters, computed on both sides; several syncs, so that memory is reused."""
    update = colocated.update(slots)
    for _ in range(3):
        for parameter in colocated.parameters.values():
            parameter.normal_()
        assert colocated.sync_verified(update) > 0


def test_a_byte_that_is_changed_on_the_way_is_noticed(colocated, monkeypatch) -> None:
    """Check that the test above can fail."""
    from megatron_dapo.bridge.transports import shared_memory as transport

    def spoil(plan: Any, bucket: Any, source: int, sources: Any, data: torch.Tensor, *more: Any) -> int:
        written = original(plan, bucket, source, sources, data, *more)
        data[0] += 1
        return written

    original = transport.write_chunks
    monkeypatch.setattr(transport, "write_chunks", spoil)
    with pytest.raises(RuntimeError, match="engine 0 does not"):
        colocated.sync_verified(colocated.update("gpu"))
