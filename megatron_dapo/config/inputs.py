"""Whether the files a configuration names are there: the only check that looks at the disk, apart from the pure
validator."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
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
    critic = Path(config.critic.path)
    if config.has_critic and config.critic.path and not (critic / "config.json").is_file():
        yield _absent(
            "critic.path", critic, "a Hugging Face folder that exists (`megatron-dapo pretrain-value` writes one)"
        )
    yield from _absent_files("data.train_paths", config.data.train_paths)
    yield from _absent_files("data.eval_paths", config.data.eval_paths)
    if config.has_critic:
        yield from _absent_files("value_pretraining.train_paths", config.value_pretraining.train_paths)


def _absent_files(path: str, files: Iterable[Path]) -> Iterator[Violation]:
    for file in files:
        if not file.is_file():
            yield _absent(path, file, "a file that exists")


def _absent(path: str, file: Path, what: str) -> Violation:
    names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    fix = f"did you mean {file.parent / near[0]}?" if near else f"set {path}, or put it there"
    return Violation(path=path, formula=what, suggestion=fix, values={path: str(file)})
