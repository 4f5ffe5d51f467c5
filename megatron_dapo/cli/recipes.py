"""Recipes that come with the package: `megatron-dapo recipes` lists and copies them, `quickstart` trains one.

They have one home, examples/ in the repository; a wheel holds a copy of it as package data (setup.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_dapo.cli.options import (
    DryRunOption,
    JsonOption,
    LayoutOption,
    OutputDirOption,
    RestartsOption,
    SetOption,
    refuse,
    refusing,
)
from megatron_dapo.cli.run import train
from megatron_dapo.config.loader import read_toml
from megatron_dapo.config.schema import recipe_schema

PACKAGE = Path(__file__).resolve().parents[1]
QUICKSTART = Path("quickstart/quickstart.toml")
SCHEMA = "recipe.schema.json"
DIRECTIVE = "#:schema"  # first word of the line by which editors find the schema of a TOML file
_SUFFIXES = (".toml", ".sh", ".json")

recipes_app = typer.Typer(invoke_without_command=True, help="List recipes that come with the package, and copy them.")


def shipped_directory() -> Path:
    """Return the directory of the recipes: package data of an installed wheel, examples/ of a checkout."""
    packaged, checkout = PACKAGE / "examples", PACKAGE.parent / "examples"
    return packaged if packaged.is_dir() else checkout


def shipped_files() -> dict[str, Path]:
    """Return name -> path of every recipe, layout, grid, script and reference, e.g. layouts/colocated_1node."""
    root = shipped_directory()
    paths = (path for path in sorted(root.glob("*/*")) if path.suffix in _SUFFIXES)
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}


def find_shipped(name: str) -> list[Path]:
    """Return the files of a recipe (layouts/colocated_1node, or its last part), a directory (launch), or "all".

    A recipe includes its base recipes, and the data, models and references that they name. ValueError for an unknown
    name.
    """
    root, files = shipped_directory(), shipped_files()
    if name == "all":
        return sorted(_files_in(root))
    name = name.removeprefix("examples/").rstrip("/")
    if (root / name).is_dir():
        return sorted({*_files_in(root / name), *(root / SCHEMA for _ in islice((root / name).glob("*.toml"), 1))})
    stem = name.removesuffix(".toml").removesuffix(".sh").removesuffix(".json")
    matches = [path for key, path in files.items() if stem in (key, key.rpartition("/")[2])]
    if not matches:
        raise ValueError(f"no recipe {name!r} comes with the package; `megatron-dapo recipes` lists them")
    if len(matches) > 1:
        names = ", ".join(path.relative_to(root).as_posix() for path in matches)
        raise ValueError(f"{name!r} may be {names}; name one of them with its directory")
    needed: set[Path] = set()
    _needed(matches[0], needed)
    return sorted(needed)


def shipped_recipe(name: Path) -> Path | None:
    """Return the recipe or layout of the package with that name, or with that path in a checkout; None for another name."""
    wanted = name.as_posix().removeprefix("./").removeprefix("examples/").removesuffix(".toml")
    matches = [
        path
        for key, path in shipped_files().items()
        if path.suffix == ".toml" and path.parent.name != "grids" and wanted in (key, path.stem)
    ]
    main = [path for path in matches if path.parent.name == path.stem]  # smollm2/smollm2 before gpu/smollm2
    return next((few[0] for few in (matches, main) if len(few) == 1), None)


def _files_in(directory: Path) -> Iterator[Path]:
    skipped = ("__pycache__", "runs")
    return (p for p in directory.rglob("*") if p.is_file() and not any(part in skipped for part in p.parts))


def _needed(path: Path, needed: set[Path]) -> None:
    """Add a file to `needed`, and the shipped files and directories that its values name: `base`, data, models, references."""
    if path in needed:
        return
    needed.add(path)
    if path.suffix != ".toml":
        return
    needed.add(shipped_directory() / SCHEMA)
    for value in _texts(read_toml(path)):
        below = (path.parent / value).resolve()
        if not below.is_relative_to(shipped_directory()) or path.is_relative_to(below):
            continue  # outside, or the directory of the recipe itself
        if below.is_dir():
            needed.update(_files_in(below))
        elif below.is_file():
            _needed(below, needed)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def summary(path: Path) -> str:
    """Return the first sentence of the comment that a file begins with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(("#!", DIRECTIVE)):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).split(". ")[0].rstrip(".:")


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List recipes that come with the package, and copy them."""
    if context.invoked_subcommand is None:
        list_recipes()


@recipes_app.command("list")
def list_recipes(json_output: JsonOption = False) -> None:
    """List every recipe, layout, grid, launch script and reference with its first line."""
    described = {name: summary(path) for name, path in shipped_files().items()}
    if json_output:
        typer.echo(json.dumps(described))
        return
    width = max(map(len, described))
    for name, text in described.items():
        typer.echo(f"{name:<{width}}  {text}".rstrip())
    typer.echo("\n`megatron-dapo recipes copy NAME [DIR]` writes one with all that it needs to DIR/examples.")


@recipes_app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of recipes. An editor's TOML extension completes and explains keys by it: save it, and begin a
    recipe with the line `#:schema recipe.schema.json`."""
    typer.echo(schema_text(), nl=False)


def schema_text() -> str:
    """Return the JSON schema of recipes as a file has it."""
    return json.dumps(recipe_schema(), indent=1) + "\n"


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="one that `recipes` lists, a directory such as launch, or all")],
    directory: Annotated[Path, typer.Argument(help="takes the directory examples/")] = Path("."),
    force: Annotated[bool, typer.Option("--force", help="replace files that differ")] = False,
) -> None:
    """Copy a recipe, and the recipes, data and models that it refers to, to DIR/examples; paths stay as in the documentation."""
    root = shipped_directory()
    with refusing(ValueError):
        files = find_shipped(name)
    targets = {path: directory / "examples" / path.relative_to(root) for path in files}
    changed = [to for path, to in targets.items() if to.exists() and to.read_bytes() != path.read_bytes()]
    if changed and not force:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        refuse(f"{changed[0]}{more}: there already, with another content; --force replaces it")
    try:
        for path, to in targets.items():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)  # It keeps the mode: scripts stay executable.
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")
    for to in targets.values():
        if to.suffix in (".toml", ".sh"):
            typer.echo(to)
    typer.echo(f"{len(targets)} files in {directory / 'examples'}")


def quickstart(
    overrides: SetOption = None,
    layout: LayoutOption = None,
    output_dir: OutputDirOption = None,
    restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
) -> None:
    """Train the example that comes with the package: a 2 MB model, two processes, minutes on a CPU; needs no network."""
    train(
        recipe=shipped_directory() / QUICKSTART,
        overrides=overrides,
        layout=layout,
        output_dir=output_dir,
        restarts=restarts,
        dry_run=dry_run,
    )
