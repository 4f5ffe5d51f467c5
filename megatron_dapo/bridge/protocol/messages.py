"""Messages of a weight sync between the trainer and one engine rank: commands, replies, and the buckets they announce.

All of them travel as JSON; the bytes of a bucket travel separately.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_dapo.reshard.slices import Coordinates, Slice

PROTOCOL_VERSION = 9  # rises with every change of a message: external servers may have another release installed
CHUNK_ALIGNMENT = 64  # byte offsets of chunks are multiples of it, so that any element type can view them in place


class ParameterManifest(NamedTuple):
    """One engine-local parameter: the trainer promises `num_filled` elements; the rest is padding and must be zero."""

    shape: Coordinates
    dtype: torch.dtype
    num_filled: int


@dataclass(frozen=True)
class Manifest:
    """Everything one weight sync will bring to one engine rank.

    Versions must not go backwards within a `session` (one life of the trainer); a version may be sent again. Syncs of a
    session are numbered upwards, so that one that arrives after its successor is refused.
    """

    sync_id: str  # unique
    session: str
    version: int
    num_buckets: int
    parameters: Mapping[str, ParameterManifest]  # every parameter of the engine rank
    number: int = 0
    base: int | None = None  # the buckets hold changes of this version; None: all elements

    def to_json(self) -> dict[str, Any]:
        parameters = {n: [p.shape, dtype_name(p.dtype), p.num_filled] for n, p in self.parameters.items()}
        return {**vars(self), "parameters": parameters}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Manifest:
        parameters = {
            name: ParameterManifest(tuple(shape), dtype_of(dtype), num_filled)
            for name, (shape, dtype, num_filled) in value["parameters"].items()
        }
        version, num_buckets, number = (int(value[key]) for key in ("version", "num_buckets", "number"))
        base = None if value["base"] is None else int(value["base"])
        return Manifest(value["sync_id"], value["session"], version, num_buckets, parameters, number, base)


class Chunk(NamedTuple):
    """Slice `bounds` of the engine-local parameter `name`, row-major in the parameter's type, at a byte of a bucket."""

    name: str
    bounds: Slice
    byte_offset: int


@dataclass(frozen=True)
class Bucket:
    """Bucket number `index` of one engine rank: chunks that fill its first `num_bytes` bytes.

    Each trainer rank writes one run of bytes, its segment; the segments follow each other without gaps.
    """

    index: int
    num_bytes: int
    chunks: tuple[Chunk, ...]  # sorted by byte offset
    segments: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # trainer rank -> [start, stop)
    engine_rank: int = 0

    def to_json(self) -> dict[str, Any]:
        chunks: dict[str, list[Any]] = {}  # keyed by name, which is long: the commands of a 32B model take megabytes
        for name, bounds, byte_offset in self.chunks:
            chunks.setdefault(name, []).append([byte_offset, bounds.offset, bounds.shape])
        segments = [[rank, *segment] for rank, segment in self.segments.items()]
        return {**vars(self), "chunks": chunks, "segments": segments}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Bucket:
        """Raise ValueError if the segments do not cover the bucket one after the other."""
        chunks = [
            Chunk(name, Slice(tuple(offset), tuple(shape)), int(byte_offset))
            for name, entries in value["chunks"].items()
            for byte_offset, offset, shape in entries
        ]
        index, num_bytes, engine_rank = (int(value[key]) for key in ("index", "num_bytes", "engine_rank"))
        segments = {int(rank): (int(start), int(stop)) for rank, start, stop in value["segments"]}
        position = 0
        for rank, (start, stop) in segments.items():
            if start != position or stop < start:
                raise ValueError(
                    f"weight sync: trainer rank {rank} sends bytes [{start}, {stop}), expected {position} next"
                )
            position = stop
        if segments and position != num_bytes:
            raise ValueError(f"weight sync: the trainer sends {position} of {num_bytes} bytes of bucket {index}")
        # JSON grouped them by name; the p2p stream walks them byte by byte.
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.byte_offset))
        return Bucket(index, num_bytes, ordered, segments, engine_rank)


@dataclass(frozen=True)
class Command:
    """One step of a message to an engine rank.

    `channel` says how bytes and the reply travel; the first command's channel counts for the whole message.
    """

    id: str  # repeated by the reply
    op: str
    sync_id: str = ""
    manifest: Manifest | None = None  # begin, adopt
    bucket: Bucket | None = None  # bucket
    channel: Mapping[str, Any] = field(default_factory=dict)  # {"kind": ..., ...}, JSON

    def encode(self) -> str:
        value = {
            **vars(self),
            "protocol": PROTOCOL_VERSION,
            "manifest": self.manifest.to_json() if self.manifest else None,
            "bucket": self.bucket.to_json() if self.bucket else None,
            "channel": dict(self.channel),
        }
        return json.dumps(value, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> Command:
        """Raise ValueError if the text is no command of this protocol version."""
        try:
            value = json.loads(text)
            if value["protocol"] != PROTOCOL_VERSION:
                raise ValueError(
                    f"weight sync: the command speaks protocol {value['protocol']}, this engine {PROTOCOL_VERSION}; "
                    "start trainer and engines from one installation"
                )
            return Command(
                value["id"],
                value["op"],
                value["sync_id"],
                Manifest.from_json(value["manifest"]) if value["manifest"] else None,
                Bucket.from_json(value["bucket"]) if value["bucket"] else None,
                value["channel"],
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"weight sync: a message is no command ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class CommandReply:
    """The engine rank's answer to one message."""

    id: str
    op: str
    ok: bool
    message: str = ""
    is_lost: bool = False  # it failed because a connection broke, so something else is the cause
    sync_id: str = ""
    version: int | None = None  # held by the parameters; None while they are unknown or mixed
    num_bytes: int = 0  # copied into parameters by the message
    seconds: float = 0.0  # duration of the last command
    checksums: Mapping[str, int] = field(default_factory=dict)  # finish, adopt, checksums: signed 64-bit

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> CommandReply:
        """Raise ValueError if the text is no reply."""
        try:
            return CommandReply(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"weight sync: a message is no reply ({type(error).__name__}: {error})") from error


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type as it travels, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the element type of a name. Raise ValueError for one that no weight sync carries."""
    if name not in _DTYPES:
        raise ValueError(f"weight sync: no element type {name!r}; there are {', '.join(_DTYPES)}")
    return _DTYPES[name]
