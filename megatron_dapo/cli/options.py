"""Arguments and options that several commands share, and how a command refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megatron_dapo.plan.device import GPUS

REFUSED = 2


def shipped_if_absent(recipe: Path | None) -> Path | None:
    """Return the recipe of the package with that name if there is no such file."""
    if recipe is None or recipe.exists():
        return recipe
    from megatron_dapo.cli.recipes import shipped_recipe

    return shipped_recipe(recipe) or recipe


_RECIPE_HELP = "TOML recipe, or the name of one that `megatron-dapo recipes` lists"
RecipeArgument = Annotated[Path, typer.Argument(help=_RECIPE_HELP, callback=shipped_if_absent)]
OptionalRecipe = Annotated[Path | None, typer.Argument(help=_RECIPE_HELP, callback=shipped_if_absent)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="override a value; may be repeated")
]
LayoutOption = Annotated[
    str | None, typer.Option(help="parallel layout, e.g. tp2pp1 or tp2dp2sp; replaces the recipe's")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
OutputDirOption = Annotated[Path | None, typer.Option(help="where the run writes; replaces run.output_dir")]
HostMemoryOption = Annotated[
    float | None,
    typer.Option(metavar="GIB", help="memory of a node for --dry-run; default: this one's, 1000 for others"),
]
NetworkOption = Annotated[
    float,
    typer.Option("--network-gbit", min=0.1, help="Gbit/s of a node for weights that cross between nodes over TCP"),
]
RestartsOption = Annotated[
    int, typer.Option("--restarts", min=0, help="times that the processes are started again after a failure")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="check everything, print what would run, start nothing")]


def refuse(reason: object) -> NoReturn:
    """End the command with the reason on stderr and exit code 2."""
    typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(REFUSED)


@contextmanager
def refusing(*errors: type[Exception], prefix: str = "") -> Iterator[None]:
    """Refuse with the message of one of `errors` if it is raised inside."""
    try:
        yield
    except errors as error:
        refuse(f"{prefix}{error}")


def require_known_gpu(name: str) -> None:
    """Refuse a kind of GPU that plans do not know."""
    if name not in GPUS:
        refuse(f"--gpu {name}: not known; choose one of {', '.join(GPUS)}")
