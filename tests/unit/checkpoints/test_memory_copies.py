"""Checkpoints that are loaded from memory: file by file, newest first, with storage for whatever is missing or wrong."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.checkpoints.memory_copies import NODE, STORAGE, KeeperSettings, MemoryCopies, peers_of
from megatron_dapo.checkpoints.save import BackgroundSaves
from megatron_dapo.checkpoints.store import Checkpoint, CheckpointError, CheckpointStore, newest_valid
from megatron_dapo.files.process import FileProcess
from tests.unit.checkpoints.test_save import Run, require_state_of

pytestmark = pytest.mark.skipif(not FileProcess.IS_POSSIBLE, reason="needs Linux's O_TMPFILE")


class RunWithCopies(Run):
    """A rank that saves to a directory and to a keeper, and loads like the next attempt."""

    def __init__(self, directory: Path, files: FileProcess) -> None:
        super().__init__(CheckpointStore(directory, keep=2, files=files))
        self.settings = KeeperSettings(f"test-{secrets.token_hex(8)}", "127.0.0.1", 30.0, 0)
        self.store.copies = self.copies = MemoryCopies(self.settings, "token")
        self.copies.use_peer("")

    def load(self, step: int) -> None:
        """Require that the checkpoint of `step` is loaded."""
        loaded: list[Checkpoint] = []

        def load(checkpoint: Checkpoint) -> None:
            require_state_of(checkpoint, checkpoint.step)
            loaded.append(checkpoint)

        assert newest_valid(self.store, load) is loaded[-1] and loaded[-1].step == step

    def damage_memory(self, step: int, position: int) -> None:
        checkpoint = self.store.open(step, with_copies=True)
        descriptor = os.open(checkpoint.find_copy("rank_0.safetensors"), os.O_RDWR)
        byte = os.pread(descriptor, 1, position)
        os.pwrite(descriptor, bytes([byte[0] ^ 0x40]), position)
        os.close(descriptor)
        self.copies.release()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWithCopies]:
    files = FileProcess()
    found = RunWithCopies(tmp_path, files)
    yield found
    found.copies.end()
    found.copies.close()
    files.close()


def test_the_newest_checkpoint_is_read_in_memory_and_the_one_before_in_storage(run: RunWithCopies) -> None:
    for step in (1, 2):
        run.save(step)
    run.load(2)
    size = run.store.open(2).files["rank_0.safetensors"].size
    assert run.copies.loaded == {NODE: {"rank_0.safetensors": size}, "peer": {}, STORAGE: {}}
    (run.store.path(2) / "manifest.json").unlink()
    run.load(1)
    assert run.copies.loaded[NODE] == {} and list(run.copies.loaded[STORAGE]) == ["rank_0.safetensors"]


def test_the_next_attempt_finds_what_the_one_before_saved(run: RunWithCopies, tmp_path: Path) -> None:
    run.save(3)
    run.copies.close()
    run.store.copies = run.copies = MemoryCopies(run.settings, "token")
    run.load(3)
    assert list(run.copies.loaded[NODE]) == ["rank_0.safetensors"]


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_file_that_storage_has_lost_is_read_in_memory(run: RunWithCopies, how: str) -> None:
    run.save(1)
    file = run.store.path(1) / "rank_0.safetensors"
    if how == "missing":
        file.unlink()
    else:
        os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=r"rank_0.safetensors (is missing|has 100 bytes)"):
        run.store.open(1)
    run.load(1)
    assert list(run.copies.loaded[NODE]) == ["rank_0.safetensors"]


@pytest.mark.parametrize("position", [0, 3, 20, -1])
def test_wrong_bytes_in_memory_are_noticed_and_storage_is_read(
    run: RunWithCopies, caplog: pytest.LogCaptureFixture, position: int
) -> None:
    run.save(1)
    size = run.store.open(1).files["rank_0.safetensors"].size
    run.damage_memory(1, position % size)
    run.load(1)
    assert run.copies.loaded[NODE] == {} and list(run.copies.loaded[STORAGE]) == ["rank_0.safetensors"]
    assert sum("reading storage" in record.getMessage() for record in caplog.records) == 1


def test_what_is_wrong_in_memory_and_in_storage_is_not_loaded(run: RunWithCopies) -> None:
    for step in (1, 2):
        run.save(step)
    run.damage_memory(2, 200)
    file = run.store.path(2) / "rank_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    run.load(1)


def test_a_checkpoint_that_was_not_committed_is_not_loaded_from_memory(run: RunWithCopies) -> None:
    """Its copies are whole, and no manifest names them."""
    run.save(1)
    store = CheckpointStore(run.store.directory, keep=2, files=run.store.files)
    store.num_ranks = 2  # the other one never writes its part
    store.copies = run.copies
    run.saves = BackgroundSaves(store)
    run.start(2)
    part = run.saves._save.part  # the only witness: nothing else ends
    assert part is not None and part.result() == ""
    assert (store.partial_path(2) / "manifest_rank_0.json").is_file()
    run.load(1)
    run.store.files.cancel(run.saves._save.commit)


def test_a_keeper_that_dies_costs_its_copies_alone(run: RunWithCopies) -> None:
    run.save(1)
    run.copies.end()
    run.save(2)
    run.load(2)
    assert list(run.copies.loaded[STORAGE]) == ["rank_0.safetensors"]


def test_a_keeper_in_a_manifest_is_host_and_port(run: RunWithCopies) -> None:
    run.save(1)
    assert list(run.store.open(1).files["rank_0.safetensors"].keepers) == [run.copies.address]
    assert run.store.open(1).files["rank_0.json"].keepers == ()


def test_peers_are_a_permutation_without_fixed_points_that_avoids_shared_replicas() -> None:
    """Random placements of replicas on nodes: every node keeps for one other, and no other distance would share less."""
    draw = random.Random(5)
    assert peers_of([]) == [] and peers_of([frozenset("a")]) == [0]
    for _ in range(300):
        count = draw.randint(2, 24)
        size = draw.choice([1, 2, 3, count])  # nodes of a replica; or several replicas on a node
        replicas = [frozenset({f"policy {node // size}"}) for node in range(count)]
        if draw.random() < 0.3:
            replicas = [frozenset(f"policy {draw.randint(0, 5)}" for _ in range(3)) for _ in range(count)]
        peers = peers_of(replicas)
        assert sorted(peers) == list(range(count)) and all(node != peer for node, peer in enumerate(peers))
        shared = sum(not replicas[node].isdisjoint(replicas[peer]) for node, peer in enumerate(peers))
        for distance in range(1, count):
            others = [(node + distance) % count for node in range(count)]
            assert shared <= sum(not replicas[a].isdisjoint(replicas[b]) for a, b in enumerate(others))
        assert peers == peers_of(replicas)


def test_with_two_replicas_of_whole_nodes_no_peer_shares_one() -> None:
    for nodes_of_replica in (1, 2, 4, 8):
        for num_replicas in (2, 3, 4):
            replicas = [frozenset({f"policy {n // nodes_of_replica}"}) for n in range(nodes_of_replica * num_replicas)]
            assert all(replicas[node].isdisjoint(replicas[peer]) for node, peer in enumerate(peers_of(replicas)))
