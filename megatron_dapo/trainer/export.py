"""Exported folders: whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def replace_folder(target: Path, write: Callable[[Path], object], group: dist.ProcessGroup | None = None) -> Path:
    """`target` becomes what all ranks of `group` `write` into the folder they are given; an earlier one stays until that is whole."""
    fresh = target.with_name(target.name + ".new")
    if dist.get_rank(group) == 0:
        shutil.rmtree(fresh, ignore_errors=True)
    dist.barrier(group)
    write(fresh)
    dist.barrier(group)
    if dist.get_rank(group) == 0:
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    return target
