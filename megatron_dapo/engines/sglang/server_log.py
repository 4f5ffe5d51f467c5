"""The end of a server's log and the first error in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_TRACEBACK = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")  # [date time TP0]
_ERROR_LINE = re.compile(r"\b(?:[A-Z]\w*(?:Error|Exception)\b|error:|ERROR\b|fatal|Fatal|terminate called|crashed)")
_HARMLESS = re.compile(r"Ignore import error|Warning:|warnings\.warn")
_MAX_BYTES = 16 << 20  # read from the start: the first error is what the others follow from
_NUM_LINES = 20


def exit_reason(log: Path) -> str:
    """The last lines of `log`, then, last, the first error in it."""
    lines = _lines(log)
    if not lines:
        return f"its log {log} is empty"
    tail = "\n".join(f"  | {line}" for line in lines[-_NUM_LINES:])
    return f"its log {log} ends with:\n{tail}\nfirst cause: {first_cause(lines)}"


def first_cause(lines: Sequence[str]) -> str:
    """The exception of the first traceback, else the first line that tells of an error, else the last line."""
    errors = (line for line in lines if _ERROR_LINE.search(line) and not _HARMLESS.search(line))
    for cause in (_exceptions(lines), errors, reversed(lines)):
        found = next((line for line in cause if line.strip()), None)
        if found is not None:
            return _PREFIX.sub("", found).strip()
    return "none in the log"


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """The line that ends each traceback: the first one after it that is not indented."""
    inside = False
    for line in lines:
        if _TRACEBACK in line:
            inside = True
        elif inside and line.strip() and not line[0].isspace():
            inside = False
            yield line


def _lines(log: Path) -> list[str]:
    try:
        with open(log, "rb") as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
