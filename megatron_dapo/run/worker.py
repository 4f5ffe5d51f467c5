"""One process of a run, started by torchrun or srun: python -m megatron_dapo.run.worker RECIPE [--set a.b=c]..."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.affinity import bind, cpus_near
from megatron_dapo.files.linux import signal_at_parents_death
from megatron_dapo.imports import heavy_imports
from megatron_dapo.launch.environment import (
    ATTEMPT,
    SERVERS_ARE_KEPT,
    ProcessEnvironment,
    batch_job,
    is_requeued,
    is_restarted,
    job_end_time,
    keep_nccl_on_loopback,
    launch_attempt,
    leave_compiler_out,
    place_in_run,
    prepare_rendezvous,
    process_environment,
    raise_open_files_limit,
    rendezvous_host,
    rendezvous_port,
    rendezvous_problem,
    supervision,
    use_expandable_segments,
)
from megatron_dapo.launch.lifetime import DirectoryInUse, DirectoryLock, end_of_launch, hold_directory, require_unused, restrict_files
from megatron_dapo.launch.local import write_worker_pid
from megatron_dapo.telemetry.terminal import configure_logging, end_status, show_status
from megatron_dapo.watch.heartbeat import Heartbeat
from megatron_dapo.watch.verdict import WatchLimits

if TYPE_CHECKING:
    from megatron_dapo.config.loader import LoadedConfig
    from megatron_dapo.config.schema import RunConfig
    from megatron_dapo.watch.attempts import Verdict


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the recipe and the overrides, as `megatron-dapo train` passes them on."""
    parser = argparse.ArgumentParser(prog="megatron_dapo.run.worker")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    parser.add_argument(
        "--with",
        dest="others",
        action="append",
        nargs="+",
        default=[],
        metavar=("RECIPE", "a.b=value"),
        help="train this recipe, with these overrides, in the same processes: its adapters share the base weights of the first recipe's",
    )
    parser.add_argument("--verbose", action="store_true", help="log how the run is built, too")
    parser.add_argument("--replay", type=Path, help="directory of a dumped rollout batch: train only on it")
    parser.add_argument(
        "--pretrain-value",
        nargs="?",
        const="",
        metavar="DIR",
        help="train only the critic, on returns of the unchanged policy; DIR: where it writes, run.output_dir/value_pretraining if not given",
    )
    parser.add_argument(
        "--sft",
        nargs="?",
        const="",
        metavar="DIR",
        help="learn given responses by maximum likelihood; DIR: where it writes, run.output_dir/sft if not given",
    )
    parser.add_argument(
        "--begin",
        action="store_true",
        help="run nothing: note in the run directory that a batch script is about to start workers, and print the number of "
        f"the attempt that they begin, which the script exports as {ATTEMPT} and raises with each start, and a free port "
        "for MASTER_PORT",
    )
    parser.add_argument(
        "--verdict",
        type=int,
        nargs="?",
        const=0,
        metavar="ATTEMPT",
        help="run nothing; the exit code is that of the last attempt that the calling script has started, of those with the number ATTEMPT "
        "(see --begin) and later: 0 finished, 75 worth starting again, another one a failure that would repeat. Prints "
        '"trainer" if kept servers are worth waiting for the next attempt on these nodes, else "job", followed by the nodes that the '
        "next attempt is to leave out, with commas",
    )
    parser.add_argument(
        "--keep-servers",
        action="store_true",
        help="run nothing but the supervisor of this node's SGLang servers, which keeps them for the next attempt after a failure, "
        "and the keeper of checkpoints in its memory; ends at once if the recipe has neither",
    )
    return parser.parse_args(arguments)


def load_run(parsed: argparse.Namespace) -> LoadedConfig:
    """Return the configuration that the arguments name, that of value pretraining or fine-tuning if they ask for it."""
    from megatron_dapo.config.loader import load_config
    from megatron_dapo.run.derive import pretraining_config, sft_config

    loaded = load_config(parsed.recipe, parsed.overrides)
    for directory, adapted in ((parsed.pretrain_value, pretraining_config), (parsed.sft, sft_config)):
        if directory is not None:
            return replace(loaded, config=adapted(loaded.config, Path(directory) if directory else None))
    return loaded


def load_others(parsed: argparse.Namespace) -> list[LoadedConfig]:
    """Return the configurations of the recipes that --with names."""
    from megatron_dapo.config.loader import load_config

    return [load_config(Path(recipe), overrides) for recipe, *overrides in parsed.others]


def judge(loaded: LoadedConfig) -> Verdict | None:
    """Return the end of the last attempt that this process's launcher has made, None if none is on record.

    A launcher that does not say which attempts are its own is this process's parent, and the clock tells.
    """
    import psutil

    from megatron_dapo.watch.attempts import first_attempt_since, verdict

    run = loaded.config.run
    first = launch_attempt() or first_attempt_since(run.output_dir, psutil.Process(os.getppid()).create_time())
    return verdict(run.output_dir, batch_job(), first, run.max_fruitless_attempts)


def _begin(loaded: LoadedConfig) -> int:
    """Note a launch, and print what the batch script needs for it."""
    from megatron_dapo.watch.attempts import begin_launch

    run = loaded.config.run
    restrict_files(run.group_readable)
    try:
        require_unused(run.output_dir)
        attempt = begin_launch(run.output_dir, batch_job(), is_requeued())
    except (DirectoryInUse, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{attempt} {rendezvous_port()}\n")
    return 0


def _report_verdict(loaded: LoadedConfig, first: int) -> int:
    from megatron_dapo.watch.attempts import Verdict, excluded_nodes, failing_node
    from megatron_dapo.watch.failure import EXIT_CODE

    run, job = loaded.config.run, batch_job()
    restrict_files(run.group_readable)
    if first:
        end = end_of_launch(run.output_dir, job, first, run.max_fruitless_attempts)
    else:
        nothing = f"no attempt is on record in {run.output_dir}: the workers did not start"
        end = judge(loaded) or Verdict(1, nothing)
    failing = failing_node(run.output_dir, job, run.max_node_failures) if end.exit_code == EXIT_CODE else ""
    is_in_place = end.leaves_nodes_healthy and loaded.config.leaves_processes and not failing
    excluded = ",".join(sorted({*excluded_nodes(run.output_dir, job), *filter(None, [failing])}))
    sys.stdout.write(f"{'trainer' if is_in_place else 'job'} {excluded}".rstrip() + "\n")
    sys.stderr.write(f"exit code {end.exit_code}: {end.reason}\n")
    return end.exit_code


def _keep_servers(loaded: LoadedConfig, process: ProcessEnvironment) -> int:
    """Supervise this node's servers, and see to its keeper of checkpoints, for all attempts of the batch job."""
    from megatron_dapo.checkpoints.memory_copies import KeeperSettings
    from megatron_dapo.engines.sglang.supervisor import supervise

    place, config = supervision(), loaded.config
    run = config.run
    if place is None:
        raise ValueError(
            f"--keep-servers is for a batch script that exports {SERVERS_ARE_KEPT}=1: workers would not know"
        )
    restrict_files(run.group_readable)
    keeper = None
    if config.checkpoint.memory_copies != "none":
        # Here: what a step has started ends with it on most sites, and this step lasts as long as the job.
        settings = KeeperSettings.of(config.checkpoint, config.checkpoint_dir, process.num_nodes, rendezvous_host())
        keeper = settings.connect()
    if config.keeps_servers:
        supervise(place.address(run.output_dir), os.getppid(), config.sglang.keep_seconds)
    elif keeper is not None:
        keeper.wait_for_end()
    return 0


def _settled(loaded: LoadedConfig, others: Sequence[LoadedConfig]) -> int | None:
    """Return the exit code of runs that need no further attempt; None if one of them does."""
    from megatron_dapo.watch.attempts import is_finished
    from megatron_dapo.watch.failure import EXIT_CODE

    configs = [each.config for each in (loaded, *others)]
    if all(is_finished(each.run.output_dir, each.model_dump(mode="json"), each.checkpoint_dir) for each in configs):
        logging.getLogger(__name__).info("the run in %s is finished: nothing to do", loaded.config.run.output_dir)
        return 0
    # torchrun restarts after any failure, so repeatable failures and signals end the run here.
    last = judge(loaded) if is_restarted() else None
    if last is not None and (last.exit_code != EXIT_CODE or last.was_stopped):
        logging.getLogger(__name__).warning("not started again: %s", last.reason)
        return last.exit_code
    return None


def main(arguments: Sequence[str]) -> int:
    """Run this process of a training run and return its exit code."""
    signal_at_parents_death(signal.SIGTERM)()
    parsed = parse_arguments(arguments)
    process = process_environment()
    prepare_rendezvous(process)
    leave_compiler_out()
    raise_open_files_limit()
    configure_logging(process.rank, parsed.verbose)
    if parsed.begin:
        return _begin(load_run(parsed))
    if parsed.verdict is not None:
        return _report_verdict(load_run(parsed), parsed.verdict)
    if parsed.keep_servers:
        keep_nccl_on_loopback(process)
        return _keep_servers(load_run(parsed), process)
    try:
        if parsed.replay is None and (settled := _settled(load_run(parsed), load_others(parsed))) is not None:
            return settled
    except ValueError:  # The run below reports errors of the configuration.
        pass
    if process.rank == 0 and parsed.replay is None:
        show_status("loading the model, data and rewards")
    heartbeat = Heartbeat(process.rank)
    # From here on a hang, a crash and an error of this process are noticed, imports included.
    heartbeat.connect(place_in_run(process))
    try:
        code = _run(parsed, process, heartbeat)
    except Exception as error:
        end_status()
        code = heartbeat.fail(error)
        # Other ranks may wait in a collective: leaving without the destructors of process groups lets the launcher end
        # them.
        os._exit(code)
    end_status()
    heartbeat.close(is_complete=True)
    return code


def _run(parsed: argparse.Namespace, process: ProcessEnvironment, heartbeat: Heartbeat) -> int:
    loaded = load_run(parsed)
    if not loaded.config.shares_gpu_memory:
        use_expandable_segments()
    # Heavy imports come after the arguments are known to be right.
    with heavy_imports():
        from megatron_dapo.parallel.coordination import collective_timeout
        from megatron_dapo.parallel.store import open_store, restrict_stores
        from megatron_dapo.watch.attempts import begin_attempt, exit_code_at

    output_dir, others = loaded.config.run.output_dir, load_others(parsed)
    restrict_stores(process.num_nodes)
    if not loaded.config.sglang.urls:
        keep_nccl_on_loopback(process)
    if process.rank == 0 and (problem := rendezvous_problem()):
        raise RuntimeError(problem)  # another attempt may find the port free
    store, _, _ = open_store(collective_timeout(loaded.config.run.wait_timeout_seconds))
    # Held until the process ends: a second run must not write into the same directory, not even why it failed.
    launched_by = batch_job() if launch_attempt() else None
    lock, attempt = hold_directory(output_dir, process.rank, store, loaded.config.run.group_readable, launched_by)
    if process.rank == 0:
        begin_attempt(output_dir, attempt, batch_job())
    locks = [_hold_other(other.config.run.output_dir) for other in others if process.rank == 0]
    heartbeat.describe(output_dir, attempt, watch_limits(loaded.config.run))
    write_worker_pid(output_dir, process.rank)
    heartbeat.is_on_gpu = _use_own_device(process)
    reason = ""
    if parsed.replay is not None:
        from megatron_dapo.trainer.replay import run_replay

        with heartbeat.phase("replay"):
            run_replay(loaded, parsed.replay, process.rank, process.world_size)
    else:
        with heavy_imports():
            if parsed.pretrain_value is not None:
                from megatron_dapo.trainer.value_pretraining import run_value_pretraining as run
            else:
                from megatron_dapo.trainer.run import run_training as run
            from megatron_dapo.trainer.context import RunProcess

        place = process.rank, process.world_size, rendezvous_host(), process.num_nodes
        more = {"others": others} if others else {}  # only training has any
        reason = run(loaded, RunProcess(*place, heartbeat, job_end_time(), supervision()), **more)
    for each in filter(None, (lock, *locks)):
        each.release()
    return exit_code_at(reason)


def _hold_other(output_dir: Path) -> DirectoryLock:
    """Lock the directory of a run that shares the processes of another, and begin an attempt there. On rank 0."""
    from megatron_dapo.watch.attempts import begin_attempt, next_attempt

    lock = DirectoryLock(output_dir)
    begin_attempt(output_dir, next_attempt(output_dir), batch_job())
    return lock


def watch_limits(run: RunConfig) -> WatchLimits:
    """Return the watcher's limits as a run's configuration sets them."""
    return WatchLimits(
        stopped_s=run.stopped_timeout_seconds, stalled_s=run.hang_timeout_seconds, node_s=run.node_timeout_seconds
    )


def _use_own_device(process: ProcessEnvironment) -> bool:
    """Give every process of a node a separate GPU; False if there is none. A launcher may show each process only one,
    as GPU 0."""
    import torch

    if not torch.cuda.is_available():
        return False
    device = process.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    if address := pci_address(torch.cuda.get_device_properties(device)):
        bind(cpus_near(address))
    return True


def pci_address(properties: object) -> str:
    """Return a GPU's address in sysfs notation, such as "0000:1b:00.0"; "" if torch does not report it."""
    domain, bus, device = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    return "" if domain is None or bus is None or device is None else f"{domain:04x}:{bus:02x}:{device:02x}.0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
