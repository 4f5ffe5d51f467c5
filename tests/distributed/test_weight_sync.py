"""Weight sync by four processes: agreement over gloo, shared memory, relays between nodes, a killed sender."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from launcher import RankProcess, output_of, run_distributed, start_job
from sync_simulation import PATIENT, SimulatedEngine, World, run_ranks, small_architecture

from megatron_dapo.bridge.protocol import weight_loader
from megatron_dapo.bridge.transports import node_memory
from megatron_dapo.parallel.layout import ParallelLayout

WORKER = Path(__file__).with_name("sync_worker.py")


@pytest.mark.parametrize(
    ("ranks_per_node", "num_engines", "engines_per_node"),
    [(2, 4, 2), (4, 3, 3), *(pytest.param(*one, marks=pytest.mark.long) for one in ((4, 1, 1), (2, 2, 1), (1, 1, 1)))],
)
def test_shards_reach_engines_on_one_node_and_on_several(ranks_per_node, num_engines, engines_per_node, tmp_path):
    arguments = {
        "ranks_per_node": ranks_per_node,
        "num_engines": num_engines,
        "engines_per_node": engines_per_node,
        "directory": str(tmp_path),
    }
    result = run_distributed(f"{WORKER}:nodes", 4, arguments)
    assert len(result["bytes"]) == num_engines and len(set(result["bytes"])) == 1


def test_a_killed_sender_ends_the_update_everywhere(tmp_path):
    """The launcher would end all ranks when one fails; here the others must end in time by themselves."""
    arenas, run = tmp_path / "arenas", tmp_path / "run"
    arenas.mkdir()
    run.mkdir()
    processes = [RankProcess() for _ in range(4)]
    try:
        start_job(processes, f"{WORKER}:killed", run, 200.0, {"directory": str(arenas)})
        codes = [process.wait(200.0) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(output_of(run, rank) for rank in range(4))
    assert codes == [0, 0, 0, -signal.SIGKILL], logs
    for rank in range(3):
        seconds, message = (arenas / f"survivor{rank}").read_text().split(" ", 1)
        assert float(seconds) < 20 and f"rank {rank} of 4" in message
    # Arenas are unlinked once all ranks have mapped them: nothing is left although a process was killed.
    assert not [path for path in arenas.iterdir() if not path.name.startswith("survivor")]


@pytest.fixture
def handles(monkeypatch) -> dict[str, torch.Tensor]:
    """A table in place of IPC handles: handle -> shared memory."""
    shared: dict[str, torch.Tensor] = {}

    def share(tensor: torch.Tensor) -> dict[str, str]:
        shared[str(id(tensor))] = tensor
        return {"handle": str(id(tensor))}

    for module in (node_memory, weight_loader):
        monkeypatch.setattr(module, "open_shared", lambda handle, *through: shared[handle["handle"]])
    monkeypatch.setattr(node_memory, "share", share)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(node_memory, "torch", _CpuInsteadOfCuda())
    return shared


def test_slots_outside_the_arena(tmp_path, handles):
    """The GPU form: slots owned by the ranks next to the engine ranks and opened by all others. They are never freed while an
    engine may have them open: later syncs reuse them, and so does a restarted engine."""
    world = World(small_architecture(), ParallelLayout(4, tensor=2, pipeline=2), tensor_parallel=2)
    engines = [SimulatedEngine(world.layout)]
    updates = world.updates(engines, tmp_path, PATIENT)
    for update in updates:
        update.transport._memory.device = torch.device("cuda", 0)
    for version in (1, 2, 3):
        weights = world.weights(version)
        for outcome in run_ranks(4, lambda rank: updates[rank].update(version, weights[rank])):  # noqa: B023
            assert outcome.is_complete, outcome
        assert world.holds(engines[0], 0, world.expected(weights))
        if version == 2:
            engines[0] = SimulatedEngine(world.layout)  # restarted
    assert len(handles) == 2


def test_an_engine_that_cannot_open_the_slots_says_why(tmp_path, handles, monkeypatch):
    def not_visible(handle: dict[str, str], *through: torch.device) -> torch.Tensor:
        raise ValueError("GPU x is not visible in this process")

    monkeypatch.setattr(weight_loader, "open_shared", not_visible)
    world = World(small_architecture(), ParallelLayout(2, tensor=2), tensor_parallel=2)
    updates = world.updates([SimulatedEngine(world.layout)], tmp_path, PATIENT)
    for update in updates:
        update.transport._memory.device = torch.device("cuda", 0)
    weights = world.weights(1)
    for outcome in run_ranks(2, lambda rank: updates[rank].update(1, weights[rank])):
        assert "begin: GPU x is not visible" in outcome.failures[0]


def test_all_ranks_learn_of_arenas_that_cannot_be_created(tmp_path):
    """The others must not wait for a rank whose directory is gone."""
    world = World(small_architecture(), ParallelLayout(4, tensor=2, pipeline=2), tensor_parallel=2)
    updates = world.updates([SimulatedEngine(world.layout)], tmp_path / "gone", PATIENT)
    weights = world.weights(1)
    for outcome in run_ranks(4, lambda rank: updates[rank].update(1, weights[rank])):
        assert "No such file or directory" in outcome.failures[0]


class _CpuInsteadOfCuda:
    """torch with an `empty` that ignores the device."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)
