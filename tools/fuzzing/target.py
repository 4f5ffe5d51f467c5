"""A reader under test, and the errors that it may raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.untrusted import printable
from tools.fuzzing.mutations import Mutation

_LONGEST_MESSAGE = 4000


@dataclass(frozen=True)
class Target:
    """A reader: `read(directory)` reads `file` of a directory made by `write(directory)`."""

    name: str
    file: str
    write: Callable[[Path], None]
    read: Callable[[Path], object]
    mutations: tuple[Mutation, ...]
    weight: int = 10
    lists: bool = False  # its errors list one problem a line, e.g. of a recipe


def check_message(error: BaseException, directory: Path, lists: bool = False) -> None:
    """Raise AssertionError for an error that does not name the file, has several lines, or unprintable characters."""
    text = str(error)
    assert str(directory) in text, f"names no file: {text[:300]!r}"
    assert lists or "\n" not in text, f"has several lines: {text[:300]!r}"
    assert printable(text) == text, f"has unprintable characters: {text[:300]!r}"
    assert lists or len(text) <= _LONGEST_MESSAGE, f"has {len(text)} characters: {text[:100]!r}"
