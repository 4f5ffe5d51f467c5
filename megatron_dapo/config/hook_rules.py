"""Checks of user-defined functions and objects in a configuration: each is imported and its signature compared."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config.rules import UnusableInput, Violation, is_function_path, value_of
from megatron_dapo.config.schema import Config
from megatron_dapo.hooks import CALLBACKS, FUNCTIONS, load_hook

_SPELLING = '"package.module:name" or "path/to/file.py:name"'


def hook_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the field and the path of each hook that is set, except rewards and the model's family."""
    for field in FUNCTIONS:
        section, _, name = field.rpartition(".")
        # The section of another loss or advantage has no function.
        if path := getattr(value_of(config, section), name, ""):
            yield field, path
    for path in config.run.callbacks:
        yield CALLBACKS, path


def hook_problems(config: Config) -> list[Violation]:
    """Return a violation for each hook that cannot be imported or whose arguments do not match. Runs the user's
    modules."""
    found: list[Violation] = []
    for field, path in hook_paths(config):
        if not is_function_path(path):
            found.append(Violation(field, _SPELLING, f"write {field} in that form", {field: path}))
            continue
        try:
            load_hook(path, field)
        except ValueError as error:
            found.append(UnusableInput(field, str(error).removeprefix(f"{field} = ")))
    return found
