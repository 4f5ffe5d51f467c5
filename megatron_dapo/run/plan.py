"""The plan of a run: its configuration for these machines, checked, or the list of everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from megatron_dapo.config import Config, ConfigError, LoadedConfig, layout_overrides, load_config
from megatron_dapo.config.inputs import check_inputs
from megatron_dapo.config.process_limits import multiplies_bf16, process_limits
from megatron_dapo.config.rules import Doubt, Violation
from megatron_dapo.data.sources import PromptCounts, count_prompts
from megatron_dapo.doctor.hub_inputs import local_copies
from megatron_dapo.doctor.inputs import input_problems, quick_problems
from megatron_dapo.launch.environment import DRIVER_DEVICE, slurm_allocation
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan import cpu
from megatron_dapo.plan.check import validate_and_check
from megatron_dapo.plan.cluster import GPU_GIB, GPUS_PER_NODE, HOST_GIB, Cluster, cluster_for, server_gpus
from megatron_dapo.rounding import GIB
from megatron_dapo.trainer.topology import parallel_layout


@dataclass(frozen=True)
class Machines:
    """Machines of a run as far as they are known; None: as many as the layout asks for."""

    num_nodes: int | None = None
    gpus_per_node: int = GPUS_PER_NODE  # 0: the run is on CPUs
    gpu_gib: float = GPU_GIB
    host_gib: float = HOST_GIB
    num_tasks: int | None = None  # processes that a launcher will start
    cores: int = 0  # this machine's, if the run is on its CPUs; 0: not known
    has_bf16: bool = False


# What is checked of the inputs: nothing, that they exist, what needs no heavy import, or everything.
Inputs = Literal["none", "named", "quick", "all"]
ONE_NODE_OF_CPUS = Machines(num_nodes=1, gpus_per_node=0)


@dataclass(frozen=True)
class Plan:
    """A configuration that may be run."""

    recipe: Path
    loaded: LoadedConfig
    overrides: tuple[str, ...]  # all of them, for the processes that load the recipe again
    layout: ParallelLayout  # the policy's
    num_processes: int  # the whole run's
    cluster: Cluster
    architecture: ModelArchitecture  # the policy's
    warnings: tuple[str, ...] = ()  # about its inputs
    prompts: PromptCounts | None = None  # None: not counted


def make_plan(
    recipe: Path,
    overrides: Sequence[str],
    layout: str | None,
    output_dir: Path | None,
    machines: Machines,
    adapt: Callable[[Config], Config] | None = None,
    inputs: Inputs = "named",
) -> Plan:
    """Load, check everything, and raise ConfigError with all violations at once.

    `adapt`: makes the configuration to run, if that is not the recipe's. `inputs`: "none" plans a run of another machine, from
    config.json only; "quick" checks what is in the files, too, and "all" (seconds) tries what a run starts. Models and data
    of the Hub are downloaded for the last two.
    """
    merged = [*overrides]
    merged += layout_overrides(layout) if layout else []
    merged += [f"run.output_dir={output_dir}"] if output_dir else []
    loaded = load_config(recipe, merged)
    absent: list[Violation] = []
    if inputs in ("quick", "all"):
        copies, absent = local_copies(loaded)
        if copies:
            merged += copies
            loaded = load_config(recipe, merged)
    counts = _counts(loaded.config) if inputs in ("quick", "all") and not absent else None
    if counts is not None and counts.train and not counts.held_out and loaded.config.data.holds_out:
        merged.append("data.held_out_share=0.0")  # There are too few to hold one out.
        loaded = load_config(recipe, merged)
    if adapt is not None:
        loaded = replace(loaded, config=adapt(loaded.config))
    config = loaded.config
    architecture, problems = check_inputs(config, are_here=inputs != "none")
    problems = [*absent, *(one for one in problems if one.path not in {other.path for other in absent})]
    cluster = cluster_for(config, machines.num_nodes, machines.gpus_per_node, machines.gpu_gib, machines.host_gib)
    cluster = replace(cluster, cores=machines.cores, has_bf16=machines.has_bf16)
    processes = _processes(config, machines, cluster)
    problems += validate_and_check(config, cluster, architecture, processes)
    if architecture is not None and not problems:
        problems += cpu.problems(config, cluster, architecture, processes, counts.held_out if counts else 0)
    if inputs == "all":
        problems += input_problems(config, is_here=cluster.num_nodes == 1)
    elif inputs == "quick" and not problems:
        problems += quick_problems(config)
    doubts = [one for one in problems if isinstance(one, Doubt)]
    problems = [one for one in problems if not isinstance(one, Doubt)]
    if problems or architecture is None:
        raise ConfigError(problems, str(recipe))
    layout_of_policy = parallel_layout(config, processes)
    warnings = tuple(str(one) for one in doubts)
    return Plan(recipe, loaded, tuple(merged), layout_of_policy, processes, cluster, architecture, warnings, counts)


def _counts(config: Config) -> PromptCounts | None:
    """Return the numbers of prompts; None if the files cannot be read, which the checks report, or hold responses to learn."""
    if config.algorithm.name == "sft":
        return None
    try:
        return count_prompts(config.data)
    except (ValueError, OSError):
        return None


def _processes(config: Config, machines: Machines, cluster: Cluster) -> int:
    """Return the number of processes: the configured one, otherwise as many as fill the given machines."""
    if config.parallel.num_processes or machines.num_nodes is None:
        return config.num_processes
    if machines.num_tasks:
        return machines.num_tasks
    trainer_gpus = cluster.gpus_per_node - server_gpus(config)
    return cluster.num_nodes * trainer_gpus if cluster.num_nodes > 1 and trainer_gpus > 0 else config.num_processes


def these_cpus() -> Machines:
    """Return this machine as one whose CPUs train: its cores, and the memory that is free now."""
    limits = process_limits()
    free = min(limits.usable_memory, psutil.virtual_memory().available)
    return replace(ONE_NODE_OF_CPUS, host_gib=free / GIB, cores=limits.cores, has_bf16=multiplies_bf16())


def machines_of(
    dry_run: bool,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    is_here: bool = True,
) -> Machines:
    """Return this machine; for a dry run the Slurm job's, those that are given, or, if it is not for this one, nodes of the
    usual size. ValueError for machines that are named without a dry run."""
    if not dry_run:
        if given := [name for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)) if value]:
            raise ValueError(
                f"{' and '.join(given)}: only with --dry-run; a run on several nodes is started by examples/launch/slurm.sh"
            )
        return _this_machine()
    job = slurm_allocation()
    if is_here and not (job.num_nodes or nodes or gpus_per_node or gpu_memory or host_memory):
        return _this_machine()
    known: dict[str, Any] = {
        "num_nodes": nodes or job.num_nodes,
        "num_tasks": None if nodes else job.num_tasks,
        "gpus_per_node": gpus_per_node or job.gpus_per_node,
        "gpu_gib": gpu_memory,
        # The batch script runs on a node of the job, and its nodes are alike.
        "host_gib": host_memory or (process_limits().usable_memory / GIB if job.num_nodes else None),
    }
    return Machines(**{name: value for name, value in known.items() if value})


def _this_machine() -> Machines:
    # torch takes seconds to import, so it is imported only if there is a driver.
    if not DRIVER_DEVICE.exists():
        return these_cpus()
    import torch

    if not torch.cuda.device_count():
        return these_cpus()
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return Machines(1, torch.cuda.device_count(), gpu_gib, process_limits().usable_memory / GIB)
