"""Deliveries by four processes: agreement over gloo, shared memory, deputies between machines, a killed sender."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import launcher
import pytest
import torch
from delivery_simulation import PATIENT, SimulatedEngine, World, run_ranks, small_architecture
from launcher import run_distributed

from megatron_dapo.bridge.transports import colocated
from megatron_dapo.engines.sglang import weight_loader
from megatron_dapo.parallel.layout import ParallelLayout

WORKER = Path(__file__).with_name("delivery_worker.py")


@pytest.mark.parametrize(("ranks_per_node", "num_engines"), [(4, 1), (2, 2), (1, 1)])
def test_shards_reach_engines_on_one_machine_and_on_several(ranks_per_node, num_engines, tmp_path):
    arguments = {"ranks_per_node": ranks_per_node, "num_engines": num_engines, "folder": str(tmp_path)}
    result = run_distributed(f"{WORKER}:nodes", 4, arguments, timeout_s=200.0)
    assert len(result["bytes"]) == num_engines and len(set(result["bytes"])) == 1


def test_a_killed_sender_ends_the_update_everywhere(tmp_path):
    """The launcher ends all ranks when one fails; here the others must end by themselves, in time."""
    arenas, run = tmp_path / "arenas", tmp_path / "run"
    arenas.mkdir()
    run.mkdir()
    (run / "arguments.json").write_text(json.dumps({"folder": str(arenas)}))
    port = launcher.free_port()
    processes = [launcher._start(f"{WORKER}:killed", rank, 4, port, run, 200.0) for rank in range(4)]
    try:
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(launcher._tail(run, rank) for rank in range(4))
    assert codes == [0, 0, 0, -signal.SIGKILL], logs
    for rank in range(3):
        seconds, message = (arenas / f"survivor{rank}").read_text().split(" ", 1)
        assert float(seconds) < 20 and f"rank {rank} of 4" in message
    # Unlinked as soon as all had mapped them: nothing stays behind, although a process was killed.
    assert not [path for path in arenas.iterdir() if not path.name.startswith("survivor")]


def test_slots_outside_the_arena(tmp_path, monkeypatch):
    """The form for GPUs with its IPC handles replaced by a table: slots of the ranks beside the engine ranks, opened by
    all others."""
    opened: dict[str, torch.Tensor] = {}

    def share(tensor: torch.Tensor) -> dict[str, str]:
        opened[str(id(tensor))] = tensor
        return {"handle": str(id(tensor))}

    for module in (colocated, weight_loader):
        monkeypatch.setattr(module, "open_shared", lambda shared: opened[shared["handle"]])
    monkeypatch.setattr(colocated, "share", share)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(colocated, "torch", _CpuInsteadOfCuda())
    world = World(small_architecture(), ParallelLayout(4, tensor=2, pipeline=2), tensor_parallel=2)
    engines = [SimulatedEngine(world.layout)]
    updates = world.updates(engines, tmp_path, PATIENT)
    for update in updates:
        update.transport.device = torch.device("cuda", 0)
    weights = world.weights(1)
    for outcome in run_ranks(4, lambda rank: updates[rank].update(1, weights[rank])):
        assert outcome.is_complete, outcome
    assert len(opened) == 2 and world.holds(engines[0], 0, world.expected(weights))


class _CpuInsteadOfCuda:
    """torch, but that `empty` knows no GPU."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)
