"""A recipe as an object: a model, data and a reward, and whatever else differs from the defaults."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.api.source import path_of
from megatron_dapo.config.loader import overrides_of, read_toml, recipe_values
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.data.hub import marked_model

Rows = Iterable[Mapping[str, Any]]
Data = str | Path | list[str] | list[Path] | Rows
Reward = str | Callable[..., Any]

INPUTS = "inputs"  # directory of a run with the files that are written for its processes
_FILES = {"data": "train.jsonl", "eval_data": "eval.jsonl"}
_PATHS = {"data": "data.train_paths", "eval_data": "data.eval_paths"}


class Recipe:
    """Complete settings of a run, equivalent to a file passed to `megatron-dapo train RECIPE --set ...`.

    Args:
        model: Hugging Face directory of the policy (model.path), or OWNER/NAME of the Hub.
        data: rows to train on: a file, several files, or rows as mappings (a list, a `datasets.Dataset`).
        reward: a function, see docs/rewards.md, its path, or the name of a preset (reward.verifier).
        eval_data: held-out rows, in the same forms; None: no evaluation.
        prompt_column, answer_column: columns of the rows; None: "prompt" and "answer" of rows that are mappings, and the names of
            data.columns of files. An answer column that the rows lack is none.
        output_dir: where the run writes (run.output_dir).
        settings: fields by their path, {"data.max_prompt_tokens": 512}, with functions and classes in place of paths to them.
        overrides: the same as sections, run={"total_steps": 8}.

    Values are checked, and files written, when `train`, `evaluate`, `generate` or `write` is called.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        data: Data | None = None,
        reward: Reward | None = None,
        *,
        eval_data: Data | None = None,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        output_dir: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        self._base: Path | None = None
        self._values: dict[str, Any] = {}
        self._rows: dict[str, list[Mapping[str, Any]]] = {}
        self._functions: dict[str, Any] = {}
        self._take_data("data", data)
        self._take_data("eval_data", eval_data)
        columns = {"prompt": prompt_column, "answer": answer_column}
        if rows := self._rows.get("data"):
            defaults = {"prompt": "prompt", "answer": "answer" if "answer" in rows[0] else ""}
            columns = {name: defaults[name] if column is None else column for name, column in columns.items()}
        named: dict[str, Any] = {f"data.columns.{name}": column for name, column in columns.items()}
        named |= {"model.path": model, "reward.verifier": reward, "run.output_dir": output_dir}
        for path, value in named.items():
            if value is not None:
                self._take(path, value)
        for path, value in {**(settings or {}), **overrides}.items():
            self._take(path, value)

    @classmethod
    def from_toml(cls, path: str | Path, **given: Any) -> Recipe:
        """Return the recipe of a file with what is given in its place: the arguments of `Recipe`. ConfigError for a file that is
        no TOML."""
        recipe = cls(**given)
        recipe._base = Path(path).resolve()
        read_toml(recipe._base)
        return recipe

    def _take_data(self, name: str, data: Data | None) -> None:
        if data is None:
            return
        if isinstance(data, (str, Path)):
            self._values[_PATHS[name]] = [os.fspath(data)]
            return
        if isinstance(data, Mapping):
            raise TypeError(f"{name} is a mapping, which is one row: pass a list of rows, or paths of files")
        entries: list[Any] = list(data)
        if not entries:
            raise ValueError(f"{name} has no rows")
        if all(isinstance(entry, (str, Path)) for entry in entries):
            self._values[_PATHS[name]] = [os.fspath(entry) for entry in entries]
            return
        for number, row in enumerate(entries):
            if not isinstance(row, Mapping):
                raise TypeError(
                    f"{name}[{number}] is of type {type(row).__name__}; rows are mappings of columns to values"
                )
        self._rows[name] = entries

    def _take(self, path: str, value: Any) -> None:
        """Keep a value; of a section's mapping each of its values. Functions and classes are written when the recipe is."""
        if isinstance(value, Mapping):
            for name, each in value.items():
                self._take(f"{path}.{name}", each)
        elif callable(value) or (isinstance(value, (list, tuple)) and any(callable(each) for each in value)):
            self._functions[path] = value
        elif isinstance(value, (list, tuple)):
            self._values[path] = [os.fspath(each) if isinstance(each, Path) else each for each in value]
        elif isinstance(value, (str, int, float, Path)):
            self._values[path] = os.fspath(value) if isinstance(value, Path) else value
        else:
            raise TypeError(
                f"{path} is of type {type(value).__name__}; pass a number, a text, a list, a function or a class"
            )

    def write(self, directory: str | Path | None = None) -> Path:
        """Write rows, functions and the recipe into `directory` (default: run.output_dir/inputs), and return the recipe's file.

        `megatron-dapo train FILE` then does what `train` does. ValueError for a function that cannot be written, and for rows that
        are no JSON.
        """
        output_dir = self._values.get("run.output_dir")
        if not output_dir:
            given = recipe_values(self._base).get("run.output_dir") if self._base else None
            output_dir = given.value if given else RunConfig().output_dir
        target = (Path(directory) if directory else Path(output_dir) / INPUTS).resolve()
        target.mkdir(parents=True, exist_ok=True)
        for name, rows in self._rows.items():
            _replace(target / _FILES[name], "".join(_line(name, number, row) for number, row in enumerate(rows)))
        base = [f"base = {json.dumps(os.fspath(self._base))}"] if self._base else []
        file = target / "recipe.toml"
        _replace(file, "\n".join(["# Written by megatron_dapo.Recipe", *base, *self._lines(target)]) + "\n")
        return file

    def _lines(self, directory: Path) -> list[str]:
        """Return every value as "a.b=value" in TOML, and write functions without an import path into `directory`."""
        values = dict(self._values)
        values.update({_PATHS[name]: [os.fspath(directory / _FILES[name])] for name in self._rows})
        if "model.path" in values:
            values["model.path"] = marked_model(values["model.path"])
        for path, given in self._functions.items():
            stem, hooks = path.replace(".", "_"), given if isinstance(given, (list, tuple)) else [given]
            try:
                paths = [path_of(hook, directory / f"{stem}_{number}.py") for number, hook in enumerate(hooks)]
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            values[path] = paths if isinstance(given, (list, tuple)) else paths[0]
        return list(overrides_of(values))


def _line(name: str, number: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}[{number}]: no JSON ({error}); convert it to numbers, texts, lists and mappings"
        ) from error


def _replace(file: Path, text: str) -> None:
    """Write a file in one piece, unless it is the same: a run in progress may read it."""
    data = text.encode()
    if file.is_file() and hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256(data).digest():
        return
    partial = file.with_name(file.name + ".tmp")
    partial.write_bytes(data)
    os.replace(partial, file)
