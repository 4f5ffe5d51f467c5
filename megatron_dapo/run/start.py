"""Start of a run on this machine and its end: the summary is left in its directory, or the first root cause is returned."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.checkpoints.disk_space import checkpoint_space
from megatron_dapo.launch.environment import batch_job
from megatron_dapo.launch.lifetime import require_unused
from megatron_dapo.launch.local import launch_workers
from megatron_dapo.run.plan import Plan
from megatron_dapo.watch.attempts import begin_launch, is_finished, verdict
from megatron_dapo.watch.failure import EXIT_CODE, clear_failures, first_line, read_failure

WORKER = "megatron_dapo.run.worker"


@dataclass(frozen=True)
class RunEnd:
    """The end of the processes of a run."""

    exit_code: int  # 0: finished
    reason: str = ""  # one line; "" if it finished
    is_printed: bool = False  # the reason is the last line that the processes have printed


def run_to_end(
    plan: Plan, arguments: Sequence[str] = (), restarts: int = 0, others: Sequence[Plan] = ()
) -> RunEnd | None:
    """Run a plan and return its end; None if it is finished already. Its summary is then in summary.json.

    `arguments`: further ones of the worker. `others`: runs in the same processes, on the same base weights. ConfigError if checkpoints do not fit the disk, RuntimeError if another run uses
    the same directory.
    """
    configs = [each.loaded.config for each in (plan, *others)]
    for each in configs:
        require_unused(each.run.output_dir)
    if all(is_finished(each.run.output_dir, each.model_dump(mode="json"), each.checkpoint_dir) for each in configs):
        return None
    for each in configs:
        checkpoint_space(each, plan.architecture).require()
        (each.run.output_dir / "summary.json").unlink(missing_ok=True)  # a run that ends without one would show its predecessor's
    more = [part for each in others for part in ("--with", str(each.recipe), *each.overrides)]
    return run_workers(plan, (*arguments, *more), restarts)


def run_workers(plan: Plan, arguments: Sequence[str] = (), restarts: int = 0) -> RunEnd:
    """Start the workers of a plan, wait, and return their end. RuntimeError if another run uses the same directory.

    `arguments`: further ones of the worker. After a failure all are started again, `restarts` times at most.
    """
    config = plan.loaded.config
    directory = config.run.output_dir
    require_unused(directory)
    clear_failures(directory)
    given = [part for override in plan.overrides for part in ("--set", override)]
    job = batch_job()
    attempt = begin_launch(directory, job, mode=0o640 if config.run.group_readable else 0o600)
    worker_arguments = [str(plan.recipe), *given, *arguments]
    code = launch_workers(WORKER, worker_arguments, plan.num_processes, directory, restarts, attempt)
    if (failure := read_failure(directory)) is not None:
        # The watcher prints the line when it decides. Other ranks may print the consequences after it.
        return RunEnd(failure.exit_code, first_line(failure), is_printed=plan.num_processes == 1)
    if code == 0:
        return RunEnd(0)
    # torchrun's own code says only that a worker ended otherwise than with 0.
    last = verdict(directory, job, attempt, config.run.max_fruitless_attempts)
    if last is None or not last.was_stopped:
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            name = signal.Signals(code - 128).name
            return RunEnd(EXIT_CODE, f"stopped by a signal ({name}) before training began; the same command starts it")
        words = "and none could report why: see what they printed above"
        return RunEnd(code, f"error: the processes of the run ended with exit code {code}, {words}")
    return RunEnd(last.exit_code, f"{last.reason}; the same command continues the run (exit code {last.exit_code})")
