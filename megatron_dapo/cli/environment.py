"""The command `megatron-dapo environment check`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_dapo.cli.options import JsonOption, SetOption, refusing, shipped_if_absent
from megatron_dapo.untrusted import one_line

if TYPE_CHECKING:
    from megatron_dapo.config import Config
    from megatron_dapo.environments.check import CheckRow
    from megatron_dapo.environments.pool import WorkerSettings

environment_app = typer.Typer(no_args_is_help=True, help="Environments of episodes, tried before a run.")
WOULD_REFUSE = 1


@environment_app.callback()
def _environment() -> None:
    """Environments of episodes, tried before a run."""


@environment_app.command("check")
def check_command(
    path: Annotated[
        str, typer.Argument(help="FILE.py:NAME or package.module:NAME: a class or a function; default: the recipe's")
    ] = "",
    recipe: Annotated[
        Path | None,
        typer.Option(callback=shipped_if_absent, help="recipe whose rows, limits and chat template are checked with it"),
    ] = None,
    overrides: SetOption = None,
    num_tasks: Annotated[int, typer.Option("--num-tasks", min=1, help="tasks to play")] = 32,
    max_turns: Annotated[int, typer.Option(min=1, help="turns of an episode, without a recipe")] = 8,
    python: Annotated[str, typer.Option(help="interpreter of the workers; default: this one")] = "",
    json_output: JsonOption = False,
) -> None:
    """Play tasks twice with a scripted policy: is the environment repeatable, are its messages well formed, how long does
    it take, how much memory, is an episode lost? With a recipe, can its chat template continue episodes?

    Exit code: 0 a run can use it, 1 a run would refuse it or lose episodes, 2 it cannot be loaded.
    """
    with refusing(ValueError, OSError):
        if recipe is not None:
            table = _check_with_recipe(recipe, overrides or [], path, python, num_tasks)
        elif path:
            table = _check_alone(path, python, num_tasks, max_turns)
        else:
            raise ValueError("name a class or a function, or a recipe that does: environment check games.py:GuessNumber")
    if json_output:
        typer.echo(json.dumps([asdict(row) for row in table]))
    else:
        width = max(len(row.name) for row in table)
        for row in table:
            typer.echo(f"{'ok ' if row.is_ok else 'NO '} {row.name:{width}}  {row.text}")
    raise typer.Exit(0 if all(row.is_ok for row in table) else WOULD_REFUSE)


def _check_alone(path: str, python: str, num_tasks: int, max_turns: int) -> list[CheckRow]:
    from megatron_dapo.environments.check import check_environment
    from megatron_dapo.environments.pool import WorkerSettings

    tasks = [{"messages": [{"role": "user", "content": "Begin."}], "answer": ""} for _ in range(num_tasks)]
    return check_environment(WorkerSettings("either", path, python=python), tasks, max_turns)


def _check_with_recipe(
    recipe: Path, overrides: list[str], path: str, python: str, num_tasks: int
) -> list[CheckRow]:
    """Check an environment, the recipe's unless there is a path, with the recipe's rows, again and again if it has fewer."""
    from megatron_dapo.config import load_config
    from megatron_dapo.config.inputs import missing_programs
    from megatron_dapo.data.sources import train_sources
    from megatron_dapo.environments.check import check_environment
    from megatron_dapo.trainer.build_episodes import worker_settings

    config = load_config(recipe, overrides).config
    settings = worker_settings(config)
    if path:
        settings = replace(settings, kind="either", place=path)
    elif not config.environment.is_on:
        raise ValueError(f"{recipe} has no environment: name one as the argument, or set environment.path")
    elif missing := next(missing_programs(config), None):
        raise ValueError(str(missing))
    settings = replace(settings, python=python or settings.python)
    rows = list(islice(chain.from_iterable(source.rows() for source in train_sources(config.data)), num_tasks))
    tasks = [{**row.extra, "messages": [dict(message) for message in row.messages], "answer": row.answer} for row in rows]
    repeated = [tasks[index % len(tasks)] for index in range(num_tasks)]
    table = check_environment(settings, repeated, config.environment.max_turns)
    return [*table, _template_row(config, settings)] if config.environment.is_on else table


def _template_row(config: Config, settings: WorkerSettings) -> CheckRow:
    """Return whether the chat template continues episodes exactly, as the start of a run proves it."""
    from megatron_dapo.data.model_inputs import read_model_inputs
    from megatron_dapo.environments.check import CheckRow
    from megatron_dapo.environments.pool import WorkerPool
    from megatron_dapo.trainer.build_episodes import check_tool_role, template_proof

    try:
        inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
        proof = template_proof(config, inputs)
        assert proof is not None, "the environment is on"
        with WorkerPool(settings) as pool:
            check_tool_role(config, proof, pool.hello)
    except (ValueError, OSError) as error:
        return CheckRow("template", False, one_line(error))
    history = "; ".join(str(rewrite) for rewrite in proof.rewrites) or "earlier turns stay as they are"
    roles = ", ".join(proof.turns.roles)
    return CheckRow("template", True, f"{proof.num_conversations} conversations; answers of the roles {roles}; {history}")
