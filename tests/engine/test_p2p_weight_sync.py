"""Weight syncs by point-to-point and by disk into the real server, which then serves what transformers computes.

Trainer ranks are threads of this process; the engine's ranks are the server's own.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sync_simulation import Rendezvous, ThreadCoordination, World, break_sender, run_ranks
from transformers import AutoModelForCausalLM

from megatron_dapo.bridge.transports.disk import DiskTransport
from megatron_dapo.bridge.transports.p2p import P2PTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, SyncTimeouts, Transport, WeightSync
from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

PROMPT = [5, 6, 7, 200, 9, 31]
TIMEOUTS = SyncTimeouts(120, 120, 120, 120, 120, 120, 60)
Tensors = dict[str, torch.Tensor]


@dataclass
class Site:
    """A server and the trainer's ranks."""

    server: SglangServer
    client: SglangClient
    world: World
    model_directory: Path

    def model(self, version: int) -> Tensors:
        """The whole model at a version."""
        reference = AutoModelForCausalLM.from_pretrained(self.model_directory, dtype=torch.float32)
        return {n: t.detach() * (1 + 0.1 * version) for n, t in reference.named_parameters()}

    def weights(self, version: int) -> list[Tensors]:
        model = self.model(version)
        return [self.world.shards(model, rank) for rank in range(self.world.size)]

    def check_served(self, version: int) -> None:
        reference = AutoModelForCausalLM.from_pretrained(self.model_directory, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in self.model(version).items():
                reference.get_parameter(name).copy_(tensor)
            logprobs = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        expected = [float(logprobs[i, token]) for i, token in enumerate(PROMPT[1:])]
        served = self.client.prompt_logprobs(PROMPT)
        assert served == pytest.approx(expected, abs=1e-4)
        assert self.client.weight_version == str(version)

    def updates(self, transport_of: Callable[[EngineHandles, ThreadCoordination], Transport]) -> list[WeightSync]:
        """Return one WeightSync a trainer rank, of a newly started trainer."""
        rendezvous, session = Rendezvous(self.world.size), secrets.token_hex(8)
        result = []
        for rank in range(self.world.size):
            handles = EngineHandles([0], {0: self.client} if rank == 0 else {})
            coordination = ThreadCoordination(rendezvous, rank)
            transport = transport_of(handles, coordination)
            result.append(WeightSync(self.world.plan, handles, transport, coordination, TIMEOUTS, session))
        return result

    def by_peers(self) -> list[WeightSync]:
        return self.updates(lambda handles, coordination: P2PTransport(self.world.plan, handles, coordination))


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2], ids=["tp1", "tp2"])
def site(request, filled_server, tiny_model_untied: Path) -> Site:
    return make_site(filled_server(tiny_model_untied, request.param), tiny_model_untied, request.param)


def make_site(server: SglangServer, directory: Path, tensor_parallel: int) -> Site:
    assert server.info is not None
    client = SglangClient(server.url, read_key(server.key_file), api_version=server.info.api_version)
    layout = ParallelLayout(4, tensor=2, pipeline=2)
    architecture = read_architecture(directory)
    world = World(architecture, layout, tensor_parallel=tensor_parallel, bucket_bytes=100_000)
    return Site(server, client, world, directory)


def update_all(syncs: Sequence[WeightSync], version: int, weights: Sequence[Tensors]) -> list:
    return run_ranks(len(syncs), lambda rank: syncs[rank].update(version, weights[rank]), 300)


def close_all(syncs: Sequence[WeightSync]) -> None:
    for update in syncs:
        update.transport.close()


def test_two_versions_and_a_killed_sender_between_them(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, version 1, a sync whose sender fails halfway, and version 3."""
    syncs = site.by_peers()
    reports = update_all(syncs, 1, site.weights(1))
    assert all(report.is_complete for report in reports), reports
    site.check_served(1)

    with monkeypatch.context() as patch:
        break_sender(patch, 2)
        reports = update_all(syncs, 2, site.weights(2))
    assert not any(report.is_complete for report in reports)
    assert reports[0].failures[0] == "trainer rank 2: RuntimeError: a made-up failure"
    assert syncs[0].serving == () and reports[0].seconds < 60  # the deadline is 120 s

    reports = update_all(syncs, 3, site.weights(3))
    assert all(report.is_complete for report in reports), reports
    site.check_served(3)
    close_all(syncs)


def test_sync_through_a_directory(site: Site, tmp_path: Path) -> None:
    syncs = site.updates(
        lambda handles, coordination: DiskTransport(
            site.world.plan, handles, tmp_path, exporter(site, coordination.rank), coordination
        )
    )
    for version in (4, 5):
        reports = update_all(syncs, version, site.weights(version))
        assert all(report.is_complete for report in reports), reports
        site.check_served(version)
    assert len(list(tmp_path.iterdir())) == 1


def exporter(site: Site, rank: int) -> Callable[[Path, Tensors], None]:
    def export(directory: Path, sources: Tensors) -> None:
        if rank:
            return
        version = next(v for v in range(10) if torch.equal(site.weights(v)[0][FIRST], sources[FIRST]))
        with atomic_directory(directory) as temporary:
            shutil.copy(site.model_directory / "config.json", temporary)
            tensors = {name: tensor.contiguous() for name, tensor in site.model(version).items()}
            save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})

    return export


FIRST = "0.embedding.word_embeddings.weight"


@pytest.mark.long
def test_a_killed_server_and_its_successor(filled_server, tiny_model_untied: Path) -> None:
    """The death is noticed in seconds; the successor gets a group of its own and the whole version."""
    site = make_site(filled_server(tiny_model_untied), tiny_model_untied, 1)
    syncs = site.by_peers()
    assert all(report.is_complete for report in update_all(syncs, 1, site.weights(1)))
    real = P2PTransport._send

    def kill_and_send(self, *arguments) -> None:
        if self.rank == 0:
            site.server.kill()
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PTransport, "_send", kill_and_send)
        reports = update_all(syncs, 2, site.weights(2))
    assert not any(report.is_complete for report in reports)
    assert reports[0].seconds < 60

    server = filled_server(tiny_model_untied)
    successor = replace(site, server=server, client=make_site(server, tiny_model_untied, 1).client)
    syncs[0].handles.controls[0] = successor.client
    reports = update_all(syncs, 2, successor.weights(2))
    assert all(report.is_complete for report in reports), reports
    successor.check_served(2)
    close_all(syncs)
