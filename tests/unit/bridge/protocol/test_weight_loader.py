"""The loader inside the engine: commands through an arena, tied weights written once, no failure ends the process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.bridge.protocol import weight_loader
from megatron_dapo.bridge.protocol.arena import PREFIX, Arena, create_arena, remove_arena
from megatron_dapo.bridge.protocol.messages import Bucket, Chunk, Command, CommandReply, Manifest, ParameterManifest
from megatron_dapo.reshard.checksum import tensor_checksum
from megatron_dapo.reshard.slices import Slice


class TiedModel(torch.nn.Module):
    """A model whose embedding is also its head, with a buffer that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.Linear(4, 1, bias=False)
        self.lm_head = self.embed_tokens
        self.register_buffer("rotary", torch.ones(3))


@pytest.fixture
def model() -> TiedModel:
    return TiedModel()


@pytest.fixture
def arena(tmp_path) -> Arena:
    return Arena(create_arena(tmp_path, "x", 128))


MANIFEST = Manifest(
    "d",
    "s",
    4,
    1,
    {
        "embed_tokens.weight": ParameterManifest((6, 4), torch.float32, 24),
        "norm.weight": ParameterManifest((1, 4), torch.float32, 4),
    },
)
CHUNKS = (Chunk("embed_tokens.weight", Slice((0, 0), (6, 4)), 0),)


def _send(model: TiedModel, arena: Arena, *commands: Command, number: int = 0, writers: int = 1) -> CommandReply:
    """Send one message and return the reply."""
    channel = {"kind": "arena", "arena": arena.spec.to_json(), "number": number, "writers": writers, "wait_s": 0.1}
    arena.clear_reply()
    counts = [command.bucket.index + 1 for command in commands if command.bucket is not None]
    if counts:
        arena.progress.count_written(0, max(counts))
    texts = [replace(command, channel=channel).encode() for command in commands]
    weight_loader.load(model, [(text, torch.empty(0)) for text in texts])
    return CommandReply.decode(arena.read_reply())


def test_a_sync_through_an_arena(model, arena):
    address = model.embed_tokens.weight.data_ptr()
    values = torch.arange(28.0)
    arena.slots[0][:112] = values.view(torch.uint8)
    chunks = (CHUNKS[0], Chunk("norm.weight", Slice((0, 0), (1, 4)), 64 + 64))
    assert _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST)).ok
    refused = _send(model, arena, Command("2", "bucket", "d", bucket=Bucket(0, 112, chunks)))
    assert not refused.ok and "bytes [128, 144) of a bucket of 112" in refused.message

    assert arena.progress.is_stopped  # trainer ranks stop writing

    commands = _whole("e", 4)
    arena.progress.start(1)
    assert _send(model, arena, commands[0], number=1).ok
    remove_arena(arena.spec)  # mapped: the file is no longer needed
    assert _send(model, arena, commands[1], number=1).num_bytes == 96
    arena.slots[1][:16] = torch.full((4,), 2.5).view(torch.uint8)
    assert _send(model, arena, commands[2], number=1).ok
    end = _send(model, arena, commands[3], number=1)
    assert end.ok and end.version == 4
    assert end.checksums == {name: tensor_checksum(p) for name, p in model.named_parameters()}
    assert torch.equal(model.lm_head.weight, values[:24].view(6, 4)) and bool((model.norm.weight == 2.5).all())
    assert model.embed_tokens.weight.data_ptr() == address and model.embed_tokens.weight.requires_grad


def _whole(sync_id: str, version: int) -> list[Command]:
    """All commands of a sync of two buckets."""
    norm = (Chunk("norm.weight", Slice((0, 0), (1, 4)), 0),)
    return [
        Command(f"{sync_id}/begin", "begin", sync_id, manifest=Manifest(sync_id, "s", version, 2, MANIFEST.parameters)),
        Command(f"{sync_id}/0", "bucket", sync_id, bucket=Bucket(0, 96, CHUNKS)),
        Command(f"{sync_id}/1", "bucket", sync_id, bucket=Bucket(1, 16, norm)),
        Command(f"{sync_id}/finish", "finish", sync_id),
    ]


def test_a_whole_sync_in_one_message(model, arena):
    arena.slots[0][:96] = torch.arange(24.0).view(torch.uint8)
    arena.slots[1][:16] = torch.full((4,), 2.5).view(torch.uint8)
    reply = _send(model, arena, *_whole("d", 4))
    assert reply.ok and (reply.id, reply.op, reply.num_bytes, reply.version) == ("d/finish", "finish", 112, 4)
    assert reply.checksums == {name: tensor_checksum(p) for name, p in model.named_parameters()}
    assert torch.equal(model.lm_head.weight, torch.arange(24.0).view(6, 4)) and bool((model.norm.weight == 2.5).all())
    assert arena.progress.num_loaded == 2 and not arena.progress.is_stopped


def test_what_an_engine_derives_from_its_weights_is_derived_again(model, arena):
    """In place: CUDA graphs read the memory that they were captured with."""
    copy = model.norm.weight.detach().clone()  # as GLM's routers in SGLang keep one
    model.norm.register_buffer("_weight_fp32", copy, persistent=False)
    calls = []
    model.post_load_weights = lambda: calls.append(bool((model.norm.weight == 2.5).all()))
    arena.slots[1][:16] = torch.full((4,), 2.5).view(torch.uint8)
    assert _send(model, arena, *_whole("d", 4)).ok
    assert calls == [True] and model.norm._weight_fp32 is copy and bool((copy == 2.5).all())


def test_a_message_that_arrives_twice_changes_nothing(model, arena):
    """The slots hold bytes of later buckets by the second time."""
    assert _send(model, arena, *_whole("d", 4)).ok
    before = model.embed_tokens.weight.clone()
    arena.slots.fill_(9)
    again = _send(model, arena, *_whole("d", 4))
    assert not again.ok and again.id == "d/begin" and "begun already" in again.message
    assert torch.equal(model.embed_tokens.weight, before)


def test_commands_after_a_failure_are_not_carried_out(model, arena):
    begin, first, second, finish = _whole("d", 4)
    before = model.norm.weight.clone()
    reply = _send(model, arena, begin, second, first, finish)
    assert not reply.ok and reply.id == "d/1" and "expected bucket 0" in reply.message
    assert reply.num_bytes == 0 and torch.equal(model.norm.weight, before)
    assert arena.progress.num_loaded == 0 and arena.progress.is_stopped


def test_an_unreadable_message_ends_the_wait_of_the_writers(model, arena, caplog):
    assert _send(model, arena, _whole("d", 4)[0]).ok
    with caplog.at_level(logging.ERROR):
        weight_loader.load(model, [("{", torch.empty(0))])
    assert "no command" in caplog.text and arena.progress.is_stopped


def test_missing_bytes_fail_the_bucket_in_time(model, arena):
    """A command may come before its bytes. A writer that stays silent, a trainer that gave up, or a slot that already
    belongs to another sync must not pass for them."""
    assert _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST), writers=2).ok
    channel = {"kind": "arena", "arena": arena.spec.to_json(), "number": 0, "writers": 2, "wait_s": 0.1}
    command = Command("2", "bucket", "d", bucket=Bucket(0, 96, CHUNKS), channel=channel)
    before = model.embed_tokens.weight.clone()
    arena.progress.count_written(0, 1)  # one of two

    def message() -> str:
        weight_loader.load(model, [(command.encode(), torch.empty(0))])
        reply = CommandReply.decode(arena.read_reply())
        assert not reply.ok and reply.num_bytes == 0
        return reply.message

    assert "longer than 0.1 s" in message()
    arena.progress.stop()
    assert "abandoned the weight sync" in message()
    arena.progress.start(7)
    arena.progress.count_written(0, 1)
    arena.progress.count_written(1, 1)
    assert "abandoned the weight sync" in message()
    assert torch.equal(model.embed_tokens.weight, before)


def test_an_arena_stays_mapped_until_a_command_names_another(model, arena, tmp_path, caplog):
    assert _send(model, arena, Command("1", "checksums", "d")).ok
    remove_arena(arena.spec)
    assert _send(model, arena, Command("2", "checksums", "e")).ok  # the next sync, through the same memory
    late = arena
    successor = Arena(create_arena(tmp_path, "y", 128))
    assert _send(model, successor, Command("3", "checksums", "f")).ok
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="no reply"):
        _send(model, late, Command("4", "checksums", "d"))
    remove_arena(successor.spec)
    assert _send(model, successor, Command("5", "checksums", "g")).ok


def test_a_late_message_does_not_stop_the_current_sync(model, arena, tmp_path):
    remove_arena(arena.spec)
    current = Arena(create_arena(tmp_path, "y", 128))
    current.progress.start(8)
    assert _send(model, current, _whole("e", 4)[0], number=8).ok
    with pytest.raises(ValueError, match="no reply"):
        _send(model, arena, _whole("d", 4)[0], number=7)
    assert not current.progress.is_stopped
    assert _send(model, current, *_whole("e", 4)[1:], number=8).ok


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "no json",
        Command("1", "begin", "d", channel={"kind": "smoke"}).encode(),
        Command("1", "begin").encode(),
    ],
)
def test_a_message_that_cannot_be_answered_is_logged_and_not_raised(text, model, caplog):
    with caplog.at_level(logging.ERROR):
        weight_loader.load(model, [(text, torch.empty(0))])
    assert "could not be answered" in caplog.text


def test_commands_of_two_syncs_in_one_message_are_refused(model, arena, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="no reply"):
        _send(model, arena, _whole("d", 4)[0], _whole("e", 4)[1])
    assert "do not belong to one weight sync" in caplog.text


def test_a_vanished_arena_is_logged_and_not_raised(model, arena, caplog):
    remove_arena(arena.spec)
    with caplog.at_level(logging.ERROR):
        with pytest.raises(ValueError, match="no reply"):
            _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST))
    assert "No such file" in caplog.text


def test_a_trainer_that_dies_ends_the_wait_for_its_bytes(model: TiedModel, tmp_path: Path) -> None:
    """The server may be kept for the next trainer, which must not wait for the deadline of the dead one's sync."""
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    spec = create_arena(tmp_path, "x", 128)
    theirs = tmp_path / f"{PREFIX}{trainer.pid}-x"
    os.rename(spec.path, theirs)
    arena = Arena(replace(spec, path=str(theirs)))
    channel = {"kind": "arena", "arena": arena.spec.to_json(), "number": 0, "writers": 2, "wait_s": 60.0}
    commands = (
        Command("1", "begin", "d", manifest=MANIFEST, channel=channel),
        Command("2", "bucket", "d", bucket=Bucket(0, 96, CHUNKS), channel=channel),
    )
    arena.progress.count_written(0, 1)  # The other writer has not written.
    named = [(command.encode(), torch.empty(0)) for command in commands]
    loader = threading.Thread(target=weight_loader.load, args=(model, named), daemon=True)
    began = time.monotonic()
    loader.start()
    loader.join(1.5)
    assert loader.is_alive(), "the trainer lives"
    trainer.kill()
    trainer.wait()
    loader.join(10.0)
    assert not loader.is_alive() and time.monotonic() - began < 10.0
    reply = CommandReply.decode(arena.read_reply())
    assert not reply.ok and f"the trainer, process {trainer.pid}, has ended" in reply.message
