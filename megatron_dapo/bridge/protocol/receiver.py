"""The receiving end of a weight sync: buckets into an engine rank's own parameters, and the proof that all arrived.

The trainer states in a `Manifest` which elements of which parameters it will fill, sends `Bucket`s of `Chunk`s, and
asks for the end. The `Receiver` copies each chunk into its slice of the parameter and records it in a `WriteCoverage`.
At the end every element must have been written exactly once; the checksums of all parameters go back for comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch

from megatron_dapo.bridge.protocol.checksums import CountedSlice, slice_sums
from megatron_dapo.bridge.protocol.deltas import apply, areas, decode
from megatron_dapo.bridge.protocol.messages import (
    CHUNK_ALIGNMENT,
    Bucket,
    Chunk,
    Command,
    CommandReply,
    Manifest,
    ParameterManifest,
    dtype_name,
)
from megatron_dapo.reshard.layout import slice_view
from megatron_dapo.reshard.slices import Slice, intersect, uncovered, whole


class WriteCoverage:
    """Slices of each parameter that have been written. `check` proves that every element was, exactly once."""

    def __init__(self, parameters: Mapping[str, ParameterManifest]) -> None:
        self._parameters = parameters
        self._written: dict[str, list[Slice]] = {name: [] for name in parameters}

    def add(self, name: str, bounds: Slice) -> None:
        self._written[name].append(bounds)

    def check(self) -> dict[str, tuple[Slice, ...]]:
        """Return the padding of each parameter: the slices that no chunk wrote.

        Raise ValueError that names the first parameter with elements missing, surplus or written twice.
        """
        padding = {}
        for name, (shape, _, num_filled) in self._parameters.items():
            written = self._written[name]
            num_written = sum(bounds.volume for bounds in written)
            # Counts would not show a chunk that arrived twice in place of another of equal size.
            twice = overlapping(written)
            if twice is not None:
                raise ValueError(f"weight sync: the elements {twice} of {name!r} {shape} arrived twice")
            if num_written != num_filled:
                raise ValueError(
                    f"weight sync: {num_written} elements of {name!r} {shape} arrived, {num_filled} were promised; "
                    f"{'missing' if num_written < num_filled else 'surplus'}: {abs(num_written - num_filled)}"
                )
            if num_filled < prod(shape):
                padding[name] = uncovered(whole(shape), written)
        return padding


def overlapping(slices: Iterable[Slice]) -> Slice | None:
    """Return the first common slice of two of the slices, None if they are disjoint: a sweep along dimension 0."""
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


class Channel:
    """Path of one weight sync's bytes into an engine rank, and of its replies out. This base class carries no bytes."""

    def begin(self) -> None:
        """Raise ValueError if the sync must not begin any more."""

    def data(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of a bucket: uint8, at least its num_bytes, on the parameters' device."""
        raise ValueError(f"weight sync: bucket {bucket.index} came without its bytes")

    def loaded(self, bucket: Bucket) -> None:
        """Record that a bucket is in its parameters, so its memory may be reused."""

    def reply(self, reply: CommandReply) -> None:
        """Bring a reply to the trainer. After a failure no more bytes are expected."""


@dataclass
class _Sync:
    """A weight sync in progress."""

    manifest: Manifest
    coverage: WriteCoverage
    next_bucket: int = 0
    failure: str = ""


Part = TypeVar("Part")


def _required(command: Command, value: Part | None, name: str) -> Part:
    if value is None:
        raise ValueError(f"weight sync: the command {command.id!r} has no {name}")
    return value


class Receiver:
    """Writes weight syncs into the parameters of one engine rank, in place.

    `begin`, `accept`, `finish` and `adopt` raise ValueError with the problem; `handle` turns every outcome into a reply.
    After a failure the parameters may hold a mixture: only a whole new sync, or a restart, makes the engine fit to serve.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], derive: Callable[[], None] | None = None) -> None:
        """`derive` computes what the engine derives from its parameters when it loads them."""
        self._derive = torch.no_grad()(derive or (lambda: None))
        self.parameters = {name: tensor.detach() for name, tensor in parameters.items()}
        self.version: int | None = None  # held by the parameters; None while they are unknown or mixed
        self._newest: Manifest | None = None  # manifest of the sync that began last
        self._current: _Sync | None = None

    def handle(self, command: Command, channel: Channel) -> CommandReply:
        """Carry a command out and reply. Never raises."""
        start, num_bytes, message = time.perf_counter(), 0, ""
        checksums: Mapping[str, int] = {}
        try:
            num_bytes, checksums = self._carry_out(command, channel)
        # An exception would end the engine's process: every failure must reach the trainer as a reply.
        except Exception as error:
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.fail(command.sync_id, message)
        return CommandReply(
            id=command.id,
            op=command.op,
            ok=not message,
            message=message,
            sync_id=command.sync_id,
            version=self.version,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - start,
            checksums=checksums,
        )

    def _carry_out(self, command: Command, channel: Channel) -> tuple[int, Mapping[str, int]]:
        """Return the bytes copied, and the checksums of operations that read them."""
        op = command.op
        if op == "begin":
            manifest = _required(command, command.manifest, "manifest")
            channel.begin()
            self.begin(manifest)
        elif op == "bucket":
            bucket = _required(command, command.bucket, "bucket")
            return self.accept(command.sync_id, bucket, channel.data(bucket)), {}
        elif op == "finish":
            return 0, self.finish(command.sync_id)
        elif op == "adopt":
            return 0, self.adopt(_required(command, command.manifest, "manifest"))
        elif op == "checksums":
            return 0, self.checksums()
        else:
            known = "adopt, begin, bucket, checksums, finish"
            raise ValueError(f"weight sync: no operation {op!r}; there are {known}")
        return 0, {}

    def begin(self, manifest: Manifest) -> None:
        """Open a weight sync and give up one that is still open. The parameters' version is unknown from here on."""
        self._check_version(manifest)
        self._check_base(manifest)
        self._check_parameters(manifest)
        self._newest = manifest
        self._current = _Sync(manifest, WriteCoverage(manifest.parameters))
        self.version = None

    def accept(self, sync_id: str, bucket: Bucket, data: torch.Tensor) -> int:
        """Copy the chunks of the next bucket into the parameters; return their bytes. All are checked before any.

        `data` of a delta holds its segments in their areas.
        """
        current = self._expect(sync_id, bucket)
        if current.manifest.base is not None:
            segments = {rank: data[area] for rank, area in areas(bucket, data.numel()).items()}
            return self.change(sync_id, bucket, segments)
        if bucket.num_bytes > data.numel():
            raise ValueError(
                f"weight sync: {data.numel()} of {bucket.num_bytes} bytes of bucket {bucket.index} arrived"
            )
        num_bytes = 0
        for chunk, target in self.targets(bucket).items():
            size = target.numel() * target.dtype.itemsize
            target.copy_(data[chunk.byte_offset : chunk.byte_offset + size].view(target.dtype).view(chunk.bounds.shape))
            num_bytes += size
        self.filled(sync_id, bucket)
        return num_bytes

    def change(self, sync_id: str, bucket: Bucket, segments: Mapping[int, torch.Tensor]) -> int:
        """Apply the segments of the next bucket of a delta; return their bytes. All are checked before any."""
        current = self._expect(sync_id, bucket)
        if current.manifest.base is None:
            raise ValueError(f"weight sync: changes arrived for {sync_id!r}, which brings all elements")
        targets, decoded, num_bytes = self.targets(bucket), [], 0
        for rank, (start, stop) in bucket.segments.items():
            own = {chunk: target for chunk, target in targets.items() if start <= chunk.byte_offset < stop}
            found, size = decode(segments[rank], [(target.shape, target.dtype) for target in own.values()])
            decoded += list(zip(own.values(), found))
            num_bytes += size
        for target, changed in decoded:
            apply(target, changed)
        self.filled(sync_id, bucket)
        return num_bytes

    def targets(self, bucket: Bucket) -> dict[Chunk, torch.Tensor]:
        """Return a view of each chunk's slice of its parameter, all checked. A caller that writes there calls `filled`."""
        return {chunk: slice_view(self._parameter(chunk, bucket), chunk.bounds) for chunk in bucket.chunks}

    def filled(self, sync_id: str, bucket: Bucket) -> None:
        """Record that the next bucket is in its parameters."""
        current = self._expect(sync_id, bucket)
        for chunk in bucket.chunks:
            current.coverage.add(chunk.name, chunk.bounds)
        current.next_bucket += 1

    def fail(self, sync_id: str, message: str) -> None:
        """Mark the open weight sync as failed; nothing can complete it."""
        current = self._current
        if current is not None and current.manifest.sync_id == sync_id and not current.failure:
            current.failure = message

    def finish(self, sync_id: str) -> dict[str, int]:
        """Close a complete weight sync: zero the padding and return the checksum of every parameter."""
        current = self._open(sync_id)
        if current.next_bucket != current.manifest.num_buckets:
            raise ValueError(
                f"weight sync: {current.next_bucket} of {current.manifest.num_buckets} buckets arrived before the end"
            )
        for name, slices in current.coverage.check().items():
            for bounds in slices:
                slice_view(self.parameters[name], bounds).zero_()
        self._derive()
        # Read back from the parameters after the last write: memory that changed on the way shows here.
        checksums = self.checksums()
        self.version, self._current = current.manifest.version, None
        return checksums

    def adopt(self, manifest: Manifest) -> dict[str, int]:
        """Declare that the parameters hold `manifest.version`, loaded in another way (from disk).

        The returned checksums tell the trainer whether that is so.
        """
        self._check_version(manifest)
        self._check_parameters(manifest)
        # A sync that was open has been overtaken: its buckets would overwrite what the disk brought.
        self._current, self._newest = None, manifest
        self.version = manifest.version
        self._derive()
        return self.checksums()

    def checksums(self) -> dict[str, int]:
        """Return the checksum of every parameter, all computed before the device is waited for."""
        shapes = [tuple(tensor.shape) for tensor in self.parameters.values()]
        parts = [CountedSlice(tensor, whole(shape), shape) for tensor, shape in zip(self.parameters.values(), shapes)]
        return dict(zip(self.parameters, slice_sums(parts).tolist()))

    def _expect(self, sync_id: str, bucket: Bucket) -> _Sync:
        current = self._open(sync_id)
        if bucket.index != current.next_bucket:
            raise ValueError(f"weight sync: bucket {bucket.index} arrived, expected bucket {current.next_bucket}")
        return current

    def _open(self, sync_id: str) -> _Sync:
        if self._current is None or self._current.manifest.sync_id != sync_id:
            other = "none is" if self._current is None else f"{self._current.manifest.sync_id!r} is"
            raise ValueError(f"weight sync: {sync_id!r} is not open, {other}; begin it first")
        if self._current.failure:
            raise ValueError(f"weight sync: {sync_id!r} has failed already ({self._current.failure})")
        return self._current

    def _check_version(self, manifest: Manifest) -> None:
        newest = self._newest
        if newest is None or newest.session != manifest.session:
            return
        if manifest.version < newest.version:
            raise ValueError(
                f"weight sync: version {manifest.version} is older than version {newest.version}, which this engine has "
                "already begun to receive; versions must not go backwards"
            )
        if manifest.number < newest.number:
            raise ValueError(
                f"weight sync: {manifest.sync_id!r} comes late, after {newest.sync_id!r}, which began after it"
            )

    def _check_base(self, manifest: Manifest) -> None:
        """A delta changes what this trainer's last complete sync left, and nothing else."""
        if manifest.base is None:
            return
        session = self._newest.session if self._newest is not None else None
        if self.version != manifest.base or session != manifest.session:
            held = "no verified version" if self.version is None else f"version {self.version}"
            of = "" if self.version is None or session == manifest.session else " of another trainer"
            raise ValueError(
                f"weight sync: version {manifest.version} comes as changes of version {manifest.base}, this engine holds "
                f"{held}{of}; it needs a full update"
            )

    def _check_parameters(self, manifest: Manifest) -> None:
        promised, own = manifest.parameters.keys(), self.parameters.keys()
        if promised - own:
            surplus = _first(promised - own)
            raise ValueError(f"weight sync: the engine has no parameters {surplus}, which the trainer sends")
        if own - promised:
            raise ValueError(
                f"weight sync: nothing is sent for the engine's parameters {_first(own - promised)}; "
                "they would keep old weights"
            )
        for name, (shape, dtype, num_filled) in manifest.parameters.items():
            tensor = self.parameters[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"weight sync: {name!r} is {tuple(tensor.shape)} {dtype_name(tensor.dtype)} in the engine, "
                    f"{shape} {dtype_name(dtype)} in the trainer's plan; both must serve the same model"
                )
            if num_filled > tensor.numel():
                raise ValueError(
                    f"weight sync: {num_filled} elements are promised for the {tensor.numel()} of {name!r}"
                )

    def _parameter(self, chunk: Chunk, bucket: Bucket) -> torch.Tensor:
        """Return the parameter of a chunk. Raise ValueError if the chunk is not inside it or not inside the bucket."""
        if chunk.name not in self.parameters:
            raise ValueError(
                f"weight sync: bucket {bucket.index} has a chunk of {chunk.name!r}, which the engine lacks"
            )
        parameter = self.parameters[chunk.name]
        bounds, shape = chunk.bounds, tuple(parameter.shape)
        fits = len(bounds.offset) == len(bounds.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(bounds.offset, bounds.shape, shape)
        )
        if not fits:
            raise ValueError(f"weight sync: the chunk {bounds} is not inside {chunk.name!r} {shape}")
        end = chunk.byte_offset + bounds.volume * parameter.dtype.itemsize
        if chunk.byte_offset < 0 or chunk.byte_offset % CHUNK_ALIGNMENT or end > bucket.num_bytes:
            raise ValueError(
                f"weight sync: the chunk {bounds} of {chunk.name!r} lies at bytes [{chunk.byte_offset}, {end}) of a bucket "
                f"of {bucket.num_bytes}"
            )
        return parameter


def _first(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
