"""The `megatron-dapo` command: parse, load, check, then call. Heavy libraries are imported inside the commands that
need them.

Exit codes: 0 done, 1 failed (a check did not hold, a process failed in a way that would repeat), 2 refused (everything
that is wrong is listed), 75 not at its end and worth starting again: a signal stopped it, or a failure that may pass.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from megatron_dapo import __version__
from megatron_dapo.cli.data import data_app
from megatron_dapo.cli.plan import (
    ONE_NODE_OF_CPUS,
    Machines,
    Plan,
    describe,
    describe_pretraining,
    describe_sft,
    make_plan,
)
from megatron_dapo.config import Config, ConfigError, pretraining_config
from megatron_dapo.config.algorithm_schema import CriticConfig
from megatron_dapo.config.cluster import GIB
from megatron_dapo.config.process_limits import process_limits
from megatron_dapo.launch.environment import DRIVER_DEVICE, slurm_allocation
from megatron_dapo.recovery.disk_space import checkpoint_space, size

app = typer.Typer(
    name="megatron-dapo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=__doc__.splitlines()[0],
)

plan_app = typer.Typer(no_args_is_help=True, help="What a run would cost, computed without running it.")
app.add_typer(plan_app, name="plan")
app.add_typer(data_app, name="data")

REFUSED = 2
WORKER = "megatron_dapo.launch.worker"
CONVERTERS = {"hf-to-megatron": "hf_to_megatron", "megatron-to-hf": "megatron_to_hf", "verify": "verify"}

RecipeArgument = Annotated[Path, typer.Argument(help="TOML recipe, e.g. examples/quickstart/quickstart.toml")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="override a value; may be repeated")
]
LayoutOption = Annotated[
    str | None, typer.Option(help="parallel layout, e.g. tp2pp1 or tp2dp2sp; replaces the recipe's")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
OutputDirOption = Annotated[Path | None, typer.Option(help="where the run writes; replaces run.output_dir")]
NodesOption = Annotated[
    int | None,
    typer.Option(min=1, help="nodes of the run that --dry-run checks; default: the Slurm job's, else the layout's"),
]
GpusOption = Annotated[
    int | None, typer.Option(min=1, help="GPUs of a node for --dry-run; default: the Slurm job's, else 8")
]
GpuMemoryOption = Annotated[
    float | None, typer.Option(metavar="GIB", help="memory of a GPU for --dry-run; default: 79, an 80 GB H100")
]
HostMemoryOption = Annotated[
    float | None,
    typer.Option(metavar="GIB", help="memory of a node for --dry-run; default: this one's in a Slurm job, else 1000"),
]
FreeDiskOption = Annotated[
    float | None,
    typer.Option(
        metavar="GIB", help="free disk of the checkpoints for --dry-run; default: what is free there from here"
    ),
]
RestartsOption = Annotated[
    int, typer.Option("--restarts", min=0, help="times that the processes are started again after a failure")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="check everything, print what would run, start nothing")]


def _refuse(reason: object) -> NoReturn:
    typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(REFUSED)


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
        _refuse(error)
    typer.echo(json.dumps(to_json(report)) if json_output else "\n".join(describe(report)))
    raise typer.Exit(0 if report.is_ok else 1)


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    output_dir: OutputDirOption = None,
    restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    gpu_memory: GpuMemoryOption = None,
    host_memory: HostMemoryOption = None,
    free_disk: FreeDiskOption = None,
) -> None:
    """Train: load a Hugging Face model, run the recipe's algorithm, write a Hugging Face directory and summary.json."""
    plan = _plan(
        recipe, overrides, layout, output_dir, _machines(dry_run, nodes, gpus_per_node, gpu_memory, host_memory)
    )
    for line in (*describe(plan), _require_disk(plan, free_disk if dry_run else None)):
        typer.echo(line)
    if not dry_run:
        raise typer.Exit(_run(recipe, plan, restarts))


@app.command("pretrain-value")
def pretrain_value(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="where pretraining writes; default: value_pretraining in run.output_dir")
    ] = None,
    restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    gpu_memory: GpuMemoryOption = None,
    host_memory: HostMemoryOption = None,
    free_disk: FreeDiskOption = None,
) -> None:
    """Train the critic alone, on responses of the policy as it is; critic.path = OUTPUT_DIR/critic then starts a run from it."""

    def adapt(config: Config) -> Config:
        if not config.has_critic:
            raise ValueError('algorithm.name = "dapo" has no critic; set ppo, vapo or tppo')
        return pretraining_config(config, output_dir)

    machines = _machines(dry_run, nodes, gpus_per_node, gpu_memory, host_memory)
    plan = _plan(recipe, overrides, layout, None, machines, adapt=adapt)
    for line in (*describe_pretraining(plan), _require_disk(plan, free_disk if dry_run else None)):
        typer.echo(line)
    if not dry_run:
        raise typer.Exit(_run(recipe, plan, restarts, ("--pretrain-value", *([str(output_dir)] if output_dir else []))))


@app.command()
def sft(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    output_dir: Annotated[Path | None, typer.Option(help="where it writes; default: sft in run.output_dir")] = None,
    restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    gpu_memory: GpuMemoryOption = None,
    host_memory: HostMemoryOption = None,
    free_disk: FreeDiskOption = None,
) -> None:
    """Learn given responses by maximum likelihood (supervised fine-tuning); model.path = OUTPUT_DIR/huggingface continues."""
    from megatron_dapo.data.examples import sft_config

    machines = _machines(dry_run, nodes, gpus_per_node, gpu_memory, host_memory)
    plan = _plan(recipe, overrides, layout, None, machines, adapt=lambda config: sft_config(config, output_dir))
    for line in (*describe_sft(plan), _require_disk(plan, free_disk if dry_run else None)):
        typer.echo(line)
    if not dry_run:
        raise typer.Exit(_run(recipe, plan, restarts, ("--sft", *([str(output_dir)] if output_dir else []))))


@app.command("rejection-sample")
def rejection_sample(
    recipe: RecipeArgument,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory; default: model.path of the recipe")
    ] = None,
    overrides: SetOption = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="where it writes; default: rejection_sampling in run.output_dir")
    ] = None,
) -> None:
    """Sample responses to the training prompts, verify them, keep diverse correct ones, and write them for `sft` with a data card."""
    chosen = [*(overrides or []), *([f"model.path={model}"] if model else [])]
    config = _plan(recipe, chosen, "tp1", None, ONE_NODE_OF_CPUS, adapt=_for_sampling).loaded.config
    from megatron_dapo.selection.run import EXAMPLES
    from megatron_dapo.selection.run import rejection_sample as run

    directory = output_dir or config.run.output_dir / "rejection_sampling"
    try:
        figures = run(config, directory)["figures"]
    except ValueError as error:
        _refuse(error)
    fates = ", ".join(f"{count} {fate}" for fate, count in figures["fates"].items())
    typer.echo(f"{figures['responses']} responses to {figures['prompts']} prompts: {fates}")
    typer.echo(f"examples: {directory / EXAMPLES}")


@app.command()
def rounds(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    output_dir: OutputDirOption = None,
    restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
) -> None:
    """Fine-tune, sample, select, fine-tune, then train: the stages of one recipe, continued when it is run again."""
    from megatron_dapo.selection.rounds import begin, outcome_lines, stages

    # Checked as a whole at first: what is wrong with the last stage must not show hours later.
    plan = _plan(recipe, overrides, layout, output_dir, _machines(dry_run))
    _require_disk(plan, None)
    config = plan.loaded.config
    sequence = stages(config, config.run.output_dir)
    if dry_run:
        for stage in sequence:
            typer.echo(f"{stage.name}: megatron-dapo {stage.command}, {', '.join(stage.overrides)}")
        return

    try:
        begin(config, config.run.output_dir)
    except (ValueError, OSError) as error:
        _refuse(error)
    code, launched = 0, {"layout": layout, "restarts": restarts}
    commands = {"sft": (sft, launched), "rejection-sample": (rejection_sample, {}), "train": (train, launched)}
    for number, stage in enumerate(sequence, start=1):
        typer.echo(f"stage {number} of {len(sequence)}: {stage.command} in {stage.directory}")
        command, options = commands[stage.command]
        try:
            command(recipe, overrides=[*(overrides or []), *stage.overrides], output_dir=stage.directory, **options)
        except typer.Exit as end:
            code = end.exit_code
        if code:
            typer.echo(f"stage {number}, {stage.name}: exit code {code}; the same command continues from it", err=True)
            break
    for line in outcome_lines(sequence):
        typer.echo(line)
    raise typer.Exit(code)


def _plan(
    recipe: Path,
    overrides: list[str] | None,
    layout: str | None,
    output_dir: Path | None,
    machines: Machines,
    adapt: Callable[[Config], Config] = lambda config: config,
) -> Plan:
    try:
        return make_plan(recipe, overrides or [], layout, output_dir, machines, adapt=adapt)
    except ValueError as error:  # ConfigError lists all violations; a bad --layout is a plain one
        _refuse(error)


def _require_disk(plan: Plan, free_gib: float | None) -> str:
    """Return the line about the disk that checkpoints need; refuse where it is not free."""
    assert plan.architecture is not None, "a plan of a model that cannot be read is refused"
    free = None if free_gib is None else int(free_gib * GIB)
    space = checkpoint_space(plan.loaded.config, plan.architecture, free)
    try:
        space.require()
    except ConfigError as error:
        _refuse(error)
    return f"disk of the checkpoints: {size(space.needed)} = {space.formula}; {size(space.free)} free"


def _machines(
    dry_run: bool,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
) -> Machines:
    """Return the machines that a dry run is for, or this one."""
    if dry_run:
        job = slurm_allocation()
        known = {
            "num_nodes": nodes or job.num_nodes,
            "num_tasks": None if nodes else job.num_tasks,
            "gpus_per_node": gpus_per_node or job.gpus_per_node,
            "gpu_gib": gpu_memory,
            # The batch script runs on a node of the job, and its nodes are alike.
            "host_gib": host_memory or (process_limits().usable_memory / GIB if job.num_nodes else None),
        }
        return Machines(**{name: value for name, value in known.items() if value})
    if given := [name for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)) if value]:
        _refuse(
            f"{' and '.join(given)}: only with --dry-run; a run on several nodes is started by examples/launch/slurm.sh"
        )
    # torch is imported only where there is a driver: it takes seconds.
    if not DRIVER_DEVICE.exists():
        return ONE_NODE_OF_CPUS
    import torch

    if not torch.cuda.device_count():
        return ONE_NODE_OF_CPUS
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return Machines(1, torch.cuda.device_count(), gpu_gib, process_limits().usable_memory / GIB)


def _run(recipe: Path, plan: Plan, restarts: int, arguments: tuple[str, ...] = ()) -> int:
    """Run the workers with `arguments`, and end with the summary or with the first root cause as the last line."""
    from megatron_dapo.launch.lifetime import require_unused
    from megatron_dapo.recovery.attempts import is_finished
    from megatron_dapo.telemetry.summary import read_summary, summary_table

    config = plan.loaded.config
    directory = config.run.output_dir
    try:
        require_unused(directory)
    except RuntimeError as error:
        _refuse(error)
    summary, code = directory / "summary.json", 0
    if is_finished(directory, config.model_dump(mode="json"), config.checkpoint_dir):
        typer.echo(f"the run in {directory} is finished: nothing to do")
    else:
        summary.unlink(missing_ok=True)  # else a run that ends without one would show its predecessor's
        code = _start_workers(recipe, plan, directory, arguments, restarts)
    if summary.is_file():
        Console().print(summary_table(read_summary(summary)))
    return code


def _start_workers(recipe: Path, plan: Plan, directory: Path, arguments: tuple[str, ...], restarts: int = 0) -> int:
    """Start the workers, whose records go to `directory`, and wait; the first root cause of a failure is the last line."""
    from megatron_dapo.launch.environment import batch_job
    from megatron_dapo.launch.local import launch_workers
    from megatron_dapo.recovery.attempts import verdict
    from megatron_dapo.recovery.failure import clear_failures, first_line, read_failure

    clear_failures(directory)
    overrides = [part for override in plan.overrides for part in ("--set", override)]
    start = time.time()
    code = launch_workers(WORKER, [str(recipe), *overrides, *arguments], plan.num_processes, directory, restarts)
    failure = read_failure(directory)
    if failure is not None:
        typer.echo(first_line(failure), err=True)
        return failure.exit_code
    if code == 0:
        return 0
    # torchrun's own code says only that a worker ended otherwise than with 0.
    last = verdict(directory, batch_job(), start, plan.loaded.config.run.max_fruitless_attempts)
    if last is None or not last.was_stopped:
        return code
    typer.echo(f"{last.reason}; the same command continues the run (exit code {last.exit_code})", err=True)
    return last.exit_code


@app.command()
def replay(
    recipe: RecipeArgument,
    batch: Annotated[Path, typer.Argument(help="directory of a dumped rollout batch, e.g. runs/x/batches/step_000001")],
    overrides: SetOption = None,
    layout: LayoutOption = None,
    output_dir: OutputDirOption = None,
) -> None:
    """Train on a dumped rollout batch alone, from the state before it; metrics go to BATCH/replay.json."""
    plan = _plan(recipe, overrides, layout, output_dir, _machines(dry_run=False))
    code = _start_workers(recipe, plan, plan.loaded.config.run.output_dir, ("--replay", str(batch)))
    if code == 0:
        typer.echo((batch / "replay.json").read_text(encoding="utf-8"))
    raise typer.Exit(code)


@app.command("eval")
def evaluate(
    recipe: RecipeArgument,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory; default: model.path of the recipe")
    ] = None,
    overrides: SetOption = None,
    output: Annotated[Path | None, typer.Option(help="write the whole result, protocol included, as JSON")] = None,
) -> None:
    """Evaluate a Hugging Face directory on the recipe's held-out data: by SGLang servers of any TP, or in this process.

    Servers where rollout.engine = "sglang": as many of sglang.tp_size ranks as fit this machine's GPUs, or those of sglang.urls.
    Exit code: 0 done, 1 servers failed, 2 refused.
    """
    chosen = [*(overrides or []), *([f"model.path={model}"] if model else [])]
    # One process without a Megatron layout evaluates: the recipe's layout need not fit this machine.
    plan = _plan(recipe, chosen, "tp1", None, ONE_NODE_OF_CPUS, adapt=_for_evaluation)
    config = plan.loaded.config
    if not config.data.eval_paths:
        _refuse("data.eval_paths is empty; set it in the recipe or by --set data.eval_paths='[\"file\"]'")
    from megatron_dapo.cli.evaluate import evaluate_model

    try:
        result = evaluate_model(config)
    except ValueError as error:
        _refuse(error)
    except RuntimeError as error:  # servers: the last line of it is the first error in their log
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(result.to_json() + "\n", encoding="utf-8")
    for name, estimate in result.metrics.items():
        typer.echo(f"{name}: {estimate.value:.4f}  [{estimate.low:.4f}, {estimate.high:.4f}]")
    for name, rate in result.rates.items():
        typer.echo(f"{name}: {rate:.4g}")


@app.command()
def compare(
    run: Annotated[Path, typer.Argument(help="a run's directory")],
    reference: Annotated[
        Path, typer.Argument(help="another run's directory, or a .json, .csv or .jsonl with a step column")
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
    from megatron_dapo.cli.compare import comparison_table, remarks
    from megatron_dapo.evaluation.comparison import compare_with, rule_from
    from megatron_dapo.evaluation.reference import read_record

    if unit not in (None, "train_step", "optimizer_step"):
        _refuse(f"--unit {unit}: choose train_step or optimizer_step")
    try:
        comparison = compare_with(run, read_record(reference, unit), dict(map(rule_from, metric or ())))
    except (ValueError, OSError) as error:
        _refuse(error)
    if json_output:
        typer.echo(json.dumps({**asdict(comparison), "off_since": comparison.off_since}))
    else:
        Console().print(comparison_table(comparison))
        for remark in remarks(comparison):
            typer.echo(remark)
        typer.echo(comparison.verdict())
    raise typer.Exit(0 if comparison.off_since is None else 1)


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
        _refuse(error)
    raise typer.Exit(code)


@app.command()
def export(
    run: RunArgument,
    space: Annotated[Path, typer.Option(help="directory that the Space's files are written to")],
    base: BaseOption = "",
    trained: TrainedOption = "",
) -> None:
    """Write the demo of a run as a Hugging Face Space: page, requirements, model card, and models that are directories."""
    from megatron_dapo.demo.space import write_space

    try:
        write_space(run, space, base, trained)
    except (ValueError, OSError) as error:
        _refuse(error)
    typer.echo(f"{space}: push it to a Space of yours (git, or `hf upload NAME {space} --repo-type space`)")


def _for_evaluation(config: Config) -> Config:
    """Return the configuration without what only training needs: it may be cut for other machines, or not be there any more."""
    data = config.data.model_copy(update={"train_paths": config.data.eval_paths or config.data.train_paths})
    telemetry = config.telemetry.model_copy(update={"references": ()})
    # No weights are brought to servers that run already, so no transport is refused.
    external = {"placement": "disaggregated", "weight_sync_transport": "disk"} if config.sglang.urls else {}
    sglang = config.sglang.model_copy(update=external)
    return config.model_copy(update={"critic": CriticConfig(), "data": data, "sglang": sglang, "telemetry": telemetry})


def _for_sampling(config: Config) -> Config:
    """Return the same with the training prompts."""
    return _for_evaluation(config).model_copy(update={"data": config.data})


@app.command()
def ablate(
    grid: Annotated[Path, typer.Argument(help="TOML grid of variants and seeds, e.g. examples/grids/dapo_table1.toml")],
    overrides: SetOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs side by side")] = 1,
    max_runs: Annotated[int | None, typer.Option(min=1, help="stop after this many runs")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="stop after this time, runs under way with a checkpoint")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="directory of results.jsonl and the report; default: the grid's output directory"),
    ] = None,
    any_commit: Annotated[bool, typer.Option("--any-commit", help="results of other commits count as well")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="make no run")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train every variant of a grid with every seed, and report means, intervals and paired differences.

    Finished runs are on record in results.jsonl; started again, the command makes the others.
    """
    from megatron_dapo.ablation.command import Limits
    from megatron_dapo.ablation.command import ablate as run_ablation

    most = 0 if report_only else max_runs or float("inf")
    limits = Limits(jobs, seconds or float("inf"), most)
    try:
        code = run_ablation(
            grid, overrides or [], _machines(dry_run=False), limits, results, any_commit, dry_run, typer.echo
        )
    except (ValueError, RuntimeError) as error:
        _refuse(error)
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
    within_node: Annotated[float, typer.Option(help="GB/s of a rank to ranks of its node, each direction")] = 400.0,
    between_nodes: Annotated[float, typer.Option(help="GB/s of a rank to other nodes, each direction")] = 50.0,
    json_output: JsonOption = False,
) -> None:
    """Print what a weight sync moves and how long it takes: bytes of every rank, messages, memory."""
    from megatron_dapo.cli import plan_sync as costs
    from megatron_dapo.reshard.traffic import Links

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
            links=Links(within_node * costs.GB, between_nodes * costs.GB),
        )
    except ValueError as error:
        _refuse(error)
    typer.echo(json.dumps(asdict(figures)) if json_output else "\n".join(costs.describe_sync(figures)))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def convert(
    context: typer.Context, direction: Annotated[str, typer.Argument(help=" | ".join(CONVERTERS))] = ""
) -> None:
    """Convert checkpoints: megatron-dapo convert {hf-to-megatron|megatron-to-hf|verify} ARGUMENTS..."""
    if direction not in CONVERTERS:
        _refuse(f"convert {direction!r}: choose one of {', '.join(CONVERTERS)}, then --help for its arguments")
    # They are programs of their own, with argparse; --help and options after the direction are theirs.
    module = importlib.import_module(f"checkpoint_converters.{CONVERTERS[direction]}")
    raise typer.Exit(module.main(context.args))


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
