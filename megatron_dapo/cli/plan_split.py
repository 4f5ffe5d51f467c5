"""`megatron-dapo plan split`: which side of a finished or running run waits, and a split of its devices that is faster."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from megatron_dapo.cli.options import JsonOption, refusing, require_known_gpu
from megatron_dapo.config import Config, config_from_dict
from megatron_dapo.config.derive import derive
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.plan.check import validate_and_check
from megatron_dapo.plan.cluster import GPUS_PER_NODE, Cluster, cluster_for
from megatron_dapo.plan.comparison import known_gpu
from megatron_dapo.plan.device import GPUS, Gpu
from megatron_dapo.plan.memory import RunMemory, run_memory
from megatron_dapo.plan.overlap import Collection
from megatron_dapo.plan.rollout import Lengths, engine_rates, running_at_once
from megatron_dapo.plan.split import Measured, Proposal, Split, SplitLimits, calibrated, measured_lengths, propose
from megatron_dapo.plan.step import step_lengths, trainer_seconds
from megatron_dapo.report.run_files import RunFiles, read_run

LEFT_OUT = 5  # first steps, which compile and fill the queue
LEAST = 3  # steps that a mean is taken of
MOST_LISTED = 8
METRICS = (
    *("time/step", "time/evaluate", "time/checkpoint", "time/generate", "time/weight_sync"),
    *("throughput/generated_tokens", "throughput/generated_tokens_per_s"),
    *("rollout/groups_filtered_share", "rollout/response_tokens_max", "rollout/truncated_share", "rollout/prompt_tokens_mean"),
    *("window/responses", "window/per_finished", "async/engine_idle"),
)


def plan_split(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="directory of a run with separate servers")],
    gpu: Annotated[str | None, typer.Option(help=f"kind of GPU: {', '.join(GPUS)}; default: the run's")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node")] = GPUS_PER_NODE,
    json_output: JsonOption = False,
) -> None:
    """Say from a run's measured seconds which side waits for the other, and how many of its devices should train and how many
    generate, with the rollout.oversample and rollout.ahead that follow."""
    if gpu is not None:
        require_known_gpu(gpu)
    with refusing(ValueError, OSError):
        report = split_report(run_directory, gpu, gpus_per_node)
    typer.echo(json.dumps(report_json(report)) if json_output else "\n".join(report_lines(report)))


@dataclass(frozen=True)
class SplitReport:
    """What a run measured, and the splits of its devices."""

    config: Config
    gpu: str
    num_steps: int  # number of steps in the means
    measured: Measured
    idle: float  # measured seconds of a step in which a server has no request
    now: Proposal  # the run's split and settings, in the queue
    factor: float  # engines' measured rates / planned rates
    is_told: bool  # the measured seconds determine `factor`
    proposals: Sequence[Proposal]

    @property
    def best(self) -> Proposal:
        return self.proposals[0]

    @property
    def nodes(self) -> int:
        """Nodes that servers are started on."""
        return self.now.split.servers // self.config.sglang.servers_per_node

    def settings(self, one: Proposal) -> dict[str, Any]:
        """Return what a recipe sets for a proposal, without what the run has already."""
        rollout = self.config.rollout
        now = self.now.split
        values = {
            "parallel.num_processes": (one.split.trainer, now.trainer),
            "sglang.servers_per_node": (one.split.servers // self.nodes, self.config.sglang.servers_per_node),
            "rollout.oversample": (one.oversample, rollout.oversample),
            "rollout.ahead": (one.ahead, rollout.ahead),
        }
        return {path: value for path, (value, before) in values.items() if value != before}


def split_report(directory: Path, gpu_name: str | None, gpus_per_node: int) -> SplitReport:
    """Read a run and return its report. ValueError for a run without separate servers, or with too few steps."""
    run = read_run(directory)
    document = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = config_from_dict(document["config"])
    _require_separate(config, directory)
    machine = str(run.provenance.get("machine", ""))
    device = machine.partition(";")[0].rpartition(", ")[2] or "an unknown device"
    gpu = GPUS[gpu_name] if gpu_name else known_gpu(device)
    if gpu is None:
        raise ValueError(f"{directory}: ran on {device}, whose rates are unknown; name the kind of GPU that is closest with --gpu")
    found = re.search(r"on (\d+) processes", machine)
    processes = int(found[1]) if found else config.num_processes
    cluster = cluster_for(config, gpus_per_node=gpus_per_node, gpu_gib=gpu.memory_gib)
    architecture = read_architecture(planned_directory(config.model.path))
    planned = _Planned(config, architecture, gpu, cluster, processes)
    num_steps, idle, measured = _measured(run, config)
    now = Split(processes, planned.memory.num_engines, measured.train)
    rollout = config.rollout
    limits = SplitLimits(
        planned.running(measured.lengths), rollout.max_staleness, config.algorithm.name == "tppo", Collection.of(config)
    )
    rates, factor, is_told = calibrated(planned.rates, measured, now, limits, rollout.oversample, rollout.ahead)
    splits = [now, *planned.splits(measured.train, now)]
    return SplitReport(
        config,
        gpu.name,
        num_steps,
        measured,
        idle * measured.step,
        Proposal.of(rates, measured, now, limits, rollout.oversample, rollout.ahead),
        factor,
        is_told,
        propose(rates, measured, splits, limits),
    )


def _require_separate(config: Config, directory: Path) -> None:
    if config.rollout.engine != "sglang" or config.sglang.placement != "disaggregated":
        raise ValueError(
            f"{directory}: its engines share the trainer's devices, so there is no split; "
            '`megatron-dapo plan RECIPE --set sglang.placement="disaggregated"` plans separate ones'
        )
    if config.sglang.nodes_per_server > 1:
        raise ValueError(f"{directory}: servers over several nodes (sglang.nodes_per_server) are not split")
    if config.sglang.urls:
        raise ValueError(f"{directory}: its servers were given by sglang.urls, and their devices are unknown")
    if config.num_critic_processes:
        raise ValueError(
            f"{directory}: {config.num_critic_processes} processes have only the critic (critic.parallel.num_processes): "
            "a split in three is not planned"
        )


def _measured(run: RunFiles, config: Config) -> tuple[int, float, Measured]:
    """Return the number of steps, the servers' idle share, and the means of the steps, without the first ones."""
    rows = [dict(zip(METRICS, values, strict=True)) for values in zip(*map(run.column, METRICS), strict=True)]
    rows = [row for row in rows[LEFT_OUT:] if all(map(math.isfinite, row.values()))]
    if len(rows) < LEAST:
        raise ValueError(f"{run.path}: {len(run.steps)} steps, needs {LEFT_OUT + LEAST}: the first {LEFT_OUT} are left out")
    mean = {name: fmean(row[name] for row in rows) for name in METRICS}
    step = mean["time/step"] - mean["time/evaluate"] - mean["time/checkpoint"]
    wait, update = mean["time/generate"], mean["time/weight_sync"]
    tokens = mean["throughput/generated_tokens"]
    has_windows = config.algorithm.name == "tppo"
    kept = max(0.01, 1 - mean["rollout/groups_filtered_share"])
    responses = mean["window/responses"] if has_windows else config.rollout.prompts_per_step * config.rollout.group_size / kept
    lengths = measured_lengths(
        config.rollout.max_response_tokens,
        tokens / responses * (max(1.0, mean["window/per_finished"]) if has_windows else 1.0),
        mean["rollout/response_tokens_max"],
        mean["rollout/truncated_share"],
        round(responses),
        mean["rollout/prompt_tokens_mean"],
    )
    if has_windows:
        lengths = lengths.in_windows(config.window.tokens)
    collect = fmean(row["throughput/generated_tokens"] / max(1e-9, row["throughput/generated_tokens_per_s"]) for row in rows)
    measured = Measured(step, wait, max(0.0, step - wait - update), update, collect, responses, lengths)
    return len(rows), mean["async/engine_idle"], measured


@dataclass(frozen=True)
class _Planned:
    """What a plan says of the run and of other splits."""

    config: Config
    architecture: ModelArchitecture
    gpu: Gpu
    cluster: Cluster
    processes: int

    @property
    def memory(self) -> RunMemory:
        return run_memory(self.config, self.architecture, self.processes, self.cluster)

    @property
    def rates(self) -> Any:
        engine = self.memory.engine_memory
        assert engine is not None, "the run starts its servers"
        return engine_rates(self.config, self.architecture, engine, self.gpu)

    def running(self, lengths: Lengths) -> int:
        engine = self.memory.engine_memory
        assert engine is not None, "the run starts its servers"
        return running_at_once(self.config, engine, lengths)

    def splits(self, train: float, now: Split) -> Iterator[Split]:
        """Yield the other splits of the same devices that are valid and fit; the trainer's seconds follow the plan's."""
        config, nodes = self.config, now.servers // self.config.sglang.servers_per_node
        parallel, ranks = config.parallel, config.sglang.tp_size
        model_size = parallel.tp_size * parallel.pp_size * parallel.cp_size
        devices = now.trainer + now.servers * ranks
        before = self._trainer_seconds(self.config, now.trainer)
        for servers in range(nodes, devices // ranks + 1, nodes):
            trainer = devices - servers * ranks
            if servers == now.servers or trainer <= 0 or trainer % model_size or trainer % nodes:
                continue
            changes = {"parallel.num_processes": trainer, "sglang.servers_per_node": servers // nodes}
            changed = derive(config, changes)
            if not validate_and_check(changed, self.cluster, self.architecture, trainer):
                yield Split(trainer, servers, train * self._trainer_seconds(changed, trainer) / before)

    def _trainer_seconds(self, config: Config, processes: int) -> float:
        given = config, self.architecture, processes, self.cluster
        phases = trainer_seconds(*given, self.gpu, step_lengths(config), run_memory(*given))
        return sum(sum(parts.values()) for parts in phases.values())


def report_json(report: SplitReport) -> dict[str, Any]:
    """Return the report as JSON."""
    measured = {name: value for name, value in asdict(report.measured).items() if name != "lengths"}
    return {
        "gpu": report.gpu,
        "steps": report.num_steps,
        "measured": {**measured, "engine_idle": report.idle, "mean_tokens": report.measured.lengths.mean},
        "engine_factor": report.factor,
        "engine_factor_is_told": report.is_told,
        "now": _proposal_json(report, report.now),
        "proposals": [_proposal_json(report, one) for one in report.proposals],
    }


def _proposal_json(report: SplitReport, one: Proposal) -> dict[str, Any]:
    seconds = one.seconds
    return {
        "trainer": one.split.trainer,
        "servers": one.split.servers,
        "step": seconds.step,
        "trainer_waits": seconds.wait,
        "engines_wait": seconds.engine_idle,
        "waits": one.waits,
        "settings": report.settings(one),
    }


def report_lines(report: SplitReport) -> Iterator[str]:
    """Yield the report's lines."""
    measured, now, best = report.measured, report.now, report.best
    yield (
        f"measured, mean of {report.num_steps} steps: {measured.step:.1f} s, of which the trainer waits {measured.wait:.1f} and "
        f"the engines {report.idle:.1f}; trainer's phases {measured.train:.1f}, weight update {measured.update:.1f}"
    )
    off = now.seconds.step / measured.step - 1
    yield (
        f"engines at {report.factor:.2g} of the rates that a plan takes for {report.gpu}; in the queue this run's step is "
        f"{now.seconds.step:.1f} s ({off:+.0%})"
    )
    yield from _warnings(report)
    yield "trainer  servers   step s   trainer waits   engines wait   settings"
    for one in report.proposals[:MOST_LISTED]:
        shown = _shown(report.settings(one)) or "as in this run"
        seconds = one.seconds
        yield (
            f"{one.split.trainer:7}  {one.split.servers:7}  {seconds.step:7.1f}  {seconds.wait:14.1f}  "
            f"{seconds.engine_idle:13.1f}   {shown}"
        )
    gain = 1 - best.seconds.step / now.seconds.step
    if gain < 0.02:
        yield "no split is faster by 2 % or more"
    else:
        yield f"proposed, {gain:.0%} faster: {_shown(report.settings(best))}"


def _warnings(report: SplitReport) -> Iterator[str]:
    if not report.is_told:
        yield (
            "warning: the trainer sets the pace, so the measured seconds say little of the engines' speed; steps in which the "
            "trainer waits are those of the plan's rates"
        )


def _shown(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--set {path}={value}" for path, value in settings.items())
