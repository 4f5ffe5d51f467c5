"""The `megatron-dapo` command: parse, load, check, then call. Heavy libraries are imported inside the commands that
need them.

Exit codes: 0 done, 1 failed (a check did not hold, a process failed in a way that would repeat), 2 refused (everything
that is wrong is listed), 75 not at its end and worth starting again: a signal stopped it, or a failure that may pass.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_dapo._version import __version__
from megatron_dapo.checkpoints.disk_space import size
from megatron_dapo.cli.convert import convert_app
from megatron_dapo.cli.data import data_app
from megatron_dapo.cli.options import (
    DryRunOption,
    JsonOption,
    LayoutOption,
    NetworkOption,
    RecipeArgument,
    SetOption,
    refuse,
)
from megatron_dapo.cli.quantize import quantize
from megatron_dapo.cli.recipes import quickstart, recipes_app
from megatron_dapo.cli.run import evaluate, pretrain_value, rejection_sample, replay, rounds, sft, train
from megatron_dapo.cli.run_plan import RecipeOrCommand, plan_recipe
from megatron_dapo.plan.cluster import NETWORK_GBIT
from megatron_dapo.plan.device import GPUS
from megatron_dapo.run.plan import machines_of

app = typer.Typer(
    name="megatron-dapo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=__doc__.splitlines()[0],
)

plan_app = typer.Typer(
    cls=RecipeOrCommand, no_args_is_help=True, help="Memory and time of a run, computed without running it."
)
plan_app.command(RecipeOrCommand.default_command)(plan_recipe)
app.add_typer(plan_app, name="plan")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Checkpoints of runs.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(convert_app, name="convert")
app.add_typer(recipes_app, name="recipes")


@app.command()
def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="check also what this recipe needs")] = None,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check packages, GPUs and their libraries, and what a recipe needs; the first conflict is the last line.

    Exit code: 0 no conflict (warnings do not count), 1 a conflict, 2 arguments that cannot be read.
    """
    from megatron_dapo.doctor.report import describe, examine, to_json

    try:
        report = examine(recipe, overrides or [], layout)
    except ValueError as error:  # a bad --layout
        refuse(error)
    typer.echo(json.dumps(to_json(report)) if json_output else "\n".join(describe(report)))
    raise typer.Exit(0 if report.is_ok else 1)


for _name, _command in (
    ("quickstart", quickstart),
    ("train", train),
    ("pretrain-value", pretrain_value),
    ("sft", sft),
    ("rejection-sample", rejection_sample),
    ("rounds", rounds),
    ("replay", replay),
    ("eval", evaluate),
    ("quantize", quantize),
):
    app.command(_name)(_command)


@app.command()
def nodes(
    run: Annotated[Path, typer.Argument(help="a run's directory")],
    seconds: Annotated[int, typer.Option(min=1, help="newest seconds that are shown and searched")] = 900,
    metric: Annotated[
        str | None, typer.Option(help="metric to show; default: an alert's, or where a node differs most")
    ] = None,
    continuity: Annotated[
        int, typer.Option(min=1, help="seconds that a node must stand out, for a run without alerts")
    ] = 240,
    svg: Annotated[
        Path | None, typer.Option(help="file for the picture; default: nodes/timeline.svg in the run")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show the metrics of a run's nodes over time, and the node that stands out.

    Exit code: 0 none stands out or too early to say, 1 one does, 2 arguments or files that cannot be read.
    """
    from megatron_dapo.cli.nodes import report_nodes
    from megatron_dapo.nodes.detection import DetectorSettings
    from megatron_dapo.nodes.timeline import to_lines, to_svg

    picture = svg or run / "nodes/timeline.svg"
    try:
        report = report_nodes(run, seconds, metric, DetectorSettings(continuity_s=continuity))
        picture.write_text(to_svg(report.drawn), encoding="utf-8")
    except (ValueError, OSError) as error:
        refuse(error)
    if json_output:
        typer.echo(json.dumps({"alerts": [asdict(alert) for alert in report.alerts], "remarks": list(report.remarks)}))
    else:
        typer.echo("\n".join([*to_lines(report.shown), *report.remarks, f"picture: {picture}"]))
    raise typer.Exit(1 if report.alerts else 0)


@app.command()
def compare(
    run: Annotated[Path, typer.Argument(help="a run's directory, or a result that `eval --output` wrote")],
    reference: Annotated[
        Path,
        typer.Argument(
            help="another run's directory, or a .json, .csv or .jsonl with a step column; of a result another result"
        ),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=TOLERANCE]", help="compare this one, too, or with another tolerance; may repeat"),
    ] = None,
    unit: Annotated[str | None, typer.Option(help="steps of two directories: train_step or optimizer_step")] = None,
    json_output: JsonOption = False,
) -> None:
    """Say whether a run is on the track of a reference, or since when not, with intervals.

    Exit code: 0 on track or too early to say, 1 off track, 2 arguments that cannot be read.
    """
    from megatron_dapo.cli.compare import comparison_table, difference_lines, remarks
    from megatron_dapo.evaluation.comparison import compare_with, rule_from
    from megatron_dapo.evaluation.reference import Unit, read_record

    if run.is_file():
        from megatron_dapo.evaluation.protocol import EvaluationResult

        try:
            results = [EvaluationResult.from_json(path.read_text(encoding="utf-8")) for path in (run, reference)]
            typer.echo("\n".join(difference_lines(*results)))
        except (ValueError, OSError) as error:
            refuse(error)
        return
    units: dict[str | None, Unit | None] = {None: None, "train_step": "train_step", "optimizer_step": "optimizer_step"}
    if unit not in units:
        refuse(f"--unit {unit}: choose train_step or optimizer_step")
    try:
        comparison = compare_with(run, read_record(reference, units[unit]), dict(map(rule_from, metric or ())))
    except (ValueError, OSError) as error:
        refuse(error)
    if json_output:
        typer.echo(json.dumps({**asdict(comparison), "off_since": comparison.off_since}))
    else:
        Console().print(comparison_table(comparison))
        for remark in remarks(comparison):
            typer.echo(remark)
        typer.echo(comparison.verdict())
    raise typer.Exit(0 if comparison.off_since is None else 1)


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
    from megatron_dapo.cli.report import make_report

    try:
        typer.echo(make_report(runs, reference or (), output))
    except (ValueError, OSError) as error:
        refuse(error)


RunArgument = Annotated[Path, typer.Argument(help="directory of a finished run")]
BaseOption = Annotated[
    str, typer.Option(help="the model before training: directory or Hub repository; default: model.path")
]
TrainedOption = Annotated[str, typer.Option(help="the model after it; default: the run's exported one")]


@app.command()
def demo(
    run: RunArgument,
    base: BaseOption = "",
    trained: TrainedOption = "",
    packages: Annotated[Path, typer.Option(help="directory with Gradio (make .venv-demo)")] = Path(".venv-demo"),
    port: Annotated[int, typer.Option(min=0, help="on loopback; 0: any free one")] = 7860,
) -> None:
    """Open a page that asks the base and the trained model the same problem and shows the verifier's score."""
    from megatron_dapo.cli.demo import run_page

    try:
        code = run_page(run, base, trained, packages, port)
    except ValueError as error:
        refuse(error)
    raise typer.Exit(code)


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(help="a checkpoint, e.g. runs/x/checkpoints/step_000012; a finished run with --space")
    ],
    target: Annotated[Path | None, typer.Argument(help="Hugging Face directory to write, of a checkpoint")] = None,
    critic: Annotated[bool, typer.Option("--critic", help="the critic of the checkpoint")] = False,
    model: Annotated[
        Path | None, typer.Option(help="directory the checkpoint's run started from; default: as its config.json says")
    ] = None,
    verify: Annotated[bool, typer.Option(help="check every byte of the model's files first")] = True,
    form: Annotated[
        str,
        typer.Option("--format", help="huggingface, or torch_dist: a checkpoint that Megatron-LM loads in any layout"),
    ] = "huggingface",
    space: Annotated[
        Path | None, typer.Option(help="write the demo of a run as a Hugging Face Space to this directory")
    ] = None,
    base: BaseOption = "",
    trained: TrainedOption = "",
) -> None:
    """Write the model of any checkpoint as a Hugging Face directory, or the demo of a run as a Hugging Face Space."""
    if (target is None) == (space is None):
        refuse("export: give a checkpoint and the directory to write, or a run and --space DIRECTORY")
    if form not in ("huggingface", "torch_dist") or (form == "torch_dist" and (critic or target is None)):
        refuse(f"export --format {form}: choose huggingface, or torch_dist for the policy of a checkpoint")
    if target is not None:
        _export_checkpoint(source, target, critic, model, verify, form == "torch_dist")
        return
    assert space is not None, "one of the two is given"
    from megatron_dapo.demo.space import write_space

    try:
        write_space(source, space, base, trained)
    except (ValueError, OSError) as error:
        refuse(error)
    typer.echo(f"{space}: push it to a Space of yours (git, or `hf upload NAME {space} --repo-type space`)")


def _export_checkpoint(
    source: Path,
    target: Path,
    is_critic: bool = False,
    model: Path | None = None,
    verifies: bool = True,
    for_megatron: bool = False,
) -> None:
    from megatron_dapo.checkpoints.store import CheckpointError
    from megatron_dapo.cli.checkpoint import export_checkpoint, export_torch_dist

    try:
        if for_megatron:
            typer.echo(f"{target}: {size(export_torch_dist(source, target, model, verifies))} for Megatron-LM")
            return
        report = export_checkpoint(source, target, is_critic, model, verifies)
    except (ValueError, OSError, CheckpointError) as error:
        refuse(error)
    typer.echo(f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}")


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

    try:
        facts = checkpoint.inspect(directory, verify)
        lines = checkpoint.inspection_lines(facts)
        is_good = not any("problem" in one for one in facts.get("checkpoints", ()))
        if other is not None:
            checkpoint.inspect(other, verify)
            facts = checkpoint.compare(directory, other)
            lines, is_good = checkpoint.comparison_lines(facts), facts["is_equal"]
    except (ValueError, OSError, CheckpointError) as error:
        refuse(error)
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
    try:
        code = run_ablation(
            grids, overrides or [], machines_of(dry_run=False), limits, results, any_commit, dry_run, typer.echo
        )
    except (ValueError, RuntimeError) as error:
        refuse(error)
    raise typer.Exit(code)


@app.command("check-loss")
def check_loss(
    processes: Annotated[int, typer.Option(min=1, help="processes to start; layouts that fit them are compared")] = 4,
    json_output: JsonOption = False,
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory; default: a small random model")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Prove that the gradient does not depend on layout, packing, micro-batches or accumulation."""
    from megatron_dapo.proof.check_loss import check_loss as run_check

    raise typer.Exit(run_check(processes, json_output, str(model) if model else None, dtype))


@app.command()
def preflight(
    recipe: Annotated[Path | None, typer.Argument(help="recipe or layout whose groups are measured too")] = None,
    overrides: SetOption = None,
    directory: Annotated[Path, typer.Option(help="where runs write: the disk that is measured")] = Path("runs"),
    tolerance: Annotated[float, typer.Option(help="share of the median below which a node is slow")] = 0.6,
) -> None:
    """Measure every node before a run, under srun or torchrun: matrix product, memory, all-reduce and disk against the median.

    Exit code: 0 all nodes are alike, 1 slow ones are named, 2 arguments or environment that cannot be used.
    """
    if not 0 < tolerance < 1:
        refuse(f"--tolerance {tolerance:g}: has to be above 0 and below 1")
    from megatron_dapo.cli.preflight import preflight as measure

    try:
        layout = None
        if recipe is not None:
            from megatron_dapo.config.loader import load_config
            from megatron_dapo.launch.environment import process_environment
            from megatron_dapo.trainer.topology import parallel_layout

            layout = parallel_layout(load_config(recipe, overrides or []).config, process_environment().world_size)
        code = measure(directory, tolerance, typer.echo, layout)
    except ValueError as error:
        refuse(error)
    raise typer.Exit(code)


@plan_app.command("sync")
def plan_sync(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="trainer ranks; default: the layout's")] = None,
    engine_tp: Annotated[int | None, typer.Option(min=1, help="ranks of an engine; default: sglang.tp_size")] = None,
    engine_ep: Annotated[
        int | None, typer.Option(min=1, help="expert-parallel ranks of an engine; default: sglang.ep_size")
    ] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="default: as many as fit the trainer's ranks")] = None,
    device: Annotated[str, typer.Option(help="where the engines run: cuda or cpu (they pad differently)")] = "cuda",
    ranks_per_node: Annotated[int, typer.Option(min=1)] = 8,
    gpu: Annotated[str, typer.Option(help=f"kind of GPU: {', '.join(GPUS)}")] = "H100",
    network_gbit: NetworkOption = NETWORK_GBIT,
    json_output: JsonOption = False,
) -> None:
    """Print what a weight sync moves and how long it takes: bytes of every rank, messages, memory."""
    from megatron_dapo.cli import plan_sync as costs

    if gpu not in GPUS:
        refuse(f"--gpu {gpu}: not known; choose one of {', '.join(GPUS)}")
    try:
        figures = costs.plan_sync(
            recipe,
            overrides or [],
            layout,
            world_size=world_size,
            engine_tp=engine_tp,
            engine_ep=engine_ep,
            engines=engines,
            device=device,
            ranks_per_node=ranks_per_node,
            gpu=GPUS[gpu],
            network_gbit=network_gbit,
        )
    except ValueError as error:
        refuse(error)
    typer.echo(json.dumps(asdict(figures)) if json_output else "\n".join(costs.describe_sync(figures)))


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


@app.callback()
def configure() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    app()
