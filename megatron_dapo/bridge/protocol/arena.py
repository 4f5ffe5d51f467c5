"""Memory that trainer and engine processes of one node share, one arena an engine rank: reply area, counters, slots.

An arena is a file in a memory file system, readable only by its owner. The trainer creates it and unlinks it as soon as
all have mapped it. `remove_stale` removes the files of killed processes; the name carries the creator's pid.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from megatron_dapo.bridge.protocol.progress import KEY_WORD, NUM_SLOTS, NUM_WORDS, ArenaProgress

logger = logging.getLogger(__name__)

PREFIX = "megatron_dapo-arena-"
_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-")
REPLY_BYTES = 1 << 20
_SLOTS_BEGIN = REPLY_BYTES + 8 * NUM_WORDS
_HEADER_BYTES = 16  # length and checksum of the reply, 8 bytes each, little-endian


@dataclass(frozen=True)
class ArenaSpec:
    """Path, key and division of an arena."""

    path: str
    key: int  # also in the arena: a damaged path that names the arena of another engine rank does not open it
    slot_bytes: int
    num_slots: int = NUM_SLOTS

    @property
    def creator(self) -> int:
        """Process id of the trainer rank that created the arena, as that rank sees it; 0 if the name has none."""
        match = _NAME.match(Path(self.path).name)
        return int(match[1]) if match else 0

    @property
    def num_bytes(self) -> int:
        return _SLOTS_BEGIN + self.slot_bytes * self.num_slots

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ArenaSpec:
        return ArenaSpec(str(value["path"]), int(value["key"]), int(value["slot_bytes"]), int(value["num_slots"]))


class Arena:
    """An arena mapped into this process. `pinned`: for copies from and to GPUs, which pageable memory slows down."""

    def __init__(self, spec: ArenaSpec, *, pinned: bool = False) -> None:
        self.spec = spec
        # Map the open descriptor: from_file would create the file again if it has been unlinked since the check.
        descriptor = os.open(spec.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _check_owner(spec, os.fstat(descriptor))
            path = f"/proc/self/fd/{descriptor}"
            memory = torch.from_file(path, shared=True, size=spec.num_bytes, dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.reply = memory[:REPLY_BYTES]
        self.progress = ArenaProgress(memory[REPLY_BYTES:_SLOTS_BEGIN].view(torch.int64))
        self.slots = memory[_SLOTS_BEGIN:].view(spec.num_slots, spec.slot_bytes)
        if self.progress.key != spec.key:
            raise ValueError(
                f"arena {spec.path}: its key is {self.progress.key}, not {spec.key}: it is another engine's"
            )
        if pinned:
            _pin(self, self.slots)

    def write_reply(self, text: str) -> None:
        write_reply(self.reply, text)

    def read_reply(self) -> str:
        return read_reply(self.reply)

    def clear_reply(self) -> None:
        """Forget the last reply, so that a silent engine is not mistaken for an answering one."""
        self.reply[:_HEADER_BYTES].zero_()


def _pin(arena: Arena, memory: torch.Tensor) -> None:
    """Lock the pages of `memory` for CUDA until the arena is dropped. If CUDA refuses, copies are slower: a warning."""
    if not memory.numel():
        return
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        logger.warning(
            "arena %s: its %d bytes stay pageable, cudaHostRegister failed with code %d: weight syncs through it are slower",
            arena.spec.path,
            memory.nbytes,
            code,
        )
        return
    # Before the memory is unmapped, which happens once the arena's tensors are gone.
    weakref.finalize(arena, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False


def create_arena(directory: Path, name: str, slot_bytes: int, num_slots: int = NUM_SLOTS) -> ArenaSpec:
    """Create a file in `directory` and reserve its memory. Raise ValueError if there is not enough."""
    path = directory / f"{PREFIX}{os.getpid()}-{name}"
    spec = ArenaSpec(str(path), secrets.randbits(62), slot_bytes, num_slots)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Without the reservation, the first write beyond the free memory would kill the process (SIGBUS).
        os.posix_fallocate(descriptor, 0, spec.num_bytes)
        os.pwrite(descriptor, spec.key.to_bytes(8, "little"), REPLY_BYTES + 8 * KEY_WORD)
    except OSError as error:
        remove_arena(spec)
        free = os.statvfs(directory)
        raise ValueError(
            f"arena of {spec.num_bytes} bytes in {directory}, which has {free.f_bavail * free.f_frsize} free: "
            f"{error.strerror}; give it more memory or take smaller buckets"
        ) from error
    finally:
        os.close(descriptor)
    return spec


def remove_arena(spec: ArenaSpec) -> None:
    """Unlink an arena; mappings stay valid. One that is gone already is ignored."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(spec.path)


def remove_stale(directory: Path) -> list[Path]:
    """Unlink the arenas of this user whose creator is dead; return their paths."""
    removed = []
    for path in directory.glob(PREFIX + "*"):
        match = _NAME.match(path.name)
        with contextlib.suppress(FileNotFoundError):
            if match and path.stat().st_uid == os.getuid() and not is_running(int(match[1])):
                path.unlink()
                removed.append(path)
    return removed


def write_reply(area: torch.Tensor, text: str) -> None:
    """Write a reply into a reply area. Raise ValueError if it does not fit."""
    payload = text.encode()
    if len(payload) > area.numel() - _HEADER_BYTES:
        raise ValueError(f"reply of {len(payload)} bytes, the reply area has {area.numel() - _HEADER_BYTES}")
    area[:_HEADER_BYTES].zero_()
    area[_HEADER_BYTES : _HEADER_BYTES + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    # The header last: a reader never sees the length of a reply that is not all there.
    area[:_HEADER_BYTES] = torch.tensor([len(payload), crc32(payload)], dtype=torch.int64).view(torch.uint8)


def read_reply(area: torch.Tensor) -> str:
    """Return the reply in a reply area. Raise ValueError if there is none, or a broken one."""
    length, check = area[:_HEADER_BYTES].clone().view(torch.int64).tolist()
    if not 0 < length <= area.numel() - _HEADER_BYTES:
        raise ValueError("the engine left no reply")
    payload = bytes(area[_HEADER_BYTES : _HEADER_BYTES + length].tolist())
    if crc32(payload) != check:
        raise ValueError(f"the engine's reply of {length} bytes is broken")
    return payload.decode()


def _check_owner(spec: ArenaSpec, status: os.stat_result) -> None:
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(
            f"arena {spec.path}: belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}, "
            f"must be user {os.getuid()}'s with mode 600"
        )
    if status.st_size != spec.num_bytes:
        raise ValueError(f"arena {spec.path}: {status.st_size} bytes, {spec.num_bytes} expected")


def is_running(pid: int) -> bool:
    """Return True if a process of this node is alive; a zombie is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][:1] not in "ZX"
    return True
