"""The plan of a run: its configuration for these machines, checked, or the list of everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.config import Config, ConfigError, LoadedConfig, layout_overrides, load_config
from megatron_dapo.config.inputs import check_inputs
from megatron_dapo.config.process_limits import process_limits
from megatron_dapo.config.rules import Doubt, UnusableInput, Violation
from megatron_dapo.doctor.hub_inputs import local_copies
from megatron_dapo.doctor.inputs import input_problems, quick_problems
from megatron_dapo.launch.environment import DRIVER_DEVICE, slurm_allocation
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.parallel.layout import ParallelLayout
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
    gpus_here: int = 0  # a dry run's machine has these, if nothing else is given; 0: none or unknown


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
    if adapt is not None:
        loaded = replace(loaded, config=adapt(loaded.config))
    config = loaded.config
    architecture, problems = check_inputs(config, are_here=inputs != "none")
    problems = [*absent, *(one for one in problems if one.path not in {other.path for other in absent})]
    cluster = cluster_for(config, machines.num_nodes, machines.gpus_per_node, machines.gpu_gib, machines.host_gib)
    processes = _processes(config, machines, cluster)
    problems += validate_and_check(config, cluster, architecture, processes)
    needed = processes + server_gpus(config)
    if 0 < machines.gpus_here < needed and cluster.num_nodes == 1:
        fix = f"use a layout for {machines.gpus_here}, or --gpus-per-node {needed} if it is for another machine"
        problems.append(
            UnusableInput(
                "parallel", f"the run needs {needed} GPUs of its node, this machine has {machines.gpus_here}", fix
            )
        )
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
    return Plan(recipe, loaded, tuple(merged), layout_of_policy, processes, cluster, architecture, warnings)


def _processes(config: Config, machines: Machines, cluster: Cluster) -> int:
    """Return the number of processes: the configured one, otherwise as many as fill the given machines."""
    if config.parallel.num_processes or machines.num_nodes is None:
        return config.num_processes
    if machines.num_tasks:
        return machines.num_tasks
    trainer_gpus = cluster.gpus_per_node - server_gpus(config)
    return cluster.num_nodes * trainer_gpus if cluster.num_nodes > 1 and trainer_gpus > 0 else config.num_processes


_GPUS_OF_DRIVER = Path("/proc/driver/nvidia/gpus")


def machines_of(
    dry_run: bool,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
) -> Machines:
    """Return the machines that a dry run is for, or this one. ValueError for machines that are named without a dry run."""
    if dry_run:
        job = slurm_allocation()
        known: dict[str, Any] = {
            "num_nodes": nodes or job.num_nodes,
            "num_tasks": None if nodes else job.num_tasks,
            "gpus_per_node": gpus_per_node or job.gpus_per_node,
            "gpu_gib": gpu_memory,
            # Counted without torch, which takes seconds; a machine without any is not where the run is to start.
            "gpus_here": 0 if nodes or gpus_per_node or job.num_nodes else len(list(_GPUS_OF_DRIVER.glob("*"))),
            # The batch script runs on a node of the job, and its nodes are alike.
            "host_gib": host_memory or (process_limits().usable_memory / GIB if job.num_nodes else None),
        }
        return Machines(**{name: value for name, value in known.items() if value})
    if given := [name for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)) if value]:
        raise ValueError(
            f"{' and '.join(given)}: only with --dry-run; a run on several nodes is started by examples/launch/slurm.sh"
        )
    # torch takes seconds to import, so it is imported only if there is a driver.
    if not DRIVER_DEVICE.exists():
        return ONE_NODE_OF_CPUS
    import torch

    if not torch.cuda.device_count():
        return ONE_NODE_OF_CPUS
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return Machines(1, torch.cuda.device_count(), gpu_gib, process_limits().usable_memory / GIB)
