"""SGLang is imported once for an installation: a success is remembered, a failure and another installation are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.doctor.engine_import import cache_file, import_problem


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that counts its calls, and fails where a file `broken` is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\necho "$1 ${2##*; }" >> calls\n'
        'if [ -e broken ]; then echo "ImportError: libcuda.so.1" >&2; exit 1; fi\n'
    )
    script.chmod(0o755)
    return script


def calls(python: Path) -> list[str]:
    return (python.parent / "calls").read_text().splitlines()


def test_a_success_is_remembered_for_its_installation(python: Path) -> None:
    record = ("/env/sglang.dist-info/RECORD", 1, 2)
    assert import_problem(python, record) == "" == import_problem(python, record)
    assert calls(python) == ["-c import sglang"]
    assert import_problem(python, (*record[:2], 3)) == ""  # installed anew
    assert len(calls(python)) == 2
    cache_file().write_text("damaged")
    assert import_problem(python, record) == "" and len(calls(python)) == 3


def test_a_failure_is_named_and_tried_again(python: Path) -> None:
    (python.parent / "broken").touch()
    for _ in range(2):
        assert import_problem(python, ("r",)) == "`import sglang` fails: ImportError: libcuda.so.1"
    assert len(calls(python)) == 2 and not cache_file().exists()
    (python.parent / "broken").unlink()
    assert import_problem(python, ("r",)) == ""


def test_a_cache_that_cannot_be_written_is_no_error(python: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert import_problem(python, ("r",)) == "" == import_problem(python, ("r",))
    assert len(calls(python)) == 2
