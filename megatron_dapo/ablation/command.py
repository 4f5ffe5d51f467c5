"""`megatron-dapo ablate`: check all variants, make the runs that are not on record, write the reports.

Grids given in one call share a queue. A run or critic that several of them need is trained once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dapo.ablation.grid import Grid, read_grid
from megatron_dapo.ablation.report import write_report
from megatron_dapo.ablation.run_queue import Limits, RunQueue, Tell
from megatron_dapo.ablation.runs import (
    RESULTS,
    Run,
    append_record,
    code_commit,
    matching,
    plan_runs,
    read_records,
    record_of,
)
from megatron_dapo.launch.environment import visible_devices
from megatron_dapo.launch.lifetime import DirectoryLock
from megatron_dapo.run.plan import Machines
from megatron_dapo.watch.failure import EXIT_CODE


@dataclass(frozen=True)
class _Study:
    """A grid with its runs, and the directory of its records and report."""

    path: Path
    grid: Grid
    runs: tuple[Run, ...]
    directory: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_records(self.directory / RESULTS)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record under this grid's names if its settings belong to this grid."""
        for run in self.runs:
            if run.settings == record["settings"]:
                own = {"grid": self.grid.name, "variant": run.variant.name, "set": dict(run.variant.written)}
                append_record(self.directory / RESULTS, {**record, **own})


def ablate(
    paths: Sequence[Path],
    overrides: Sequence[str],
    machines: Machines,
    limits: Limits,
    results: Path | None = None,
    any_commit: bool = False,
    dry_run: bool = False,
    tell: Tell = print,
) -> int:
    """Make the runs of grids within `limits` and report on all that are on record. Returns the exit code: 0 all runs are on
    record, 1 some failed, 75 some are left.

    `results`: directory of results.jsonl and the report; for several grids, the parent of one directory per grid, named
    after its file. Raises ValueError for an invalid grid or variant, RuntimeError if another process works on a grid.
    """
    grids = [read_grid(path, overrides) for path in paths]
    commit = code_commit(results or grids[0].output_dir)
    studies = _studies(paths, grids, machines, commit, results)
    devices = visible_devices(machines.gpus_per_node)
    _check_devices([run for study in studies for run in study.runs], limits.jobs, devices)
    counted = None if any_commit else commit
    known = [record for study in studies for record in study.records]
    left: dict[str, Run] = {}
    for study in studies:
        done = {record["settings"] for record in matching(known, study.runs, counted)}
        missing = {run.settings: run for run in study.runs if run.settings not in done}
        left = missing | left
        tell(
            f"{study.grid.name}: {len(study.grid.variants)} variants x {len(study.grid.seeds)} seeds at {commit}: "
            f"{len(done)} on record, {len(missing)} left"
        )
    order = sorted(left.values(), key=lambda run: run.seed)  # every variant of a seed before the next seed
    if dry_run:
        for run in order:
            tell(f"{run.label}: {' '.join(run.overrides)}")
        return 0
    owners = {run.settings: study.grid for study in reversed(studies) for run in study.runs}

    def keep(run: Run) -> dict[str, Any]:
        record = record_of(run, owners[run.settings], commit)
        for study in studies:
            study.add(record)
        return record

    with ExitStack() as stack:
        for study in studies:
            stack.callback(DirectoryLock(study.grid.output_dir).release)
        for study in studies:
            own = {record["settings"] for record in matching(study.records, study.runs, counted)}
            for record in matching(known, study.runs, counted):
                if record["settings"] not in own:  # made for another grid
                    study.add(record)
        result = RunQueue(keep, limits, devices, tell).make(order)
    for study in studies:
        records = matching(study.records, study.runs, counted)
        command = f"megatron-dapo ablate {study.path}{''.join(f' --set {each}' for each in overrides)}"
        documents = write_report(study.grid, records, study.directory, command)
        tell(f"{len(records)} of {len(study.runs)} runs on record; {', '.join(map(str, documents))}")
    for failure in result.failures:
        tell(f"failed: {failure}")
    num_made = len({record["settings"] for record in result.records})
    return 1 if result.failures else 0 if num_made == len(order) else EXIT_CODE


def _studies(
    paths: Sequence[Path], grids: Sequence[Grid], machines: Machines, commit: str, results: Path | None
) -> list[_Study]:
    """Plan the runs of all grids. Raises ValueError if two of them write into one directory."""
    studies, critics = list[_Study](), dict[str, Path]()
    for path, grid in zip(paths, grids, strict=True):
        runs = [
            replace(run, critic_directory=critics.setdefault(run.critic_directory.name, run.critic_directory))
            if run.critic_directory is not None
            else run
            for run in plan_runs(grid, machines, commit)
        ]
        directory = grid.output_dir if results is None else results / path.stem if len(paths) > 1 else results
        studies.append(_Study(path, grid, tuple(runs), directory))
    for place in ([study.directory for study in studies], [grid.output_dir for grid in grids]):
        for index, one in enumerate(place):
            if one in place[:index]:
                twin = paths[place.index(one)]
                raise ValueError(
                    f"{twin} and {paths[index]} write into one directory, {one}: give one another output_dir"
                )
    return studies


def _check_devices(runs: Sequence[Run], jobs: int, devices: Sequence[str]) -> None:
    needed = jobs * max(run.num_processes for run in runs)
    if jobs > 1 and devices and needed > len(devices):
        most = max(1, jobs * len(devices) // needed)
        raise ValueError(
            f"--jobs {jobs}: runs side by side take {needed} GPUs, there are {len(devices)}; take --jobs {most}"
        )
