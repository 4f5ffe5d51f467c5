"""SGLang is imported once for an installation: an answer without a failure is remembered, others are asked for again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_dapo.doctor import engine_probe
from megatron_dapo.doctor.engine_import import cache_file, engine_libraries
from megatron_dapo.doctor.engine_probe import EngineLibraries
from megatron_dapo.doctor.probes import MARK

LIBRARIES = EngineLibraries(torch="2.11.0+cu130", cuda="13.0", nccl="2.28.9", has_gpu=True, has_compiler=True)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that counts its calls, answers LIBRARIES, and fails if a file `broken` is next to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\ncd "$(dirname "$0")"\necho "$*" >> calls\n'
        'if [ -e broken ]; then echo "ImportError: libcuda.so.1" >&2; exit 1; fi\n'
        f"echo a library talks; echo '{MARK}{json.dumps(asdict(LIBRARIES))}'\n"
    )
    script.chmod(0o755)
    return script


def calls(python: Path) -> list[str]:
    return (python.parent / "calls").read_text().splitlines()


def test_an_answer_is_remembered_for_its_installation(python: Path) -> None:
    record = ("/env/sglang.dist-info/RECORD", 1, 2)
    assert engine_libraries(python, record) == LIBRARIES == engine_libraries(python, record)
    assert calls(python) == [f"-m {engine_probe.__name__}"]
    assert engine_libraries(python, (*record[:2], 3)) == LIBRARIES  # installed anew
    assert len(calls(python)) == 2
    cache_file().write_text("damaged")
    assert engine_libraries(python, record) == LIBRARIES and len(calls(python)) == 3
    cache_file().write_text(
        json.dumps({key: {"fields": "of another version"} for key in json.loads(cache_file().read_text())})
    )
    assert engine_libraries(python, record) == LIBRARIES and len(calls(python)) == 4


def test_a_failure_is_named_and_tried_again(python: Path) -> None:
    (python.parent / "broken").touch()
    for _ in range(2):
        assert engine_libraries(python, ("r",)).error == "`import sglang` fails: ImportError: libcuda.so.1"
    assert len(calls(python)) == 2 and not cache_file().exists()
    (python.parent / "broken").unlink()
    assert engine_libraries(python, ("r",)).error == ""


def test_a_cache_that_cannot_be_written_is_no_error(python: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert engine_libraries(python, ("r",)) == LIBRARIES == engine_libraries(python, ("r",))
    assert len(calls(python)) == 2
