"""Delivery of one version of the weights into one engine rank: what is promised, what arrives, and the proof of it.

The sender states in a `Manifest` which elements of which parameters it will fill, sends `Bucket`s of `Chunk`s, and asks
for the end. The `Receiver` copies each chunk into its slice of the engine's own parameter and keeps a `Ledger`; at the end
every element must have been written exactly once, and the checksums of the parameters go back for comparison.

Messages are `Command`s and `Reply`s, both JSON; the bytes of a bucket travel beside them. This module needs torch and
the standard library alone: it runs inside the engine's processes too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from megatron_dapo.reshard.checksum import tensor_checksum
from megatron_dapo.reshard.slices import Coordinates, Slice, intersect, uncovered, whole

PROTOCOL_VERSION = 3
CHUNK_ALIGNMENT = 64  # byte offsets of chunks are multiples of it


class ParameterManifest(NamedTuple):
    """What a delivery promises about one engine-local parameter. What it does not fill is padding, to be zero."""

    shape: Coordinates
    dtype: torch.dtype
    num_filled: int  # elements


@dataclass(frozen=True)
class Manifest:
    """What one delivery will bring to one engine rank.

    Versions must not go backwards within a `session` (one life of the trainer); the same one may be delivered again.
    Deliveries are numbered upwards within it: one that is begun late, after its successor, is refused.
    """

    delivery: str  # unique
    session: str
    version: int
    num_buckets: int
    parameters: Mapping[str, ParameterManifest]  # every parameter of the engine rank
    number: int = 0

    def to_json(self) -> dict[str, Any]:
        parameters = {n: [p.shape, _dtype_name(p.dtype), p.num_filled] for n, p in self.parameters.items()}
        return {**vars(self), "parameters": parameters}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Manifest:
        parameters = {
            name: ParameterManifest(tuple(shape), _dtype(dtype), num_filled)
            for name, (shape, dtype, num_filled) in value["parameters"].items()
        }
        version, num_buckets, number = (int(value[key]) for key in ("version", "num_buckets", "number"))
        return Manifest(value["delivery"], value["session"], version, num_buckets, parameters, number)


class Chunk(NamedTuple):
    """Slice `bounds` of the engine-local parameter `name` lies row-major, in the parameter's type, at a byte of a bucket."""

    name: str
    bounds: Slice
    byte_offset: int


@dataclass(frozen=True)
class Bucket:
    """Parts number `index` of a delivery, which fill the first `num_bytes` of the bytes that travel beside it."""

    index: int
    num_bytes: int
    chunks: tuple[Chunk, ...]

    def to_json(self) -> dict[str, Any]:
        chunks: dict[str, list[Any]] = {}
        for name, bounds, byte_offset in self.chunks:
            chunks.setdefault(name, []).append([byte_offset, bounds.offset, bounds.shape])
        return {"index": self.index, "num_bytes": self.num_bytes, "chunks": chunks}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Bucket:
        chunks = tuple(
            Chunk(name, Slice(tuple(offset), tuple(shape)), int(byte_offset))
            for name, entries in value["chunks"].items()
            for byte_offset, offset, shape in entries
        )
        return Bucket(int(value["index"]), int(value["num_bytes"]), chunks)


@dataclass(frozen=True)
class Command:
    """One step of a message to an engine rank. `channel` says how bytes and the report travel; its kind's module reads
    it, and that of a message's first command counts for all."""

    id: str  # the report repeats it
    op: str
    delivery: str = ""
    manifest: Manifest | None = None  # begin, adopt
    bucket: Bucket | None = None  # bucket
    channel: Mapping[str, Any] = field(default_factory=dict)  # {"kind": ..., ...}, JSON
    seed: int = 0  # randomize

    def encode(self) -> str:
        value = {
            "protocol": PROTOCOL_VERSION,
            "id": self.id,
            "op": self.op,
            "delivery": self.delivery,
            "manifest": self.manifest.to_json() if self.manifest else None,
            "bucket": self.bucket.to_json() if self.bucket else None,
            "channel": dict(self.channel),
            "seed": self.seed,
        }
        return json.dumps(value, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> Command:
        """ValueError where the text is no command of this protocol."""
        try:
            value = json.loads(text)
            if value["protocol"] != PROTOCOL_VERSION:
                raise ValueError(
                    f"delivery: the command speaks protocol {value['protocol']}, this engine {PROTOCOL_VERSION}; "
                    "start trainer and engines from one installation"
                )
            return Command(
                value["id"],
                value["op"],
                value["delivery"],
                Manifest.from_json(value["manifest"]) if value["manifest"] else None,
                Bucket.from_json(value["bucket"]) if value["bucket"] else None,
                value["channel"],
                int(value["seed"]),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"delivery: a message is no command ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Reply:
    """The engine rank's answer to one command."""

    id: str
    op: str
    ok: bool
    message: str = ""
    delivery: str = ""
    version: int | None = None  # of the last delivery that ended well
    num_bytes: int = 0  # copied into parameters by the message
    seconds: float = 0.0  # of this command
    checksums: Mapping[str, int] = field(default_factory=dict)  # finish, adopt, checksums: signed 64-bit

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> Reply:
        """ValueError where the text is no report."""
        try:
            return Reply(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"delivery: a message is no report ({type(error).__name__}: {error})") from error


class Ledger:
    """Which slices of which parameters have been written. `check` proves that every element was, exactly once."""

    def __init__(self, parameters: Mapping[str, ParameterManifest]) -> None:
        self._parameters = parameters
        self._slice: dict[str, list[Slice]] = {name: [] for name in parameters}

    def add(self, name: str, bounds: Slice) -> None:
        self._slice[name].append(bounds)

    def num_elements(self, name: str) -> int:
        return sum(bounds.volume for bounds in self._slice[name])

    def check(self) -> dict[str, tuple[Slice, ...]]:
        """Padding of each parameter: the slices that no chunk wrote.

        Raises ValueError that names the first parameter with elements missing, surplus or written twice. Counts alone
        would not see a chunk that arrived twice in place of another of equal size.
        """
        padding = {}
        for name, (shape, _, num_filled) in self._parameters.items():
            slices, arrived = self._slice[name], self.num_elements(name)
            twice = overlapping(slices)
            if twice is not None:
                raise ValueError(f"delivery: the elements {twice} of {name!r} {shape} arrived twice")
            if arrived != num_filled:
                raise ValueError(
                    f"delivery: {arrived} elements of {name!r} {shape} arrived, {num_filled} were promised; "
                    f"{'missing' if arrived < num_filled else 'surplus'}: {abs(arrived - num_filled)}"
                )
            if num_filled < prod(shape):
                padding[name] = uncovered(whole(shape), slices)
        return padding


def overlapping(slices: Iterable[Slice]) -> Slice | None:
    """The first common slice of two of the slices, None where they are disjoint: a sweep along dimension 0."""
    active: list[Slice] = []
    for bounds in sorted(slices):
        start = bounds.offset[0] if bounds.offset else 0
        active = [other for other in active if not other.offset or other.offset[0] + other.shape[0] > start]
        for other in active:
            common = intersect(bounds, other)
            if common is not None:
                return common
        active.append(bounds)
    return None


@dataclass
class _Delivery:
    """A delivery in progress."""

    manifest: Manifest
    ledger: Ledger
    next_bucket: int = 0
    failure: str = ""


class BucketSource(Protocol):
    """Where a delivery's bytes come from."""

    def begin(self) -> None:
        """ValueError where the delivery is not to be begun any more."""

    def data(self, bucket: Bucket) -> torch.Tensor:
        """The bytes of a bucket: uint8, at least its num_bytes, on the parameters' device."""


class Receiver:
    """Writes deliveries into the parameters of one engine rank, in place.

    `begin`, `accept`, `finish` and `adopt` raise ValueError with what is wrong; `handle` turns every outcome into a
    Reply. After a failure the delivery is dead: parameters may hold a mixture, and only a whole new delivery (or a
    restart) makes the engine fit to serve again.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = {name: tensor.detach() for name, tensor in parameters.items()}
        self.version: int | None = None  # of what the parameters hold; None while that is unknown or a mixture
        self._newest: Manifest | None = None  # of the delivery begun last
        self._current: _Delivery | None = None

    def handle(self, command: Command, source: BucketSource) -> Reply:
        """Carries a command out. Never raises."""
        start, num_bytes, message = time.perf_counter(), 0, ""
        checksums: Mapping[str, int] = {}
        try:
            if command.op not in _OPERATIONS:
                raise ValueError(f"delivery: no operation {command.op!r}; there are {', '.join(sorted(_OPERATIONS))}")
            num_bytes, checksums = _OPERATIONS[command.op](self, command, source)
        # The border of a process that an exception would kill: whatever went wrong must reach the trainer as a report.
        except Exception as error:
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.fail(command.delivery, message)
        return Reply(
            id=command.id,
            op=command.op,
            ok=not message,
            message=message,
            delivery=command.delivery,
            version=self.version,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - start,
            checksums=checksums,
        )

    def begin(self, manifest: Manifest) -> None:
        """Opens a delivery; one that is still open is given up. The parameters' version is unknown from here on."""
        self._check_version(manifest)
        self._check_parameters(manifest)
        self._newest = manifest
        self._current = _Delivery(manifest, Ledger(manifest.parameters))
        self.version = None

    def accept(self, delivery: str, bucket: Bucket, data: torch.Tensor) -> int:
        """Copies the chunks of the next bucket into the parameters; returns their bytes. All are checked before any."""
        self._expect(delivery, bucket)
        if bucket.num_bytes > data.numel():
            raise ValueError(f"delivery: {data.numel()} of {bucket.num_bytes} bytes of bucket {bucket.index} arrived")
        num_bytes = 0
        for chunk, place in self.places(bucket).items():
            size = place.numel() * place.dtype.itemsize
            place.copy_(data[chunk.byte_offset : chunk.byte_offset + size].view(place.dtype).view(chunk.bounds.shape))
            num_bytes += size
        self.filled(delivery, bucket)
        return num_bytes

    def places(self, bucket: Bucket) -> dict[Chunk, torch.Tensor]:
        """The slice of a parameter where each chunk of a bucket belongs; all are checked. Whoever writes there itself
        reports with `filled`."""
        return {chunk: slice_view(self._place(chunk, bucket)[0], chunk.bounds) for chunk in bucket.chunks}

    def filled(self, delivery: str, bucket: Bucket) -> None:
        """Enters the next bucket into the ledger: its chunks are in their places."""
        current = self._expect(delivery, bucket)
        for chunk in bucket.chunks:
            current.ledger.add(chunk.name, chunk.bounds)
        current.next_bucket += 1

    def fail(self, delivery: str, message: str) -> None:
        """The delivery cannot end well any more."""
        current = self._current
        if current is not None and current.manifest.delivery == delivery and not current.failure:
            current.failure = message

    def _expect(self, delivery: str, bucket: Bucket) -> _Delivery:
        current = self._open(delivery)
        if bucket.index != current.next_bucket:
            raise ValueError(f"delivery: bucket {bucket.index} arrived, bucket {current.next_bucket} was to come next")
        return current

    def finish(self, delivery: str) -> dict[str, int]:
        """Closes a delivery that is complete: zeroes the padding and returns the checksum of every parameter."""
        current = self._open(delivery)
        if current.next_bucket != current.manifest.num_buckets:
            raise ValueError(
                f"delivery: {current.next_bucket} of {current.manifest.num_buckets} buckets arrived before the end"
            )
        for name, slices in current.ledger.check().items():
            for bounds in slices:
                slice_view(self.parameters[name], bounds).zero_()
        checksums = self.checksums()
        self.version, self._current = current.manifest.version, None
        return checksums

    def adopt(self, manifest: Manifest) -> dict[str, int]:
        """Takes what the parameters hold (loaded in another way, as from disk) for `manifest.version`; the checksums
        tell the sender whether they do."""
        self._check_version(manifest)
        self._check_parameters(manifest)
        self._current, self._newest = None, manifest
        self.version = manifest.version
        return self.checksums()

    def checksums(self) -> dict[str, int]:
        """`tensor_checksum` of every parameter."""
        return {name: tensor_checksum(tensor) for name, tensor in self.parameters.items()}

    def randomize(self, seed: int) -> None:
        """Fills every parameter with noise; the version is unknown from here on (a test of the first delivery)."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.parameters.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.version, self._current = None, None

    def _open(self, delivery: str) -> _Delivery:
        if self._current is None or self._current.manifest.delivery != delivery:
            other = "none is" if self._current is None else f"{self._current.manifest.delivery!r} is"
            raise ValueError(f"delivery: {delivery!r} is not open, {other}; begin it first")
        if self._current.failure:
            raise ValueError(f"delivery: {delivery!r} has failed already ({self._current.failure})")
        return self._current

    def _check_version(self, manifest: Manifest) -> None:
        newest = self._newest
        if newest is None or newest.session != manifest.session:
            return
        if manifest.version < newest.version:
            raise ValueError(
                f"delivery: version {manifest.version} is older than version {newest.version}, which this engine has "
                "already begun to receive; versions must not go backwards"
            )
        if manifest.number < newest.number:
            raise ValueError(
                f"delivery: {manifest.delivery!r} comes late, behind {newest.delivery!r}, which was ordered after it"
            )

    def _check_parameters(self, manifest: Manifest) -> None:
        promised, own = manifest.parameters.keys(), self.parameters.keys()
        if promised - own:
            surplus = _first(promised - own)
            raise ValueError(f"delivery: the engine has no parameters {surplus}, which the trainer sends")
        if own - promised:
            raise ValueError(
                f"delivery: nothing is sent for the engine's parameters {_first(own - promised)}; "
                "they would keep old weights"
            )
        for name, (shape, dtype, num_filled) in manifest.parameters.items():
            tensor = self.parameters[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"delivery: {name!r} is {tuple(tensor.shape)} {_dtype_name(tensor.dtype)} in the engine, "
                    f"{shape} {_dtype_name(dtype)} in the trainer's plan; both must serve the same model"
                )
            if num_filled > tensor.numel():
                raise ValueError(f"delivery: {num_filled} elements are promised for the {tensor.numel()} of {name!r}")

    def _place(self, chunk: Chunk, bucket: Bucket) -> tuple[torch.Tensor, int]:
        """The parameter a chunk goes into, and the byte of the bucket where the chunk ends."""
        if chunk.name not in self.parameters:
            raise ValueError(f"delivery: bucket {bucket.index} has a chunk of {chunk.name!r}, which the engine lacks")
        parameter = self.parameters[chunk.name]
        bounds, shape = chunk.bounds, tuple(parameter.shape)
        fits = len(bounds.offset) == len(bounds.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(bounds.offset, bounds.shape, shape)
        )
        if not fits:
            raise ValueError(f"delivery: the chunk {bounds} is not inside {chunk.name!r} {shape}")
        end = chunk.byte_offset + bounds.volume * parameter.dtype.itemsize
        if chunk.byte_offset < 0 or chunk.byte_offset % CHUNK_ALIGNMENT or end > bucket.num_bytes:
            raise ValueError(
                f"delivery: the chunk {bounds} of {chunk.name!r} lies at bytes [{chunk.byte_offset}, {end}) of a bucket of "
                f"{bucket.num_bytes}"
            )
        return parameter, end


Outcome = tuple[int, Mapping[str, int]]  # bytes copied, checksums


def _begin(receiver: Receiver, command: Command, source: BucketSource) -> Outcome:
    manifest = _manifest(command)
    source.begin()
    receiver.begin(manifest)
    return 0, {}


def _bucket(receiver: Receiver, command: Command, source: BucketSource) -> Outcome:
    if command.bucket is None:
        raise ValueError(f"delivery: the command {command.id!r} has no bucket")
    return receiver.accept(command.delivery, command.bucket, source.data(command.bucket)), {}


def _finish(receiver: Receiver, command: Command, source: BucketSource) -> Outcome:
    return 0, receiver.finish(command.delivery)


def _adopt(receiver: Receiver, command: Command, source: BucketSource) -> Outcome:
    return 0, receiver.adopt(_manifest(command))


def _checksums(receiver: Receiver, command: Command, source: BucketSource) -> Outcome:
    return 0, receiver.checksums()


def _randomize(receiver: Receiver, command: Command, source: BucketSource) -> Outcome:
    receiver.randomize(command.seed)
    return 0, {}


_OPERATIONS: Mapping[str, Callable[[Receiver, Command, BucketSource], Outcome]] = {
    "begin": _begin,
    "bucket": _bucket,
    "finish": _finish,
    "adopt": _adopt,
    "checksums": _checksums,
    "randomize": _randomize,
}


def slice_view(tensor: torch.Tensor, bounds: Slice) -> torch.Tensor:
    """View of the chunk `bounds` of a tensor."""
    for dim, (start, size) in enumerate(zip(bounds.offset, bounds.shape)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _manifest(command: Command) -> Manifest:
    if command.manifest is None:
        raise ValueError(f"delivery: the command {command.id!r} has no manifest")
    return command.manifest


def _first(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"delivery: no element type {name!r}; there are {', '.join(_DTYPES)}")
    return _DTYPES[name]
