"""What torchrun (or srun) starts: one process of a run. `python -m megatron_dapo.launch.worker RECIPE [--set a.b=c]...`"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.launch.environment import ProcessEnvironment, prepare_rendezvous, process_environment
from megatron_dapo.launch.local import worker_pid_file


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The recipe and the overrides, as `megatron-dapo train` passes them on."""
    parser = argparse.ArgumentParser(prog="megatron_dapo.launch.worker")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs this process's part of a training run and returns its exit code."""
    parsed = parse_arguments(arguments)
    process = process_environment()
    prepare_rendezvous(process)
    _configure_logging(process)
    # Heavy imports come after the arguments are known to be right.
    from megatron_dapo.config.loader import load_config
    from megatron_dapo.recovery.failure import failure_of, record_failure

    loaded = load_config(parsed.recipe, parsed.overrides)
    run_folder = loaded.config.run.folder
    _write_pid(run_folder, process.rank)
    try:
        from megatron_dapo.trainer.run import run_training

        run_training(loaded, process.rank, process.world_size)
    except Exception as error:
        record_failure(run_folder, failure_of(process.rank, error))
        logging.getLogger(__name__).exception("rank %d failed", process.rank)
        # Other ranks may wait in a collective: leaving without the destructors of process groups lets the launcher end them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return 0


def _configure_logging(process: ProcessEnvironment) -> None:
    level = logging.INFO if process.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"[rank {process.rank}] %(levelname)s %(name)s: %(message)s")
    for name in ("megatron", "transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _write_pid(run_folder: Path, rank: int) -> None:
    file = worker_pid_file(run_folder, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(os.getpid()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
