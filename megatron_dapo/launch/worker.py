"""One process of a run, started by torchrun or srun: python -m megatron_dapo.launch.worker RECIPE [--set a.b=c]..."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dapo.launch.environment import (
    ProcessEnvironment,
    place_in_run,
    prepare_rendezvous,
    process_environment,
    raise_open_files_limit,
    rendezvous_host,
)
from megatron_dapo.launch.lifetime import end_with_parent, hold_directory
from megatron_dapo.launch.local import write_worker_pid
from megatron_dapo.recovery.heartbeat import Heartbeat

_STARTED = time.time()  # seconds since 1970; near the start of the process, before heavy imports


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the recipe and the overrides, as `megatron-dapo train` passes them on."""
    parser = argparse.ArgumentParser(prog="megatron_dapo.launch.worker")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    parser.add_argument("--replay", type=Path, help="directory of a dumped rollout batch: train only on it")
    parser.add_argument(
        "--pretrain-value",
        nargs="?",
        const="",
        metavar="DIR",
        help="train only the critic, on returns of the unchanged policy; DIR: where it writes, run.output_dir/value_pretraining if not given",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run this process of a training run and return its exit code."""
    end_with_parent(signal.SIGTERM)()
    parsed = parse_arguments(arguments)
    process = process_environment()
    prepare_rendezvous(process)
    raise_open_files_limit()
    _configure_logging(process)
    heartbeat = Heartbeat(process.rank)
    # From here on a hang, a crash and an error of this process are noticed, imports included.
    heartbeat.connect(place_in_run(process))
    try:
        _run(parsed, process, heartbeat)
    except Exception as error:
        code = heartbeat.fail(error)
        # Other ranks may wait in a collective: leaving without the destructors of process groups lets the launcher end
        # them.
        os._exit(code)
    heartbeat.close(is_complete=True)
    return 0


def _run(parsed: argparse.Namespace, process: ProcessEnvironment, heartbeat: Heartbeat) -> None:
    # Heavy imports come after the arguments are known to be right.
    from megatron_dapo.config.loader import load_config
    from megatron_dapo.config.schema import pretraining_config
    from megatron_dapo.parallel.coordination import collective_timeout
    from megatron_dapo.parallel.store import open_store, restrict_stores
    from megatron_dapo.recovery.failure import begin_attempt

    loaded = load_config(parsed.recipe, parsed.overrides)
    if parsed.pretrain_value is not None:
        target = Path(parsed.pretrain_value) if parsed.pretrain_value else None
        loaded = replace(loaded, config=pretraining_config(loaded.config, target))
    output_dir = loaded.config.run.output_dir
    restrict_stores(process.num_nodes)
    store = open_store(collective_timeout(loaded.config.run.wait_timeout_seconds))
    # Held until the process ends: a second run must not write into the same directory, not even why it failed.
    lock = hold_directory(output_dir, process.rank, store, loaded.config.run.group_readable)
    heartbeat.describe(output_dir, begin_attempt(output_dir, _STARTED) if process.rank == 0 else None)
    write_worker_pid(output_dir, process.rank)
    _use_own_device(process)
    if parsed.replay is not None:
        from megatron_dapo.trainer.replay import run_replay

        with heartbeat.phase("replay"):
            run_replay(loaded, parsed.replay, process.rank, process.world_size)
    elif parsed.pretrain_value is not None:
        from megatron_dapo.trainer.value_pretraining import run_value_pretraining

        run_value_pretraining(loaded, process.rank, process.world_size, rendezvous_host(), process.num_nodes, heartbeat)
    else:
        from megatron_dapo.trainer.run import run_training

        run_training(loaded, process.rank, process.world_size, rendezvous_host(), process.num_nodes, heartbeat)
    if lock is not None:
        lock.release()


def _use_own_device(process: ProcessEnvironment) -> None:
    """Give every process of a node its own GPU. Under a launcher that shows a process only its own one, that is GPU 0."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(process.local_rank % torch.cuda.device_count())


def _configure_logging(process: ProcessEnvironment) -> None:
    level = logging.INFO if process.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"[rank {process.rank}] %(levelname)s %(name)s: %(message)s")
    for name in ("megatron", "transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # megatron-core warns once a module that Transformer Engine and apex are absent; the layer specification's log line
    # says it once.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core|torch\.autograd")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
