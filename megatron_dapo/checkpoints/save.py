"""Checkpoints that are written while the run continues.

    rank                                   its file process                    rank 0's file process
    start     begin, agreed on        -->                                      make the directory
              note tensors, copy JSON
    (thread)  copy the tensors        -->  write, hash, fsync its files
    ...       train on                     leave its part of the manifest -->  wait for every part, merge them, rename
    status    idle, in flight, failed
    finish    agree on the end                                                 delete old checkpoints

Each rank copies into shared memory, which the next save reuses. Tensors must not change from `start` to the end of
`wait_for_copy`; JSON is encoded at once. Rank 0 sees the parts in the directory that all nodes share: the rename needs no
communication, and a failure on any rank is reported at the next collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.checkpoints.memory_copies import CopyTargets, keep_copies
from megatron_dapo.checkpoints.store import (
    CheckpointError,
    CheckpointStore,
    CheckpointWriter,
    part_name,
    require_together,
    save_checkpoint,
    written_twice,
)
from megatron_dapo.device_thread import device_thread
from megatron_dapo.files.durable import (
    HERE,
    DIRECT_BYTES,
    Work,
    piece_sizes,
    safetensors_header,
    write_direct,
)
from megatron_dapo.files.process import FileProcess

if TYPE_CHECKING:
    import torch

# Name, begin and end in the shared memory of a file, and the sizes of its pieces if it has any.
Place = tuple[str, int, int, Sequence[int]]
IDLE, IN_FLIGHT, FAILED = 0.0, 1.0, 2.0  # status of a save on one rank; the maximum over ranks is that of the save
_LOOK_S = 0.02  # interval of the checks for the parts of other ranks


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is in place."""

    step: int
    directory: Path
    seconds: float  # time between the start of the save and the renamed directory on disk; 0 on ranks other than 0


@dataclass(frozen=True)
class CopiedFile:
    """Bytes [start, end) of the shared memory that become one file: `head`, then `tensors` one after another."""

    name: str
    start: int
    end: int
    head: bytes
    tensors: Sequence[torch.Tensor] = ()
    sizes: Sequence[int] = ()  # bytes of each piece of a safetensors file

    def fill(self, memory: torch.Tensor) -> None:
        """Copy the content to `memory` (uint8)."""
        import torch

        position = self.start + len(self.head)
        memory[self.start : position] = torch.frombuffer(bytearray(self.head), dtype=torch.uint8)
        for tensor in self.tensors:
            size = tensor.numel() * tensor.element_size()
            # Every tensor is aligned to its type: the widest types come first, after a head of whole words.
            memory[position : position + size].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            position += size


def arrange(noted: CheckpointWriter) -> list[CopiedFile]:
    """Place files one after another in shared memory. ValueError for a type of tensor that the format does not have."""
    files: list[CopiedFile] = []
    for name, content in noted.contents.items():
        # Page-aligned: the file process writes them past the page cache.
        start = -(-files[-1].end // DIRECT_BYTES) * DIRECT_BYTES if files else 0
        if isinstance(content, bytes):
            files.append(CopiedFile(name, start, start + len(content), content))
            continue
        header, order = safetensors_header(content)
        ordered = [content[each].detach() for each in order]
        sizes = piece_sizes(header, ordered)
        files.append(CopiedFile(name, start, start + sum(sizes), header, ordered, sizes))
    return files


def tensors_of(noted: CheckpointWriter) -> Iterator[torch.Tensor]:
    for content in noted.contents.values():
        if not isinstance(content, bytes):
            yield from content.values()


class _CopyMemory:
    """The shared memory of a rank's file process as a tensor; its pages are locked if the rank uses CUDA."""

    def __init__(self, files: FileProcess) -> None:
        self._files = files
        self._tensor: torch.Tensor | None = None
        self._is_locked = False

    def tensor(self, num_bytes: int, is_locked: bool) -> torch.Tensor:
        """Return at least `num_bytes` of memory as uint8; growing loses what it held."""
        import torch

        if self._tensor is None or self._tensor.numel() < num_bytes:
            self.unlock()
            self._tensor = torch.frombuffer(self._files.copy_memory(num_bytes), dtype=torch.uint8)
        if is_locked and not self._is_locked:
            # If CUDA refuses, copies are slower but still correct.
            code = torch.cuda.cudart().cudaHostRegister(self._tensor.data_ptr(), self._tensor.nbytes, 0)
            self._is_locked = int(code) == 0
        return self._tensor

    def unlock(self) -> None:
        """Unregister the locked pages from CUDA before the memory is remapped or unmapped."""
        import torch

        if self._is_locked and self._tensor is not None:
            torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
        self._is_locked = False


@dataclass
class _Save:
    step: int
    begun: float  # monotonic clock, which processes of one machine share
    is_noted: threading.Event = field(default_factory=threading.Event)  # set once the content may be copied
    problem: Exception | None = None  # raised while noting, copying or starting to write
    copying: threading.Thread | None = None
    part: Future[Any] | None = None  # this rank's files; None until they are copied
    commit: Future[Any] | None = None  # rank 0 only


class BackgroundSaves:
    """The saves of one rank, at most one in flight.

    Without a file process (on systems other than Linux, in a single process) a save is done when `start` returns.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._save: _Save | None = None
        self._saved: Saved | None = None  # the result for `finish` of a save that was done immediately
        self._memory: _CopyMemory | None = None

    def start(
        self, step: int, write: Callable[[CheckpointWriter], None], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to save what `write` gives its writer. Collective, and no save may be in flight.

        Raises CheckpointError on all ranks if the directory cannot be made; `status` reports any other failure.
        """
        assert not self.is_in_flight, "one save at a time"
        store, begun = self._store, time.monotonic()
        if not isinstance(store.files, FileProcess):
            path = save_checkpoint(store, step, write, metadata=metadata)
            self._saved = Saved(step, path, time.monotonic() - begun)
            return
        self._memory = self._memory or _CopyMemory(store.files)
        with require_together(store, step):
            if store.rank == 0:
                store.ask("begin", step)
        self._save = save = _Save(step, begun)
        try:
            self._copy(save, write, self._memory, store.files)
            if store.rank == 0:
                save.commit = store.files.start(commit_when_written, *store.identity, step, dict(metadata or {}))
        except Exception as error:  # the other ranks continue and learn of it at the next collective
            save.problem = error
        finally:
            save.is_noted.set()

    def _copy(
        self, save: _Save, write: Callable[[CheckpointWriter], None], memory: _CopyMemory, files: FileProcess
    ) -> None:
        noted = CheckpointWriter()
        write(noted)
        devices = {tensor.device for tensor in tensors_of(noted)}
        cuda = next((device for device in devices if device.type == "cuda"), None)
        stream = _stream_after_current(cuda) if cuda is not None else None

        def copy() -> None:
            save.is_noted.wait()  # let the run continue first
            try:
                places = self._fill(arrange(noted), memory, stream)
                copies, store = self._store.copies, self._store
                targets = asdict(copies.targets) if copies is not None and copies.targets is not None else None
                directory = store.partial_path(save.step)
                save.part = files.start(write_part, directory, store.rank, places, save.step, targets)
            except Exception as error:
                save.problem = error
            noted.contents.clear()  # the run may change its tensors again

        save.copying = device_thread(copy, name="checkpoint copy")
        save.copying.start()

    @staticmethod
    def _fill(files: Sequence[CopiedFile], memory: _CopyMemory, stream: torch.cuda.Stream | None) -> list[Place]:
        """Copy files to shared memory, from a CUDA device on `stream`; return where they are."""
        import torch

        target = memory.tensor(files[-1].end if files else 0, is_locked=stream is not None)
        with torch.cuda.stream(stream):  # None changes nothing
            for file in files:
                file.fill(target)
        if stream is not None:
            stream.synchronize()
        return [(file.name, file.start, file.end, file.sizes) for file in files]

    @property
    def is_in_flight(self) -> bool:
        """True from `start` to `finish`, the same on all ranks."""
        return self._save is not None or self._saved is not None

    @property
    def is_copying(self) -> bool:
        """True while tensors that are being saved must not change."""
        return self._save is not None and self._save.copying is not None and self._save.copying.is_alive()

    def wait_for_copy(self) -> None:
        """Wait until tensors that are being saved may change."""
        if self._save is not None and self._save.copying is not None:
            self._save.copying.join()

    @property
    def status(self) -> float:
        """IDLE, IN_FLIGHT or FAILED on this rank: call `finish` once the largest of all ranks is not IN_FLIGHT."""
        save = self._save
        if save is None:
            return IDLE
        if save.problem is not None:
            return FAILED
        if self.is_copying:
            return IN_FLIGHT
        for job in (save.part, save.commit):
            if job is not None and not job.done():
                return IN_FLIGHT
            if job is not None and job.exception() is not None:
                return FAILED
        return IDLE

    def finish(self) -> Saved:
        """Wait for the save in flight. Collective.

        If it failed on any rank all raise CheckpointError, its directory is gone, and older checkpoints are as they were.
        """
        if self._saved is not None:
            saved, self._saved = self._saved, None
            return saved
        assert self._save is not None, "a save is in flight"
        store, save, self._save = self._store, self._save, None
        give_up = None
        if save.commit is not None and isinstance(store.files, FileProcess):
            give_up = partial(store.files.cancel, save.commit)
        with require_together(store, save.step, give_up):
            if save.copying is not None:
                save.copying.join()
            if save.problem is not None:
                raise save.problem
            assert save.part is not None, "what was copied is being written"
            problem = save.part.result()
            if self._store.copies is not None:
                self._store.copies.warn(problem)
        done = save.begun
        # Only after every rank's part is there: otherwise a rank 0 that waits for the others would count as hung itself.
        with require_together(store, save.step):
            if save.commit is not None:
                done = save.commit.result()
        if store.copies is not None:
            store.copies.committed(save.step)
        return Saved(save.step, store.path(save.step), done - save.begun)


def _stream_after_current(device: torch.device) -> Any:
    """Return a CUDA stream that waits for the work queued so far."""
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


# In the file process


def write_part(
    work: Work,
    directory: Path,
    rank: int,
    places: Sequence[Place],
    step: int,
    targets: Mapping[str, str] | None,
) -> str:
    """Write one rank's files from its copy, then its part of the manifest, then give the files of tensors to keepers.

    `targets`: of `CopyTargets`; None without copies in memory. Returns why a file was not copied, "" if all were.
    """
    keepers = CopyTargets(**targets) if targets else None
    entries = []
    for name, start, end, sizes in places:
        try:
            entry = write_direct(directory / name, work.memory[start:end], sizes)
            entries.append(replace(entry, keepers=keepers.keepers if keepers and entry.pieces else ()))
        except FileExistsError:
            raise ValueError(written_twice(name)) from None
    part = directory / part_name(rank)
    # Renamed atomically: to rank 0 the name means that all files of this rank are on disk.
    unfinished = part.with_suffix(".unfinished")
    HERE.write_json(unfinished, [entry.to_json() for entry in entries])
    os.replace(unfinished, part)
    if keepers is None:
        return ""
    # After the part, so that the commit does not wait for the copies.
    contents = [work.memory[start:end] for _, start, end, _ in places]
    return keep_copies(keepers, step, [(entry, each) for entry, each in zip(entries, contents) if entry.pieces])


def commit_when_written(
    work: Work, directory: Path, keep: Sequence[Any], num_ranks: int, step: int, metadata: Mapping[str, Any]
) -> float:
    """Put a checkpoint in place once the parts of all ranks are there; return when it was, on the monotonic clock."""
    store = CheckpointStore.opened(directory, keep, num_ranks)
    while store.missing_parts(step):
        if work.cancelled.wait(_LOOK_S):
            raise CheckpointError(f"checkpoint of step {step}: given up")
    store.put_in_place(step, metadata)
    done = time.monotonic()
    store.delete_old(step, metadata)
    return done
