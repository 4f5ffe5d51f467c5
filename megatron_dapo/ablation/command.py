"""`megatron-dapo ablate`: check all variants, make the runs that are not on record, write the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.ablation.grid import read_grid
from megatron_dapo.ablation.report import write_report
from megatron_dapo.ablation.run_queue import Limits, RunQueue, Tell
from megatron_dapo.ablation.runs import RESULTS, Run, code_commit, matching, plan_runs, read_records
from megatron_dapo.cli.plan import Machines
from megatron_dapo.launch.environment import visible_devices
from megatron_dapo.launch.lifetime import DirectoryLock
from megatron_dapo.recovery.failure import EXIT_CODE


def ablate(
    path: Path,
    overrides: Sequence[str],
    machines: Machines,
    limits: Limits,
    results: Path | None = None,
    any_commit: bool = False,
    dry_run: bool = False,
    tell: Tell = print,
) -> int:
    """Make a grid's runs within `limits` and report on all that are on record. Returns the exit code: 0 all runs are on
    record, 1 some failed, 75 some are left.

    `results`: directory of results.jsonl and the report. ValueError for a grid or variant that is refused, RuntimeError where
    another process works on the grid.
    """
    grid = read_grid(path, overrides)
    directory = results or grid.output_dir
    commit = code_commit(directory)
    runs = plan_runs(grid, machines, commit)
    devices = visible_devices(machines.gpus_per_node)
    _check_devices(runs, limits.jobs, devices)
    counted = None if any_commit else commit
    found = matching(read_records(directory / RESULTS), runs, counted)
    done = {record["settings"] for record in found}
    left = [run for run in runs if run.settings not in done]
    tell(
        f"{len(grid.variants)} variants x {len(grid.seeds)} seeds at {commit}: {len(found)} on record, {len(left)} left"
    )
    if dry_run:
        for run in left:
            tell(f"{run.label}: {' '.join(run.overrides)}")
        return 0
    queue = RunQueue(grid, commit, directory / RESULTS, limits, devices, tell)
    lock = DirectoryLock(grid.output_dir)
    try:
        result = queue.make(left)
    finally:
        lock.release()
    found = matching(read_records(directory / RESULTS), runs, counted)
    command = f"megatron-dapo ablate {path}{''.join(f' --set {each}' for each in overrides)}"
    documents = write_report(grid, found, directory, command)
    tell(f"{len(found)} of {len(runs)} runs on record; {', '.join(map(str, documents))}")
    for failure in result.failures:
        tell(f"failed: {failure}")
    return 1 if result.failures else 0 if len(found) == len(runs) else EXIT_CODE


def _check_devices(runs: Sequence[Run], jobs: int, devices: Sequence[str]) -> None:
    needed = jobs * max(run.num_processes for run in runs)
    if jobs > 1 and devices and needed > len(devices):
        most = max(1, jobs * len(devices) // needed)
        raise ValueError(
            f"--jobs {jobs}: runs side by side take {needed} GPUs, there are {len(devices)}; take --jobs {most}"
        )
