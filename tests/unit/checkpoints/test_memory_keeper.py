"""Keepers of copies in memory: whole or not found, bounded, freed in time, closed to strangers, gone without a trace."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.checkpoints import memory_keeper
from megatron_dapo.checkpoints.memory_copies import (
    NODE,
    PEER,
    STORAGE,
    KeeperClient,
    KeeperSettings,
    MemoryCopies,
    keep_copies,
)
from megatron_dapo.checkpoints.memory_keeper import CopyId, CopyStore, RemoteKeeper
from megatron_dapo.files.durable import FileEntry
from megatron_dapo.files.process import FileProcess

pytestmark = pytest.mark.skipif(not FileProcess.IS_POSSIBLE, reason="needs Linux's O_TMPFILE")

TOKEN = "token of the run"


def entry_of(content: bytes, name: str = "policy_00000.safetensors", keepers: tuple[str, ...] = ()) -> FileEntry:
    # Keepers do not look into files: what a rank reads it verifies itself.
    return FileEntry(name, len(content), f"{hash(content) & 0xFFFFFFFF:064x}", "pieces", keepers)


class Node:
    """A node of a run, with a keeper in a process of its own and one rank."""

    def __init__(self, keep_s: float = 30.0, limit_bytes: int = 0, token: str = TOKEN) -> None:
        self.settings = KeeperSettings(f"test-{secrets.token_hex(8)}", "127.0.0.1", keep_s, limit_bytes)
        self.copies = MemoryCopies(self.settings, token)
        self.pid = int(KeeperClient(self.settings.name).ask("state")[0]["pid"])

    def save(self, step: int, content: bytes, name: str = "policy_00000.safetensors") -> tuple[FileEntry, str]:
        """Copy a file as the file process of a rank does; return its entry and the problem."""
        targets = self.copies.targets
        assert targets is not None
        entry = entry_of(content, name, tuple(targets.keepers))
        return entry, keep_copies(targets, step, [(entry, memoryview(content))])

    def read(self, step: int, entry: FileEntry) -> bytes | None:
        path = self.copies.path(step, entry)
        content = None if path is None else path.read_bytes()
        self.copies.release()
        return content

    def num_bytes(self) -> int:
        client = KeeperClient(self.settings.name)
        try:
            return int(client.ask("state")[0]["num_bytes"])
        finally:
            client.close()

    def wait_for_the_end(self, seconds: float = 10.0) -> float:
        start = time.monotonic()
        while Path(f"/proc/{self.pid}").exists():
            assert time.monotonic() - start < seconds
            time.sleep(0.02)
        return time.monotonic() - start

    def close(self) -> None:
        self.copies.end()
        self.copies.close()
        self.wait_for_the_end()


@pytest.fixture
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes, each the other's peer."""
    nodes = Node(), Node()
    for own, other in (nodes, nodes[::-1]):
        own.copies.use_peer(other.copies.address)
    yield nodes
    for node in nodes:
        node.close()


def test_a_file_is_read_on_its_node_and_from_the_peer(two_nodes: tuple[Node, Node]) -> None:
    own, peer = two_nodes
    content = os.urandom((3 << 20) + 17)
    entry, problem = own.save(4, content)
    assert problem == "" and entry.keepers == (own.copies.address, peer.copies.address)
    own.copies.begin_load()
    assert own.read(4, entry) == content and own.copies.loaded == {
        NODE: {entry.name: entry.size},
        PEER: {},
        STORAGE: {},
    }
    assert peer.read(4, entry) == content
    # The node is lost; another one takes its place and asks the peer.
    os.kill(own.pid, signal.SIGKILL)
    own.wait_for_the_end()
    spare = Node()
    spare.copies.begin_load()
    start = time.monotonic()
    assert spare.read(4, entry) == content and time.monotonic() - start < 5.0
    assert spare.copies.loaded[PEER] == {entry.name: entry.size}
    assert spare.num_bytes() == len(content), "it has the copy for the next failure"
    spare.close()


def test_a_copy_is_found_by_step_name_size_and_hash_alone(two_nodes: tuple[Node, Node]) -> None:
    own, _ = two_nodes
    entry, _ = own.save(4, b"content")
    wrong = [
        (5, entry),
        (4, FileEntry("policy_00001.safetensors", entry.size, entry.sha256, "", entry.keepers)),
        (4, FileEntry(entry.name, entry.size, "0" * 64, "", entry.keepers)),
        (4, FileEntry(entry.name, entry.size + 1, entry.sha256, "", entry.keepers)),
    ]
    own.copies.begin_load()
    for step, other in wrong:
        assert own.read(step, other) is None
    assert own.read(4, entry) == b"content" and own.read(4, FileEntry("run.json", 2, "")) is None
    assert set(own.copies.loaded[STORAGE]) == {"run.json", "policy_00000.safetensors", "policy_00001.safetensors"}


def test_what_is_committed_frees_all_other_steps_and_an_empty_file_is_one(two_nodes: tuple[Node, Node]) -> None:
    own, peer = two_nodes
    old, _ = own.save(1, b"old")
    new, _ = own.save(2, b"newer")
    empty, problem = own.save(2, b"", "empty.safetensors")
    assert problem == "" and own.num_bytes() == peer.num_bytes() == 8, "until the new one is in place both are there"
    for node in two_nodes:
        node.copies.committed(2)
    for node in two_nodes:
        assert (node.num_bytes(), node.read(1, old), node.read(2, new)) == (5, None, b"newer")
        assert node.read(2, empty) == b""


def test_a_step_that_is_saved_again_replaces_what_an_attempt_before_has_left(two_nodes: tuple[Node, Node]) -> None:
    own, _ = two_nodes
    before, _ = own.save(3, b"of an attempt that died")
    after, _ = own.save(3, b"again")
    assert own.read(3, before) is None and own.read(3, after) == b"again" and own.num_bytes() == 5


def test_half_a_copy_is_never_found_and_is_freed_with_its_writer() -> None:
    node = Node()
    entry = entry_of(b"half")
    client = KeeperClient(node.settings.name)
    copy = CopyId(1, entry.name, entry.size, entry.sha256)
    _, descriptor = client.ask("create", **copy.__dict__)
    os.pwrite(descriptor, b"ha", 0)
    assert node.num_bytes() == 4 and node.read(1, FileEntry(entry.name, 4, entry.sha256, "", ("127.0.0.1:9",))) is None
    os.close(descriptor)
    client.close()
    end = time.monotonic() + 5.0
    while node.num_bytes():
        assert time.monotonic() < end
    # The same over TCP: the connection breaks in the middle.
    with RemoteKeeper(node.copies.address, TOKEN) as remote:
        remote.ask("put", copy)
        remote.socket.sendall(b"ha")
    while node.num_bytes():
        assert time.monotonic() < end
    assert node.read(1, FileEntry(entry.name, 4, entry.sha256, "", ("127.0.0.1:9",))) is None
    node.close()


def test_memory_is_bounded_and_the_rest_is_on_storage_alone(caplog: pytest.LogCaptureFixture) -> None:
    node, peer = Node(limit_bytes=10), Node()
    node.copies.use_peer(peer.copies.address)
    first, problem = node.save(1, b"12345678")
    assert problem == ""
    second, problem = node.save(2, b"12345678")
    assert "of this node: a copy of 0 MiB is beyond the limit" in problem
    assert node.num_bytes() == 8 and node.read(1, first) == b"12345678"
    assert peer.num_bytes() == 16, "the peer has room"
    assert node.read(2, second) is None, "no room to fetch it either, and no error"
    for _ in range(3):
        node.copies.warn(problem)
    assert len(caplog.records) == 1
    peer.close()
    node.close()


def test_a_full_shared_memory_is_an_error_and_frees_what_was_taken(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    script = (
        "import subprocess, sys; from megatron_dapo.checkpoints.memory_keeper import CopyId, CopyStore\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', sys.argv[1]], check=True)\n"
        "store = CopyStore(0, sys.argv[1]); small = CopyId(1, 'a', 32 << 10, '')\n"
        "store.create(small); store.complete(small)\n"
        "try: store.create(CopyId(1, 'b', 64 << 10, ''))\n"
        "except OSError as error: print(error.errno, error.strerror, store.num_bytes)\n"
        "store.keep_only(2); store.create(CopyId(1, 'b', 64 << 10, '')); print(store.num_bytes)"
    )
    command = ["unshare", "-m", sys.executable, "-c", script, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [f"{errno.ENOSPC} {tmp_path} has no room for a copy of 0 MiB 32768", "65536"]


def test_a_peer_that_is_lost_costs_a_warning_and_little_time() -> None:
    node = Node()
    with socket.socket() as silent:  # accepts and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        lost = f"127.0.0.1:{silent.getsockname()[1]}"
        node.copies.use_peer(lost)
        silent.settimeout(5.0)
        threading.Thread(target=lambda: silent.accept()[0].close(), daemon=True).start()
        entry, problem = node.save(1, b"content")
    assert f"of the peer {lost}" in problem and "of this node" not in problem
    assert node.read(1, entry) == b"content"
    node.close()


def test_the_keeper_ends_its_time_to_live_after_the_last_rank() -> None:
    node = Node(keep_s=1.0)
    node.copies.use_peer("")
    node.save(1, b"content")
    time.sleep(1.5)
    assert node.num_bytes() == 7, "a rank is there"
    another = MemoryCopies(node.settings, TOKEN)
    node.copies.close()
    time.sleep(1.5)
    assert node.num_bytes() == 7, "another attempt has come"
    another.close()
    assert 0.5 < node.wait_for_the_end() < 5.0


def test_the_keeper_outlives_the_process_that_started_it_and_all_its_session() -> None:
    name = f"test-{secrets.token_hex(8)}"
    script = (
        "import sys; from megatron_dapo.checkpoints.memory_copies import *\n"
        f"MemoryCopies(KeeperSettings({name!r}, '127.0.0.1', 20.0, 0), 't')\n"
        "import os, signal; os.killpg(0, signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], start_new_session=True, check=False)
    copies = MemoryCopies(KeeperSettings(name, "127.0.0.1", 20.0, 0), "t")
    assert copies.address
    copies.end()
    copies.close()


def test_strangers_get_and_put_nothing_over_tcp() -> None:
    node = Node()
    node.copies.use_peer("")
    entry, _ = node.save(1, b"content")
    copy = CopyId(1, entry.name, entry.size, entry.sha256)
    for operation in ("get", "put"):
        with RemoteKeeper(node.copies.address, "another token") as remote, pytest.raises(ConnectionError):
            remote.ask(operation, copy)
    with socket.create_connection(node.copies.address.split(":")) as raw:
        raw.settimeout(5.0)
        received = b""
        # The keeper may close the connection before it has read everything.
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"x" * (1 << 20))
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(1 << 16):
                received += part
        assert len(received) == 33, "a nonce and no answer"
    assert node.num_bytes() == 7 and node.read(1, entry) == b"content"
    node.close()


def test_a_bad_request_is_an_error_and_ends_nothing() -> None:
    node = Node()
    client = KeeperClient(node.settings.name)
    for request in ({"do": "explode"}, {"do": "create"}, {"do": "find", "step": "x"}, {"do": "complete", "step": 1}):
        operation = request.pop("do")
        with pytest.raises(OSError, match="bad request"):
            client.ask(operation, **request)
    with pytest.raises(OSError, match="beyond the limit"):
        client.ask("create", step=1, name="a", size=-1, sha256="")
    assert client.ask("state")[0]["num_bytes"] == 0
    client.close()
    node.close()


def test_a_run_without_a_keeper_reads_storage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_dapo.checkpoints.memory_copies._CONNECT_S", 0.2)
    monkeypatch.setattr(KeeperSettings, "start", lambda self: None)
    copies = MemoryCopies(KeeperSettings("nobody", "127.0.0.1", 1.0, 0), TOKEN)
    copies.use_peer("127.0.0.1:1")
    copies.begin_load()
    assert copies.targets is None and copies.path(1, entry_of(b"a", keepers=("127.0.0.1:1",))) is None
    copies.committed(1)
    copies.end()
    copies.close()
    assert [record.getMessage() for record in caplog.records if "does not answer" in record.getMessage()]
    assert copies.loaded[STORAGE] == {"policy_00000.safetensors": 1}


def test_a_keeper_imports_the_standard_library_alone_and_is_small() -> None:
    node = Node()
    status = Path(f"/proc/{node.pid}/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert rss < 24 << 10, f"{rss} KiB"
    assert "torch" not in Path(f"/proc/{node.pid}/maps").read_text()
    node.close()


def test_no_name_is_left_in_shared_memory() -> None:
    before = set(os.listdir(memory_keeper.SHARED_MEMORY))
    node = Node()
    node.copies.use_peer("")
    node.save(1, b"content")
    assert set(os.listdir(memory_keeper.SHARED_MEMORY)) <= before
    os.kill(node.pid, signal.SIGKILL)
    node.wait_for_the_end()
    node.copies.close()


def test_the_store_keeps_nothing_open_that_was_replaced() -> None:
    store = CopyStore(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for attempt in range(20):
        copy = CopyId(1, "a", 100, str(attempt))
        store.create(copy)
        if attempt % 2:
            store.complete(copy)
    assert store.num_bytes == 100 and len(os.listdir("/proc/self/fd")) == descriptors + 1
    store.keep_only(2)
    assert len(os.listdir("/proc/self/fd")) == descriptors
