"""Exact resume: a run that is killed at a random moment and restarted equals the run that was never killed.

    reference     a run to its end, which also measures its duration
    every point   the same run, killed (kill -9 of the launcher, torchrun and every worker) at a moment drawn uniformly
                  from that duration after start-up; restarted until it ends; compared byte for byte
    aimed points  in addition: kills within milliseconds of the first byte of a checkpoint

The runs are those of `megatron-dapo train`, in separate processes. The phase of a kill comes from the stacks that
the workers write on SIGUSR1 an instant before.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megatron_dapo.launch.local import worker_pid_file
from megatron_dapo.trainer.checkpointing import RESUMED
from tools.resume_proof.compare_runs import checkpoint_steps, moved_differences, run_differences
from tools.resume_proof.moved_state import moved_state_differences

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.002
STACK_S = 0.004  # The workers write their stacks before they are killed.
ORPHAN_S = 20.0  # limit for verifier processes to notice that their worker is gone
MAX_LATE = 5  # kills that came after the end, drawn again

SAVING_S = 0.03  # an aimed kill comes within this time of the first byte of a checkpoint

Say = Callable[[str], None]
# Given the directory of a run that has started, returns a condition that is true when it is time to kill.
Moment = Callable[[Path], Callable[[], bool]]


@dataclass(frozen=True)
class ResumeProofSettings:
    """Settings of one proof. `overrides` change the recipe like `--set`; the runs are made in `directory`."""

    recipe: Path
    layout: str
    directory: Path
    overrides: tuple[str, ...] = ()
    num_points: int = 20
    num_aimed: int = 0  # kills during checkpoint writes, in addition
    seed: int = 0
    run_timeout_s: float = 600.0
    to_layout: str = ""  # the killed run goes on in this layout, if there is one; see `compare_runs.moved_differences`


@dataclass(frozen=True)
class KillPoint:
    """One kill and its outcome. `difference` is the first one from the reference, "" for none."""

    aim: str  # the drawn moment
    phase: str
    trained_steps: int  # steps on record at the kill
    checkpoints: tuple[str, ...]  # directories at the kill, unfinished ones included
    resumed_from: str  # the checkpoint; "": it began anew
    episodes_continued: int  # unfinished episodes with turns in that checkpoint
    difference: str
    wall_seconds: float  # the point's


@dataclass(frozen=True)
class ResumeProofReport:
    """Report of `tools/prove_resume.py --json`."""

    layout: str
    points: int
    equal: int
    first_difference: str | None
    phases: Mapping[str, int]  # number of kills by phase
    restarts_from_a_checkpoint: int
    checkpoints_with_carried_groups: int  # the reference's: groups in the buffer, or unfinished windows
    episodes_continued: int  # unfinished episodes with turns in the checkpoints from which runs were resumed
    train_steps: int
    start_up_seconds: float  # the reference's
    run_seconds: float  # the reference's, start-up excluded
    seconds: float  # the whole proof's
    kills: Sequence[KillPoint]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable object."""
        return asdict(self)


class RunProcess:
    """One `megatron-dapo train` process and its children."""

    def __init__(
        self, settings: ResumeProofSettings, directory: Path, extra: Sequence[str] = (), options: Sequence[str] = ()
    ) -> None:
        """`extra`: further overrides; `options`: of the command."""
        self.directory = directory
        self.log = directory.with_suffix(".log")
        sets = [part for override in (*settings.overrides, *extra) for part in ("--set", override)]
        command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(settings.recipe)]
        command += ["--layout", settings.layout, "--output-dir", str(directory), *sets, *options]
        path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.start = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self._timeout_s = settings.run_timeout_s

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait; return False if the process ended before the condition held."""
        while not condition():
            if self.process.poll() is not None:
                return condition()
            self._check_time()
            time.sleep(POLL_S)
        return True

    def is_past_start_up(self) -> bool:
        """Return True once the first metrics are on record."""
        return (self.directory / "metrics.jsonl").is_file()

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        self.wait_until(lambda: False)
        return int(self.process.wait())

    def family(self) -> list[psutil.Process]:
        """Return the launcher, torchrun, workers and verifiers."""
        try:
            launcher = psutil.Process(self.process.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def worker_pids(self) -> list[int]:
        """Return the process ids of rank 0, rank 1, ..."""
        files = itertools.takewhile(Path.is_file, (worker_pid_file(self.directory, rank) for rank in itertools.count()))
        return [int(file.read_text()) for file in files]

    def kill(self) -> list[psutil.Process]:
        """Send SIGKILL to the launcher, torchrun and every worker; return the processes that outlive it by ORPHAN_S."""
        family, workers = self.family(), self.worker_pids()
        for pid in workers:
            _signal(pid, signal.SIGUSR1)
        time.sleep(STACK_S)
        # Launcher and torchrun go first, so that neither reacts to the death of a worker.
        torchrun = [process.pid for process in family[1:] if process.pid not in workers and _is_torchrun(process)]
        for pid in (self.process.pid, *torchrun, *workers):
            _signal(pid, signal.SIGKILL)
        self.process.wait()
        _, left = psutil.wait_procs(family, timeout=ORPHAN_S)
        # A zombie is dead; on a busy node init may take a while to reap it.
        return [process for process in left if not _is_zombie(process)]

    def exit_reason(self) -> str:
        """Return the last line of the log."""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def _check_time(self) -> None:
        if time.monotonic() - self.start > self._timeout_s:
            left = self.kill()
            raise TimeoutError(f"{self.directory} did not end in {self._timeout_s} s (left: {left}); see {self.log}")


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:  # it ended by itself
        pass


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_torchrun(process: psutil.Process) -> bool:
    try:
        return "megatron_dapo.launch.torchrun" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


# Phase of a stack: the first row with one of its functions on it, or for no function with any of its file. Innermost work
# comes first, because every stack has the loop on it.
PHASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("checkpoint begin", "checkpoints/save.py", ("start",)),
    ("checkpoint copy", "checkpoints/save.py", ("copy", "wait_for_copy")),
    ("checkpoint commit", "checkpoints/save.py", ("finish",)),
    ("collection", "checkpoints/store.py", ("save_checkpoint",)),
    ("export", "trainer/run.py", ("export", "export_critic")),
    ("optimizer step", "megatron/optimizer.py", ("guarded_step",)),
    ("forward and backward", "trainer/updater.py", ("step",)),
    ("old log-probs", "trainer/actor_learner.py", ("_behavior_terms",)),
    ("values", "trainer/critic_learner.py", ("values",)),
    ("evaluation", "trainer/loop.py", ("_evaluate",)),
    ("scoring", "rollout/scoring.py", ("score",)),
    ("generation", "trainer/rollout.py", ("generate",)),
    ("weight sync", "trainer/loop.py", ("_update_weights",)),
    ("recording", "trainer/recorder.py", ()),
    ("loop", "trainer/loop.py", ()),
)
START_OR_END = "start or end"


def phase_of(stacks: str) -> str:
    """Return the phase of a worker from the stacks that faulthandler wrote."""
    frames = re.findall(r'File ".*?([^/"]+/[^/"]+)", line \d+ in (\w+)', stacks)
    for name, file, functions in PHASES:
        if any(found == file and (not functions or function in functions) for found, function in frames):
            return name
    return START_OR_END


def resumed_from(log: str) -> str:
    """Return the name of the last checkpoint that a run's log says it resumed from, "" for none."""
    return (re.findall(RESUMED.replace("%s", r"\S*/(step_\d+)"), log) or [""])[-1]


def prove_resume(settings: ResumeProofSettings, say: Say = lambda line: None) -> ResumeProofReport:
    """Run the proof. Raises RuntimeError if the reference fails and TimeoutError if a run hangs."""
    start = time.monotonic()
    settings.directory.mkdir(parents=True, exist_ok=True)
    reference, start_up, duration = make_reference(settings)
    say(f"reference: {start_up:.1f} s start-up, {duration:.1f} s run")
    length = _Length(duration)
    draw = random.Random(settings.seed)
    steps = checkpoint_steps(reference / "checkpoints")
    draws = [lambda: after_seconds(draw.uniform(0.0, length.seconds))] * settings.num_points
    draws += [lambda: while_saving(draw.choice(steps), draw.uniform(0.0, SAVING_S))] * settings.num_aimed
    kills: list[KillPoint] = []
    for index, draw_moment in enumerate(draws):
        directory = settings.directory / f"point_{index:02d}"
        kills.append(_kill_point(settings, reference, draw_moment, length, directory))
        say(f"point {index + 1}: {kills[-1]}")
    differences = [kill.difference for kill in kills if kill.difference]
    return ResumeProofReport(
        layout=f"{settings.layout} -> {settings.to_layout}" if settings.to_layout else settings.layout,
        points=len(kills),
        equal=len(kills) - len(differences),
        first_difference=differences[0] if differences else None,
        phases=dict(Counter(kill.phase for kill in kills).most_common()),
        restarts_from_a_checkpoint=sum(bool(kill.resumed_from) for kill in kills),
        checkpoints_with_carried_groups=_num_carrying(reference / "checkpoints"),
        episodes_continued=sum(kill.episodes_continued for kill in kills),
        train_steps=steps[-1],
        start_up_seconds=round(start_up, 2),
        run_seconds=round(duration, 2),
        seconds=round(time.monotonic() - start, 1),
        kills=kills,
    )


def make_reference(settings: ResumeProofSettings) -> tuple[Path, float, float]:
    """Run without interruption; return (directory, seconds of start-up, seconds from then to the summary)."""
    # All checkpoints are kept, because a point may end with any of them.
    run = RunProcess(settings, settings.directory / "reference", ["checkpoint.keep=1000"])
    run.wait_until(run.is_past_start_up)
    started = time.monotonic()
    run.wait_until((run.directory / "summary.json").is_file)
    ended = time.monotonic()
    if code := run.wait():
        raise RuntimeError(f"the uninterrupted run ended with exit code {code}: {run.exit_reason()}")
    return run.directory, started - run.start, ended - started


def after_seconds(seconds: float) -> tuple[str, Moment]:
    """Return the moment this long after start-up."""

    def arm(directory: Path) -> Callable[[], bool]:
        deadline = time.monotonic() + seconds
        return lambda: time.monotonic() >= deadline

    return f"{seconds:.3f} s after start-up", arm


def while_saving(step: int, delay: float) -> tuple[str, Moment]:
    """Return the moment `delay` seconds after the checkpoint of `step` begins."""

    def arm(directory: Path) -> Callable[[], bool]:
        unfinished = directory / "checkpoints" / f"step_{step:06d}.tmp"

        def begun() -> bool:
            if not unfinished.is_dir():
                return False
            time.sleep(delay)
            return True

        return begun

    return f"{1000 * delay:.1f} ms into checkpoint {step}", arm


@dataclass
class _Length:
    """Duration of a run after start-up, updated when a run turns out to be shorter."""

    seconds: float


@dataclass(frozen=True)
class Killed:
    """State of a run at its kill."""

    phase: str
    trained_steps: int
    checkpoints: tuple[str, ...]
    left: tuple[psutil.Process, ...]  # outlived the kill


class RunWasOver(RuntimeError):
    """The run ended before its kill, `seconds` after start-up."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the run was over {seconds:.1f} s after start-up, before its kill")
        self.seconds = seconds


def _kill_point(
    settings: ResumeProofSettings,
    reference: Path,
    draw: Callable[[], tuple[str, Moment]],
    length: _Length,
    directory: Path,
) -> KillPoint:
    start = time.monotonic()
    for attempt in range(MAX_LATE):
        aim, moment = draw()
        try:
            killed = kill_at(settings, directory, moment)
            break
        except RunWasOver as over:
            length.seconds = over.seconds
            shutil.rmtree(directory)
            if attempt == MAX_LATE - 1:
                raise
    resumed, problem = resume_and_compare(settings, reference, directory)
    orphans = f"processes outlived the kill: {killed.left}" if killed.left else ""
    wall = round(time.monotonic() - start, 1)
    continued = _num_held_episodes(reference / "checkpoints" / resumed) if resumed else 0
    point = KillPoint(
        aim, killed.phase, killed.trained_steps, killed.checkpoints, resumed, continued, orphans or problem, wall
    )
    if not point.difference:
        shutil.rmtree(directory)
    return point


def kill_at(settings: ResumeProofSettings, directory: Path, moment: Moment) -> Killed:
    """Start a run and kill it at the moment. Raises RunWasOver if it has ended by then."""
    run = RunProcess(settings, directory)
    if not run.wait_until(run.is_past_start_up):
        raise RuntimeError(f"{directory}: the run failed before it was killed: {run.exit_reason()}")
    started = time.monotonic()
    is_time, summary = moment(directory), directory / "summary.json"
    run.wait_until(lambda: is_time() or summary.is_file())
    if summary.is_file():
        seconds = time.monotonic() - started
        run.wait()
        raise RunWasOver(seconds)
    left = run.kill()
    # The watcher, one of the family, kept what the ranks wrote before their death. On a busy machine it may have noticed
    # only the death of another rank than 0 before it ended too.
    entries = json.loads((directory / "failure.json").read_text(encoding="utf-8"))["entries"]
    stacks = min(entries, key=lambda entry: (entry["rank"] < 0, entry["rank"]))["detail"]  # -1: a whole node
    metrics = (directory / "metrics.jsonl").read_bytes().count(b"\n")
    names = sorted(entry.name for entry in directory.glob("checkpoints/*"))
    return Killed(phase_of(stacks), metrics, tuple(names), tuple(left))


def resume_and_compare(settings: ResumeProofSettings, reference: Path, directory: Path) -> tuple[str, str]:
    """Restart the run until its end; return (checkpoint it resumed from or "", first difference or "")."""
    run = RunProcess(replace(settings, layout=settings.to_layout or settings.layout), directory)
    code = run.wait()
    log = run.log.read_text(encoding="utf-8", errors="replace")
    resumed = resumed_from(log)
    if code:
        return resumed, f"{directory}: the restarted run ended with exit code {code}: {run.exit_reason()}"
    if settings.to_layout:
        return resumed, next(_differences_after_move(settings, reference, directory, resumed), "")
    return resumed, next(run_differences(reference, directory), "")


def _differences_after_move(
    settings: ResumeProofSettings, reference: Path, directory: Path, resumed: str
) -> Iterator[str]:
    """Yield differences of records, and of the state that the new layout loads: of the last checkpoint if the run began anew."""
    yield from moved_differences(int(resumed.removeprefix("step_") or 0), reference, directory)
    last = f"step_{checkpoint_steps(reference / 'checkpoints')[-1]:06d}"
    moved = directory.with_name(f"{directory.name}_{settings.to_layout}")
    yield from moved_state_differences(
        settings.recipe,
        settings.overrides,
        settings.to_layout,
        reference / "checkpoints" / (resumed or last),
        moved,
        settings.run_timeout_s,
    )
    shutil.rmtree(moved)


def _num_held_episodes(checkpoint: Path) -> int:
    state = json.loads((checkpoint / "collector.json").read_text(encoding="utf-8"))
    held = [one for group in state.get("open_groups", ()) for one in group["completions"].values()]
    return sum(one["finish_reason"] == "abort" and bool((one.get("episode") or {}).get("turns")) for one in held)


def _num_carrying(checkpoints: Path) -> int:
    """Count the checkpoints with groups to train later, or with unfinished responses."""
    states = [json.loads(file.read_text(encoding="utf-8")) for file in checkpoints.glob("step_*/collector.json")]
    return sum(bool(state["pool"] if "pool" in state else state["buffer"]["groups"]) for state in states)
