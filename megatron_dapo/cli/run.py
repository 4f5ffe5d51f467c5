"""Commands that train, sample or evaluate with a recipe: they plan and check the run, then start its processes."""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from megatron_dapo.checkpoints.disk_space import checkpoint_space, size
from megatron_dapo.cli.compare import difference_lines, result_lines
from megatron_dapo.cli.description import describe, describe_pretraining, describe_sft
from megatron_dapo.cli.options import (
    DryRunOption,
    HostMemoryOption,
    LayoutOption,
    OutputDirOption,
    RecipeArgument,
    RestartsOption,
    SetOption,
    refuse,
    refusing,
    shipped_if_absent,
)
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.one_base import require_one_base
from megatron_dapo.doctor.inputs import SAMPLING
from megatron_dapo.launch.environment import slurm_allocation
from megatron_dapo.models.config_json import planned_directory
from megatron_dapo.rounding import GIB
from megatron_dapo.run.derive import for_evaluation, for_sampling, pretraining_config, sft_config
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS, Inputs, Machines, Plan, machines_of, make_plan
from megatron_dapo.telemetry.terminal import status

if TYPE_CHECKING:
    from megatron_dapo.evaluation.protocol import EvaluationResult
    from megatron_dapo.run.start import RunEnd


@dataclass(frozen=True)
class RunOptions:
    """Arguments and options of the commands that train."""

    recipe: RecipeArgument
    overrides: SetOption = None
    layout: LayoutOption = None
    output_dir: OutputDirOption = None
    restarts: RestartsOption = 0
    dry_run: DryRunOption = False
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="nodes that --dry-run is for; default: the Slurm job's, else this machine"),
    ] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node for --dry-run; default: the Slurm job's or this machine's, 8 for others")
    ] = None
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="memory of a GPU for --dry-run; default: this machine's, 79 (an 80 GB H100) for others")
    ] = None
    host_memory: HostMemoryOption = None
    free_disk: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", help="free disk of the checkpoints for --dry-run; default: what is free there from here"
        ),
    ] = None
    inputs: Annotated[
        bool,
        typer.Option(
            "--inputs/--no-inputs",
            help="whether --dry-run reads weights and data and tries tokenizer, reward and engine; without, it is for another "
            "machine: the model's config.json is enough, and none is needed for a model of the shipped recipes",
        ),
    ] = True
    verbose: Annotated[
        bool, typer.Option("--verbose", help="print all numbers that --dry-run prints and the rules that refuse a run; log how it is built")
    ] = False


@dataclass(frozen=True)
class TrainOptions(RunOptions):
    """Arguments and options of `train`."""

    others: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="RECIPE",
            help="train this recipe's LoRA adapters in the same processes, on the base weights of the first recipe; may be repeated",
        ),
    ] = None


# Status lines of the checks of a recipe.
_CHECKS: dict[Inputs, str] = {
    "none": "checking the recipe",
    "named": "checking the recipe",
    "quick": "checking recipe, model and data",
    "all": "checking recipe, model, data and reward",
}
# First words of lines that a dry run prints, and a run only with --verbose.
_DETAILS = ("precision:", "memory of", "host memory", "engines:", "lengths:", "loss:", "learning rate:", "disk of")


def _with_run_options(
    output_dir: str, kind: type[Any] = RunOptions
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Give a command the options of `kind`, which it takes as one value. `output_dir`: help of that option."""
    signature = inspect.signature(kind, eval_str=True)
    directory = Annotated[Path | None, typer.Option(help=output_dir)]
    parameters = signature.parameters | {
        "output_dir": signature.parameters["output_dir"].replace(annotation=directory)
    }

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        def wrapped(**options: Any) -> None:
            command(kind(**options))

        wrapped.__doc__ = command.__doc__
        wrapped.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        return wrapped

    return decorate


@_with_run_options("output directory; replaces run.output_dir", TrainOptions)
def train(options: TrainOptions) -> None:
    """Train: load a Hugging Face model, run the recipe's algorithm, write a Hugging Face directory and summary.json."""
    others = [shipped_if_absent(recipe) or recipe for recipe in options.others or []]
    if others and options.output_dir:
        refuse("--output-dir: with --with each recipe has its own run.output_dir")
    _check_and_run(options, describe, others=others)


@_with_run_options("output directory; default: value_pretraining in run.output_dir")
def pretrain_value(options: RunOptions) -> None:
    """Train only the critic, on responses of the fixed policy; critic.path = OUTPUT_DIR/critic then starts a run from
    it."""

    def adapt(config: Config) -> Config:
        if not config.has_critic:
            raise ValueError(f'algorithm.name = "{config.algorithm.name}" has no critic; set ppo, vapo or tppo')
        return pretraining_config(config, options.output_dir)

    _check_and_run(options, describe_pretraining, "--pretrain-value", adapt)


@_with_run_options("output directory; default: sft in run.output_dir")
def sft(options: RunOptions) -> None:
    """Learn given responses by maximum likelihood (supervised fine-tuning); model.path = OUTPUT_DIR/huggingface continues."""
    adapt = functools.partial(sft_config, directory=options.output_dir)
    _check_and_run(options, describe_sft, "--sft", adapt)


def _check_and_run(
    options: RunOptions,
    lines_of: Callable[[Plan], Iterable[str]],
    mode: str = "",
    adapt: Callable[[Config], Config] | None = None,
    others: Sequence[Path] = (),
) -> None:
    """Check a run, print its lines, and start it unless it is a dry run.

    `mode`: the workers' flag of a run other than training, followed by its output directory. `adapt`: makes
    its configuration from the recipe's. `others`: recipes that train in the same processes.
    """
    with refusing(ValueError):
        machines = machines_of(
            options.dry_run,
            options.nodes,
            options.gpus_per_node,
            options.gpu_memory,
            options.host_memory,
            is_here=options.inputs,
        )
    directory = options.output_dir
    plan, *more = [
        _plan(
            recipe,
            options.overrides,
            options.layout,
            None if mode else directory,
            machines,
            adapt,
            _inputs(options.dry_run, options.inputs),
            options.verbose,
        )
        for recipe in (options.recipe, *others)
    ]
    with refusing(ValueError):
        require_one_base([each.loaded.config for each in (plan, *more)])
    reads_nothing = options.dry_run and not options.inputs
    if reads_nothing and (copy := planned_directory(plan.loaded.config.model.path)) != plan.loaded.config.model.path:
        typer.echo(f"model: {copy.name}, from the config.json that comes with the package")
    # A machine without the run's inputs rarely has its disk; a Slurm job's does.
    is_here = not reads_nothing or slurm_allocation().num_nodes is not None
    disk = _require_disk(plan, options.free_disk if options.dry_run else None, is_here)
    shows_all = options.dry_run or options.verbose
    for each in more:
        _require_disk(each, options.free_disk if options.dry_run else None, is_here)
    for line in (*lines_of(plan), disk, *(f"warning: {doubt}" for each in (plan, *more) for doubt in each.warnings)):
        if shows_all or not line.startswith(_DETAILS):
            typer.echo(line)
    if options.dry_run:
        if options.inputs and not mode:
            typer.echo(f"inputs: checked, {SAMPLING}")
        return
    arguments = (mode, *([str(directory)] if directory else [])) if mode else ()
    arguments += ("--verbose",) if options.verbose else ()
    raise typer.Exit(_run(plan, options.restarts, arguments, more))


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
    """Sample responses to the training prompts, verify them, and write diverse correct ones for `sft` with a data
    card."""
    chosen = [*(overrides or []), *([f"model.path={model}"] if model else [])]
    config = checked_config(recipe, chosen, for_sampling)
    from megatron_dapo.selection.run import EXAMPLES
    from megatron_dapo.selection.run import rejection_sample as run

    directory = output_dir or config.run.output_dir / "rejection_sampling"
    with refusing(ValueError):
        figures = run(config, directory)["figures"]
    fates = ", ".join(f"{count} {fate}" for fate, count in figures["fates"].items())
    typer.echo(f"{figures['responses']} responses to {figures['prompts']} prompts: {fates}")
    typer.echo(f"examples: {directory / EXAMPLES}")


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

    # All stages are checked first: an error in the last one must not show up hours later.
    plan = _plan(recipe, overrides, layout, output_dir, machines_of(dry_run), inputs=_inputs(dry_run))
    _require_disk(plan, None)
    config = plan.loaded.config
    sequence = stages(config, config.run.output_dir)
    if dry_run:
        for stage in sequence:
            typer.echo(f"{stage.name}: megatron-dapo {stage.command}, {', '.join(stage.overrides)}")
        return
    with refusing(ValueError, OSError):
        begin(config, config.run.output_dir)
    code, launched = 0, {"layout": layout, "restarts": restarts}
    commands: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
        "sft": (sft, launched),
        "rejection-sample": (rejection_sample, {}),
        "train": (train, launched),
    }
    for number, stage in enumerate(sequence, start=1):
        typer.echo(f"stage {number} of {len(sequence)}: {stage.command} in {stage.directory}")
        command, options = commands[stage.command]
        try:
            command(
                recipe=recipe, overrides=[*(overrides or []), *stage.overrides], output_dir=stage.directory, **options
            )
        except typer.Exit as end:
            code = end.exit_code
        if code:
            typer.echo(f"stage {number}, {stage.name}: exit code {code}; the same command continues from it", err=True)
            break
    for line in outcome_lines(sequence):
        typer.echo(line)
    raise typer.Exit(code)


def replay(
    recipe: RecipeArgument,
    batch: Annotated[Path, typer.Argument(help="directory of a dumped rollout batch, e.g. runs/x/batches/step_000001")],
    overrides: SetOption = None,
    layout: LayoutOption = None,
    output_dir: OutputDirOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Train only on a dumped rollout batch, from the state before it; metrics go to BATCH/replay.json."""
    plan = _plan(recipe, overrides, layout, output_dir, machines_of(dry_run), inputs=_inputs(dry_run))
    if not batch.is_dir():
        refuse(f"{batch} is no directory of a dumped rollout batch; telemetry.dump_batches writes them to RUN/batches")
    if dry_run:
        typer.echo(f"would train on {batch}")
        return
    from megatron_dapo.run.start import run_workers

    code = _exit_code(run_workers(plan, ("--replay", str(batch))))
    if code == 0:
        typer.echo((batch / "replay.json").read_text(encoding="utf-8"))
    raise typer.Exit(code)


def evaluate(
    recipe: RecipeArgument,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory; default: model.path of the recipe")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="a checkpoint instead, e.g. RUN/checkpoints/step_000012, of a run that may still be training"
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="compare with this directory, or with a result of --output: differences with intervals"),
    ] = None,
    overrides: SetOption = None,
    output: Annotated[Path | None, typer.Option(help="write the whole result, protocol included, as JSON")] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Evaluate a Hugging Face directory on the recipe's held-out data: by SGLang servers of any TP, or in this process.

    Uses servers if rollout.engine = "sglang": as many of sglang.tp_size ranks as fit this machine's GPUs, or those of
    sglang.urls. Exit code: 0 done, 1 servers failed, 2 refused.
    """
    from megatron_dapo.evaluation.protocol import EvaluationResult

    if model and checkpoint:
        refuse("--model and --checkpoint: give one of them")
    if against and not against.exists():
        refuse(f"--against {against}: neither a Hugging Face directory nor a result that `eval --output` wrote")
    with tempfile.TemporaryDirectory(prefix="evaluated-") as scratch:
        if checkpoint:
            from megatron_dapo.checkpoints.store import CheckpointError
            from megatron_dapo.cli.checkpoint import export_checkpoint

            model = Path(scratch) / "model"
            with refusing(ValueError, OSError, CheckpointError), status("reading the checkpoint"):
                export_checkpoint(checkpoint, model)
        config = _evaluated_config(recipe, model, overrides, dry_run)
        if dry_run:
            files = ", ".join(map(str, config.data.eval_paths)) or "what is held out of data.train_paths"
            typer.echo(f"would evaluate {checkpoint or config.model.path} on {files}; {SAMPLING}")
            return
        result = _evaluated(config, str(checkpoint or config.model.path))
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(result.to_json() + "\n", encoding="utf-8")
        other = None
        if against and against.is_file():
            with refusing(ValueError, OSError, prefix=f"--against {against}: "):
                other = EvaluationResult.from_json(against.read_text(encoding="utf-8"))
        elif against:
            other = _evaluated(_evaluated_config(recipe, against, overrides, False), str(against))
    for line in result_lines(result):
        typer.echo(line)
    if other is not None:
        with refusing(ValueError):
            typer.echo("\n".join(difference_lines(result, other)))


def checked_config(recipe: Path, overrides: list[str] | None, adapt: Callable[[Config], Config]) -> Config:
    """Return the configuration of one process without a Megatron layout; the recipe's layout need not fit this machine."""
    return _plan(recipe, overrides, "tp1", None, ONE_NODE_OF_CPUS, adapt, _inputs(False)).loaded.config


def _evaluated_config(recipe: Path, model: Path | None, overrides: list[str] | None, dry_run: bool) -> Config:
    chosen = [*(overrides or []), *([f"model.path={model}"] if model else [])]
    # One process without a Megatron layout evaluates: the recipe's layout need not fit this machine.
    plan = _plan(recipe, chosen, "tp1", None, ONE_NODE_OF_CPUS, for_evaluation, _inputs(dry_run))
    if not plan.loaded.config.data.has_held_out:
        refuse("data.eval_paths is empty; set it in the recipe or by --set data.eval_paths='[\"file\"]'")
    return plan.loaded.config


def _evaluated(config: Config, name: str) -> EvaluationResult:
    from megatron_dapo.run.evaluate import evaluate_model

    try:
        with status(f"loading and evaluating {name}"):
            return evaluate_model(config, name)
    except ValueError as error:
        refuse(error)
    except RuntimeError as error:  # servers: the last line of it is the first error in their log
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _plan(
    recipe: Path,
    overrides: list[str] | None,
    layout: str | None,
    output_dir: Path | None,
    machines: Machines,
    adapt: Callable[[Config], Config] | None = None,
    inputs: Inputs = "named",
    shows_rules: bool = False,
) -> Plan:
    with refusing(ValueError):  # ConfigError lists all violations; a bad --layout is a plain one
        try:
            with status(_CHECKS[inputs]):
                return make_plan(recipe, overrides or [], layout, output_dir, machines, adapt, inputs)
        except ConfigError as error:
            refuse(error.with_rules() if shows_rules else error)


def _inputs(dry_run: bool, reads: bool = True) -> Inputs:
    """Return which inputs a command checks before it starts anything: all for a dry run that reads them, those that take a
    second for a run."""
    return ("all" if reads else "none") if dry_run else "quick"


def _require_disk(plan: Plan, free_gib: float | None, is_here: bool = True) -> str:
    """Return the line about the disk space for checkpoints; refuse if it is not free. is_here: this machine has the disk."""
    free = None if free_gib is None else int(free_gib * GIB)
    space = checkpoint_space(plan.loaded.config, plan.architecture, free)
    needed = f"disk of the checkpoints: {size(space.needed)} = {space.formula}"
    if free is None and not is_here:
        return f"{needed}; not compared with this machine's disk (--free-disk GIB: with another one)"
    with refusing(ConfigError):
        space.require()
    return f"{needed}; {size(space.free)} free"


def _run(plan: Plan, restarts: int, arguments: tuple[str, ...] = (), others: Sequence[Plan] = ()) -> int:
    """Run the workers with `arguments`, and end with the summaries or with the first root cause as the last line."""
    from megatron_dapo.run.start import run_to_end

    directory = plan.loaded.config.run.output_dir
    if sys.stderr.isatty():
        typer.echo(f"starting {plan.num_processes} process{'' if plan.num_processes == 1 else 'es'}", err=True)
    with refusing(RuntimeError):
        end = run_to_end(plan, arguments, restarts, others)
    if end is None:
        typer.echo(f"the run in {directory} is finished: nothing to do")
    code = _exit_code(end) if end else 0
    for each in (plan, *others):
        _show_summary(each)
    return code


def _show_summary(plan: Plan) -> None:
    """Print the summary of a run that has ended."""
    from megatron_dapo.telemetry.completions import before_and_after_table
    from megatron_dapo.telemetry.summary import next_steps, read_summary, summary_table

    directory = plan.loaded.config.run.output_dir
    if (summary := directory / "summary.json").is_file():
        console, result = Console(), read_summary(summary)
        if (example := before_and_after_table(directory / "evaluations")) is not None:
            console.print(example)
        console.print(summary_table(result, directory))
        for step in next_steps(result, plan.recipe, plan.loaded.config.model.path):
            typer.echo(f"next: {step}")


def _exit_code(end: RunEnd) -> int:
    """Print why the processes ended, unless they did, and return their exit code."""
    if end.reason and not end.is_printed:
        typer.echo(end.reason, err=True)
    return end.exit_code
