"""Reinforcement learning for reasoning models on Megatron-core: train, evaluate and look at runs.

Commands parse, load, check, then call. Heavy libraries are imported inside the commands that need them.

Exit codes: 0 done, 1 failed (a check did not hold, a process failed in a way that would repeat), 2 refused (everything
that is wrong is listed), 75 not at its end and worth starting again: a signal stopped it, or a failure that may pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_dapo._version import __version__
from megatron_dapo.cli.compare import compare
from megatron_dapo.cli.convert import convert_app
from megatron_dapo.cli.data import data_app
from megatron_dapo.cli.demo import demo
from megatron_dapo.cli.environment import environment_app
from megatron_dapo.cli.export import export
from megatron_dapo.cli.init import init
from megatron_dapo.cli.nodes import nodes
from megatron_dapo.cli.options import (
    DryRunOption,
    JsonOption,
    LayoutOption,
    OptionalRecipe,
    SetOption,
    refuse,
    refusing,
)
from megatron_dapo.cli.plan import plan_app
from megatron_dapo.cli.quantize import quantize
from megatron_dapo.cli.recipes import quickstart, recipes_app
from megatron_dapo.cli.run import evaluate, pretrain_value, rejection_sample, replay, rounds, sft, train
from megatron_dapo.cli.try_recipe import try_recipe
from megatron_dapo.config import load_config
from megatron_dapo.run.plan import machines_of
from megatron_dapo.telemetry.terminal import configure_logging, end_status, show_status, status

# The panels of --help with their commands, in order.
PANELS = {
    "Train": (
        *("init", "try", "train", "eval", "quickstart", "recipes", "data", "environment"),
        *("sft", "pretrain-value", "rejection-sample", "rounds", "replay", "ablate"),
    ),
    "Look": ("report", "compare", "demo", "nodes", "checkpoint"),
    "Cluster": ("plan", "doctor", "preflight", "check-loss", "prove-gateway", "version"),
    "Convert": ("export", "convert", "quantize"),
}


class Commands(TyperGroup):
    """The top-level commands in the panels of `PANELS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of --help."""
        panel_of = {name: panel for panel, names in PANELS.items() for name in names}
        for name, command in self.commands.items():
            command.rich_help_panel = panel_of[name]  # type: ignore[attr-defined]
        return [name for name in panel_of if name in self.commands]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, with no type next to those that are switches, here and in every command."""
        _hide_types_of_switches(self, ctx)
        return super().get_params(ctx)


def _hide_types_of_switches(command: Any, ctx: Any) -> None:
    """Leave <bool> out of the help of a command and of those below it."""
    for option in (*command.params, command.get_help_option(ctx)):
        if getattr(option, "is_bool_flag", False) and option.metavar is None:
            option.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _hide_types_of_switches(each, ctx)


app = typer.Typer(
    name="megatron-dapo",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=__doc__.splitlines()[0],
)

app.add_typer(plan_app, name="plan")
checkpoint_app = typer.Typer(no_args_is_help=True, help="List, verify and compare the checkpoints of runs.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(environment_app, name="environment")
app.add_typer(convert_app, name="convert")
app.add_typer(recipes_app, name="recipes")


@app.command()
def doctor(
    recipe: OptionalRecipe = None,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check packages, GPUs and their libraries, and what a recipe needs, if one is given; the first conflict is the last line.

    Exit code: 0 no conflict (warnings do not count), 1 a conflict, 2 arguments that cannot be read.
    """
    from megatron_dapo.doctor.report import describe, examine, to_json

    with refusing(ValueError), status("examining packages, devices and kernels"):  # ValueError: a bad --layout
        report = examine(recipe, overrides or [], layout)
    typer.echo(json.dumps(to_json(report)) if json_output else "\n".join(describe(report)))
    raise typer.Exit(0 if report.is_ok else 1)


for _name, _command in (
    ("init", init),
    ("try", try_recipe),
    ("quickstart", quickstart),
    ("train", train),
    ("pretrain-value", pretrain_value),
    ("sft", sft),
    ("rejection-sample", rejection_sample),
    ("rounds", rounds),
    ("replay", replay),
    ("eval", evaluate),
    ("export", export),
    ("quantize", quantize),
    ("nodes", nodes),
    ("compare", compare),
    ("demo", demo),
):
    app.command(_name)(_command)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="directories of runs; several are overlaid")],
    reference: Annotated[
        list[Path] | None,
        typer.Option(
            help="curve to compare with, as of `compare`: a run, .json, .csv (step,value) or .jsonl; may repeat"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="file to write; default: report.html in the run")] = None,
) -> None:
    """Write one HTML file about runs: verdict, anomalies, curves, time, samples, configuration. It needs no network.

    Exit code: 0 written, 2 arguments or files that cannot be read.
    """
    from megatron_dapo.report.background import REPORT
    from megatron_dapo.report.page import write_report

    target = output or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    with refusing(ValueError, OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with status("reading the runs"):
            num_bytes = write_report(runs, reference or (), target)
    typer.echo(f"{target}: {num_bytes / 1e6:.2f} MB, open it in any browser")


@checkpoint_app.command("inspect")
def inspect_checkpoint(
    directory: Annotated[
        Path, typer.Argument(help="a run's directory, one of checkpoints, or one checkpoint (step_*)")
    ],
    other: Annotated[Path | None, typer.Argument(help="another checkpoint, to compare the first one with")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read every byte and check its hash")] = False,
    json_output: JsonOption = False,
) -> None:
    """List checkpoints with their layouts, sizes and tensors, verify them, or compare two, saved under any layouts.

    Exit code: 0 whole, and equal to the other one; 1 damaged or different; 2 nothing that can be read.
    """
    from megatron_dapo.checkpoints.store import CheckpointError
    from megatron_dapo.cli import checkpoint

    with refusing(ValueError, OSError, CheckpointError):
        with status("reading the checkpoints"):
            facts = checkpoint.inspect(directory, verify)
            lines = checkpoint.inspection_lines(facts)
            is_good = not any("problem" in one for one in facts.get("checkpoints", ()))
            if other is not None:
                checkpoint.inspect(other, verify)
                facts = checkpoint.compare(directory, other)
                lines, is_good = checkpoint.comparison_lines(facts), facts["is_equal"]
    typer.echo(json.dumps(facts) if json_output else "\n".join(lines))
    raise typer.Exit(0 if is_good else 1)


@app.command()
def ablate(
    grids: Annotated[
        list[Path], typer.Argument(help="TOML grids of variants and seeds, e.g. examples/grids/dapo_table1.toml")
    ],
    overrides: SetOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs side by side")] = 1,
    max_runs: Annotated[int | None, typer.Option(min=1, help="stop after this many runs")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="stop after this time, runs under way with a checkpoint")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="directory of results.jsonl and the report, of several grids of one each; default: the grid's output directory"
        ),
    ] = None,
    any_commit: Annotated[bool, typer.Option("--any-commit", help="results of other commits count as well")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="make no run")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train every variant of grids with every seed, and report means, intervals and paired differences.

    Finished runs are on record in results.jsonl; started again, the command makes the others. A run that several grids have is
    made once.
    """
    from megatron_dapo.ablation.command import Limits
    from megatron_dapo.ablation.command import ablate as run_ablation

    most = 0 if report_only else max_runs or float("inf")
    limits = Limits(jobs, seconds or float("inf"), most)
    with refusing(ValueError, RuntimeError):
        code = run_ablation(
            grids, overrides or [], machines_of(dry_run=False), limits, results, any_commit, dry_run, typer.echo
        )
    raise typer.Exit(code)


@app.command("check-loss")
def check_loss(
    processes: Annotated[int, typer.Option(min=1, help="processes to start; layouts that fit them are compared")] = 4,
    json_output: JsonOption = False,
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory; default: a small random model")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    loss: Annotated[str, typer.Option(help="a built-in name of algorithm.loss")] = "ppo_clip",
) -> None:
    """Prove that the gradient does not depend on layout, packing, micro-batches or accumulation."""
    from megatron_dapo.proof.check_loss import check_loss as run_check

    raise typer.Exit(run_check(processes, json_output, str(model) if model else None, dtype, loss))


@app.command("prove-gateway")
def prove_gateway(
    num_sessions: Annotated[int, typer.Option("--sessions", min=1, help="random episodes of agents to play")] = 10_000,
    seed: Annotated[int, typer.Option(help="of the random sessions")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Prove that every token sampled for an agent's requests is trained once, or listed with its reason.

    Random clients repeat, edit and forget, summarize, delegate, ask at the same time and lose their connections; what is
    sampled and trained is compared with a search over all served conversations. On one core, without HTTP.

    Exit code: 0 no violation, 1 violations.
    """
    from megatron_dapo.proof.gateway.run import prove_gateway as prove

    proof = prove(num_sessions, seed, lambda done: show_status(f"{done:,} of {num_sessions:,} sessions are played"))
    end_status()
    typer.echo(json.dumps(proof.as_json()) if json_output else "\n".join(proof.lines()))
    raise typer.Exit(1 if proof.violations else 0)


@app.command()
def preflight(
    recipe: OptionalRecipe = None,
    overrides: SetOption = None,
    directory: Annotated[Path, typer.Option(help="where runs write: the disk that is measured")] = Path("runs"),
    tolerance: Annotated[float, typer.Option(help="share of the median below which a node is slow")] = 0.6,
) -> None:
    """Measure every node before a run, under srun or torchrun: matrix product, memory, all-reduce and disk against the median,
    and the groups of a recipe's layout, if one is given.

    Exit code: 0 all nodes are alike, 1 slow ones are named, 2 arguments or environment that cannot be used.
    """
    if not 0 < tolerance < 1:
        refuse(f"--tolerance {tolerance:g}: has to be above 0 and below 1")
    from megatron_dapo.cli.preflight import preflight as measure

    with refusing(ValueError):
        layout = None
        if recipe is not None:
            from megatron_dapo.launch.environment import process_environment
            from megatron_dapo.trainer.topology import parallel_layout

            layout = parallel_layout(load_config(recipe, overrides or []).config, process_environment().world_size)
        code = measure(directory, tolerance, typer.echo, layout)
    raise typer.Exit(code)


@app.command()
def version() -> None:
    """Versions of this package and of what it stands on."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    typer.echo(f"megatron-dapo {__version__}, Python {sys.version.split()[0]}")
    for name in ("torch", "megatron-core", "transformers", "safetensors", "transformer-engine", "sglang"):
        try:
            typer.echo(f"{name} {installed(name)}")
        except PackageNotFoundError:
            typer.echo(f"{name} not installed")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def configure(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    configure_logging()


if __name__ == "__main__":
    app()
