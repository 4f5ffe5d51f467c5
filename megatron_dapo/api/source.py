"""Functions and classes of a script or a notebook on their way to the processes of a run: a path, or their source in a file.

A run's processes import by path. What an importable module defines has one. A script cannot be imported, as it would start its
run again, and a notebook has no file: the definition is written to a file, with the imports, constants, functions and
classes that it uses. What is not source, such as a model in a variable, cannot follow it, and the error says so.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_HEAD = '"""Written by megatron_dapo from the script or notebook that started the run."""\n\nfrom __future__ import annotations\n'


def path_of(hook: Any, file: Path | None) -> str:
    """Return "package.module:name" or "path/to/file.py:name" of a function or class; `file` is written if it has no
    such path, None writes none and only checks.

    A text is returned as it is. ValueError in one line for what cannot be written.
    """
    if isinstance(hook, str):
        return hook
    name = getattr(hook, "__name__", "")
    if not isinstance(hook, (FunctionType, type)):
        raise ValueError(f"{hook!r:.80}: of type {type(hook).__name__}; pass a function, a class, or a path to one")
    if name == "<lambda>":
        raise ValueError("a lambda has no name that other processes could import; write it as a function with def")
    module = sys.modules.get(hook.__module__)
    if _is_importable(hook):
        # Modules next to a script are only on the script's path; workers start in another directory.
        origin = getattr(module, "__file__", None)
        is_in_package = "." in hook.__module__ or getattr(module, "__path__", None) is not None
        is_plain_file = origin is not None and not is_in_package and "site-packages" not in origin
        return f"{Path(origin).resolve()}:{name}" if origin and is_plain_file else f"{hook.__module__}:{name}"
    text = source_of(hook)
    if file is None:
        return f"source.py:{name}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return f"{file.resolve()}:{name}"


def _is_importable(value: Any) -> bool:
    """Return True if other processes can import a function or class by module and name."""
    module = sys.modules.get(value.__module__ or "")
    return module is not None and value.__module__ != "__main__" and getattr(module, value.__qualname__, None) is value


def source_of(hook: FunctionType | type) -> str:
    """Return a module's text that defines a function or class with everything that it uses. ValueError if something has
    no source."""
    statements: list[str] = []
    _define(hook, hook.__name__, statements, {hook.__name__})
    return _HEAD + "\n" + "\n".join(statements)


def _define(value: FunctionType | type, user: str, statements: list[str], seen: set[str]) -> None:
    """Append what a definition uses, then the definition itself."""
    text, node = _definition(value)
    scope = _scope(value)
    for name in _used_names(value, node):
        if name in scope and name not in seen:
            seen.add(name)
            _state(name, scope[name], user, statements, seen)
    statements.append(f"\n{text}")


def _used_names(value: FunctionType | type, node: ast.AST) -> list[str]:
    """Return the names that a definition takes from around it, in a fixed order."""
    found: dict[str, None] = {}
    # Decorators, defaults, bases and the values of a class are evaluated outside of functions; annotations are not at all.
    outside = list(getattr(node, "decorator_list", [])) + list(getattr(node, "bases", []))
    outside += [
        each
        for one in ast.walk(node)
        if isinstance(one, ast.arguments)
        for each in (*one.defaults, *one.kw_defaults)
        if each
    ]
    for part in getattr(node, "body", []) if isinstance(value, type) else ():
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            outside += part.decorator_list
        elif isinstance(part, (ast.Assign, ast.AnnAssign)) and part.value is not None:
            outside.append(part.value)
    for each in (name for part in outside for name in ast.walk(part)):
        if isinstance(each, ast.Name):
            found[each.id] = None
    for function in _functions(value):
        found.update(dict.fromkeys(function.__code__.co_freevars))
        for code in _codes(function.__code__):
            names = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
            found.update(dict.fromkeys(names))
    return list(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _state(name: str, value: Any, user: str, statements: list[str], seen: set[str]) -> None:
    """Append a statement that binds `name` to `value`."""
    if isinstance(value, ModuleType):
        statements.append(f"import {value.__name__} as {name}")
    elif isinstance(value, re.Pattern):
        statements.append(f"import re as _re\n{name} = _re.compile({value.pattern!r}, {value.flags})")
    elif _is_literal(value):
        statements.append(f"{name} = {value!r}")
    elif isinstance(inner := inspect.unwrap(value), (FunctionType, type)) and not _is_importable(inner):
        if inner.__name__ == "<lambda>":
            raise ValueError(f"{user} uses {name}, a lambda; write it as a function with def")
        seen.add(inner.__name__)
        _define(inner, inner.__name__, statements, seen)
        if inner.__name__ != name:
            statements.append(f"{name} = {inner.__name__}")
    elif "." not in (qualified := getattr(value, "__qualname__", ".")) and hasattr(
        sys.modules.get(getattr(value, "__module__", None) or ""), qualified
    ):
        statements.append(f"from {value.__module__} import {qualified} as {name}")
    else:
        raise ValueError(
            f"{user} uses {name}, a {type(value).__name__}, which cannot be written to a file for other processes; create it inside "
            f"{user}, or put both into a module and pass 'package.module:{user}'"
        )


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _scope(value: FunctionType | type) -> dict[str, Any]:
    """Return the names that a definition can use: its module's and those of the functions around it, without built-in ones."""
    scope: dict[str, Any] = {**vars(sys.modules[value.__module__])}
    for function in _functions(value):
        scope.update(function.__globals__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        scope.update({name: cell.cell_contents for name, cell in cells if name != "__class__"})
    return {name: each for name, each in scope.items() if getattr(builtins, name, scope) is not each}


def _functions(value: FunctionType | type) -> Iterator[FunctionType]:
    """Yield a function without its decorators, or the methods of a class."""
    for each in vars(value).values() if isinstance(value, type) else (value,):
        function = inspect.unwrap(each.__func__ if isinstance(each, (classmethod, staticmethod)) else each)
        # Those that a decorator such as dataclass has made have no source.
        if isinstance(function, FunctionType) and function.__module__ == value.__module__ and _lines(function):
            yield function


def _lines(function: FunctionType) -> list[str]:
    return linecache.getlines(function.__code__.co_filename)


def _definition(value: FunctionType | type) -> tuple[str, ast.AST]:
    """Return the dedented source of a function or class, its decorators included, and its node."""
    own = next(_functions(value), None)
    if own is None:
        raise ValueError(
            f"{value.__name__}: its source is not on record, as of what is typed at a prompt; put it into a file and pass "
            f"'path/to/file.py:{value.__name__}'"
        )
    code, lines = own.__code__, _lines(own)
    kinds: Mapping[bool, tuple[type, ...]] = {True: (ast.ClassDef,), False: (ast.FunctionDef, ast.AsyncFunctionDef)}
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, kinds[isinstance(value, type)]) and getattr(node, "name", "") == value.__name__:
            decorators = getattr(node, "decorator_list", [])
            start = min([node.lineno, *(each.lineno for each in decorators)])  # type: ignore[attr-defined]
            end = node.end_lineno  # type: ignore[attr-defined]
            if start == code.co_firstlineno or (isinstance(value, type) and start <= code.co_firstlineno <= end):
                return textwrap.dedent("".join(lines[start - 1 : end])), node
    raise ValueError(f"{value.__name__}: its source has changed since it was defined; run that file or cell again")
