"""Attempts of a run, in attempts.jsonl of its directory, and whether another one is worthwhile.

    {"attempt": 2, "began": 1700000000.0, "job": "17", "completed_steps": 7}
    {"attempt": 2, "alert": {"node": "node3", "metric": "cpu_throttled", ...}, "job": "17", "excluded": "node3"}
    {"attempt": 2, "ended": 1700003600.0, "reason": "stopped by a signal", "exit_code": 75}

Rank 0 writes the first and last line of an attempt, the node watch the alerts in between. An attempt without a last
line failed or was killed; the run is started again as long as attempts make progress: more train steps on record than
before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.watch.failure import EXIT_CODE, clear_failures, first_line, read_failure

ATTEMPTS = "attempts.jsonl"
STOPPED_BY_SIGNAL = "stopped by a signal"
_NODE_CAUSES = ("node lost", "link lost", "not started", "file system hung")
_CLOCK_S = 2.0  # the kernel's start time of a process and the clock may differ by this


@dataclass(frozen=True)
class Verdict:
    """The end of the last attempt. exit_code: 0 finished, 75 worth starting again, any other a failure that would
    repeat."""

    exit_code: int
    reason: str
    cause: str = ""  # of a recorded failure, as in failure.json

    @property
    def leaves_nodes_healthy(self) -> bool:
        """True if another attempt may start on the same nodes, next to servers left running there."""
        return self.exit_code == EXIT_CODE and not self.was_stopped and self.cause not in _NODE_CAUSES

    @property
    def was_stopped(self) -> bool:
        """True if a signal ended the attempt in an orderly way."""
        return self.reason == STOPPED_BY_SIGNAL


def exit_code_at(reason: str) -> int:
    """Return the exit code of a run whose loop ended for `reason`."""
    return EXIT_CODE if reason == STOPPED_BY_SIGNAL else 0


def begin_attempt(run_directory: Path, started: float, job: str) -> int:
    """Note that an attempt begins, in the batch job `job` or "", forget earlier failures, and return its number, from 1.

    Rank 0 calls it before the records of steps change. started: when its process started, in seconds since 1970; the
    record of a failure since then belongs to this attempt and stays.
    """
    clear_failures(run_directory, before=started)
    number, steps = _newest_begin(run_directory).get("attempt", 0) + 1, completed_steps(run_directory)
    _append(run_directory, {"attempt": number, "began": time.time(), "job": job, "completed_steps": steps})
    return number


def record_end(run_directory: Path, reason: str) -> None:
    """Note that the attempt under way ended for `reason`, in an orderly way. Rank 0 calls it."""
    attempt = _newest_begin(run_directory).get("attempt", 1)
    end = {"attempt": attempt, "ended": time.time(), "reason": reason, "exit_code": exit_code_at(reason)}
    _append(run_directory, end)


def record_alert(run_directory: Path, attempt: int, alert: Mapping[str, Any], excluded: str) -> None:
    """Note an alert of the watch over the nodes; `excluded`: the node that the next attempt of the job is to leave out, or ""."""
    job = _newest_begin(run_directory).get("job", "")
    _append(run_directory, {"attempt": attempt, "alert": dict(alert), "job": job, "excluded": excluded})


def _newest_begin(run_directory: Path) -> dict[str, Any]:
    """Return the first line of the newest attempt, {} before the first."""
    return next((record for record in _records(run_directory / ATTEMPTS) if "began" in record), {})


def excluded_nodes(run_directory: Path, job: str) -> list[str]:
    """Return the host names that attempts of the batch job `job` are to leave out."""
    records = _records(run_directory / ATTEMPTS)
    return sorted({record["excluded"] for record in records if record.get("excluded") and record["job"] == job})


def completed_steps(run_directory: Path) -> int:
    """Return the newest train step in the run's metrics, 0 before the first."""
    newest = next(_records(run_directory / "metrics.jsonl"), {})
    return newest.get("train_step", 0)


def is_finished(run_directory: Path, config: Mapping[str, Any], checkpoint_dir: Path) -> bool:
    """Return True if the last attempt finished a run of this configuration and its final output is still there.

    config: every value as JSON, as in the run's config.json.
    """
    newest = next(_records(run_directory / ATTEMPTS), {})
    is_whole = (run_directory / "summary.json").is_file() and (run_directory / "config.json").is_file()
    if newest.get("exit_code") != 0 or not is_whole:
        return False
    was = json.loads((run_directory / "config.json").read_text(encoding="utf-8"))["config"]
    return was == config and (checkpoint_dir / f"step_{completed_steps(run_directory):06d}").is_dir()


def require_new_run(run_directory: Path, checkpoint_dir: Path, interval: int) -> None:
    """Raise FileNotFoundError if the run's records say that it saved checkpoints and there is none.

    The caller found none and is about to start from the initial policy. Attempts that ended by themselves or by a
    signal saved at their end, others every `interval` train steps (0: never). A run that was killed before its first
    checkpoint starts anew.
    """
    steps, records = completed_steps(run_directory), list(_records(run_directory / ATTEMPTS))
    # Fewer steps than an attempt found when it began: it started anew, and what ended before it says nothing.
    is_same_run = steps >= max((record.get("completed_steps", 0) for record in records), default=0)
    has_ended = is_same_run and any("ended" in record for record in records)
    # A step's row is written before its checkpoint, which is written before the next row.
    if not steps or not (has_ended or 0 < interval < steps):
        return
    state = "holds no checkpoint" if checkpoint_dir.is_dir() else "is not there (not mounted?)"
    raise FileNotFoundError(
        f'checkpoint.resume = "auto": {run_directory} records {steps} train steps, but {checkpoint_dir} {state}; mount or '
        'restore it and start again, or set checkpoint.resume = "never" (or another run.output_dir) to start from step 0'
    )


def verdict(run_directory: Path, job: str, since: float, max_fruitless: int) -> Verdict | None:
    """Judge the last attempt that began after `since`, in seconds since 1970; None if none did.

    After `max_fruitless` attempts in a row without progress the run has failed, whatever ended them. Attempts of the
    batch job `job` count; outside one ("") those since `since`.
    """
    records = list(_records(run_directory / ATTEMPTS))[::-1]
    begun = [record for record in records if "began" in record and record["job"] == job]
    recent = [record for record in begun if record["began"] >= since - _CLOCK_S]
    if not recent:
        return None
    end = _end(run_directory, records, recent[-1]["attempt"])
    if end.exit_code != EXIT_CODE:
        return end
    # Steps on record when each attempt began, then what the last one left: progress is more than ever before.
    steps = [record["completed_steps"] for record in (begun if job else recent)] + [completed_steps(run_directory)]
    progress = [index for index in range(1, len(steps)) if steps[index] > max(steps[:index])]
    fruitless = len(steps) - 1 - max(progress, default=0)
    if fruitless < max_fruitless:
        return end
    return Verdict(
        1,
        f"{fruitless} attempts in a row completed no train step beyond step {max(steps)} (run.max_fruitless_attempts is "
        f"{max_fruitless}); the last one: {end.reason}",
    )


def _end(run_directory: Path, records: list[dict[str, Any]], attempt: int) -> Verdict:
    """Return how an attempt ended: from its last line, or the recorded failure; otherwise it counts as killed."""
    ended = [record for record in records if record.get("attempt") == attempt and "ended" in record]
    if ended:
        return Verdict(ended[-1]["exit_code"], ended[-1]["reason"])
    failure = read_failure(run_directory)
    if failure is not None and failure.attempt == attempt:
        return Verdict(failure.exit_code, first_line(failure), failure.cause)
    return Verdict(EXIT_CODE, "killed: no process left a record of its end")


def _append(run_directory: Path, record: dict[str, Any]) -> None:
    run_directory.mkdir(parents=True, exist_ok=True)
    with open(run_directory / ATTEMPTS, "a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps(record) + "\n")  # starts on a new line, in case a kill cut the last one short


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a JSONL file, newest first; a kill may have cut one short."""
    for line in reversed(path.read_bytes().splitlines() if path.is_file() else ()):
        with suppress(ValueError):
            yield json.loads(line)
