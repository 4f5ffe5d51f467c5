"""Text of models and data files, made safe to look at in a terminal, a log or an editor."""

from __future__ import annotations

import logging
import re

# Controls (C0 but tab and newline, C1), line separators, invisible characters that change the direction or the meaning of those
# around them, and halves of surrogate pairs, which UTF-8 cannot hold.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return `text` with unsafe characters as JSON escapes (\\u001b). JSON text keeps its meaning: only its strings have any."""
    return _UNSAFE.sub(_escape, text)


class PrintableFormatter(logging.Formatter):
    """Format records as `logging.Formatter` does, tracebacks included, in printable text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _escape(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[start : start + 2].hex()}" for start in range(0, len(units), 2))
