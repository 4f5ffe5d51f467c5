"""The receiver: writes, counts, and every way in which a weight sync can be wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megatron_dapo.bridge.protocol.deltas import change, encode
from megatron_dapo.bridge.protocol.messages import (
    PROTOCOL_VERSION,
    Bucket,
    Chunk,
    Command,
    CommandReply,
    Manifest,
    ParameterManifest,
)
from megatron_dapo.bridge.protocol.receiver import Receiver, WriteCoverage, overlapping
from megatron_dapo.reshard.checksum import tensor_checksum
from megatron_dapo.reshard.slices import Slice


class Bytes:
    """A `Channel` that gives every bucket the same bytes."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def begin(self) -> None: ...

    def data(self, bucket: Bucket) -> torch.Tensor:
        return self._values


VALUES = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(100.0, 105.0)}
# Rows 0-1 of a and the whole of b, then rows 2-3 of a; the fifth element of b is padding.
HALVES = (Slice((0, 0), (2, 6)), Slice((2, 0), (2, 6)))
B_FILLED = Slice((0,), (4,))


def _manifest(version: int = 1, sync_id: str = "d1", session: str = "s", **parameters) -> Manifest:
    promised = {
        "a": ParameterManifest((4, 6), torch.float32, 24),
        "b": ParameterManifest((5,), torch.float32, 4),
        **parameters,
    }
    return Manifest(sync_id, session, version, 2, {n: p for n, p in promised.items() if p is not None})


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _message(index: int) -> tuple[Bucket, torch.Tensor]:
    data = torch.zeros(128, dtype=torch.uint8)
    half = HALVES[index]
    data[:48] = _bytes(VALUES["a"][half.offset[0] : half.offset[0] + 2])
    if index:
        return Bucket(1, 48, (Chunk("a", half, 0),)), data
    data[64:80] = _bytes(VALUES["b"][:4])
    return Bucket(0, 80, (Chunk("a", half, 0), Chunk("b", B_FILLED, 64))), data


@pytest.fixture
def receiver() -> Receiver:
    return Receiver({"a": torch.full((4, 6), 7.0), "b": torch.full((5,), 7.0)})


def _sync(receiver: Receiver, manifest: Manifest) -> dict[str, int]:
    receiver.begin(manifest)
    for index in (0, 1):
        receiver.accept(manifest.sync_id, *_message(index))
    return receiver.finish(manifest.sync_id)


def test_a_sync_fills_all_parameters_in_place(receiver):
    before = receiver.parameters["a"].data_ptr()
    checksums = _sync(receiver, _manifest())
    filled = {"a": VALUES["a"], "b": torch.cat([VALUES["b"][:4], torch.zeros(1)])}
    assert all(torch.equal(receiver.parameters[name], value) for name, value in filled.items())
    assert checksums == {name: tensor_checksum(value) for name, value in filled.items()}
    assert (receiver.version, receiver.parameters["a"].data_ptr()) == (1, before)


def test_what_changes_between_arrival_and_parameter_is_in_the_checksums(receiver, monkeypatch):
    """Checksums are those of the memory that the engine serves from, not of the bytes that arrived."""
    good = _sync(receiver, _manifest(1, "d1"))
    filled = receiver.filled

    def flip(sync_id: str, bucket: Bucket) -> None:
        receiver.parameters["a"].view(torch.int32)[bucket.index, 3] ^= 1
        filled(sync_id, bucket)

    monkeypatch.setattr(receiver, "filled", flip)
    assert _sync(receiver, _manifest(2, "d2"))["a"] != good["a"]
    monkeypatch.undo()
    # A copy in place of the parameter's own memory.
    elsewhere = receiver.targets
    monkeypatch.setattr(receiver, "targets", lambda bucket: {c: t.clone() for c, t in elsewhere(bucket).items()})
    assert _sync(receiver, _manifest(3, "d3"))["a"] != good["a"]
    monkeypatch.undo()
    assert _sync(receiver, _manifest(4, "d4")) == good


def test_a_sync_that_begins_after_its_successor_is_refused(receiver):
    """A message that the trainer gave up on may still arrive."""
    receiver.begin(replace(_manifest(5, "new"), number=8))
    with pytest.raises(ValueError, match="'old' comes late, after 'new'"):
        receiver.begin(replace(_manifest(5, "old"), number=7))
    receiver.begin(replace(_manifest(5, "again"), number=9))
    receiver.begin(replace(_manifest(1, "another", session="life 2"), number=1))


def test_versions_grow_within_a_session(receiver):
    _sync(receiver, _manifest(5))
    with pytest.raises(ValueError, match="version 4 is older than version 5"):
        receiver.begin(_manifest(4, "d2"))
    assert receiver.version == 5  # the refused sync changed nothing
    _sync(receiver, _manifest(5, "d3"))
    receiver.begin(_manifest(6, "d4"))
    assert receiver.version is None
    with pytest.raises(ValueError, match="older than version 6"):
        receiver.begin(_manifest(5, "d5"))
    _sync(receiver, _manifest(2, "d6", session="a restarted trainer"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"c": ParameterManifest((1,), torch.float32, 1)}, r"no parameters 'c', which the trainer sends"),
        ({"b": None}, r"nothing is sent for the engine's parameters 'b'"),
        ({"a": ParameterManifest((6, 4), torch.float32, 24)}, r"'a' is \(4, 6\) float32 in the engine, \(6, 4\)"),
        ({"a": ParameterManifest((4, 6), torch.bfloat16, 24)}, r"float32 in the engine, \(4, 6\) bfloat16"),
        ({"b": ParameterManifest((5,), torch.float32, 6)}, r"6 elements are promised for the 5 of 'b'"),
    ],
)
def test_a_manifest_for_another_model_is_refused(changed, message, receiver):
    before = {name: tensor.clone() for name, tensor in receiver.parameters.items()}
    with pytest.raises(ValueError, match=message):
        receiver.begin(_manifest(**changed))
    assert all(torch.equal(receiver.parameters[name], tensor) for name, tensor in before.items())


def _bad_bucket(**changes) -> Bucket:
    return replace(_message(0)[0], **changes)


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (_bad_bucket(index=1), "bucket 1 arrived, expected bucket 0"),
        (_bad_bucket(num_bytes=129), "128 of 129 bytes of bucket 0 arrived"),
        (_bad_bucket(chunks=(Chunk("z", HALVES[0], 0),)), "chunk of 'z', which the engine lacks"),
        (_bad_bucket(chunks=(Chunk("a", Slice((3, 0), (2, 6)), 0),)), r"\[3:5, 0:6\] is not inside 'a' \(4, 6\)"),
        (_bad_bucket(chunks=(Chunk("a", Slice((-1, 0), (2, 6)), 0),)), "is not inside"),
        (_bad_bucket(chunks=(Chunk("a", Slice((0,), (4,)), 0),)), "is not inside"),
        (_bad_bucket(chunks=(Chunk("a", HALVES[0], 64),)), r"bytes \[64, 112\) of a bucket of 80"),
        (_bad_bucket(chunks=(Chunk("a", HALVES[0], 4),)), r"lies at bytes \[4, 52\)"),
    ],
)
def test_a_wrong_bucket_writes_nothing(bucket, message, receiver):
    receiver.begin(_manifest())
    with pytest.raises(ValueError, match=message):
        receiver.accept("d1", bucket, _message(0)[1])
    assert all(bool((tensor == 7).all()) for tensor in receiver.parameters.values())


def test_a_wrong_message_fails_its_own_sync_alone(receiver):
    data = _message(0)[1]
    begin = Command("1", "begin", "d1", manifest=_manifest())
    assert receiver.handle(begin, Bytes(data)).ok
    stray = receiver.handle(Command("2", "bucket", "d0", bucket=_message(0)[0]), Bytes(data))
    assert not stray.ok and "'d0' is not open, 'd1' is" in stray.message
    assert receiver.handle(Command("3", "bucket", "d1", bucket=_message(0)[0]), Bytes(data)).ok
    doubled = receiver.handle(Command("4", "bucket", "d1", bucket=_message(0)[0]), Bytes(data))
    assert not doubled.ok and "bucket 0 arrived, expected bucket 1" in doubled.message
    later = receiver.handle(Command("5", "bucket", "d1", bucket=_message(1)[0]), Bytes(_message(1)[1]))
    end = receiver.handle(Command("6", "finish", "d1"), Bytes(data))
    assert not later.ok and not end.ok and "has failed already" in end.message
    assert receiver.version is None and end.version is None
    assert _sync(receiver, _manifest(1, "d2"))


def _delta(base: int, version: int, number: int, session: str = "s") -> Manifest:
    return replace(_manifest(version, f"d{version}.{number}", session), num_buckets=1, number=number, base=base)


DELTA = Bucket(0, 96, (Chunk("a", Slice((0, 0), (4, 6)), 0),), {0: (0, 96)})


def _changes(position: int) -> dict[int, torch.Tensor]:
    old = VALUES["a"]
    new = old.clone()
    new.view(-1)[position] += 1
    return {0: encode([(old.shape, change(new, old))])}


def test_a_delta_changes_what_the_last_sync_left(receiver):
    parameters = {"a": ParameterManifest((4, 6), torch.float32, 24), "b": ParameterManifest((5,), torch.float32, 0)}
    _sync(receiver, _manifest(5))
    manifest = replace(_delta(5, 6, 1), parameters=parameters)
    receiver.begin(manifest)
    assert receiver.change(manifest.sync_id, DELTA, _changes(7)) == 24
    expected = VALUES["a"].clone()
    expected.view(-1)[7] += 1
    assert receiver.finish(manifest.sync_id)["a"] == tensor_checksum(expected)
    assert torch.equal(receiver.parameters["a"], expected) and receiver.version == 6


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (_delta(5, 6, 3), "comes as changes of version 5, this engine holds version 6; it needs a full update"),  # twice
        (_delta(7, 8, 3), "comes as changes of version 7, this engine holds version 6"),  # one was lost
        (_delta(6, 7, 1), "comes late"),  # an older one comes later
        (_delta(6, 7, 3, "another"), "holds version 6 of another trainer; it needs a full update"),
    ],
)
def test_deltas_lost_doubled_or_out_of_order_are_refused(manifest, message, receiver):
    _sync(receiver, replace(_manifest(6), number=2))
    before = {name: tensor.clone() for name, tensor in receiver.parameters.items()}
    with pytest.raises(ValueError, match=message) as error:
        receiver.begin(manifest)
    assert "\n" not in str(error.value)
    assert receiver.version == 6 and all(torch.equal(receiver.parameters[n], t) for n, t in before.items())


def test_a_delta_after_a_failed_sync_is_refused(receiver):
    _sync(receiver, _manifest(5))
    receiver.begin(replace(_manifest(6, "d6"), number=1))  # never finished
    with pytest.raises(ValueError, match="holds no verified version; it needs a full update"):
        receiver.begin(_delta(5, 6, 2))
    with pytest.raises(ValueError, match="which brings all elements"):
        receiver.change("d6", _message(0)[0], {})


def test_finishing_before_the_last_bucket_is_refused(receiver):
    receiver.begin(_manifest())
    receiver.accept("d1", *_message(0))
    with pytest.raises(ValueError, match="1 of 2 buckets arrived before the end"):
        receiver.finish("d1")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Chunk("a", HALVES[0], 0), r"\[0:2, 0:6\] of 'a' \(4, 6\) arrived twice"),
        (Chunk("a", Slice((1, 0), (2, 6)), 0), r"\[1:2, 0:6\] of 'a'"),
        (Chunk("a", Slice((2, 0), (1, 6)), 0), r"18 elements of 'a' \(4, 6\) arrived, 24 were promised; missing: 6"),
        (Chunk("b", Slice((4,), (1,)), 0), "12 elements of 'a'"),
    ],
)
def test_every_element_must_be_written_exactly_once(second, message, receiver):
    receiver.begin(_manifest())
    receiver.accept("d1", *_message(0))
    receiver.accept("d1", Bucket(1, 48, (second,)), _message(1)[1])
    with pytest.raises(ValueError, match=message):
        receiver.finish("d1")


def test_surplus_elements_are_named():
    coverage = WriteCoverage({"b": ParameterManifest((5,), torch.float32, 4)})
    coverage.add("b", Slice((0,), (5,)))
    with pytest.raises(ValueError, match="5 elements of 'b' .* 4 were promised; surplus: 1"):
        coverage.check()


def test_overlaps_are_found():
    assert overlapping([Slice((), ()), Slice((), ())]) == Slice((), ())
    assert overlapping([Slice((0, 0), (4, 3)), Slice((0, 3), (4, 3)), Slice((4, 0), (1, 6))]) is None
    assert overlapping([Slice((0, 0), (4, 3)), Slice((9, 0), (1, 1)), Slice((3, 2), (1, 4))]) == Slice((3, 2), (1, 1))


def test_adopting_checks_and_declares_without_buckets(receiver):
    reply = receiver.handle(Command("1", "adopt", "d1", manifest=_manifest(3)), Bytes(torch.empty(0)))
    assert reply.ok and reply.version == 3 and reply.checksums == receiver.checksums()
    older = receiver.handle(Command("2", "adopt", "d2", manifest=_manifest(2)), Bytes(torch.empty(0)))
    assert not older.ok and "must not go backwards" in older.message


def test_handle_never_raises(receiver):
    class Exploding(Bytes):
        def data(self, bucket: Bucket) -> torch.Tensor:
            raise MemoryError("no memory")

    explode = Exploding(torch.empty(0))
    receiver.begin(_manifest())
    reply = receiver.handle(Command("1", "bucket", "d1", bucket=_message(0)[0]), explode)
    assert not reply.ok and reply.message == "MemoryError: no memory"
    unknown = receiver.handle(Command("2", "dance"), explode)
    assert not unknown.ok and "no operation 'dance'; there are adopt, begin" in unknown.message
    assert not receiver.handle(Command("3", "begin"), explode).ok


def test_messages_survive_the_wire():
    bucket = _message(0)[0]
    command = Command("7", "bucket", "d1", _manifest(), bucket, {"kind": "arena", "slot": 1})
    assert Command.decode(command.encode()) == command
    reply = CommandReply("7", "finish", True, "", "d1", 3, 80, 0.5, {"a": -(1 << 63)})
    assert CommandReply.decode(reply.encode()) == reply


@pytest.mark.parametrize(
    "text", ["", "[]", "{", json.dumps({"protocol": PROTOCOL_VERSION}), json.dumps({"protocol": 99})]
)
def test_text_that_is_no_command_is_refused(text):
    with pytest.raises(ValueError, match="protocol 99|no command"):
        Command.decode(text)


@pytest.mark.parametrize("text", ["", "[]", '{"id": 1, "surplus": 2}'])
def test_text_that_is_no_reply_is_refused(text):
    with pytest.raises(ValueError, match="no reply"):
        CommandReply.decode(text)
