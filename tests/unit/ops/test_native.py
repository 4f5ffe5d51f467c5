"""C libraries that are kept: when the compiler runs again, and which files are not loaded."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.ops import native

pytestmark = pytest.mark.skipif(native.shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the compiler, with an empty cache."""
    commands: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(native.subprocess, "run", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return commands


def source(directory: Path, answer: int) -> Path:
    file = directory / "answer.c"
    file.write_text(f"#ifndef MORE\n#define MORE 0\n#endif\nint answer(void) {{ return {answer} + MORE; }}\n")
    return file


def answer(file: Path, *flags: str) -> int:
    functions = native.compiled(file, *flags)
    assert functions is not None
    return functions.answer()


def kept(directory: Path) -> list[Path]:
    return sorted((directory / "cache" / "megatron_dapo" / "native").iterdir())


def test_the_compiler_runs_once_for_a_source_and_its_flags(tmp_path: Path, runs: list[list[str]]) -> None:
    assert [answer(source(tmp_path, 41)) for _ in range(2)] == [41, 41] and len(runs) == 1
    assert answer(source(tmp_path, 41), "-DMORE=1") == 42 and len(runs) == 2
    assert answer(source(tmp_path, 40)) == 40 and len(runs) == 3
    assert len(kept(tmp_path)) == 3, "nothing partial is left"


def test_a_library_is_not_taken_from_another_processor(
    tmp_path: Path, runs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = source(tmp_path, 1)
    answer(file)
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **how: read(self, **how).replace("flags\t\t: ", "flags\t\t: new ")
    )
    answer(file)
    assert len(runs) == 2


@pytest.mark.parametrize("place", ["file", "directory"])
def test_what_others_may_write_is_compiled_again(tmp_path: Path, runs: list[list[str]], place: str) -> None:
    file = source(tmp_path, 1)
    answer(file)
    (library,) = kept(tmp_path)
    (library if place == "file" else library.parent).chmod(0o777)
    assert answer(file) == 1 and len(runs) == 2


def test_a_damaged_library_is_replaced(tmp_path: Path, runs: list[list[str]]) -> None:
    file = source(tmp_path, 7)
    library = native._kept(file, [str(native.shutil.which("cc")), "-O3", "-shared", "-fPIC"])
    assert library is not None
    library.parent.mkdir(parents=True, mode=0o700)
    library.write_bytes(b"not a library")
    library.chmod(0o500)
    assert answer(file) == 7 and len(runs) == 1
    assert answer(file) == 7 and len(runs) == 1


def test_without_a_cache_each_process_compiles(tmp_path: Path, runs: list[list[str]]) -> None:
    (tmp_path / "cache").write_text("a file where the directory would be")
    assert [answer(source(tmp_path, 5)) for _ in range(2)] == [5, 5] and len(runs) == 2
