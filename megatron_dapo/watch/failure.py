"""The cause of a failed run: one record for each thing that went wrong, the culprit first, in failure.json.

Once one rank fails, the others fail because of it: connections break, collectives time out. Their records are
consequences and come after the cause, whichever was noticed first. `in_order` decides; docs/failures.md describes the
file. This module needs only the standard library, as the watcher uses it too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_dapo.untrusted import printable

VERSION = 2  # format of failure.json
EXIT_CODE = 75  # EX_TEMPFAIL: worth starting again from the last checkpoint
# Errors that repeat when the same program is started again with the same input; errors of a network, a device or a
# server may not.
_REPEATING = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError, NotImplementedError)
_REPEATING_FILES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
_MAX_ENTRIES = 64  # Records of a thousand lost connections add nothing to failure.json.
CONTACT = ".no_contact_"  # begin of the names of files in which a node notes that it does not hear another one
_RESERVE = ".failure_reserve"  # removed to make room for the record if the disk is full
_RESERVE_BYTES = 1 << 18
_FULL = (errno.ENOSPC, errno.EDQUOT)

# Causes, and what to do about each.
_ADVICE = {
    "out of memory": "give the job more memory, fewer verifiers or servers on this node, or a smaller micro-batch",
    "signal": "look for who sent it on that node (an operator, a monitor, a limit); the run can be started again",
    "stopped": "the process was stopped by SIGSTOP or a debugger; let nothing suspend ranks",
    "link lost": "check cable, switch port and interface of that node, or exclude it, and start again",
    "path lost": "check switch ports, routes and ARP entries between the two nodes, or exclude one of them, and start again",
    "no address": "let every node resolve the host name of rank 0's node (DNS or /etc/hosts), then start again",
    "node lost": "check that node's power, link and kernel log, or exclude it, and start again",
    "disk full": "free space, lower checkpoint.keep, or move run.output_dir",
    "file system lost": "mount it again on that node, or exclude the node, then start again",
    "file system hung": "check the server of that file system and its mount on that node, then start again",
    "hang": "see the stacks of that rank in stacks/; start again, and report it if it repeats",
    "deadline": "see the stacks in stacks/; raise run.wait_timeout_seconds if the wait was healthy",
    "not started": "see the log of that rank or node: it never reported",
    "exit": "see the log of that rank",
    "exception": "mend what it names; the traceback is in failure.json",
    "connection lost": "see the log and the kernel log of the rank at the other end",
}
# Kernel evidence outranks reports of the ranks: a broken connection is noticed before the death that caused it.
_HARD = frozenset(
    {
        *("out of memory", "signal", "stopped", "link lost", "path lost", "no address", "node lost"),
        *("disk full", "file system lost", "file system hung"),
    }
)
_BROKEN_CONNECTION = re.compile(
    r"gloo/|ncclRemoteError|ncclSystemError|remote process exited|c10d|TCPStore|Connection (reset|closed) by peer|Broken pipe"
    r"|rollout rank 0 stopped|for the others|lost each other|waited for rank 0's next command|monitored_?[bB]arrier"
)


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong: the end of a process, the loss of a node, or a hang."""

    rank: int  # -1: a whole node
    cause: str  # "signal", "out of memory", ...: the keys of _ADVICE
    message: str  # one line: what happened, without node and rank
    node: str = ""  # host name
    phase: str = ""  # the rank's phase at that time
    detail: str = ""  # traceback, kernel lines or the stack
    is_consequence: bool = False  # An earlier failure caused it.
    time: float = field(default_factory=time.time)  # seconds since 1970, on the deciding node's clock
    attempt: int = 1  # start of the run in its output directory, from 1
    node_rank: int = 0
    exit_code: int = EXIT_CODE  # the run's: 75 if starting again may help, else 1

    @property
    def advice(self) -> str:
        return _ADVICE[self.cause]

    @property
    def where(self) -> str:
        """Return node, rank and phase in readable form, e.g. "rank 3 (node1), phase train_actor"."""
        place = f"rank {self.rank} ({self.node})" if self.rank >= 0 else self.node
        return f"{place}, phase {self.phase}" if self.phase else place


def failure_of(rank: int, error: BaseException, phase: str = "", node: str = "") -> Failure:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    chain = list(_chain(error))
    is_consequence = any(getattr(each, "is_consequence", False) for each in chain)
    cause = "exception"
    if named := [each.failure_cause for each in chain if hasattr(each, "failure_cause")]:
        cause = named[0]
    elif any(isinstance(each, OSError) and each.errno in _FULL for each in chain):
        cause = "disk full"
    elif any(_BROKEN_CONNECTION.search(f"{type(each).__name__}: {each}") for each in chain):
        cause, is_consequence = "connection lost", True
    code = 1 if cause == "disk full" else EXIT_CODE if is_consequence else exit_code_of(error)
    return Failure(rank, cause, message, node, phase, lines, is_consequence, exit_code=code)


def exit_code_of(error: BaseException) -> int:
    """Return 75 for an error that another attempt may avoid, 1 for one that would repeat (or has `is_final`)."""
    if getattr(error, "is_consequence", False):
        return EXIT_CODE
    is_final = getattr(error, "is_final", False) or isinstance(error, (*_REPEATING, *_REPEATING_FILES))
    return 1 if is_final else EXIT_CODE


def _chain(error: BaseException | None) -> Sequence[BaseException]:
    """Return an error and what it was raised from."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return errors


def in_order(failures: Sequence[Failure]) -> list[Failure]:
    """Return failures with the culprit first and all others marked as consequences.

    Kernel evidence comes before reports of a rank, and those before broken connections; then time decides.
    """

    def order(failure: Failure) -> tuple[int, float, int]:
        weight = 2 if failure.is_consequence else 0 if failure.cause in _HARD else 1
        return (weight, failure.time, failure.rank)

    first, *others = sorted(failures, key=order)
    return [first, *(replace(failure, is_consequence=True) for failure in others)]


def first_line(failure: Failure) -> str:
    """Return the line to print first (and last) of a failed run."""
    consequence = " (a consequence: no rank reported its cause)" if failure.is_consequence else ""
    return f"first failure: attempt {failure.attempt}, {failure.where}: {failure.message}{consequence}; to do: {failure.advice}"


def to_document(failures: Sequence[Failure], writer: str) -> dict[str, Any]:
    """Return failure.json's content for failures in order, written by the watcher or rank `writer`."""
    first = failures[0]
    entries = [
        {**asdict(failure), "advice": failure.advice, "seconds_after_first": round(failure.time - first.time, 3)}
        for failure in failures[:_MAX_ENTRIES]
    ]
    return {
        "version": VERSION,
        "attempt": first.attempt,
        "writer": writer,
        "exit_code": first.exit_code,
        "line": first_line(first),
        "num_failures": len(failures),
        "entries": entries,
    }


def write_failures(run_directory: Path, failures: Sequence[Failure], writer: str) -> bool:
    """Write failure.json, or failure_<writer>.json if it exists. Return True for failure.json.

    Both halves of a partitioned network may write. Readers never see a partial record. If the disk is full, the write
    uses the space that `reserve_space` has taken.
    """
    run_directory.mkdir(parents=True, exist_ok=True)
    own = run_directory / f"failure_{writer}.json"
    partial = own.with_suffix(".tmp")
    text = json.dumps(to_document(failures, writer), indent=1)
    try:
        partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno not in _FULL:
            raise
        (run_directory / _RESERVE).unlink(missing_ok=True)
        partial.write_text(text, encoding="utf-8")
    try:
        os.link(partial, run_directory / "failure.json")  # fails if another writer was first
    except FileExistsError:
        os.replace(partial, own)
        return False
    partial.unlink()
    return True


def reserve_space(run_directory: Path) -> None:
    """Reserve space for a record, so that a full disk can be recorded. Raises OSError."""
    run_directory.mkdir(parents=True, exist_ok=True)
    # Not zeros: a compressing file system would reserve nothing.
    (run_directory / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))


def read_failure(run_directory: Path) -> Failure | None:
    """Return the first entry of failure.json, or None if there is none."""
    path = run_directory / "failure.json"
    if not path.is_file():
        return None
    entry = json.loads(path.read_text(encoding="utf-8"))["entries"][0]
    return Failure(**{each.name: entry[each.name] for each in fields(Failure)})


def clear_failures(run_directory: Path, keep: int = 0) -> None:
    """Remove the records of failures of all attempts but the one with the number `keep`, whose first is then in failure.json."""
    contacts = run_directory.glob(f"{CONTACT}*")
    for path in [*sorted(run_directory.glob("failure*.json")), *contacts]:
        with suppress(FileNotFoundError):
            if keep == 0 or _attempt_of(path) != keep:
                path.unlink()
            elif not (run_directory / "failure.json").exists():
                path.rename(run_directory / "failure.json")


def _attempt_of(path: Path) -> int:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["attempt"])
    except (ValueError, KeyError, TypeError):  # cut short, or no record
        return 0
