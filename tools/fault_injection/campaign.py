"""Runs with several faults each: injects, waits for the verdict, heals, waits for progress, judges the run.

The injector's notes stay in this process's memory until the run has given its verdict: no process of the cluster can
read them.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.fault_injection import outcome
from tools.fault_injection.cells import CRASH, FAULTS, SILENCE, STOP, SURVIVED, Cell, Fault
from tools.fault_injection.cluster_run import ClusterRun, is_given_up, wait_until
from tools.fault_injection.faults import Injector
from tools.virtual_cluster import VirtualCluster

READY_S = 300.0  # limit: submission or end of an attempt to training of the next one
PHASE_S = 120.0  # limit for the start of a phase
VERDICT_S = 60.0
SLURM_S = 120.0
HOLD_S = 20.0  # seconds that a removable fault stays at most, if the run must survive it
_TYPICAL_S = {"generate": 1.0, "score": 0.7, "train": 0.4, "weight_sync": 0.05, "checkpoint": 0.05, "evaluate": 2.0}
NUM_REPLAYS = 2  # the last steps; the checkpoint before each is kept, and one may be newer
_WRITING = frozenset({"record", "checkpoint"})
MAX_SUBMITTED = 3  # jobs for one fault: the one before it may have ended its own
_VISITS = 8  # visits of a phase before a fault comes at its begin

Say = Callable[[str], None]
Append = Callable[[dict[str, Any]], None]


class RunIsStuck(RuntimeError):
    """Raised if the run did not reach the point at which the next fault could be injected."""


@dataclass
class Campaign:
    """Faults into runs of one cluster. `append` keeps records; `engine_python` runs SGLang."""

    cluster: VirtualCluster
    environment: Mapping[str, str]
    directory: Path
    disk: Path
    engine_python: Path
    append: Append
    say: Say
    seed: int = 0
    deadline: float = float("inf")  # time.monotonic; no fault is injected later
    _num_runs: int = 0
    _ended: list[tuple[Path, int]] = field(default_factory=list)  # output of embedded runs, newest checkpoint

    def run(self, configuration: str, plan: Sequence[Cell]) -> None:
        """Inject the faults of a plan into one run, and judge it."""
        self._num_runs += 1
        name = f"run{self._num_runs}"
        shutil.rmtree(self.disk / "out", ignore_errors=True)
        run = ClusterRun(
            self.cluster, self.environment, self.directory / name, self.disk, configuration, self.engine_python, keep=4
        )
        injector = Injector(self.cluster, self.disk)
        # The number of results so far is part of the seed: a repeated cell draws other moments.
        draw = random.Random(f"{self.seed} {time.time_ns() if self.seed < 0 else ''} {plan}")
        start = time.time()
        run.submit()
        num_faults = 0
        try:
            for cell in plan:
                if time.monotonic() > self.deadline:
                    break
                shot = Shot(run, injector, FAULTS[cell[0]], cell[1], draw, self.append, self.say)
                try:
                    record = shot.take()
                except RunIsStuck as stuck:
                    self.append({"kind": "stuck", "cell": list(cell), "message": str(stuck)})
                    self.say(f"{cell[0]} x {cell[1]}: {stuck}\n{run.log()[-3000:]}")
                    injector.heal()
                    run.cancel()
                    run.submit()
                    continue
                num_faults += 1
                self.append({"kind": "fault", "configuration": configuration, "run": name, **record})
            wall_s, step = time.time() - start, run.saved_step()
        finally:
            injector.heal()
            run.cancel()
        self._judge(run, configuration, name, plan, num_faults, wall_s, step)

    def _judge(
        self,
        run: ClusterRun,
        configuration: str,
        name: str,
        plan: Sequence[Cell],
        num_faults: int,
        wall_s: float,
        step: int,
    ) -> None:
        leftovers = outcome.orphans(self.cluster)
        step = run.saved_step() or step
        kept = self.directory / f"{name}_out"
        shutil.copytree(run.output, kept)
        useful_s = outcome.useful_seconds(kept, step)
        record = {
            "kind": "run",
            "configuration": configuration,
            "run": name,
            "num_faults": num_faults,
            "plan": [list(cell) for cell in plan],
            "train_steps": step,
            "unaccounted_responses": outcome.unaccounted_responses(kept, step),
            "orphans": leftovers,
            "wall_seconds": round(wall_s, 1),
            "useful_seconds": round(useful_s, 1),
        }
        self.append(record)
        self.say(f"{name}: {record}")
        if configuration == "embedded":
            self._ended.append((kept, step))
        else:
            self._compare_replays(run.directory / "layout.toml", kept, step)

    def _compare_replays(self, layout: Path, kept: Path, step: int) -> None:
        """Compare the metrics of the last steps with those of only the trainer on the recorded batches."""
        for each in range(max(1, step - NUM_REPLAYS + 1), step + 1):
            difference = outcome.replay_difference(layout, kept, each, self.environment)
            self.append(
                {"kind": "equality", "configuration": "servers", "run": kept.name, "train_steps": each}
                | {"equal": not difference, "difference": difference, "unaccounted_responses": 0}
            )
            self.say(f"{kept.name}, train step {each}: {difference or 'equals its replay'}")

    def compare(self) -> None:
        """Run the configuration that repeats its bits once without faults, and compare all its runs with that one."""
        ended = [each for each in self._ended if each[1]]
        if ended:
            reference = self._undisturbed(max(step for _, step in ended))
            for output, step in ended:
                difference = outcome.first_difference(reference, output, step)
                lost = outcome.lost_responses(reference, output, step)
                self.append(
                    {"kind": "equality", "configuration": "embedded", "run": output.name, "train_steps": step}
                    | {"equal": not difference, "difference": difference, "unaccounted_responses": lost}
                )
                self.say(f"{output.name}: {difference or 'equals the undisturbed run'} after {step} steps")
        self._ended.clear()

    def _undisturbed(self, steps: int) -> Path:
        disk = self.directory / "undisturbed"
        run = ClusterRun(
            self.cluster,
            self.environment,
            self.directory / "reference",
            disk,
            "embedded",
            self.engine_python,
            keep=1000,
        )
        run.submit()
        try:
            if not wait_until(lambda: run.saved_step() >= steps, READY_S + 30.0 * steps, poll_s=0.2):
                raise RuntimeError(f"the undisturbed run made no checkpoint of step {steps}:\n{run.log()[-4000:]}")
        finally:
            run.cancel()
        return run.output

    def soak(self, seconds: float) -> None:
        """Run without faults next to a process that keeps a core busy; count the failures that are declared."""
        self._num_runs += 1
        shutil.rmtree(self.disk / "out", ignore_errors=True)
        name = f"soak{self._num_runs}"
        run = ClusterRun(self.cluster, self.environment, self.directory / name, self.disk, "soak", self.engine_python)
        hog = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        start, loads, lines = time.monotonic(), [outcome.load_average()], []
        try:
            run.submit()
            while time.monotonic() - start < seconds and not run.job().is_over:
                time.sleep(2.0)
                loads.append(outcome.load_average())
            # Before the end, which is this function's doing.
            lines, state = run.first_lines(), run.job().state
        finally:
            hog.kill()
            hog.wait()
            run.cancel()
        record = {
            "kind": "soak",
            "seconds": round(time.monotonic() - start),
            "train_steps": run.completed_steps(),
            "false_alarms": len(lines) + (not lines and state not in ("RUNNING", "COMPLETING")),
            "lines": lines,
            "state": state,
            "log": "" if state == "RUNNING" else run.log()[-2000:],
            "load_max": max(loads),
        }
        self.append(record)
        self.say(f"{name}: {record}")


@dataclass
class Shot:
    """One fault into one run."""

    run: ClusterRun
    injector: Injector
    fault: Fault
    phase: str
    draw: random.Random
    append: Append
    say: Say

    def take(self) -> dict[str, Any]:
        """Inject the fault in its phase and return what came of it. Raises RunIsStuck."""
        self._wait_ready()
        rank = self.draw.choice(sorted(self.run.ranks))
        lines_before = len(self.run.first_lines())
        inject = self.injector.prepare(self.fault.name, self.run, rank)
        self._wait_phase()
        steps, node = self.run.completed_steps(), self.run.ranks[rank].node
        hit, began = self.run.phase(), time.time()
        self.num_begun = self.run.num_begun()
        inject()
        injected = time.time()
        record = {
            "fault": self.fault.name,
            "phase": self.phase,
            "kind_of_fault": self.fault.kind,
            "phase_hit": hit,
            "node": node,
            "rank": rank if self.fault.scope == "rank" else -1,
            "train_steps": steps,
            "load": outcome.load_average(),
            "time": outcome.now(),
            "seconds_to_inject": round(injected - began, 3),
        }
        try:
            if self.fault.kind in (CRASH, SILENCE):
                # Out of memory comes with the end of the injection; the others within milliseconds of its begin.
                effect = injected if self.fault.name == "oom" else began
                record |= self._verdict(effect, lines_before, node, rank)
            elif self.fault.kind == SURVIVED:
                self._hold(lines_before)
            elif self.fault.kind == STOP:
                record |= self._stop(began, lines_before)
            else:
                record |= self._slurm(began, node)
        finally:
            self.injector.heal()
        record |= self._recovery(began, steps)
        lines = self.run.first_lines()[lines_before:]
        if self.fault.kind == SURVIVED:
            record["ok"] = record["continued"] and not lines and not record["new_attempts"]
        record.setdefault("line", lines[0] if lines else "")
        self.say(
            f"{self.fault.name} x {self.phase} on {node}: "
            + ", ".join(f"{key} {record[key]}" for key in ("named", "ok", "detect_seconds", "recovery_seconds", "line") if key in record)
        )  # fmt: skip
        return record

    # Before

    def _wait_ready(self) -> None:
        """Wait until an attempt trains. A failure that is declared meanwhile is nobody's fault: a false alarm."""
        lines, num_jobs = len(self.run.first_lines()), len(self.run.job_ids)
        end = time.monotonic() + READY_S
        while not self.run.look():
            self._submit_if_over()
            if len(self.run.job_ids) > num_jobs + MAX_SUBMITTED:
                raise RunIsStuck(f"{MAX_SUBMITTED} jobs ended one after the other before they trained")
            new = self.run.first_lines()[lines:]
            for line in new:
                self.append({"kind": "false alarm", "line": line})
                self.say(f"without a fault: {line}")
            lines += len(new)
            if time.monotonic() > end:
                raise RunIsStuck(
                    f"no attempt trains {READY_S:.0f} s after the last fault; the job is {self.run.job().state}"
                )
            time.sleep(0.3)

    def _submit_if_over(self) -> None:
        if self.run.job().is_over:
            self.run.submit()

    def _wait_phase(self) -> None:
        """Return at a random moment within the phase."""
        end = time.monotonic() + PHASE_S
        delay = self.draw.uniform(0.0, _TYPICAL_S[self.phase])
        for visit in range(_VISITS):
            while self._phase() != self.phase:
                self._require_alive(end)
                time.sleep(0.002)
            begun = time.monotonic()
            while (is_there := self._phase() == self.phase) and time.monotonic() - begun < delay:
                time.sleep(0.002)
            if is_there:
                return
            # The phase was shorter than the drawn delay.
            delay = 0.0 if visit == _VISITS - 2 else delay / 2

    def _phase(self) -> str:
        phase = self.run.phase()
        return "train" if phase == "logprobs" else phase

    def _require_alive(self, end: float) -> None:
        if time.monotonic() > end:
            raise RunIsStuck(f"phase {self.phase} did not come within {PHASE_S:.0f} s, it is {self.run.phase()!r}")
        if self.run.ranks[0].has_ended():
            raise RunIsStuck(f"the run ended before phase {self.phase} came: {self.run.first_lines()[-1:]}")

    # After

    def _verdict(self, began: float, lines_before: int, node: str, rank: int) -> dict[str, Any]:
        # A file system is missed only once it is written to.
        effect = 0.0 if self.fault.scope == "shared" else began
        end = time.monotonic() + VERDICT_S
        # srun's connections end at the first node: a line of the second node is lost with them, its record is not.
        while not (lines := self.run.first_lines()[lines_before:]) and time.monotonic() < end:
            if outcome.read_verdict(self.run, began, 0.0):
                break
            if not effect and self.run.phase() in _WRITING:
                effect = time.time()
            time.sleep(0.02)
        seen, left = time.time(), []
        if self.fault.name == "fs-hung":
            time.sleep(11.0)  # ranks must end, and the line be out, while it hangs
            left = [rank.rank for rank in self.run.ranks.values() if not rank.has_ended()]
            self.injector.heal()
        entry, line = outcome.read_verdict(self.run, began, 5.0), lines[0] if lines else ""
        if not line and not entry:
            return {"named": False, "line": "", "detect_seconds": None, "state": self.run.job().state}
        line = line or f"failure.json: {entry['message']}"
        told = {key: entry[key] for key in ("node", "rank", "cause") if key in entry}
        if not told:  # a hanging file system prevents the record, so only the log line reports it
            causes = [cause for cause in self.fault.causes if outcome.is_cause_printed(cause, line)]
            told = dict(zip(("node", "rank", "cause"), (*outcome.place_of(line), *(causes or [""])), strict=False))
        return {
            "named": self._is_named(told, entry, node, rank),
            "told": told,
            "line": line,
            "num_lines": len(lines),
            "detect_seconds": round(max(0.0, seen - (effect or began)), 2),
            **({"ranks_held": left} if left else {}),
        }

    def _is_named(self, told: Mapping[str, Any], entry: Mapping[str, Any], node: str, rank: int) -> bool:
        if told["cause"] not in self.fault.causes or entry.get("is_consequence"):
            return False
        if self.fault.scope == "shared":
            return told["rank"] in self.run.ranks and self.run.ranks[told["rank"]].node == told["node"]
        if self.fault.scope == "pair":
            return told["rank"] == -1 and node in str(told["node"]).split(" and ")
        return told["node"] == node and told["rank"] == (rank if self.fault.scope == "rank" else -1)

    def _hold(self, lines_before: int) -> None:
        """Leave a fault in that can be taken out, for as long as the run declares no failure."""
        if self.injector.can_heal:
            wait_until(lambda: len(self.run.first_lines()) > lines_before, HOLD_S, poll_s=0.1)

    def _stop(self, began: float, lines_before: int) -> dict[str, Any]:
        def ended() -> list[dict[str, Any]]:
            return [record for record in self.run.attempts() if record.get("ended", 0.0) > began]

        # Slurm looks at time limits every half minute.
        wait_until(lambda: bool(ended()) or len(self.run.first_lines()) > lines_before, VERDICT_S, poll_s=0.1)
        lines, records = self.run.first_lines()[lines_before:], ended()
        is_orderly = bool(records) and records[0]["reason"] == "stopped by a signal" and not lines
        return {
            "ok": is_orderly,
            "line": lines[0] if lines else "",
            "detect_seconds": round(records[0]["ended"] - began, 2) if records else None,
        }

    def _slurm(self, began: float, node: str) -> dict[str, Any]:
        restarts, cluster = self.run.job().restarts, self.run.cluster

        def is_noticed() -> bool:
            return is_given_up(cluster, node) or self.run.job().restarts > restarts

        is_seen = wait_until(is_noticed, SLURM_S, poll_s=0.5)
        return {"ok": is_seen, "slurm_seconds": round(time.time() - began, 1)}

    def _recovery(self, began: float, steps: int) -> dict[str, Any]:
        """Wait until the run has made a step beyond those before the fault."""
        end = time.monotonic() + READY_S
        # An attempt that is told to stop ends its step, and one of which only Slurm knows that it is lost trains until Slurm
        # ends it.
        num_attempts = self.num_begun + (self.fault.kind != SURVIVED)
        while self.run.completed_steps() <= steps or self.run.num_begun() < num_attempts:
            if time.monotonic() > end:
                self.say(self.run.log()[-4000:])
                return {"continued": False, "recovery_seconds": None, "new_attempts": None}
            self._submit_if_over()
            time.sleep(0.3)
        attempts = self.run.num_begun() - self.num_begun
        return {"continued": True, "recovery_seconds": round(time.time() - began, 1), "new_attempts": attempts}
