"""Weight syncs through a Hugging Face directory: trainer and engine ranks as threads, the directory and its faults real."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sync_simulation import (
    PATIENT,
    Rendezvous,
    SimulatedEngine,
    ThreadCoordination,
    World,
    run_ranks,
    small_architecture,
)

from megatron_dapo.bridge.transports.disk import DiskTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, WeightSync
from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import ReplicatedLayout, SingleHolderLayout
from megatron_dapo.reshard.planner import plan
from tests.reshard_oracles import execute_in_memory

TP2_PP2 = ParallelLayout(4, tensor=2, pipeline=2)


class DiskEngine(SimulatedEngine):
    """An engine that loads a directory by itself, as the server does."""

    def __init__(self, world: World) -> None:
        super().__init__(world.layout)
        self._world = world
        self.directories: list[Path] = []

    def update_weights_from_disk(self, directory: str) -> None:
        self._call("disk")
        assert self.is_paused and self.session
        self.directories.append(Path(directory))
        stored = load_file(Path(directory) / "model.safetensors")
        layout = self._world.layout
        filled = [
            {n: torch.zeros(s.shape, dtype=s.dtype) for n, s in layout.local_specs(rank).items()}
            for rank in range(layout.num_ranks)
        ]
        source = ReplicatedLayout(layout.tensors, layout.num_ranks)
        execute_in_memory(plan(source, layout), [stored] * layout.num_ranks, filled)
        for model, tensors in zip(self.models, filled):
            for name, parameter in model.named_parameters():
                parameter.data.copy_(tensors[name])


class Exporter:
    """Gathers the shards of all threads and writes them from rank 0."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._barrier = threading.Barrier(world.size, timeout=60)
        self._shards: dict[int, dict[str, torch.Tensor]] = {}
        self.error: Exception | None = None

    def of_rank(self, rank: int):
        def export(directory: Path, sources) -> None:
            self._shards[rank] = sources
            self._barrier.wait()
            if rank == 0 and self.error is None:
                self._write(directory)
            self._barrier.wait()
            if self.error is not None:
                raise self.error if rank == 0 else RuntimeError("export failed on rank 0")

        return export

    def _write(self, directory: Path) -> None:
        tensors = self._world.source.tensors
        whole = {name: torch.zeros(spec.shape) for name, spec in tensors.items()}
        target = SingleHolderLayout(tensors, self._world.size)
        shards = [self._shards[rank] for rank in range(self._world.size)]
        empty = [whole, *({} for _ in range(self._world.size - 1))]
        execute_in_memory(plan(self._world.source, target), shards, empty)
        with atomic_directory(directory) as temporary:
            save_file(whole, temporary / "model.safetensors")


@pytest.fixture
def world() -> World:
    return World(small_architecture(), TP2_PP2, tensor_parallel=2)


def updates(world: World, engine: DiskEngine, directory: Path, exporter: Exporter) -> list[WeightSync]:
    rendezvous = Rendezvous(world.size)
    result = []
    for rank in range(world.size):
        handles = EngineHandles(world.leaders, {0: engine} if world.leaders[0] == rank else {})
        coordination = ThreadCoordination(rendezvous, rank)
        transport = DiskTransport(world.plan, handles, directory, exporter.of_rank(rank), coordination)
        result.append(WeightSync(world.plan, handles, transport, coordination, PATIENT, "session"))
    return result


def update_all(syncs: Sequence[WeightSync], version: int, weights) -> list:
    return run_ranks(len(syncs), lambda rank: syncs[rank].update(version, weights[rank]))


def test_every_rank_releases_its_cache_before_an_engine_resumes(world, tmp_path) -> None:
    engine = DiskEngine(world)
    syncs = updates(world, engine, tmp_path / "weights", Exporter(world))
    for update in syncs:
        update._release_cache = lambda: engine.calls.append("release cache")
    update_all(syncs, 0, world.weights(0))
    first_resume = engine.calls.index("resume")
    assert engine.calls[:first_resume].count("release cache") == world.size
    assert engine.calls.index("release cache") > engine.calls.index("disk")


def test_one_version_after_the_other(world, tmp_path) -> None:
    engine = DiskEngine(world)
    syncs = updates(world, engine, tmp_path / "versions", Exporter(world))
    for version in (1, 2, 3):
        weights = world.weights(version)
        assert all(report.is_complete for report in update_all(syncs, version, weights))
        assert world.holds(engine, 0, world.expected(weights)) and engine.version == version
        # Only the served version stays.
        assert list((tmp_path / "versions").iterdir()) == [engine.directories[-1]]


def test_an_engine_that_loaded_other_bytes_is_not_served(world, tmp_path) -> None:
    engine = DiskEngine(world)
    syncs = updates(world, engine, tmp_path, Exporter(world))
    real = engine.update_weights_from_disk

    def load_and_lose(directory: str) -> None:
        real(directory)
        next(engine.models[1].parameters()).data.view(torch.int32).view(-1)[3] ^= 1

    engine.update_weights_from_disk = load_and_lose
    reports = update_all(syncs, 1, world.weights(1))
    assert all("1 of" in report.failures[0] and "rank 1 differ" in report.failures[0] for report in reports), reports
    assert engine.is_paused and engine.version is None


def test_a_failed_export_touches_no_engine(world, tmp_path) -> None:
    engine, exporter = DiskEngine(world), Exporter(world)
    syncs = updates(world, engine, tmp_path, exporter)
    exporter.error = OSError(28, "No space left on device")
    reports = update_all(syncs, 1, world.weights(1))
    assert all("No space left" in report.failures[0] for report in reports)
    assert "disk" not in engine.calls and list(tmp_path.iterdir()) == []
    exporter.error = None
    assert all(report.is_complete for report in update_all(syncs, 2, world.weights(2)))


def test_an_engine_that_does_not_see_the_directory(world, tmp_path) -> None:
    """The engine never replies; the directory of the last good version stays next to the new one."""
    engine = DiskEngine(world)
    syncs = updates(world, engine, tmp_path, Exporter(world))
    assert all(report.is_complete for report in update_all(syncs, 1, world.weights(1)))
    engine.load = lambda model, payload: None
    reports = update_all(syncs, 2, world.weights(2))
    assert all("left no reply" in report.failures[0] for report in reports)
    assert len(list(tmp_path.iterdir())) == 2
