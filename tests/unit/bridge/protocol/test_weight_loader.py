"""The loader inside the engine: commands through an arena, tied weights once, nothing that could end its process."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from megatron_dapo.bridge.protocol import weight_loader
from megatron_dapo.bridge.protocol.arena import Arena, create_arena, remove_arena
from megatron_dapo.bridge.protocol.messages import Bucket, Chunk, Command, Manifest, ParameterManifest, Reply
from megatron_dapo.reshard.checksum import tensor_checksum
from megatron_dapo.reshard.slices import Slice


class TiedModel(torch.nn.Module):
    """An embedding that is the head as well, and a buffer that is no parameter."""

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
PARTS = (Chunk("embed_tokens.weight", Slice((0, 0), (6, 4)), 0),)


def _send(model: TiedModel, arena: Arena, *commands: Command, number: int = 0, writers: int = 1) -> Reply:
    """One message; the report on it."""
    channel = {"kind": "arena", "arena": arena.spec.to_json(), "number": number, "writers": writers, "wait_s": 0.1}
    arena.clear_reply()
    counts = [command.bucket.index + 1 for command in commands if command.bucket is not None]
    if counts:
        arena.progress.count_written(0, max(counts))
    texts = [replace(command, channel=channel).encode() for command in commands]
    weight_loader.load(model, [(text, torch.empty(0)) for text in texts])
    return Reply.decode(arena.read_reply())


def test_a_delivery_through_an_arena(model, arena):
    address = model.embed_tokens.weight.data_ptr()
    values = torch.arange(28.0)
    arena.slots[0][:112] = values.view(torch.uint8)
    chunks = (PARTS[0], Chunk("norm.weight", Slice((0, 0), (1, 4)), 64 + 64))
    assert _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST)).ok
    refused = _send(model, arena, Command("2", "bucket", "d", bucket=Bucket(0, 112, chunks)))
    assert not refused.ok and "bytes [128, 144) of a bucket of 112" in refused.message

    assert arena.progress.is_stopped  # whoever writes need not go on

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


def _whole(delivery: str, version: int) -> list[Command]:
    """All commands of a delivery of two buckets."""
    norm = (Chunk("norm.weight", Slice((0, 0), (1, 4)), 0),)
    return [
        Command(
            f"{delivery}/begin", "begin", delivery, manifest=Manifest(delivery, "s", version, 2, MANIFEST.parameters)
        ),
        Command(f"{delivery}/0", "bucket", delivery, bucket=Bucket(0, 96, PARTS)),
        Command(f"{delivery}/1", "bucket", delivery, bucket=Bucket(1, 16, norm)),
        Command(f"{delivery}/finish", "finish", delivery),
    ]


def test_a_whole_delivery_in_one_message(model, arena):
    arena.slots[0][:96] = torch.arange(24.0).view(torch.uint8)
    arena.slots[1][:16] = torch.full((4,), 2.5).view(torch.uint8)
    report = _send(model, arena, *_whole("d", 4))
    assert report.ok and (report.id, report.op, report.num_bytes, report.version) == ("d/finish", "finish", 112, 4)
    assert report.checksums == {name: tensor_checksum(p) for name, p in model.named_parameters()}
    assert torch.equal(model.lm_head.weight, torch.arange(24.0).view(6, 4)) and bool((model.norm.weight == 2.5).all())
    assert arena.progress.num_loaded == 2 and not arena.progress.is_stopped


def test_a_message_that_arrives_twice_changes_nothing(model, arena):
    """Its slots hold bytes of later buckets by then."""
    assert _send(model, arena, *_whole("d", 4)).ok
    before = model.embed_tokens.weight.clone()
    arena.slots.fill_(9)
    again = _send(model, arena, *_whole("d", 4))
    assert not again.ok and again.id == "d/begin" and "begun already" in again.message
    assert torch.equal(model.embed_tokens.weight, before)


def test_nothing_is_carried_out_behind_a_failure(model, arena):
    begin, first, second, finish = _whole("d", 4)
    before = model.norm.weight.clone()
    report = _send(model, arena, begin, second, first, finish)
    assert not report.ok and report.id == "d/1" and "expected bucket 0" in report.message
    assert report.num_bytes == 0 and torch.equal(model.norm.weight, before)
    assert arena.progress.num_loaded == 0 and arena.progress.is_stopped


def test_a_message_that_cannot_be_read_ends_the_waiting_of_those_who_write(model, arena, caplog):
    assert _send(model, arena, _whole("d", 4)[0]).ok
    with caplog.at_level(logging.ERROR):
        weight_loader.load(model, [("{", torch.empty(0))])
    assert "no command" in caplog.text and arena.progress.is_stopped


def test_bytes_that_never_come_are_waited_for_in_vain_and_not_taken(model, arena):
    """A command may come before its bytes. Neither silence, nor a trainer that gave up, nor a slot that belongs to
    another delivery already may be taken for them."""
    assert _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST), writers=2).ok
    channel = {"kind": "arena", "arena": arena.spec.to_json(), "number": 0, "writers": 2, "wait_s": 0.1}
    command = Command("2", "bucket", "d", bucket=Bucket(0, 96, PARTS), channel=channel)
    before = model.embed_tokens.weight.clone()
    arena.progress.count_written(0, 1)  # one of two

    def message() -> str:
        weight_loader.load(model, [(command.encode(), torch.empty(0))])
        report = Reply.decode(arena.read_reply())
        assert not report.ok and report.num_bytes == 0
        return report.message

    assert "longer than 0.1 s" in message()
    arena.progress.stop()
    assert "abandoned the weight sync" in message()
    arena.progress.start(7)
    arena.progress.count_written(0, 1)
    arena.progress.count_written(1, 1)
    assert "abandoned the weight sync" in message()
    assert torch.equal(model.embed_tokens.weight, before)


def test_an_arena_is_mapped_until_another_one_is_named(model, arena, tmp_path, caplog):
    assert _send(model, arena, Command("1", "checksums", "d")).ok
    remove_arena(arena.spec)
    assert _send(model, arena, Command("2", "checksums", "e")).ok  # the next delivery, by the same memory
    late = arena
    successor = Arena(create_arena(tmp_path, "y", 128))
    assert _send(model, successor, Command("3", "checksums", "f")).ok
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="no reply"):
        _send(model, late, Command("4", "checksums", "d"))
    remove_arena(successor.spec)
    assert _send(model, successor, Command("5", "checksums", "g")).ok


def test_a_late_message_does_not_stop_the_delivery_that_is_under_way(model, arena, tmp_path):
    remove_arena(arena.spec)
    current = Arena(create_arena(tmp_path, "y", 128))
    current.progress.start(8)
    assert _send(model, current, _whole("e", 4)[0], number=8).ok
    with pytest.raises(ValueError, match="no reply"):
        _send(model, arena, _whole("d", 4)[0], number=7)
    assert not current.progress.is_stopped
    assert _send(model, current, *_whole("e", 4)[1:], number=8).ok


def test_noise_and_checksums(model, arena):
    before = _send(model, arena, Command("1", "checksums", "d")).checksums
    assert _send(model, arena, Command("2", "randomize", seed=1)).ok
    after = _send(model, arena, Command("3", "checksums", "f")).checksums
    assert set(before) == {"embed_tokens.weight", "norm.weight"} and all(before[n] != after[n] for n in before)


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
def test_what_cannot_be_answered_is_logged_and_not_raised(text, model, caplog):
    with caplog.at_level(logging.ERROR):
        weight_loader.load(model, [(text, torch.empty(0))])
    assert "could not be answered" in caplog.text


def test_commands_of_two_deliveries_are_no_message(model, arena, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="no reply"):
        _send(model, arena, _whole("d", 4)[0], _whole("e", 4)[1])
    assert "do not belong to one weight sync" in caplog.text


def test_a_vanished_arena_is_logged_and_not_raised(model, arena, caplog):
    remove_arena(arena.spec)
    with caplog.at_level(logging.ERROR):
        with pytest.raises(ValueError, match="no reply"):
            _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST))
    assert "No such file" in caplog.text
