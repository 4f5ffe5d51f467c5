"""The command `megatron-dapo environment check`."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_dapo.cli.options import JsonOption, SetOption, refusing, shipped_if_absent

environment_app = typer.Typer(no_args_is_help=True, help="Environments of episodes, tried before a run.")
WOULD_REFUSE = 1


@environment_app.callback()
def _environment() -> None:
    """Environments of episodes, tried before a run."""


@environment_app.command("check")
def check_command(
    path: Annotated[str, typer.Argument(help="FILE.py:NAME or package.module:NAME: a class or a function")],
    recipe: Annotated[
        Path | None, typer.Option(callback=shipped_if_absent, help="recipe whose data rows are the tasks")
    ] = None,
    overrides: SetOption = None,
    num_tasks: Annotated[int, typer.Option("--num-tasks", min=1, help="tasks to play")] = 32,
    max_turns: Annotated[int, typer.Option(min=1, help="turns of an episode")] = 8,
    python: Annotated[str, typer.Option(help="interpreter of the workers; default: this one")] = "",
    json_output: JsonOption = False,
) -> None:
    """Play tasks twice with a scripted policy: is the environment repeatable, are its messages well formed, how long does
    it take, how much memory, is an episode lost?

    Exit code: 0 a run can use it, 1 a run would refuse it or lose episodes, 2 it cannot be loaded.
    """
    from megatron_dapo.environments.check import check_environment
    from megatron_dapo.environments.pool import WorkerSettings

    with refusing(ValueError, OSError):
        settings = WorkerSettings("either", path, python=python)
        table = check_environment(settings, tasks_of(recipe, overrides or [], num_tasks), max_turns)
    if json_output:
        typer.echo(json.dumps([asdict(row) for row in table]))
    else:
        width = max(len(row.name) for row in table)
        for row in table:
            typer.echo(f"{'ok ' if row.is_ok else 'NO '} {row.name:{width}}  {row.text}")
    raise typer.Exit(0 if all(row.is_ok for row in table) else WOULD_REFUSE)


def tasks_of(recipe: Path | None, overrides: list[str], num_tasks: int) -> list[dict[str, Any]]:
    """Return the tasks: the recipe's first rows, again and again if it has fewer, else ones without columns."""
    if recipe is None:
        return [{"messages": [{"role": "user", "content": "Begin."}], "answer": ""} for _ in range(num_tasks)]
    from megatron_dapo.config import load_config
    from megatron_dapo.data.sources import train_sources

    config = load_config(recipe, overrides).config
    rows = list(islice(chain.from_iterable(source.rows() for source in train_sources(config.data)), num_tasks))
    tasks = [
        {**row.extra, "messages": [dict(message) for message in row.messages], "answer": row.answer} for row in rows
    ]
    return [tasks[index % len(tasks)] for index in range(num_tasks)]
