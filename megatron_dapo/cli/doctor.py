"""`megatron-dapo doctor`: what is wrong with this machine, before a run finds out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="check also what this recipe needs")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=value", help="override a value; may be repeated")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="parallel layout, e.g. tp2pp1; replaces the recipe's")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Check packages, GPUs and their libraries, and what a recipe needs; the first conflict is the last line.

    Exit code: 0 no conflict (warnings do not count), 1 a conflict, 2 arguments that cannot be read.
    """
    from megatron_dapo.doctor.report import describe, examine, to_json

    try:
        report = examine(recipe, overrides or [], layout)
    except ValueError as error:  # a bad --layout
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps(to_json(report)) if json_output else "\n".join(describe(report)))
    raise typer.Exit(0 if report.is_ok else 1)
