"""Directories appear complete or not at all, and a replaced one survives until its successor is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_dapo.checkpoints.atomic_directory import atomic_directory, replace_directory


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "out") as directory:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path: Path):
    with pytest.raises(ValueError, match="out exists already"), atomic_directory(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_is_replaced(tmp_path: Path, one_process):
    target = tmp_path / "run" / "model"
    for content in ("first", "second"):
        with replace_directory(target) as directory:
            assert not directory.exists()
            directory.mkdir(parents=True)
            (directory / "weights").write_text(content)
        assert (target / "weights").read_text() == content
        assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failed_replacement_leaves_the_previous_directory(tmp_path: Path, one_process):
    target = tmp_path / "model"
    target.mkdir()
    (target / "weights").write_text("first")
    with pytest.raises(OSError, match="full"), replace_directory(target) as directory:
        directory.mkdir()
        raise OSError("disk full")
    assert (target / "weights").read_text() == "first"


def test_at_every_rename_one_complete_directory_exists(tmp_path: Path, one_process, monkeypatch):
    """A kill between any two operations of the file system loses no model."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "weights").write_text("first")
    seen: list[set[str]] = []

    def complete() -> set[str]:
        return {path.read_text() for path in tmp_path.glob("model*/weights")}

    rename = Path.rename

    def recorded(path: Path, other: Path) -> Path:
        seen.append(complete())
        return rename(path, other)

    remove = os.unlink

    def removed(*arguments, **options):
        remove(*arguments, **options)
        seen.append(complete())

    monkeypatch.setattr(Path, "rename", recorded)
    monkeypatch.setattr(os, "unlink", removed)
    with replace_directory(target) as directory:
        directory.mkdir()
        (directory / "weights").write_text("second")
    assert len(seen) == 3 and seen[0] == seen[1] == {"first", "second"} and seen[2] == {"second"}
    assert (target / "weights").read_text() == "second"
