"""Attempts of a run, in attempts.jsonl of its directory, and whether another one is worthwhile.

    {"launched": 1699999960.0, "job": "17"}
    {"attempt": 2, "began": 1700000000.0, "job": "17", "completed_steps": 7}
    {"attempt": 2, "alert": {"node": "node3", "metric": "cpu_throttled", ...}, "job": "17", "excluded": "node3"}
    {"attempt": 2, "ended": 1700003600.0, "reason": "stopped by a signal", "exit_code": 75}

What starts the workers (a batch script, `megatron-dapo train`) writes the line of a launch. Rank 0 writes the first and
last line of an attempt, the node watch the alerts in between. An attempt without a last line failed or was killed; the
run is started again as long as attempts make progress: more train steps on record than before. Attempts are found by
their numbers, never by a clock.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.watch.failure import EXIT_CODE, Failure, clear_failures, first_line, read_failure, write_failures

ATTEMPTS = "attempts.jsonl"
STOPPED_BY_SIGNAL = "stopped by a signal"
_NODE_CAUSES = ("node lost", "link lost", "path lost", "no address", "not started", "file system lost", "file system hung")
_CLOCK_S = 2.0  # the kernel's start time of a process and the clock may differ by this
_UNSTARTED = "the workers ended before the attempt was on record: the lines above name the first that did"


@dataclass(frozen=True)
class Verdict:
    """The end of the last attempt. exit_code: 0 finished, 75 worth starting again, any other a failure that would
    repeat."""

    exit_code: int
    reason: str
    cause: str = ""  # the cause in failure.json

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


def begin_launch(run_directory: Path, job: str, is_restarted: bool = False, mode: int = 0o600) -> int:
    """Note that attempts are about to start in the batch job `job` or "", and return the number of the first one.

    is_restarted: the job was launched here before. Raises FileNotFoundError if the directory knows nothing of that: it is not the
    one that the job began with, and a new run must not begin in its place. mode: of the file, if it is new.
    """
    if is_restarted and not is_launched(run_directory, job):
        raise FileNotFoundError(
            f"job {job} has been started before, and {run_directory / ATTEMPTS} does not know of it: the directory is not "
            f"mounted on {socket.gethostname()}, or was removed. Mount it and submit the job again"
        )
    run_directory.mkdir(parents=True, exist_ok=True)
    os.close(os.open(run_directory / ATTEMPTS, os.O_WRONLY | os.O_CREAT, mode))
    _append(run_directory, {"launched": time.time(), "job": job})
    return next_attempt(run_directory)


def is_launched(run_directory: Path, job: str) -> bool:
    """Return True if anything of the batch job `job` is on record."""
    return any(record.get("job") == job for record in _records(run_directory / ATTEMPTS))


def next_attempt(run_directory: Path) -> int:
    """Return the number of the attempt that begins next, from 1."""
    return _newest_begin(run_directory).get("attempt", 0) + 1


def begin_attempt(run_directory: Path, attempt: int, job: str) -> None:
    """Note that an attempt begins, in the batch job `job` or "", and forget the failures of others.

    Rank 0 calls it before the records of steps change.
    """
    failure = read_failure(run_directory)
    clear_failures(run_directory, keep=attempt)
    begin = {"attempt": attempt, "began": time.time(), "job": job, "completed_steps": completed_steps(run_directory)}
    if failure is not None and failure.attempt == attempt - 1:
        begin["after"] = {"node": failure.node, "cause": failure.cause}  # the previous attempt
    _append(run_directory, begin)


def record_unstarted(run_directory: Path, job: str) -> None:
    """Note an attempt whose workers ended before rank 0 could: it counts among those without progress."""
    attempt = next_attempt(run_directory)
    begin_attempt(run_directory, attempt, job)
    end = {"attempt": attempt, "ended": time.time(), "reason": _UNSTARTED, "exit_code": EXIT_CODE}
    _append(run_directory, end)
    failure = Failure(-1, "not started", _UNSTARTED, f"job {job}", "start", attempt=attempt)
    write_failures(run_directory, [failure], "launcher")


def first_attempt_since(run_directory: Path, since: float) -> int:
    """Return the number of the first attempt that began after `since`, in seconds since 1970, by the clock that noted it."""
    numbers = [
        record["attempt"]
        for record in _records(run_directory / ATTEMPTS)
        if record.get("began", 0.0) >= since - _CLOCK_S
    ]
    return min(numbers, default=next_attempt(run_directory))


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


def failing_node(run_directory: Path, job: str, limit: int) -> str:
    """Return the node on which the last `limit` attempts of a batch job failed without a new train step; "" if there is none."""
    failure = read_failure(run_directory)
    if failure is None or limit == 0 or not _is_host(failure.node):
        return ""
    num_failures, steps = 1, completed_steps(run_directory)
    for record in _records(run_directory / ATTEMPTS):
        if "began" not in record or record["job"] != job:
            continue
        # What an attempt found when it began, and how the one before it ended.
        if num_failures >= limit or record["completed_steps"] < steps or record.get("after", {}).get("node") != failure.node:
            break
        num_failures += 1
    return failure.node if num_failures >= limit else ""


def _is_host(name: str) -> bool:
    return bool(name) and " " not in name  # " and ": a pair, of which either may be at fault


def completed_steps(run_directory: Path) -> int:
    """Return the newest train step in the run's metrics, 0 before the first."""
    newest = next(_records(run_directory / "metrics.jsonl"), {})
    return newest.get("train_step", 0)


def is_finished(run_directory: Path, config: Mapping[str, Any], checkpoint_dir: Path) -> bool:
    """Return True if the last attempt finished a run of this configuration and its final output is still there.

    config: every value as JSON, as in the run's config.json.
    """
    newest = next((record for record in _records(run_directory / ATTEMPTS) if "attempt" in record), {})
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


def verdict(run_directory: Path, job: str, first: int, max_fruitless: int) -> Verdict | None:
    """Judge the last attempt of this launch, whose attempts have the number `first` and later; None if none began.

    After `max_fruitless` attempts in a row without progress the run has failed, whatever ended them. Attempts of the
    batch job `job` count; outside one ("") those of this launch.
    """
    records = list(_records(run_directory / ATTEMPTS))[::-1]
    begun = [record for record in records if "began" in record and record["job"] == job]
    recent = [record for record in begun if record["attempt"] >= first]
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
