"""Text and files from outside (models, data, recipes): errors that name the file in one line, and text that is safe to look at."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Controls (C0 but tab and newline, C1), line separators, invisible characters that change the direction or the meaning of those
# around them, and halves of surrogate pairs, which UTF-8 cannot hold.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return `text` with unsafe characters as JSON escapes (\\u001b). JSON text keeps its meaning: only its strings have any."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: object, limit: int = 1000) -> str:
    """Return the text of a value or an error in one printable line of at most `limit` characters."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= limit else f"{line[:limit]} ... ({len(line)} characters)"


# Exceptions of code that takes a value of the wrong type, size or depth for granted.
_SURPRISES: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


@contextmanager
def blamed_on(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Turn errors of reading `path` (of types `more`, too) into a ValueError of one printable line that names it.

    Fields of a foreign file are too many to check the type of each before it is used. OSError stays: it names its file.
    """
    try:
        yield
    except (*_SURPRISES, *more) as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(one_line(text if str(path) in text else f"{path}: {text}")) from error


def read_json(path: Path) -> Any:
    """Return a JSON document. ValueError in one line that names the file, FileNotFoundError if it is missing."""
    with blamed_on(path):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from None


class PrintableFormatter(logging.Formatter):
    """Format records as `logging.Formatter` does, tracebacks included, in printable text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _escape(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[start : start + 2].hex()}" for start in range(0, len(units), 2))
