"""The commands of `megatron-dapo plan`: memory and time of a step, layouts that fit a number of GPUs, a weight sync."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape

import typer
from typer.core import TyperGroup

from megatron_dapo.checkpoints.disk_space import size
from megatron_dapo.cli.description import memory_warnings, states_of
from megatron_dapo.cli.options import (
    HostMemoryOption,
    JsonOption,
    LayoutOption,
    NetworkOption,
    RecipeArgument,
    SetOption,
    refusing,
    require_known_gpu,
)
from megatron_dapo.cli.plan_split import plan_split
from megatron_dapo.config import Config, ConfigError, layout_overrides, load_config, validate
from megatron_dapo.config.loader import toml_value
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.plan import cpu
from megatron_dapo.plan.check import check
from megatron_dapo.plan.cluster import GPUS_PER_NODE, HOST_GIB, NETWORK_GBIT, Cluster, cluster_for
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.memory import num_parameters, recompute_of
from megatron_dapo.plan.search import Found, Ranked, search
from megatron_dapo.plan.step import StepPlan, plan_step
from megatron_dapo.rounding import GIB
from megatron_dapo.run.plan import these_cpus
from megatron_dapo.svg import GRAY, document, text
from megatron_dapo.telemetry.terminal import status

DOES_NOT_FIT = 1
_DEFAULT_GPU = "H100"


class RecipeOrCommand(TyperGroup):
    """Group of commands whose first argument may also be a recipe: `plan RECIPE` in addition to `plan sync RECIPE`."""

    default_command = "recipe"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command before an argument that is neither a command nor a request for help."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(
    cls=RecipeOrCommand, no_args_is_help=True, help="Memory and time of a run, computed without running it."
)


@plan_app.command(RecipeOrCommand.default_command)
def plan_recipe(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    layout: LayoutOption = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="find the layouts for so many GPUs instead of the recipe's own")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"kind of GPU: {', '.join(GPUS)}; default: H100, this machine's CPUs with the embedded engine"),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node")] = GPUS_PER_NODE,
    host_memory: HostMemoryOption = None,
    network_gbit: NetworkOption = NETWORK_GBIT,
    nvls: Annotated[
        bool, typer.Option("--nvls/--no-nvls", help="count NCCL's buffers for NVLS, as without NCCL_NVLS_ENABLE=0")
    ] = False,
    mean_response: Annotated[
        float | None, typer.Option(min=1, help="mean tokens of a response; default: a quarter of the longest")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="file for a picture of the layout, with --gpus of the first")] = None,
    write: Annotated[
        Path | None, typer.Option(help="recipe to write: this one with its settings, with --gpus those of the first layout")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Plan a run without starting it: memory of a GPU by phase and component, KV cache and queues, seconds of a step,
    bytes of a weight update and of a checkpoint; with --gpus the layouts that fit, fastest first. Only the model's
    config.json is read. `plan sync` shows the bytes of every rank in a weight update.

    Exit code: 0 it fits, 1 it does not, 2 a recipe or sizes that cannot be planned.
    """
    require_known_gpu(gpu or _DEFAULT_GPU)
    with refusing(ValueError, OSError):
        config = load_config(recipe, [*(overrides or []), *(layout_overrides(layout) if layout else [])]).config
        architecture = read_architecture(planned_directory(config.model.path))
        if gpu is None and not gpus and config.rollout.engine == "embedded":
            here = these_cpus()
            machines = Cluster(1, 0, host_gib=host_memory or here.host_gib, cores=here.cores, has_bf16=here.has_bf16)
            report, lines, plan = _on_cpus(config, architecture, machines)
            _write_files(plan, "CPUs", svg, write, recipe, _given(config, overrides, layout))
            typer.echo(json.dumps(report) if json_output else "\n".join(lines))
            raise typer.Exit(DOES_NOT_FIT if report["problems"] else 0)
        gpu = gpu or _DEFAULT_GPU
        machines = cluster_for(
            config,
            -(-gpus // gpus_per_node) if gpus else None,
            min(gpus_per_node, gpus or gpus_per_node),
            GPUS[gpu].memory_gib,
            host_memory or HOST_GIB,
            network_gbit,
            nvls,
        )
        if gpus:
            with status("searching layouts"):
                found = search(config, architecture, gpus, GPUS[gpu], machines, mean_response)
            report, lines, fits = found_json(found, gpu, gpus), list(found_lines(found, gpu, gpus)), bool(found.layouts)
            drawn = found.layouts[0].plan if found.layouts else None
        else:
            processes = config.num_processes
            if violations := validate(config, processes, architecture):
                raise ConfigError(violations, str(config.model.path))
            drawn = plan_step(config, architecture, processes, machines, GPUS[gpu], mean_response)
            problems = check(config, machines, architecture, processes)
            report = {"gpu": gpu, **plan_json(drawn), "problems": [str(one) for one in problems]}
            lines = [*plan_lines(drawn, architecture, gpu), *(f"does not fit: {one}" for one in problems)]
            fits = not problems
        settings = found.layouts[0].settings if gpus and found.layouts else {}
        _write_files(drawn, gpu, svg, write, recipe, {**_given(config, overrides, layout), **_of_run(settings, config)})
    typer.echo(json.dumps(report) if json_output else "\n".join(lines))
    raise typer.Exit(0 if fits else DOES_NOT_FIT)


plan_app.command("split")(plan_split)


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
    device: Annotated[str, typer.Option(help="device of the engines: cuda or cpu (they pad differently)")] = "cuda",
    ranks_per_node: Annotated[int, typer.Option(min=1)] = 8,
    gpu: Annotated[str, typer.Option(help=f"kind of GPU: {', '.join(GPUS)}")] = "H100",
    network_gbit: NetworkOption = NETWORK_GBIT,
    json_output: JsonOption = False,
) -> None:
    """Print what a weight sync moves and how long it takes: bytes of every rank, messages, memory."""
    from megatron_dapo.cli import plan_sync as costs

    require_known_gpu(gpu)
    with refusing(ValueError):
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
    typer.echo(json.dumps(asdict(figures)) if json_output else "\n".join(costs.describe_sync(figures)))


def _on_cpus(
    config: Config, architecture: ModelArchitecture, machines: Cluster
) -> tuple[dict[str, Any], list[str], StepPlan]:
    """Return the report, the lines and the plan of a run on the CPUs of this machine."""
    processes = config.num_processes
    if violations := validate(config, processes, architecture):
        raise ConfigError(violations, str(config.model.path))
    plan = cpu.plan_on_cpus(config, architecture, processes, machines)
    problems = [str(one) for one in cpu.problems(config, machines, architecture, processes)]
    report = {"gpu": None, "cores": machines.cores, **plan_json(plan), "problems": problems}
    return report, [*cpu_lines(plan, architecture), *(f"does not fit: {one}" for one in problems)], plan


def _given(config: Config, overrides: list[str] | None, layout: str | None) -> dict[str, str]:
    """Return what the command's overrides set, as TOML by its path; files by absolute paths."""
    resolved = config.model_dump(mode="json")
    paths = (one.partition("=")[0].strip() for one in (*(overrides or []), *(layout_overrides(layout) if layout else ())))
    return {path: toml_value(functools.reduce(lambda tree, name: tree[name], path.split("."), resolved)) for path in paths}


def _of_run(settings: Mapping[str, Any], config: Config) -> dict[str, str]:
    """Return the settings of a layout as TOML by their path, without a critic's if the run has none."""
    return {
        path: toml_value(value)
        for path, value in settings.items()
        if config.has_critic or not path.startswith("critic.")
    }


def _write_files(
    plan: StepPlan | None, machine: str, svg: Path | None, write: Path | None, recipe: Path, values: Mapping[str, str]
) -> None:
    """Write the picture of a plan, and a recipe of the values on top of `recipe`."""
    if plan is None:
        return
    if svg:
        title = f"{recipe.stem}: {_layout(plan.config)}, {_machines(plan, machine)}"
        svg.write_text(to_svg(plan, title), encoding="utf-8")
    if write:
        if write.resolve() == recipe.resolve():
            raise ValueError(f"--write {write}: is the recipe itself, which the new one is based on; name another file")
        base = os.path.relpath(recipe.resolve(), write.resolve().parent)
        lines = [f"# Written by `megatron-dapo plan {recipe.name}`: {_layout(plan.config)}", f"base = {json.dumps(base)}"]
        write.write_text("\n".join([*lines, *(f"{path} = {value}" for path, value in values.items())]) + "\n", encoding="utf-8")


def _machines(plan: StepPlan, name: str) -> str:
    """Return the machines of a plan in words."""
    if not plan.cluster.gpus_per_node:
        return f"{plan.cluster.cores} cores of this machine"
    return f"{plan.cluster.num_nodes} x {plan.cluster.gpus_per_node} {name}"


# ---- lines


def cpu_lines(plan: StepPlan, architecture: ModelArchitecture) -> Iterator[str]:
    """Yield the lines of a run on CPUs."""
    config, cluster = plan.config, plan.cluster
    yield f"model: {num_parameters(architecture) / 1e6:,.1f} M parameters; {_layout(config)}; {_machines(plan, '')}"
    yield "memory of a process, by phase, in MiB"
    for phase in plan.memory.phases:
        parts = ", ".join(f"{name} {part / 2**20:.0f}" for name, part in phase.parts.items() if part >= 2**20)
        yield f"  {phase.phase:13} {phase.total / 2**20:7,.0f}: {parts}"
    needed = cpu.memory_bytes(config, plan.memory, plan.processes) / GIB
    yield f"memory of the run: {needed:.1f} GiB of {cluster.host_gib:.1f} GiB that are free"
    found = cpu.estimate(config, architecture, cluster.cores, cluster.has_bf16)
    yield cpu.step_line(config, found, cluster.cores)
    yield "  " + ", ".join(f"{phase} {cpu.duration(seconds)}" for phase, seconds in found.phases.items())
    yield f"bytes: checkpoint {size(plan.checkpoint_bytes)} every {config.checkpoint.interval} steps"


def plan_lines(plan: StepPlan, architecture: ModelArchitecture, gpu: str) -> Iterator[str]:
    """Yield the lines of one layout."""
    yield f"model: {num_parameters(architecture) / 1e9:.1f} B parameters; {_layout(plan.config)}; {_machines(plan, gpu)}"
    yield f"memory of a GPU of {plan.cluster.gpu_gib:g} GiB, by phase (shared: trainer and engine take turns), in GiB"
    for phase in plan.memory.phases:
        parts = ", ".join(f"{name} {part / GIB:.1f}" for name, part in phase.parts.items() if part >= 0.05 * GIB)
        yield f"  {phase.phase:13} {phase.device:7} {phase.total / GIB:5.1f}: {parts}"
    yield f"host memory of a node: {plan.memory.host / GIB:.0f} GiB of {plan.cluster.host_gib:.0f}"
    yield from _queue_lines(plan)
    yield from _time_lines(plan)
    update = ""
    if plan.sync is not None:
        between = size(plan.sync.between_nodes) if plan.sync.between_nodes else "none"
        update = f"weight update {size(plan.sync.num_bytes)} into all servers, {between} of it between nodes, "
    yield f"bytes: {update}checkpoint {size(plan.checkpoint_bytes)} every {plan.config.checkpoint.interval} steps"
    yield from memory_warnings(plan.config, plan.memory, plan.processes, plan.cluster)


def _queue_lines(plan: StepPlan) -> Iterator[str]:
    engine, queue = plan.memory.engine_memory, plan.queue
    if engine is None or queue is None:
        return
    longest = plan.config.longest_sequence
    yield (
        f"KV cache of an engine: {engine.kv_tokens} tokens, {engine.kv_tokens / longest:.1f} sequences of {longest}; "
        f"{states_of(engine)}{plan.memory.num_engines} engines"
    )
    yield (
        f"queue of an engine: {queue.responses} responses, {queue.running} at a time; {queue.waiting} wait, the last for "
        f"{queue.last_start:.0f} s; the longest takes {queue.longest_seconds:.0f} s; idle places {queue.idle_share:.0%}"
    )


def _time_lines(plan: StepPlan) -> Iterator[str]:
    how = "generation during training" if plan.overlaps else "one phase after the other"
    rate = plan.trained_tokens / plan.total / (plan.cluster.num_nodes * plan.cluster.gpus_per_node)
    yield f"step: {plan.total:.0f} s, {how}; {rate:.0f} trained tokens a second and GPU"
    for phase, parts in plan.seconds.items():
        shown = ", ".join(
            f"{name} {part:.1f}" for name, part in sorted(parts.items(), key=lambda one: -one[1]) if part >= 0.05
        )
        yield f"  {phase:13} {plan.of_phase(phase):7.1f} s: {shown}"
    yield "not in it: rewards, the driver's own work, checkpoints, evaluation"


def found_lines(found: Found, gpu: str, gpus: int) -> Iterator[str]:
    """Yield the lines of a search."""
    yield f"{gpus} {gpu}: {found.num_tried} layouts tried, {found.num_fitting} fit"
    if found.needs_fp8:
        yield 'nothing fits with servers in 16 bits on one node: those below have sglang.quantization = "fp8"'
    if found.over_nodes:
        plan, sglang = found.over_nodes.plan, found.over_nodes.plan.config.sglang
        yield (
            f"in 16 bits a step takes {plan.total:.0f} s with servers of TP{sglang.tp_size}, {sglang.places}, and "
            f"{plan.cluster.processes_per_node(plan.processes)} trainer processes a node: {_as_options(found.over_nodes)}"
        )
    if found.fp8_seconds:
        yield f'servers in 16 bits hold few responses; with sglang.quantization = "fp8" a step takes {found.fp8_seconds:.0f} s'
    if not found.layouts:
        why = ", ".join(f"{name} in {count}" for name, count in found.reasons.items())
        yield f"none fits: {why or 'no sizes divide the model and the GPUs'}"
        if found.refused:
            yield f"the fastest that has the memory is refused: {found.refused}"
        yield "use more GPUs, or GPUs with more memory (--gpu H200)"
    for rank, one in enumerate(found.layouts, 1):
        plan, sglang = one.plan, one.plan.config.sglang
        yield (
            f"{rank:2}. {plan.total:.0f} s a step: {_layout(plan.config)}; {plan.memory.num_engines} servers of "
            f"TP{sglang.tp_size}, {sglang.places}, at mem_fraction_static {sglang.mem_fraction_static:g}, {sglang.placement}"
        )
        phases = ", ".join(f"{phase} {plan.of_phase(phase):.1f} s" for phase in plan.seconds)
        yield f"    {phases}; {plan.peak / GIB:.1f} GiB"
        yield f"    limited by {one.binding}"
        if one.flip:
            yield f"    {one.flip}"
        if rank > 1:
            yield f"    unlike the first: {_difference(one.settings, found.layouts[0].settings)}"
    if found.layouts:
        yield "settings of the first: (--write layout.toml makes a recipe of them)"
        yield f"  {_as_options(found.layouts[0])}"


def _as_options(one: Ranked) -> str:
    """Return a layout's settings as options of a command."""
    chosen = one.settings.items() if one.plan.config.has_critic else _without_critic(one.settings)
    return " ".join(f"--set {path}={_value(value)}" for path, value in chosen)


def _without_critic(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(path, value) for path, value in settings.items() if not path.startswith("critic.")]


def _difference(settings: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the settings that differ from those of another layout, or are not among them."""
    paths = dict.fromkeys([*settings, *other])
    words = (
        f"{path} = {_value(settings[path])}"
        if path in settings
        else f"without {path}"
        for path in paths
        if settings.get(path) != other.get(path) and not path.startswith("critic.")
    )
    return ", ".join(words)


def _layout(config: Config) -> str:
    p = config.parallel
    data = config.num_processes // (p.tp_size * p.pp_size * p.cp_size)
    sizes = [("TP", p.tp_size), ("PP", p.pp_size), ("VPP", p.vpp_size), ("CP", p.cp_size), ("EP", p.ep_size)]
    shown = [f"{name}{count}" for name, count in sizes if count > 1 or name in ("TP", "PP")] + [f"DP{data}"]
    if p.first_stage_layers or p.last_stage_layers:
        shown.append(f"layers {p.first_stage_layers} first, {p.last_stage_layers} last")
    modules = " ".join(sorted(recompute_of(config).modules))
    return f"{' '.join(shown)}, recompute {config.model.recompute_granularity}" + (f" ({modules})" if modules else "")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return shlex.quote(json.dumps(value))  # JSON is TOML's spelling of these
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- picture: a bar of memory for each phase, and a bar of the step's seconds

_LEFT, _WIDTH, _ROW, _TOP, _RIGHT = 110, 760, 30, 64, 90
_LEGEND_COLUMNS, _LEGEND_ROW = 5, 20
_COLORS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#994455", "#6699cc", "#997700"),
    *("#44aa99", "#882255", "#ddcc77", "#117733", "#cc6677", "#332288", "#999933", "#aa4499", "#88ccee"),
)
_NARROW = 60  # a part of fewer points has no name in it


def to_svg(plan: StepPlan, title: str) -> str:
    """Return the picture as an SVG document: a colour for each component, a legend, and totals at the right."""
    on_gpus = plan.cluster.gpus_per_node > 0
    limit = max(plan.cluster.gpu_bytes if on_gpus else 0, plan.peak) / GIB
    bars = {one.phase: {name: part / GIB for name, part in one.parts.items()} for one in plan.memory.phases}
    words = f"of a GPU by phase, of {plan.cluster.gpu_gib:g} GiB" if on_gpus else "of a process by phase"
    parts = [text(10, 20, title, anchor="start"), text(10, _TOP - 16, f"Memory {words}", GRAY, "start")]
    top = _TOP
    colors = _colors(bars.values(), limit)
    for phase, sizes in bars.items():
        parts += _bar(top, phase, sizes, limit, "GiB", colors)
        top += _ROW
    if on_gpus:
        right = _LEFT + _WIDTH * plan.cluster.gpu_bytes / GIB / limit
        parts.append(f'<line x1="{right:.1f}" y1="{_TOP - 6}" x2="{right:.1f}" y2="{top}" stroke="#cc3311"/>')
    top = _legend(parts, top + 8, colors)
    seconds = {phase: plan.of_phase(phase) for phase in plan.seconds if plan.of_phase(phase)}
    parts.append(text(10, top + 24, f"Seconds of a step, {plan.total:,.0f} in all{_overlap(plan)}", GRAY, "start"))
    colors = _colors([seconds], sum(seconds.values()))
    parts += _bar(top + 40, "step", seconds, sum(seconds.values()), "s", colors)
    top = _legend(parts, top + 40 + _ROW + 8, colors)
    return document(_LEFT + _WIDTH + _RIGHT, top + 10, parts)


def _overlap(plan: StepPlan) -> str:
    return "; generation runs during training" if plan.overlaps else ""


def _colors(bars: Iterable[Mapping[str, float]], limit: float) -> dict[str, str]:
    """Return a colour for each component that can be seen in one of the bars, in order of appearance."""
    names = dict.fromkeys(name for sizes in bars for name, size in sizes.items() if size >= limit / _WIDTH)
    return dict(zip(names, itertools.cycle(_COLORS)))


def _bar(
    top: int, name: str, sizes: Mapping[str, float], limit: float, unit: str, colors: Mapping[str, str]
) -> Iterator[str]:
    """Yield a row of parts side by side with their total, `limit` being the whole width."""
    yield text(_LEFT - 8, top + 16, name, GRAY, "end")
    left = float(_LEFT)
    for part, size in sizes.items():
        width = _WIDTH * size / max(limit, 1e-9)
        label = f"{part} {size:.1f} {unit}"
        yield (
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 8}" fill="{colors.get(part, GRAY)}">'
            f"<title>{escape(label)}</title></rect>"
        )
        if width > max(_NARROW, 7 * len(label)):
            yield text(left + width / 2, top + 15, label, "#ffffff")
        left += width
    yield text(_LEFT + _WIDTH + 8, top + 16, f"{sum(sizes.values()):,.1f} {unit}", anchor="start")


def _legend(parts: list[str], top: int, colors: Mapping[str, str]) -> int:
    """Append a square and a name for each component, and return where the next row begins."""
    width = (_WIDTH + _RIGHT) / _LEGEND_COLUMNS
    for number, (name, color) in enumerate(colors.items()):
        row, column = divmod(number, _LEGEND_COLUMNS)
        x, y = _LEFT + column * width, top + row * _LEGEND_ROW
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 18, y + 11, name, anchor="start"))
    return top + _LEGEND_ROW * -(-len(colors) // _LEGEND_COLUMNS)


# ---- JSON


def plan_json(plan: StepPlan) -> dict[str, Any]:
    """Return one layout's plan as JSON's types: bytes and seconds."""
    engine, queue = plan.memory.engine_memory, plan.queue
    return {
        "layout": _layout(plan.config),
        "processes": plan.processes,
        "nodes": plan.cluster.num_nodes,
        "memory": [
            {"phase": one.phase, "device": one.device, "total": one.total, "parts": dict(one.parts)}
            for one in plan.memory.phases
        ],
        "peak_bytes": plan.peak,
        "gpu_bytes": plan.cluster.gpu_bytes,
        "host_bytes": plan.memory.host,
        "kv_tokens": engine.kv_tokens if engine else None,
        "engines": plan.memory.num_engines,
        "queue": dict(vars(queue)) if queue else None,
        "seconds": {phase: dict(parts) for phase, parts in plan.seconds.items()},
        "step_seconds": plan.total,
        "overlaps": plan.overlaps,
        "weight_update_bytes": plan.sync.num_bytes if plan.sync else 0,
        "inter_node_gb": plan.sync.between_nodes / 1e9 if plan.sync else 0.0,
        "warnings": list(memory_warnings(plan.config, plan.memory, plan.processes, plan.cluster)),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "trained_tokens": plan.trained_tokens,
        "generated_tokens": plan.generated_tokens,
    }


def _ranked_json(one: Ranked) -> dict[str, Any]:
    return {**plan_json(one.plan), "settings": one.settings, "binding": one.binding, "flip": one.flip}


def found_json(found: Found, gpu: str, gpus: int) -> dict[str, Any]:
    """Return the result of a search as JSON's types."""
    return {
        "gpu": gpu,
        "gpus": gpus,
        "num_tried": found.num_tried,
        "num_fitting": found.num_fitting,
        "reasons": found.reasons,
        "refused": found.refused,
        "needs_fp8": found.needs_fp8,
        "fp8_seconds": found.fp8_seconds,
        "over_nodes": _ranked_json(found.over_nodes) if found.over_nodes else None,
        "layouts": [_ranked_json(one) for one in found.layouts],
    }
