"""Checksums of the pieces of a file, computed while it is written and verified by the reader of a piece.

A piece is the header of a safetensors file or one of its tensors; pieces follow each other without gaps. As text:
"1024:9ae0daaf 16777216:0f7b2c11", size in bytes and CRC-32 of each. Imports only the standard
library, and isal if it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

try:
    # zlib's CRC-32 by carry-less multiplication: the same values in a fraction of the time.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

_PIECES = re.compile(r"\d{1,18}:[0-9a-f]{8}(?: \d{1,18}:[0-9a-f]{8})*")


class DamagedError(ValueError):
    """Bytes of a checkpoint are not what was written; the message names the file.

    `is_consequence`: this rank read nothing wrong; another rank's message says what is damaged.
    """

    is_consequence = False


class PieceChecksums:
    """The checksums of a file's pieces, by the offset at which each begins."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for text in any other format."""
        if not _PIECES.fullmatch(text):
            raise ValueError(f"checksums of pieces are {text[:100]!r}, not size:crc32 of each")
        self._pieces: dict[int, tuple[int, int]] = {}
        self.sizes = [int(piece.partition(":")[0]) for piece in text.split(" ")]  # bytes of each piece, in order
        for start, size, piece in zip(accumulate(self.sizes, initial=0), self.sizes, text.split(" ")):
            if size:  # an empty tensor begins where the next one does
                self._pieces[start] = size, int(piece.partition(":")[2], 16)

    def fits(self, start: int, size: int, checksum: int) -> bool:
        """Return True if the piece that begins at byte `start` was written with this size and this CRC-32."""
        return size == 0 or self._pieces.get(start) == (size, checksum)


class PieceSums:
    """Computes checksums of a file's pieces, of known sizes, from its chunks in writing order, split anywhere."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._done: list[str] = []
        self._read = self._sum = 0  # bytes and checksum of the unfinished piece

    def update(self, chunk: memoryview) -> None:
        while chunk:
            part = chunk[: self._sizes[len(self._done)] - self._read]
            chunk = chunk[len(part) :]
            self._sum = crc32(part, self._sum)
            self._read += len(part)
            self._end_pieces()

    def _end_pieces(self) -> None:
        while len(self._done) < len(self._sizes) and self._read == self._sizes[len(self._done)]:
            self._done.append(f"{self._read}:{self._sum:08x}")
            self._read = self._sum = 0

    def text(self) -> str:
        self._end_pieces()  # all may be empty
        assert len(self._done) == len(self._sizes), f"{len(self._done)} of {len(self._sizes)} pieces were written"
        return " ".join(self._done)
