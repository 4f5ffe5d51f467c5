"""Arenas: shared between mappings, private to their owner, removed once their creator is dead."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from megatron_dapo.bridge.protocol.arena import (
    PREFIX,
    REPLY_BYTES,
    Arena,
    create_arena,
    read_reply,
    remove_arena,
    remove_stale,
    write_reply,
)


def test_two_mappings_share_slots_and_reply(tmp_path):
    spec = create_arena(tmp_path, "x", 256)
    writer, reader = Arena(spec), Arena(type(spec).from_json(spec.to_json()))
    remove_arena(spec)
    assert not list(tmp_path.iterdir())
    writer.slots[1][7] = 9
    writer.write_reply('{"id": "é"}')
    assert reader.slots[1].tolist() == [0] * 7 + [9] + [0] * 248
    assert reader.slots[0].sum() == 0
    assert reader.read_reply() == '{"id": "é"}'


def test_a_path_changed_to_another_arena_does_not_open_it(tmp_path):
    """One damaged digit of a command's path names the arena of the neighboring engine rank."""
    own, other = create_arena(tmp_path, "sync-0", 64), create_arena(tmp_path, "sync-1", 64)
    Arena(other).progress.start(7)
    assert Arena(other).progress.key == other.key, "a start resets only the counters"
    with pytest.raises(ValueError, match=f"its key is {other.key}, not {own.key}: it is another engine's"):
        Arena(dataclasses.replace(own, path=other.path))


def test_missing_and_broken_replies_are_refused(tmp_path):
    arena = Arena(create_arena(tmp_path, "x", 64))
    with pytest.raises(ValueError, match="no reply"):
        arena.read_reply()
    arena.write_reply("hello")
    arena.reply[17] += 1
    with pytest.raises(ValueError, match="broken"):
        arena.read_reply()
    arena.write_reply("hello")
    arena.clear_reply()
    with pytest.raises(ValueError, match="no reply"):
        arena.read_reply()


def test_a_reply_that_does_not_fit_is_refused(tmp_path):
    area = torch.zeros(64, dtype=torch.uint8)
    write_reply(area, "x" * 48)
    assert read_reply(area) == "x" * 48
    with pytest.raises(ValueError, match="49 bytes, the reply area has 48"):
        write_reply(area, "x" * 49)


def test_only_its_owner_may_read_and_the_size_must_fit(tmp_path):
    spec = create_arena(tmp_path, "x", 64)
    assert os.stat(spec.path).st_mode & 0o777 == 0o600
    os.chmod(spec.path, 0o644)
    with pytest.raises(ValueError, match="600"):
        Arena(spec)
    os.chmod(spec.path, 0o600)
    os.truncate(spec.path, REPLY_BYTES)
    with pytest.raises(ValueError, match="bytes"):
        Arena(spec)


def test_files_of_dead_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale, foreign = tmp_path / f"{PREFIX}{ended.pid}-a-0", tmp_path / "other"
    stale.touch()
    foreign.touch()
    own = create_arena(tmp_path, "mine", 64)
    assert remove_stale(tmp_path) == [stale]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([os.path.basename(own.path), "other"])


def test_slots_are_pinned_until_the_arena_is_dropped(tmp_path, monkeypatch, caplog):
    """The calls to CUDA and their order, with a stand-in for its runtime."""
    calls = []

    class Runtime:
        code = 0

        def cudaHostRegister(self, *arguments: int) -> int:
            calls.append(("register", *arguments))
            return self.code

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unregister", address))
            return 0

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    spec = create_arena(tmp_path, "pinned", 4096)
    arena = Arena(spec, pinned=True)
    address = arena.slots.data_ptr()
    assert calls == [("register", address, 2 * 4096, 0)]
    del arena
    assert calls[1:] == [("unregister", address)]
    runtime.code = 2
    arena = Arena(spec, pinned=True)
    assert "cudaHostRegister failed with code 2" in caplog.text
    arena.slots.fill_(1)  # usable all the same
    del arena
    assert len(calls) == 3
    # Slots on a GPU: nothing to pin.
    Arena(create_arena(tmp_path, "empty", 0), pinned=True)
    assert len(calls) == 3
