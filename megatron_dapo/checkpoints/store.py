"""Atomic checkpoints: written under a temporary name, verified, renamed; the newest valid one is loaded.

    <directory>/step_000123.tmp/     while ranks write: their files, and one part of the manifest a rank
    <directory>/step_000123/         after rank 0 merged the parts into manifest.json (size and SHA-256 of every file, and its own) and renamed

Files of tensors have a checksum of every tensor: a load verifies what it reads and falls back to the previous checkpoint.
A kill at any point leaves either the old directory or the new one. Old checkpoints are deleted only after the new one is
in place. The caller passes a function that writes the content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.checkpoints.memory_copies import MemoryCopies
from megatron_dapo.checkpoints.retention import KeepPolicy, steps_to_delete
from megatron_dapo.files.checksums import DamagedError, PieceChecksums
from megatron_dapo.files.durable import (
    HERE,
    FileEntry,
    Files,
    is_intact,
    json_bytes,
    sha256_of_pieces,
    sync,
)
from megatron_dapo.untrusted import one_line, read_json

if TYPE_CHECKING:
    import torch

    from megatron_dapo.parallel.coordination import Coordination

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_OWN_HASH = "sha256"  # field of the manifest
_STEP = re.compile(r"step_(\d{6,})")
_PART = re.compile(r"manifest_rank_(\d+)\.json")
_ADDRESS, _MAX_KEEPERS = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}:\d{1,5}"), 2  # keepers' addresses
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or none can be loaded; the message says which, why and what is left.

    `is_consequence`: another rank failed, and its message says why. `is_final`: another attempt would fail in the same way.
    """

    def __init__(self, message: str, *, is_consequence: bool = False, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_consequence, self.is_final = is_consequence, is_final


@dataclass(frozen=True)
class Checkpoint:
    step: int
    directory: Path
    files: Mapping[str, FileEntry]
    metadata: Mapping[str, Any]
    find_copy: Callable[[str], Path | None] = lambda name: None  # the copy of a file in memory; None: read the file

    def load_json(self, name: str) -> Any:
        return read_json(self._path(name))

    def load_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of one safetensors file, on the CPU. DamagedError if the file changed since it was written."""
        # Imported here, as checkpoints are listed and checked without torch.
        from megatron_dapo.checkpoints.formats.safetensors import read_tensors

        return read_tensors(self.find_copy(name) or self._path(name), self.checksums.get(name))

    @cached_property
    def checksums(self) -> Mapping[str, PieceChecksums]:
        """The checksums of pieces of the files that have them; the others are verified as a whole."""
        return {name: PieceChecksums(entry.pieces) for name, entry in self.files.items() if entry.pieces}

    def _path(self, name: str) -> Path:
        if name not in self.files:
            raise CheckpointError(
                f"checkpoint {self.directory}: no file {name!r}; it holds {', '.join(sorted(self.files))}"
            )
        return self.directory / name


class CheckpointWriter:
    """Notes the files that one rank saves. Their names are plain and differ between ranks."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes | Mapping[str, torch.Tensor]] = {}  # tensors: of a safetensors file

    def save_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note tensors for a safetensors file; they must not change before they are written or copied."""
        self._require_new(name)
        self.contents[name] = tensors

    def save_json(self, name: str, document: Any) -> None:
        self._require_new(name)
        self.contents[name] = json_bytes(document)

    def _require_new(self, name: str) -> None:
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST or _PART.fullmatch(name):
            raise ValueError(f"checkpoint file {name!r}: use letters, digits, '_', '-', '.', and not a manifest's name")
        if name in self.contents:
            raise ValueError(written_twice(name))


def part_name(rank: int) -> str:
    return f"manifest_rank_{rank}.json"


def written_twice(name: str) -> str:
    """Return the error message for a file name that is not unique to one rank."""
    return f"checkpoint file {name!r} is written twice; put the rank into its name"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint directory by its name; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


class CheckpointStore:
    """The checkpoints of one run, as one of its ranks sees them; `coordination` is None in a single process.

    Only rank 0 changes the directory (`begin`, `commit`, `abandon`, `clean`, `remove`), during training through `ask`.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int | KeepPolicy,
        coordination: Coordination | None = None,
        files: Files = HERE,
    ) -> None:
        """`keep`: which older checkpoints stay; a number: that many of the newest valid ones."""
        self.directory = Path(directory)
        self.keep = KeepPolicy(keep) if isinstance(keep, int) else keep
        self.rank, self.num_ranks = (coordination.rank, coordination.size) if coordination else (0, 1)
        self._coordination = coordination
        self.files = files
        self.copies: MemoryCopies | None = None  # copies in memory; on all ranks or on none

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of this store in the process that writes the files; return its result. All values are JSON."""
        return self.files.run(_manage_checkpoints, *self.identity, method, *arguments)

    @property
    def identity(self) -> tuple[Path, Sequence[Any], int]:
        """Return the arguments by which `opened` has this store in another process."""
        return self.directory, astuple(self.keep), self.num_ranks

    @classmethod
    def opened(cls, directory: Path, keep: Sequence[Any], num_ranks: int) -> CheckpointStore:
        """Return rank 0's store of that `identity`; for its file process."""
        store = cls(directory, KeepPolicy(*keep))
        store.num_ranks = num_ranks
        return store

    def agree(self, ok: bool) -> bool:
        """Return True on every rank if every rank passed True. Collective, and a barrier."""
        return ok if self._coordination is None else self._coordination.all_true(ok)

    def sum(self, rows: list[list[int]]) -> list[list[int]]:
        """Return the element-wise sum of every rank's rows, on all ranks. Collective."""
        if self._coordination is None:
            return rows
        return self._coordination.merge(rows, _summed, "where checkpoints were read")

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def partial_path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}.tmp"

    def steps(self) -> list[int]:
        """Steps of the existing checkpoint directories, valid or not, newest first."""
        if not self.directory.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.directory.iterdir() if entry.is_dir())
        return sorted((int(match.group(1)) for match in matches if match), reverse=True)

    def begin(self, step: int) -> None:
        self.clean()
        # Not its parents: without the run's directory, its file system is gone, and the mount point has to stay empty.
        self.directory.mkdir(exist_ok=True)
        self.partial_path(step).mkdir()

    def write(self, step: int, noted: CheckpointWriter) -> None:
        """Write this rank's files, then its part of the manifest, which declares them complete."""
        directory, entries = self.partial_path(step), []
        for name, content in noted.contents.items():
            try:
                if isinstance(content, bytes):
                    entry = self.files.write(directory / name, [content], "x")
                else:
                    entry = self.files.write_tensors(directory / name, content, "x")
            except FileExistsError:
                raise ValueError(written_twice(name)) from None
            entries.append(entry.to_json())
        self.files.write_json(directory / part_name(self.rank), entries)

    def commit(self, step: int, metadata: Mapping[str, Any] | None = None) -> None:
        """Merge the ranks' parts, put the checkpoint in place, then delete what `keep` does not cover.

        "evaluations" in `metadata`, train step -> metrics, determine the best checkpoint.
        """
        self.put_in_place(step, metadata)
        self.delete_old(step, metadata)

    def missing_parts(self, step: int) -> list[int]:
        """Return the ranks that have not finished their part of an unfinished checkpoint."""
        names = os.listdir(self.partial_path(step))
        parts = {int(match.group(1)) for match in map(_PART.fullmatch, names) if match}
        return sorted(set(range(self.num_ranks)) - parts)

    def put_in_place(self, step: int, metadata: Mapping[str, Any] | None = None) -> None:
        partial, final = self.partial_path(step), self.path(step)
        if missing := self.missing_parts(step):
            raise CheckpointError(
                f"checkpoint {partial}: ranks {missing} of {self.num_ranks} wrote nothing; is the directory shared by all nodes?"
            )
        entries = [
            FileEntry(**entry)
            for rank in range(self.num_ranks)
            for entry in json.loads((partial / part_name(rank)).read_text(encoding="utf-8"))
        ]
        document = {
            "format": FORMAT,
            "step": step,
            "files": [entry.to_json() for entry in entries],
            "metadata": dict(metadata or {}),
        }
        HERE.write_json(partial / MANIFEST, {**document, _OWN_HASH: _own_hash(document)})
        for rank in range(self.num_ranks):
            (partial / part_name(rank)).unlink()
        sync(partial)
        if final.exists():
            # The same step again, e.g. over a corrupt one: `clean` undoes this if the next rename never happens.
            os.replace(final, final.with_name(final.name + ".replaced"))
        os.replace(partial, final)
        sync(self.directory)
        self.open(step)

    def abandon(self, step: int) -> None:
        """Remove the unfinished checkpoint of `step` so that its space is free again."""
        shutil.rmtree(self.partial_path(step), ignore_errors=True)
        self.clean()

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.directory if self.directory.is_dir() else Path.cwd()).free

    def clean(self) -> None:
        """Undo or finish whatever a killed process left half done."""
        if not self.directory.is_dir():
            return
        for entry in sorted(self.directory.iterdir()):
            name, _, suffix = entry.name.rpartition(".")
            if suffix == "replaced" and _STEP.fullmatch(name) and not (self.directory / name).exists():
                os.replace(entry, self.directory / name)
            elif suffix in ("tmp", "replaced", "deleting") and _STEP.fullmatch(name):
                logger.info("removing %s, left by an interrupted run", entry)
                shutil.rmtree(entry, ignore_errors=True)

    def open(self, step: int, with_copies: bool = False) -> Checkpoint:
        """The checkpoint of `step`, its manifest and file sizes checked (not its contents: `wrong_files`).

        `with_copies`: files that have a copy in memory are read there and may be missing in the directory. Raises
        CheckpointError with the reason if it is incomplete.
        """
        directory = self.path(step)
        checkpoint = _read_manifest(directory, step)
        if with_copies and self.copies is not None:
            # A copy on another node is fetched when it is looked up, once.
            lookup = cache(partial(self.copies.path, step))
            checkpoint = replace(checkpoint, find_copy=lambda name: lookup(checkpoint.files[name]))
        for entry in checkpoint.files.values():
            path = directory / entry.name
            size = path.stat().st_size if path.is_file() else None
            if size != entry.size and checkpoint.find_copy(entry.name) is None:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CheckpointError(
                    f"checkpoint {directory}: {entry.name} {found}, the manifest says {entry.size} bytes"
                )
        return checkpoint

    def delete_old(self, newest: int, metadata: Mapping[str, Any] | None = None) -> None:
        """Delete what `keep` does not ask for; `metadata` are those of `newest`."""
        evaluations = (metadata or {}).get("evaluations", {})
        steps = {step: step == newest or self._is_whole(step) for step in self.steps()}
        for step in steps_to_delete(self.keep, newest, steps, evaluations):
            self._delete(step)

    def _is_whole(self, step: int) -> bool:
        try:
            self.open(step)
        except CheckpointError:
            return False
        return True

    def _delete(self, step: int) -> None:
        # Renamed first: a kill in the middle must not leave a directory that looks like a checkpoint.
        doomed = self.directory / f"{self.path(step).name}.deleting"
        try:
            os.replace(self.path(step), doomed)
        except OSError as error:  # the new checkpoint is in place: not a reason to fail
            logger.warning("could not delete the old checkpoint %s: %s", self.path(step), error)
        shutil.rmtree(doomed, ignore_errors=True)


def _summed(parts: list[list[list[int]]]) -> list[list[int]]:
    return [[sum(numbers) for numbers in zip(*rows)] for rows in zip(*parts)]


def _manage_checkpoints(directory: Path, keep: Sequence[Any], num_ranks: int, method: str, *arguments: Any) -> Any:
    """Call a method of rank 0's store of `num_ranks` ranks and return its result; runs in its file process."""
    return getattr(CheckpointStore.opened(directory, keep, num_ranks), method)(*arguments)


def wrong_files(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """Return the files whose contents changed since they were written; reads each of `names` in full."""
    return [name for name in names if not is_intact(checkpoint.directory / name, checkpoint.files[name])]


def save_checkpoint(
    store: CheckpointStore,
    step: int,
    write: Callable[[CheckpointWriter], None],
    *,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Every rank calls this; `write` saves this rank's files. Returns the directory once the checkpoint is in place.

    If anything fails on any rank (a full disk, a bug in `write`), all ranks raise, the unfinished directory is gone, and
    earlier checkpoints are as they were.
    """

    def write_own() -> None:
        writer = CheckpointWriter()
        write(writer)
        store.write(step, writer)

    is_first, begin = store.rank == 0, partial(store.ask, "begin", step)
    commit = partial(store.ask, "commit", step, dict(metadata or {}))
    for is_mine, phase in ((is_first, begin), (True, write_own), (is_first, commit)):
        with require_together(store, step):
            if is_mine:
                phase()
    return store.path(step)


@contextmanager
def require_together(store: CheckpointStore, step: int, give_up: Callable[[], object] | None = None) -> Iterator[None]:
    """Raise CheckpointError on all ranks if the body failed on any, after removing the unfinished checkpoint. Collective.

    `give_up` is called before the removal; only rank 0 passes one.
    """
    problem = None
    try:
        yield
    except Exception as error:
        # Ranks agree before they raise, or the others would wait for this one.
        problem = error
    if store.agree(problem is None):
        return
    if give_up is not None:
        give_up()
    if store.rank == 0:
        store.ask("abandon", step)
    message = _save_message(store, step, problem)
    if problem is None:
        raise CheckpointError(message, is_consequence=True)
    raise CheckpointError(message) from problem


def _save_message(store: CheckpointStore, step: int, problem: Exception | None) -> str:
    what = "another rank failed; its own message says why" if problem is None else str(problem)
    if isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
        fix = "free space, lower checkpoint.keep, or move checkpoint.output_dir"
        what = f"the disk is full ({store.ask('free_bytes') / 2**20:.0f} MiB free); {fix}"
    earlier = [other for other in store.ask("steps") if other != step]
    left = f"the newest earlier checkpoint is {store.path(earlier[0])}" if earlier else "there is no earlier checkpoint"
    return f"checkpoint of step {step} was not saved in {store.directory}: {what}; {left}"


def newest_valid(store: CheckpointStore, load: Callable[[Checkpoint], None] | None = None) -> Checkpoint | None:
    """Return the newest checkpoint whose bytes are all as written; each rank reads its share of the files.

    `load` loads this rank's part and verifies the files of tensors while it reads them: if it raises DamagedError or
    OSError on any rank, all ranks load the previous checkpoint instead. Broken checkpoints are reported and skipped.
    Returns None if there is no checkpoint; raises CheckpointError if all are broken.
    """
    if store.rank == 0:
        store.clean()
    # The others list the directory only once rank 0 has put the leftovers of a killed run in order.
    store.agree(True)
    reasons = []
    found_here = False
    for step in store.steps():
        problem = _problem(store, step, load is not None)
        if store.agree(problem is None):
            if load is None:
                return store.open(step)
            # Copies in memory come first. If one of them is wrong, storage has the same checkpoint.
            for with_copies in (True, False) if store.copies is not None else (False,):
                checkpoint, problem = _loaded(store, step, load, with_copies)
                if store.agree(problem is None):
                    return checkpoint
                if with_copies:
                    logger.warning(
                        "copies of step %d in memory: %s; reading storage", step, problem or "broken on another rank"
                    )
        reason = problem or f"checkpoint {store.path(step)}: another rank found it broken"
        logger.warning("%s; trying the one before", reason)
        reasons.append(reason)
        found_here = found_here or bool(problem)
    if reasons:
        message = (
            f"none of the checkpoints in {store.directory} can be loaded: {'; '.join(reasons)}. "
            "Restore one, or start anew with another run.output_dir"
        )
        raise CheckpointError(message, is_final=found_here, is_consequence=not found_here)
    return None


def _problem(store: CheckpointStore, step: int, is_loaded: bool) -> str | None:
    """Return why a checkpoint is broken, None if it is not. If it `is_loaded` next, the load verifies the tensor
    files."""
    if store.copies is not None:
        store.copies.begin_load()
    try:
        checkpoint = store.open(step, with_copies=is_loaded)
        later = checkpoint.checksums if is_loaded else {}
        names = [name for name in sorted(checkpoint.files) if name not in later]
        wrong = wrong_files(checkpoint, names[store.rank :: store.num_ranks])
    except (CheckpointError, OSError) as error:
        return str(error)
    return (
        f"checkpoint {checkpoint.directory}: contents of {', '.join(wrong)} changed since they were written"
        if wrong
        else None
    )


def _loaded(
    store: CheckpointStore, step: int, load: Callable[[Checkpoint], None], with_copies: bool
) -> tuple[Checkpoint | None, str | None]:
    """Load a checkpoint; return it with None or the reason why it cannot be loaded, "" if another rank knows the reason."""
    if store.copies is not None:
        store.copies.begin_load(with_copies)
    checkpoint: Checkpoint | None = None
    problem: str | None = None
    try:
        checkpoint = store.open(step, with_copies=True)
    except CheckpointError as error:  # a file that only memory had
        problem = str(error)
    if not store.agree(problem is None):
        return checkpoint, problem or ""
    assert checkpoint is not None
    try:
        load(checkpoint)
    except (DamagedError, OSError) as error:
        problem = "" if getattr(error, "is_consequence", False) else str(error)
    finally:
        if store.copies is not None:
            store.copies.release()
    return checkpoint, problem


def find_resume(
    mode: str, store: CheckpointStore, load: Callable[[Checkpoint], None] | None = None
) -> Checkpoint | None:
    """Return the checkpoint to continue from under checkpoint.resume = `mode`, or None to start from the initial
    policy.

    `load` loads it, see `newest_valid`.

    auto: the newest valid one if there is any. must: CheckpointError if there is none. never: CheckpointError if there
    is one.
    """
    if mode == "never":
        if store.steps():
            raise CheckpointError(
                f'checkpoint.resume = "never", but {store.directory} holds checkpoints of steps {store.steps()}; '
                "choose another run.output_dir, or resume",
                is_final=True,
            )
        return None
    found = newest_valid(store, load)
    if found is None and mode == "must":
        raise CheckpointError(
            f'checkpoint.resume = "must", but there is no checkpoint in {store.directory}; check run.output_dir',
            is_final=True,
        )
    return found


def _own_hash(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without the field that holds it, however its JSON is laid out."""
    fields = {name: value for name, value in manifest.items() if name != _OWN_HASH}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _read_manifest(directory: Path, step: int) -> Checkpoint:
    path = directory / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        entries = [_file_entry(entry) for entry in document["files"]]
        form, stated, metadata = document["format"], document["step"], document["metadata"]
        if document[_OWN_HASH] != _own_hash(document):
            raise ValueError(f"its own {_OWN_HASH} does not fit: it changed since it was written")
        if not isinstance(metadata, dict):
            raise ValueError(f"metadata is a {type(metadata).__name__}, not an object")
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {directory}: no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: {MANIFEST} is not readable ({one_line(repr(error), 300)})"
        ) from None
    if form != FORMAT or stated != step:
        raise CheckpointError(
            f"checkpoint {directory}: manifest of format {form!r:.50}, step {stated!r:.50}; "
            f"expected format {FORMAT}, step {step}"
        )
    bad = [entry.name for entry in entries if not _PLAIN_NAME.fullmatch(entry.name)]
    if bad:
        raise CheckpointError(f"checkpoint {directory}: {MANIFEST} names files outside the directory: {bad!r:.300}")
    files = {entry.name: entry for entry in entries}
    if len(files) != len(entries):
        raise CheckpointError(f"checkpoint {directory}: {MANIFEST} lists {len(entries)} files of {len(files)} names")
    return Checkpoint(step, directory, files, metadata)


def _file_entry(entry: Mapping[str, Any]) -> FileEntry:
    """Return the entry of a manifest. Raises ValueError, KeyError or TypeError for anything else."""
    name, size, sha256, pieces = entry["name"], entry["size"], entry["sha256"], entry.get("pieces", "")
    keepers = entry.get("keepers", ())
    if len(keepers) > _MAX_KEEPERS or any(not _ADDRESS.fullmatch(each) for each in keepers):
        raise ValueError(f"the keepers of {name!r:.200} are {keepers!r:.200}, not host:port of at most {_MAX_KEEPERS}")
    if type(size) is not int or any(not isinstance(each, str) for each in (name, sha256, pieces)):
        raise ValueError(f"a file is {entry!r:.200}, not a name with its size and sha256")
    if pieces and (sum(PieceChecksums(pieces).sizes) != size or sha256_of_pieces(pieces) != sha256):
        raise ValueError(f"the pieces of {name!r:.200} are not those of its size and sha256")
    return FileEntry(name, size, sha256, pieces, keepers)
