"""The loader inside the engine: commands through an arena, tied weights once, nothing that could end its process."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_dapo.engines.sglang import weight_loader
from megatron_dapo.parallel.reshard.arena import Arena, create_arena, remove_arena
from megatron_dapo.parallel.reshard.boxes import Box
from megatron_dapo.parallel.reshard.delivery import Bucket, Command, FilledParameter, Manifest, Part, Report
from megatron_dapo.parallel.reshard.word_checksum import parameter_checksum


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
        "embed_tokens.weight": FilledParameter((6, 4), torch.float32, 24),
        "norm.weight": FilledParameter((1, 4), torch.float32, 4),
    },
)
PARTS = (Part("embed_tokens.weight", Box((0, 0), (6, 4)), 0),)


def _send(model: TiedModel, arena: Arena, command: Command) -> Report:
    channel = {"kind": "arena", "arena": arena.spec.to_json(), "number": 0, "writers": 1, "wait_s": 0.1}
    arena.clear_report()
    if command.bucket is not None:
        arena.progress.count_written(0, command.bucket.index + 1)
    weight_loader.load(model, [(Command(**{**vars(command), "channel": channel}).encode(), torch.empty(0))])
    return Report.decode(arena.read_report())


def test_a_delivery_through_an_arena(model, arena):
    address = model.embed_tokens.weight.data_ptr()
    values = torch.arange(28.0)
    arena.slots[0][:112] = values.view(torch.uint8)
    parts = (PARTS[0], Part("norm.weight", Box((0, 0), (1, 4)), 64 + 64))
    assert _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST)).ok
    refused = _send(model, arena, Command("2", "bucket", "d", bucket=Bucket(0, 112, parts)))
    assert not refused.ok and "bytes [128, 144) of a bucket of 112" in refused.message

    manifest = Manifest("e", "s", 4, 2, MANIFEST.parameters)
    assert _send(model, arena, Command("3", "begin", "e", manifest=manifest)).ok
    remove_arena(arena.spec)  # mapped: the file is no longer needed
    assert _send(model, arena, Command("4", "bucket", "e", bucket=Bucket(0, 96, PARTS))).num_bytes == 96
    arena.slots[1][:16] = torch.full((4,), 2.5).view(torch.uint8)
    norm = (Part("norm.weight", Box((0, 0), (1, 4)), 0),)
    assert _send(model, arena, Command("5", "bucket", "e", bucket=Bucket(1, 16, norm))).ok
    end = _send(model, arena, Command("6", "finish", "e"))
    assert end.ok and end.version == 4
    assert end.checksums == {name: parameter_checksum(p) for name, p in model.named_parameters()}
    assert torch.equal(model.lm_head.weight, values[:24].view(6, 4)) and bool((model.norm.weight == 2.5).all())
    assert model.embed_tokens.weight.data_ptr() == address and model.embed_tokens.weight.requires_grad


def test_bytes_that_never_come_are_waited_for_in_vain_and_not_taken(model, arena):
    """A command may come before its bytes. Neither silence, nor a trainer that gave up, nor a slot that belongs to
    another delivery already may be taken for them."""
    assert _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST)).ok
    channel = {"kind": "arena", "arena": arena.spec.to_json(), "number": 0, "writers": 2, "wait_s": 0.1}
    command = Command("2", "bucket", "d", bucket=Bucket(0, 96, PARTS), channel=channel)
    before = model.embed_tokens.weight.clone()
    arena.progress.count_written(0, 1)  # one of two

    def message() -> str:
        weight_loader.load(model, [(command.encode(), torch.empty(0))])
        report = Report.decode(arena.read_report())
        assert not report.ok and report.num_bytes == 0
        return report.message

    assert "longer than 0.1 s" in message()
    arena.progress.stop()
    assert "given the delivery up" in message()
    arena.progress.start(7)
    arena.progress.count_written(0, 1)
    arena.progress.count_written(1, 1)
    assert "given the delivery up" in message()
    assert torch.equal(model.embed_tokens.weight, before)


def test_an_arena_is_mapped_until_another_one_is_named(model, arena, tmp_path, caplog):
    assert _send(model, arena, Command("1", "checksums", "d")).ok
    remove_arena(arena.spec)
    assert _send(model, arena, Command("2", "checksums", "e")).ok  # the next delivery, by the same memory
    late = arena
    successor = Arena(create_arena(tmp_path, "y", 128))
    assert _send(model, successor, Command("3", "checksums", "f")).ok
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="no report"):
        _send(model, late, Command("4", "checksums", "d"))
    remove_arena(successor.spec)
    assert _send(model, successor, Command("5", "checksums", "g")).ok


def test_noise_and_checksums(model, arena):
    before = _send(model, arena, Command("1", "checksums", "d")).checksums
    assert _send(model, arena, Command("2", "randomise", seed=1)).ok
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


def test_a_vanished_arena_is_logged_and_not_raised(model, arena, caplog):
    remove_arena(arena.spec)
    with caplog.at_level(logging.ERROR):
        with pytest.raises(ValueError, match="no report"):
            _send(model, arena, Command("1", "begin", "d", manifest=MANIFEST))
    assert "No such file" in caplog.text
