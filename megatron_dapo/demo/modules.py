"""Files that a program needs: what it imports from its own directory, found by following the imports in their source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from sys import stdlib_module_names


def imported_files(root: Path, files: Iterable[Path]) -> set[Path]:
    """Return `files` and every module below `root` that they import, directly or through others, with their packages.

    Imports inside functions count, those for type checkers only do not. A module that is imported by a name made at run
    time is not found: name its file.
    """
    found: set[Path] = set()
    waiting = [file.resolve() for file in files]
    root = root.resolve()
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        packages = [parent / "__init__.py" for parent in file.relative_to(root).parents if parent.name]
        waiting += [root / package for package in packages if (root / package).is_file()]
        for name in _imported_names(file, root):
            place = root.joinpath(*name.split("."))
            waiting += [each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()]
    return found


def required_distributions(root: Path, files: Sequence[Path]) -> list[str]:
    """Return the installed distributions that `files` import, beyond the standard library and the modules below `root`."""
    known = packages_distributions()
    names = {name.partition(".")[0] for file in files for name in _imported_names(file, root)}
    return sorted({known[name][0] for name in names - stdlib_module_names if name in known})


def _imported_names(file: Path, root: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; of `from a import b` both a and a.b, as b may be a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    package = file.resolve().relative_to(root.resolve()).parent.parts if file.resolve().is_relative_to(root.resolve()) else ()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from filter(None, (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)))
        waiting += ast.iter_child_nodes(node)
