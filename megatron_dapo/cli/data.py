"""The commands of `megatron-dapo data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.options import refusing

data_app = typer.Typer(no_args_is_help=True, help="Published data sets, prepared for a recipe.")


@data_app.command("list")
def list_datasets() -> None:
    """List the data sets that can be prepared, with their published counts."""
    from megatron_dapo.data.published import PUBLISHED

    for name, published in PUBLISHED.items():
        typer.echo(
            f"{name}: {published.num_rows:,} rows, {published.num_prompts:,} prompts ({published.repository}; "
            f"{published.counts_from})"
        )


@data_app.command("prepare")
def prepare_data(
    name: Annotated[str, typer.Argument(help="one of those that `data list` shows")],
    files: Annotated[list[Path] | None, typer.Argument(help="published files; default: from the Hub")] = None,
    output: Annotated[Path | None, typer.Option(help=".parquet or .jsonl; default: data/NAME.parquet")] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="prepared benchmark whose problems are left out; may be repeated")
    ] = None,
    keep_conflicts: Annotated[bool, typer.Option(help="keep prompts that have several answers")] = False,
    allow_other_counts: Annotated[
        bool, typer.Option(help="prepare a file that differs from the published one")
    ] = False,
    revision: Annotated[str, typer.Option(help="of the Hub's repository")] = "main",
) -> None:
    """Write one row per problem, checked against the published counts, with a data card next to it."""
    from megatron_dapo.data.published import card_path, download, find_published, prepare

    destination = output or Path("data") / f"{name}.parquet"
    with refusing(ValueError, OSError):
        find_published(name)
        card = prepare(
            name,
            files or download(name, revision),
            destination,
            against=against or (),
            keep_conflicts=keep_conflicts,
            allow_other_counts=allow_other_counts,
        )
    typer.echo(card.summary())
    for difference in card.differences:
        typer.echo(f"differs from what is published: {difference}")
    if card.num_not_integer:
        typer.echo(f"{card.num_not_integer:,} answers are no integers")
    typer.echo(f"{destination} (data card: {card_path(destination)})")
