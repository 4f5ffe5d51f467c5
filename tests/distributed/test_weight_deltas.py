"""Weight syncs that send only what changed: the bits of full updates, whichever way they come and whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from one_stream import use_one_queue_a_sender
from sync_simulation import PATIENT, SimulatedEngine, Tensors, World, run_ranks, small_architecture
from test_p2p_transport import PeerEngine, close_all, updates

from megatron_dapo.bridge.protocol import receiver
from megatron_dapo.bridge.protocol.deltas import Change, bits
from megatron_dapo.bridge.weight_sync import EngineState, SyncReport, WeightSync
from megatron_dapo.parallel.layout import ParallelLayout
from tests.examples import examples

TP2_PP2 = ParallelLayout(4, tensor=2, pipeline=2)
NUM_DELTAS = examples(100)


class Run:
    """A model that changes a little from version to version, its trainer ranks and its engines."""

    def __init__(self, world: World, engines: list[Any], syncs: Sequence[WeightSync]) -> None:
        self.world, self.engines, self.syncs = world, engines, syncs
        self.generator = torch.Generator().manual_seed(1)
        self.model: Tensors = {
            name: torch.randn(spec.shape, generator=self.generator) for name, spec in world.source.tensors.items()
        }
        self.version = 0

    def change(self, share: float) -> None:
        """Add to some elements of every tensor."""
        for tensor in self.model.values():
            chosen = torch.rand(tensor.shape, generator=self.generator) < share
            tensor += chosen * (0.5 + torch.rand(tensor.shape, generator=self.generator))

    def weights(self) -> list[Tensors]:
        return [self.world.shards(self.model, rank) for rank in range(self.world.size)]

    def update(self, share: float = 0.02, engines: Sequence[int] | None = None) -> SyncReport:
        """Change the weights and bring them to the engines as the next version."""
        self.version += 1
        self.change(share)
        weights = self.weights()
        wanted = range(len(self.engines)) if engines is None else engines
        reports = run_ranks(
            self.world.size, lambda rank: self.syncs[rank].update_engines(wanted, self.version, weights[rank])
        )
        for report in reports:
            assert isinstance(report, SyncReport), report
            assert (report.is_delta, report.failures.keys()) == (reports[0].is_delta, reports[0].failures.keys())
        return reports[0]

    def holds(self, engines: Sequence[int] | None = None) -> bool:
        expected = self.world.expected(self.weights())
        wanted = range(len(self.engines)) if engines is None else engines
        return all(self.world.holds(self.engines[engine], engine, expected) for engine in wanted)


def start(transport: str, directory: Path, full_interval: int, *, num_engines: int = 1, **world: Any) -> Run:
    tied = num_engines > 1
    made = World(small_architecture(tied), TP2_PP2, num_engines=num_engines, **{"tensor_parallel": 2, **world})
    of: dict[str, Callable[[], Run]] = {"p2p": lambda: _p2p(made, full_interval), "shared_memory": lambda: _shared(made)}

    def _shared(world: World) -> Run:
        engines = [SimulatedEngine(world.layout, index) for index in range(num_engines)]
        return Run(world, engines, world.updates(engines, directory, PATIENT, full_interval=full_interval))

    return of[transport]()


def _p2p(world: World, full_interval: int) -> Run:
    engines = [PeerEngine(world.layout, index) for index in range(world.layout.num_ranks // world.layout.tensor_parallel)]
    return Run(world, engines, updates(world, engines, full_interval=full_interval))


@pytest.mark.parametrize(
    ("transport", "num_engines", "dtype"),
    [
        ("shared_memory", 1, torch.bfloat16),
        ("shared_memory", 2, torch.float32),
        ("p2p", 2, torch.bfloat16),
    ],
)
def test_many_deltas_leave_the_bits_of_a_full_update(transport, num_engines, dtype, tmp_path):
    run = start(transport, tmp_path, NUM_DELTAS + 1, num_engines=num_engines, dtype=dtype, bucket_bytes=4096)
    full = run.update()
    assert not full.is_delta and run.holds()
    for number in range(NUM_DELTAS):
        report = run.update()
        assert report.is_complete and report.is_delta, report.describe()
        assert all(report.engines[e].num_bytes < 0.3 * full.engines[e].num_bytes for e in report.engines)
        assert number % (NUM_DELTAS // 5) or run.holds()
    assert run.holds()
    assert not run.update().is_delta and run.holds()
    close_all(run.syncs)


def test_segments_travel_over_a_backend_of_one_stream(monkeypatch):
    use_one_queue_a_sender(monkeypatch)
    world = World(small_architecture(), TP2_PP2, tensor_parallel=1, num_engines=2, bucket_bytes=4096)
    engines = [PeerEngine(world.layout, index) for index in range(2)]
    run = Run(world, engines, updates(world, engines, backend="nccl", full_interval=9))
    assert [run.update().is_delta for _ in range(4)] == [False, True, True, True] and run.holds()
    close_all(run.syncs)


def test_every_third_update_is_full(tmp_path):
    run = start("shared_memory", tmp_path, 3)
    assert [run.update().is_delta for _ in range(7)] == [False, True, True, False, True, True, False] and run.holds()


def test_an_update_that_changes_too_much_is_full(tmp_path):
    run = start("shared_memory", tmp_path, 100)
    assert [run.update(share).is_delta for share in (0.02, 0.02, 0.9, 0.02)] == [False, True, False, True]
    assert run.holds()


def test_bits_count_and_not_numbers(tmp_path):
    """A zero that changes its sign and a NaN that stays are equal, or not, as numbers."""
    run = start("shared_memory", tmp_path, 100)
    for tensor in run.model.values():
        tensor.view(-1)[0], tensor.view(-1)[1] = 0.0, float("nan")
    run.update()
    for tensor in run.model.values():
        tensor.view(-1)[0] = -0.0
    assert run.update(0.0).is_delta
    expected = run.world.expected(run.weights())
    for rank, model in enumerate(run.engines[0].models):
        for name, parameter in model.named_parameters():
            assert torch.equal(bits(parameter.data), bits(expected[rank][name])), name


@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
def test_a_restarted_engine_gets_a_full_update_and_then_deltas_like_the_others(transport, tmp_path):
    run = start(transport, tmp_path, 100, num_engines=2, tensor_parallel=1)
    run.update()
    assert run.update().is_delta
    # It died and came back before anyone noticed: it refuses what it cannot apply.
    run.engines[1] = type(run.engines[1])(run.world.layout, 1)
    if transport == "p2p":
        for sync in run.syncs:
            if 1 in sync.handles.controls:
                sync.handles.controls[1] = run.engines[1]
    report = run.update()
    assert report.is_delta and report.engines[0].state is EngineState.SERVING and run.holds([0])
    refused = report.failures[1]
    assert "\n" not in refused
    if transport == "shared_memory":
        assert "this engine holds no verified version; it needs a full update" in refused
    run.version -= 1
    report = run.update(0.0, [1])
    assert not report.is_delta and report.is_complete and run.holds()
    assert run.update().is_delta and run.holds()
    close_all(run.syncs)


def test_a_flipped_bit_of_a_delta_is_found_and_the_next_update_is_full(tmp_path, monkeypatch):
    run = start("shared_memory", tmp_path, 100)
    run.update()
    original, struck = receiver.apply, []

    def apply(target: torch.Tensor, changed: Change) -> None:
        original(target, changed)
        if changed.positions.numel() and not struck:
            struck.append(1)
            bits(target).view(-1)[int(changed.positions[0])] ^= 1

    monkeypatch.setattr(receiver, "apply", apply)
    report = run.update()
    assert report.is_delta and struck and "differ from the trainer's" in report.failures[0]
    report = run.update()
    assert not report.is_delta and report.is_complete and run.holds()


def test_memory_that_changed_since_the_last_update_is_found(tmp_path):
    """The whole parameter is read back, also what the delta leaves as it was."""
    run = start("shared_memory", tmp_path, 100)
    run.update()
    parameter = dict(run.engines[0].models[1].named_parameters())["model.layers.1.self_attn.o_proj.weight"]
    bits(parameter.data).view(-1)[5] ^= 1 << 20
    report = run.update(0.0)
    assert report.is_delta and "o_proj" in report.failures[0]


def test_another_trainer_begins_with_a_full_update(tmp_path):
    """As after a killed trainer whose servers live on."""
    run = start("shared_memory", tmp_path, 100)
    run.update()
    run.update()
    run.syncs = run.world.updates(run.engines, tmp_path, PATIENT, session="the next attempt", full_interval=100)
    assert [run.update().is_delta for _ in range(2)] == [False, True] and run.holds()
