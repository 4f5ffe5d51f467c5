"""A recipe as an object: a model, data and a reward, and whatever else differs from the defaults."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dapo.api.source import path_of
from megatron_dapo.config.loader import config_from_dict, overrides_of, read_toml, recipe_values
from megatron_dapo.config.rules import ConfigError, Violation
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.data.hub import marked_model

Rows = Iterable[Mapping[str, Any]]
Data = str | Path | list[str] | list[Path] | Rows
Reward = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]

INPUTS = "inputs"  # directory of a run with the files that are written for its processes
_FILES = {"data": "train.jsonl", "eval_data": "eval.jsonl"}
_PATHS = {"data": "data.train_paths", "eval_data": "data.eval_paths"}
# Argument -> the field that it sets.
_FIELDS = {
    **_PATHS,
    "model": "model.path",
    "reward": "reward.verifier",
    "prompt_column": "data.columns.prompt",
    "answer_column": "data.columns.answer",
    "output_dir": "run.output_dir",
}
_ARGUMENTS = {field: argument for argument, field in _FIELDS.items()}


class Recipe:
    """Complete settings of a run, equivalent to a file passed to `megatron-dapo train RECIPE --set ...`.

    Args:
        model: Hugging Face directory of the policy (model.path), or OWNER/NAME of the Hub.
        data: rows to train on: a file, several files, rows as mappings (a list, a `datasets.Dataset`), or a table of pandas, polars or
            pyarrow.
        reward: a function, see docs/rewards.md, its path, or the name of a preset (reward.verifier); of a list of them the sum,
            with each one's part under its name, and the first decides what is correct.
        eval_data: held-out rows, in the same forms; None: a part of `data` is held out (data.held_out_share).
        prompt_column, answer_column: columns of the rows; None: "prompt" and "answer" of rows that are mappings, and the names of
            data.columns of files. An answer column that the rows lack is none.
        output_dir: where the run writes (run.output_dir).
        settings: fields by their path, {"data.max_prompt_tokens": 512}, with functions and classes in place of paths to them.
        overrides: the same as sections, run={"total_steps": 8}.

    Names and types are checked here: ConfigError, TypeError or ValueError with the argument. Files are written, and read, when
    `train`, `evaluate`, `generate` or `write` is called.
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
        self._rewards: list[str | Callable[..., Any]] = []
        self._take_data("data", data)
        self._take_data("eval_data", eval_data)
        columns = {"prompt": prompt_column, "answer": answer_column}
        if rows := self._rows.get("data"):
            defaults = {"prompt": "prompt", "answer": "answer" if "answer" in rows[0] else ""}
            columns = {name: defaults[name] if column is None else column for name, column in columns.items()}
        named: dict[str, Any] = {f"data.columns.{name}": column for name, column in columns.items()}
        if model is not None and not isinstance(model, (str, Path)):
            raise TypeError(
                f"model is of type {type(model).__name__}, and the run's processes load the model themselves: save it with its tokenizer "
                "(save_pretrained(DIRECTORY)) and pass the directory, or pass OWNER/NAME of the Hub"
            )
        if isinstance(reward, (list, tuple)):
            self._rewards, reward = list(reward), "mix"
        named |= {"model.path": model, "reward.verifier": reward, "run.output_dir": output_dir}
        for path, value in named.items():
            if value is not None:
                self._take(path, value)
        for path, value in {**(settings or {}), **overrides}.items():
            self._take(path, value)
        self._check()

    def _check(self) -> None:
        """Raise for functions that cannot be written, and for names and types that no recipe has."""
        values = self._all_values(None)
        required = {"model.path": "model", "data.train_paths": ["data"]}  # a base may have them
        try:
            config_from_dict({**required, **values})
        except ConfigError as error:
            raise self.blamed(error) from None

    def blamed(self, error: ConfigError) -> ConfigError:
        """Return an error of the written recipe as one of this object: it names arguments, and rows by their index."""
        return ConfigError([self._blamed(one) for one in error.violations], "Recipe")

    def _blamed(self, violation: Violation) -> Violation:
        formula = violation.formula
        for argument, file in _FILES.items():
            if argument in self._rows:
                pattern = rf"\S*/{INPUTS}/{re.escape(file)}(?:, line (\d+))?"
                formula = re.sub(pattern, lambda found: f"{argument}[{int(found[1]) - 1}]" if found[1] else argument, formula)
        return replace(violation, path=_ARGUMENTS.get(violation.path, violation.path), formula=formula)

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
        data = _rows_of_table(data)
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
                f"{_ARGUMENTS.get(path, path)} is of type {type(value).__name__}; pass a number, a text, a list, a function or a class"
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
        values = self._all_values(directory)
        values.update({_PATHS[name]: [os.fspath(directory / _FILES[name])] for name in self._rows})
        if "model.path" in values:
            values["model.path"] = marked_model(values["model.path"])
        return list(overrides_of(values))

    def _all_values(self, directory: Path | None) -> dict[str, Any]:
        """Return every value by its path, with functions as paths to them; None writes none and only checks them."""
        values = dict(self._values)
        for path, given in self._functions.items():
            hooks = given if isinstance(given, (list, tuple)) else [given]
            paths = [_hook_path(path, number, hook, directory) for number, hook in enumerate(hooks)]
            values[path] = paths if isinstance(given, (list, tuple)) else paths[0]
        if self._rewards:
            values["reward.mix"] = [
                {"verifier": _hook_path("reward", number, one, directory), "name": name}
                for number, (one, name) in enumerate(zip(self._rewards, _names(self._rewards)))
            ]
        return values


def _hook_path(field: str, number: int, hook: Any, directory: Path | None) -> str:
    file = directory / f"{field.replace('.', '_')}_{number}.py" if directory else None
    try:
        return path_of(hook, file)
    except ValueError as error:
        raise ValueError(f"{_ARGUMENTS.get(field, field)}: {error}") from error


def _names(rewards: Sequence[str | Callable[..., Any]]) -> list[str]:
    """Return a name for each reward: that of its preset or function, with a number if an earlier one has the same."""
    names: list[str] = []
    for one in rewards:
        name = one.rpartition(":")[2] if isinstance(one, str) else getattr(one, "__name__", "reward")
        names.append(f"{name}_{len(names)}" if name in names else name)
    return names


def _rows_of_table(data: Any) -> Any:
    """Return the rows of a table of polars, pyarrow or pandas, told by its methods; anything else as it is."""
    for method, arguments in (("to_dicts", ()), ("to_pylist", ()), ("to_dict", ("records",))):
        if hasattr(data, method) and hasattr(data, "columns"):
            return getattr(data, method)(*arguments)
    return data


def _line(name: str, number: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain) + "\n"
    except (TypeError, ValueError) as error:
        column = next((key for key, value in row.items() if not _is_json(value)), "")
        raise ValueError(
            f"{name}[{number}]: column {column!r} is no JSON ({error}); convert it to numbers, texts, lists and mappings"
        ) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """Return a scalar or an array of numpy as Python's own; TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.60}")


def _replace(file: Path, text: str) -> None:
    """Write a file in one piece, unless it is the same: a run in progress may read it."""
    data = text.encode()
    if file.is_file() and hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256(data).digest():
        return
    partial = file.with_name(file.name + ".tmp")
    partial.write_bytes(data)
    os.replace(partial, file)
