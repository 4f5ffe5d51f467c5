"""Write the table of megatron-core's fields that a section [megatron] is checked against.

    python -m tools.megatron_fields 0.16.1=SITE_PACKAGES 0.19.2=UNPACKED_WHEEL [--output FILE]

Reads the sources of the given versions, so that a version whose Python is another one can be read as well. Without
arguments the installed version is compared with the table; exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.config.megatron_options import TABLE

# Dataclasses of each part, in the order in which they inherit.
CLASSES = {
    "model": (
        ("megatron/core/model_parallel_config.py", "ModelParallelConfig"),
        ("megatron/core/transformer/transformer_config.py", "TransformerConfig"),
    ),
    "ddp": (("megatron/core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("megatron/core/optimizer/optimizer_config.py", "OptimizerConfig"),),
}
PLAIN = {"bool": "bool", "int": "int", "float": "float", "str": "str"}
ENUMS = {"AttnBackend": ["flash", "fused", "unfused", "local", "auto"]}


def kinds_of(annotation: ast.expr) -> list[Any]:
    """Return what TOML may write for an annotation: "int", {"list": [...]}, {"one of": [...]}; nothing for a function."""
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return []
    if isinstance(annotation, ast.Name):
        if annotation.id in ENUMS:
            return [{"one of": ENUMS[annotation.id]}]
        return [PLAIN[annotation.id]] if annotation.id in PLAIN else []
    if isinstance(annotation, ast.BinOp):
        return [*kinds_of(annotation.left), *kinds_of(annotation.right)]
    if not isinstance(annotation, ast.Subscript):
        return []
    name = ast.unparse(annotation.value).lower()
    items = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if name == "literal":
        return [{"one of": [item.value for item in items if isinstance(item, ast.Constant)]}]
    if name in ("list", "tuple", "sequence"):
        inner = [kind for item in items for kind in kinds_of(item)]
        return [{"list": inner}] if inner else []
    return [kind for item in items for kind in kinds_of(item)]  # Optional, Union


def fields_of(directory: Path) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield part, name and kinds of every field of one version. FileNotFoundError if it is not in `directory`."""
    for part, classes in CLASSES.items():
        for path, wanted in classes:
            tree = ast.parse((directory / path).read_text(encoding="utf-8"))
            [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == wanted]
            for statement in found.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield part, statement.target.id, kinds_of(statement.annotation)


def table_of(versions: dict[str, Path]) -> dict[str, Any]:
    """Return the table of several versions, the newest last: its kinds are the ones kept."""
    fields: dict[str, dict[str, Any]] = {}
    for version, directory in versions.items():
        for part, name, kinds in fields_of(directory):
            entry = fields.setdefault(name, {"parts": [], "versions": [], "kinds": []})
            unique = {json.dumps(kind): kind for kind in [*entry["kinds"], *kinds] if version in entry["versions"]}
            entry["kinds"] = list(unique.values()) or list({json.dumps(kind): kind for kind in kinds}.values())
            entry["parts"] = sorted({*entry["parts"], part})
            if version not in entry["versions"]:
                entry["versions"].append(version)
    return {"versions": list(versions), "fields": dict(sorted(fields.items()))}


def installed() -> dict[str, Path]:
    """Return the installed version and the directory that has it."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None and found.origin is not None, "megatron-core is installed"
    return {importlib.metadata.version("megatron-core"): Path(found.origin).parents[2]}


def differences(version: str, directory: Path) -> list[str]:
    """Return a line for every field in which a version differs from the table."""
    known, found = json.loads(TABLE.read_text(encoding="utf-8"))["fields"], {}
    for part, name, _ in fields_of(directory):
        found.setdefault(name, set()).add(part)
    lines = [f"{name}: not in the table" for name in found if name not in known]
    return lines + [
        f"{name}: in the table for {version}, not there"
        for name, entry in known.items()
        if version in entry["versions"] and name not in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION=DIRECTORY")
    parser.add_argument("--output", type=Path, default=TABLE)
    arguments = parser.parse_args()
    versions = {name: Path(path) for name, _, path in (text.partition("=") for text in arguments.versions)}
    if versions:
        arguments.output.write_text(json.dumps(table_of(versions), separators=(",", ":")) + "\n", encoding="utf-8")
        return
    [(version, directory)] = installed().items()
    found = differences(version, directory)
    print("\n".join(found) or f"megatron-core {version} is as in the table")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
