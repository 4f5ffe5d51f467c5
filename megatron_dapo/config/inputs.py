"""Whether the files a configuration names are there: the only check that looks at the disk, apart from the pure
validator."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from megatron_dapo.config.errors import Violation
from megatron_dapo.config.schema import Config


def missing_inputs(config: Config) -> list[Violation]:
    """One violation for each model folder or data file that is not there."""
    return list(_missing(config))


def _missing(config: Config) -> Iterator[Violation]:
    model = config.model.path
    if not model.is_dir():
        yield _absent("model.path", model, "a Hugging Face folder that exists")
    for path in ("train_paths", "eval_paths"):
        for file in getattr(config.data, path):
            if not file.is_file():
                yield _absent(f"data.{path}", file, "a file that exists")


def _absent(path: str, file: Path, what: str) -> Violation:
    names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    fix = f"did you mean {file.parent / near[0]}?" if near else f"set {path}, or put it there"
    return Violation(path=path, formula=what, suggestion=fix, values={path: str(file)})
