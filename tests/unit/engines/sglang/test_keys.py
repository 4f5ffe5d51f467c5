"""The key's file belongs only to its owner."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.keys import create_key, read_key


def test_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = create_key(tmp_path / "run")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_key(path)) >= 32
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_every_key_is_another_one(tmp_path: Path) -> None:
    keys = {read_key(create_key(tmp_path)) for _ in range(8)}
    assert len(keys) == 8


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_refuses_a_file_others_get_at(tmp_path: Path, mode: int) -> None:
    path = create_key(tmp_path)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o} lets others at it; run: chmod 600"):
        read_key(path)


@pytest.mark.parametrize("content", ["", "\n", "two words"])
def test_refuses_what_is_no_key(tmp_path: Path, content: str) -> None:
    path = create_key(tmp_path)
    path.write_text(content)
    with pytest.raises(ValueError, match="one word"):
        read_key(path)


def test_refuses_a_missing_file_a_link_and_a_directory(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(create_key(tmp_path))
    with pytest.raises(ValueError, match="No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(ValueError, match="plain file"):
        read_key(link)
    with pytest.raises(ValueError, match="plain file"):
        read_key(tmp_path)
