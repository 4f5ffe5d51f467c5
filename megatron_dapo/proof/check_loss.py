"""`megatron-dapo check-loss`: the gradient of the token loss under every layout, cut, packing and aggregation, against
a plain model.

The command starts its processes, unless it runs under torchrun or srun: then the launcher's ranks are the world, and
rank 0 prints. With CUDA each process takes one device (NCCL), otherwise the CPU (gloo).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from megatron_dapo.launch.environment import process_environment
from megatron_dapo.launch.local import launch_workers
from megatron_dapo.proof.report import TOLERANCES, CheckLossReport, LossCheckRow, print_report

WORKER = "megatron_dapo.proof.check_loss"


def run_check_loss(num_processes: int = 4, *, model: str | None = None, dtype: str = "float32") -> CheckLossReport:
    """Check on `num_processes` local processes, or on the processes of the launcher, all of which call it.

    model: a Hugging Face directory, None for a small random model. Raises ValueError for settings that make no sense
    and RuntimeError if a process fails (its own output says why).
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"check-loss: dtype {dtype!r} is unknown; choose one of {', '.join(TOLERANCES)}")
    if num_processes < 1:
        raise ValueError(f"check-loss: {num_processes} processes; at least 1 is needed")
    if model is not None and not (Path(model) / "config.json").is_file():
        raise ValueError(f"check-loss: {model} holds no config.json; give a Hugging Face model directory")
    directory = str(Path(model).resolve()) if model else ""
    start = time.monotonic()
    # More than one: torchrun or srun has started this process as a rank.
    launched = process_environment().world_size
    if launched > 1:
        # Imported here: only processes that compute load megatron-core.
        from megatron_dapo.proof.worker import join_and_check

        result = join_and_check(directory, dtype)
    else:
        result = _start_and_check(directory, dtype, num_processes)
    return CheckLossReport(
        num_processes=launched if launched > 1 else num_processes,
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        rows=tuple(LossCheckRow(**row) for row in result["rows"]),
        skipped=tuple(result["skipped"]),
        seconds=time.monotonic() - start,
    )


def _start_and_check(model: str, dtype: str, num_processes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="check-loss-") as name:
        directory = Path(name)
        result_file = directory / "result.json"
        arguments = [str(result_file), dtype, *([model] if model else [])]
        code = launch_workers(WORKER, arguments, num_processes, directory)
        if code or not result_file.exists():
            raise RuntimeError(f"check-loss: a process failed (exit code {code}); its output above says why")
        return json.loads(result_file.read_text())


def check_loss(
    num_processes: int = 4, json_output: bool = False, model: str | None = None, dtype: str = "float32"
) -> int:
    """Run the check and print a table or one JSON object. Returns exit code 0 within the tolerance, 1 above it, 2 if the
    check could not run."""
    try:
        report = run_check_loss(num_processes, model=model, dtype=dtype)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if process_environment().rank == 0:
        if json_output:
            print(json.dumps(report.to_json()))
        else:
            print_report(report)
    return 0 if report.passed else 1


def _run_worker(result_file: str, dtype: str, model: str = "") -> None:
    # Standard output belongs to the one object that the command prints.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # megatron-core warns in every process about each optional package that is not installed.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # torch renames collectives that older versions have only under the old name.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    from megatron_dapo.proof.worker import run_worker

    run_worker(result_file, model, dtype)


if __name__ == "__main__":
    _run_worker(*sys.argv[1:])
