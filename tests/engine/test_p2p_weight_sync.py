"""Weight syncs by point-to-point and by disk into the real server, which then serves what transformers computes.

Trainer ranks are threads of this process; the engine's ranks are the server's own.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sync_simulation import Rendezvous, Tensors, ThreadCoordination, World, break_sender
from synced_server import SyncedServer, weights_of

from megatron_dapo.bridge.transports.disk import DiskTransport
from megatron_dapo.bridge.transports.p2p import P2PTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, SyncReport, SyncTimeouts, Transport, WeightSync
from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

TIMEOUTS = SyncTimeouts(120, 120, 120, 120, 120, 120, 60)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2], ids=["tp1", "tp2"])
def site(request, filled_server, tiny_model_untied: Path) -> SyncedServer:
    return make_site(filled_server, tiny_model_untied, request.param)


def make_site(filled_server, directory: Path, tensor_parallel: int) -> SyncedServer:
    layout = ParallelLayout(4, tensor=2, pipeline=2)
    world = World(read_architecture(directory), layout, tensor_parallel=tensor_parallel, bucket_bytes=100_000)
    return SyncedServer(filled_server(directory, tensor_parallel), directory, world)


def syncs_of(
    site: SyncedServer, transport_of: Callable[[EngineHandles, ThreadCoordination], Transport] | None = None
) -> list[WeightSync]:
    """Return one WeightSync a rank of a newly started trainer, by point-to-point unless told otherwise."""
    rendezvous, session = Rendezvous(site.world.size), secrets.token_hex(8)
    syncs = []
    for rank in range(site.world.size):
        handles = EngineHandles([0], {0: site.client} if rank == 0 else {})
        coordination = ThreadCoordination(rendezvous, rank)
        if transport_of is None:
            transport: Transport = P2PTransport(site.world.plan, handles, coordination)
        else:
            transport = transport_of(handles, coordination)
        syncs.append(WeightSync(site.world.plan, handles, transport, coordination, TIMEOUTS, session))
    return syncs


def scale(version: int) -> float:
    return 1 + 0.1 * version


def update(site: SyncedServer, syncs: Sequence[WeightSync], version: int) -> SyncReport:
    return site.run(syncs, version, scale(version))


def update_and_check(site: SyncedServer, syncs: Sequence[WeightSync], version: int) -> None:
    report = update(site, syncs, version)
    assert report.is_complete, report
    assert site.gap(scale(version)) < 1e-4 and site.client.weight_version == str(version)


def close_all(syncs: Sequence[WeightSync]) -> None:
    for sync in syncs:
        sync.transport.close()


def test_two_versions_and_a_killed_sender_between_them(site: SyncedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, version 1, a sync whose sender fails halfway, and version 3."""
    syncs = syncs_of(site)
    update_and_check(site, syncs, 1)
    with monkeypatch.context() as patch:
        break_sender(patch, 2)
        report = update(site, syncs, 2)
    assert report.failures[0] == "trainer rank 2: RuntimeError: a made-up failure"
    assert syncs[0].serving == () and report.seconds < 60  # the deadline is 120 s
    update_and_check(site, syncs, 3)
    close_all(syncs)


def test_sync_through_a_directory(site: SyncedServer, tmp_path: Path) -> None:
    plan = site.world.plan
    syncs = syncs_of(
        site,
        lambda handles, ranks: DiskTransport(plan, handles, tmp_path, exporter(site, ranks.rank), ranks),
    )
    for version in (4, 5):
        update_and_check(site, syncs, version)
    assert len(list(tmp_path.iterdir())) == 1


def exporter(site: SyncedServer, rank: int) -> Callable[[Path, Tensors], None]:
    def export(directory: Path, sources: Tensors) -> None:
        if rank:
            return
        version = next(v for v in range(10) if torch.equal(site.sources(scale(v))[0][FIRST], sources[FIRST]))
        with atomic_directory(directory) as temporary:
            shutil.copy(site.directory / "config.json", temporary)
            tensors = weights_of(site.directory, scale(version))
            save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})

    return export


FIRST = "0.embedding.word_embeddings.weight"


@pytest.mark.long
def test_a_killed_server_and_its_successor(filled_server, tiny_model_untied: Path) -> None:
    """The death is noticed in seconds; the successor gets a new group and the whole version."""
    site = make_site(filled_server, tiny_model_untied, 1)
    syncs = syncs_of(site)
    update_and_check(site, syncs, 1)
    real = P2PTransport._send

    def kill_and_send(self, *arguments) -> None:
        if self.rank == 0:
            site.server.kill()
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PTransport, "_send", kill_and_send)
        report = update(site, syncs, 2)
    assert not report.is_complete and report.seconds < 60

    successor = make_site(filled_server, tiny_model_untied, 1)
    syncs[0].handles.controls[0] = successor.client
    update_and_check(successor, syncs, 2)
    close_all(syncs)
