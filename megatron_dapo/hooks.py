"""User functions and objects that replace built-in ones, named "package.module:name" or "path/to/file.py:name".

Nothing here imports torch, because configurations are checked without it. docs/python.md lists the hooks.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dapo.untrusted import one_line

# Configuration field -> parameters that its function is called with.
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "algorithm.loss.function": ("inputs",),
    "algorithm.advantage.function": ("inputs",),
    "rollout.group_filter": ("group",),
    "data.order": ("prompts", "epoch"),
}
FAMILY, CALLBACKS = "model.family", "run.callbacks"


class HookError(ValueError):
    """A user's hook raised an error or returned an unusable result; the message names the hook."""


class Callback:
    """Base of callbacks (run.callbacks). They are called on rank 0, in order; an error in one ends the run.

    A subclass overrides what it needs. It is created once per process, without arguments.
    """

    def on_run_start(self, config: Mapping[str, Any]) -> None:
        """See the resolved configuration, nested by section, before the first step of this process."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """See the metrics of train step `step`, from 1; they are already written."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """See the evaluation of the policy after `step` train steps."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """See a checkpoint that is complete on disk."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def load_hook(path: str, field: str) -> Any:
    """Return the object that `path` names. Raise a one-line ValueError if it cannot be imported or called as `field`
    needs."""
    module_name, _, name = path.rpartition(":")
    try:
        module = import_place(module_name)
    except Exception as error:  # an import runs arbitrary module code
        raise ValueError(
            one_line(f"{field} = {path!r}: cannot import {module_name!r} ({type(error).__name__}: {error})")
        ) from error
    if not hasattr(module, name):
        own = sorted(key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
        raise ValueError(f"{field} = {path!r}: {module_name} has no {name!r}; it has {', '.join(own) or 'nothing'}")
    hook = getattr(module, name)
    if field in FUNCTIONS:
        check_parameters(hook, FUNCTIONS[field], f"{field} = {path!r}")
    elif field == CALLBACKS:
        _check_callback(hook, f"{field} = {path!r}")
    return hook


def check_parameters(function: Any, parameters: Sequence[str], what: str) -> None:
    """Raise ValueError if `function` cannot be called with these positional arguments."""
    written = f"write it as ({', '.join(parameters)})"
    if not callable(function):
        raise ValueError(f"{what}: it is of type {type(function).__name__}, no function; {written}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in without a signature
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        raise ValueError(f"{what}: it takes {signature}; {written}") from None


def _check_callback(hook: Any, what: str) -> None:
    methods = [name for name in EVENTS if hasattr(hook, name)]
    if not inspect.isclass(hook) or not methods:
        raise ValueError(f"{what}: no class with one of the methods {', '.join(EVENTS)}")
    if unknown := [name for name in vars(hook) if name.startswith("on_") and name not in EVENTS]:
        raise ValueError(f"{what}: {unknown[0]} is never called; callbacks have {', '.join(EVENTS)}")
    for name in methods:
        wanted = tuple(inspect.signature(getattr(Callback, name)).parameters)
        check_parameters(getattr(hook, name), wanted, f"{what}, method {name}")


def import_place(place: str) -> ModuleType:
    """Import the module before the colon of a user's path: "package.module" or "path/to/file.py". Errors of the import
    propagate."""
    return _file_module(Path(place)) if place.endswith(".py") else _module(place)


def source_file(place: str) -> Path | None:
    """Return the file of the module before the colon of a user's path, without running it; None if it is not found."""
    if place.endswith(".py"):
        return Path(place)
    spec, path = None, None
    for end in [index for index, each in enumerate(f"{place}.") if each == "."]:
        spec = PathFinder.find_spec(place[:end], path if path is not None else [*sys.path, os.getcwd()])
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


def _module(name: str) -> ModuleType:
    # Workers start with `python -m` and import from the current directory, so a check in a console script must too.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _file_module(path: Path) -> ModuleType:
    """Import a file once per process; it can import its neighboring files."""
    path = path.resolve()
    # A user's file must not hide another package's module of the same name.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def named(path: str, field: str) -> Iterator[None]:
    """Turn any error inside into a HookError that names the hook."""
    try:
        yield
    except HookError:
        raise
    except Exception as error:
        raise HookError(one_line(f"hook {path!r} ({field}) raised {type(error).__name__}: {error}")) from error


class Callbacks:
    """The callbacks of a run, in order."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Raise ValueError if one cannot be imported, HookError if one cannot be created."""
        self._hooks: list[tuple[str, Any]] = []
        for path in paths:
            hook = load_hook(path, CALLBACKS)
            with named(path, CALLBACKS):
                self._hooks.append((path, hook()))

    def call(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of each callback that has it. Raise HookError if one fails."""
        assert event in EVENTS, f"{event} is none of {EVENTS}"
        for path, hook in self._hooks:
            if method := getattr(hook, event, None):
                with named(path, f"{CALLBACKS}, {event}"):
                    method(*arguments)
