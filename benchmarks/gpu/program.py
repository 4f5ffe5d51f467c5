"""Runner of the GPU benchmarks: one case after another in a worker process; each result is kept as soon as it is known.

The main process measures nothing: it starts a worker, reads its reports, and kills it if a case takes longer than
`--case-s`. A worker whose CUDA context broke exits. Either way the next worker continues with the remaining cases, so
one case never takes the others down. No case begins after `--budget-s`, or if it expects not to finish by then; cases
that were not begun are listed.

`--save` keeps the result in `--results` after every case, as <benchmark>_<machine>.json. Started again there with the same
settings and versions, a benchmark takes what it finds and runs the rest (`--again`: everything).

    cases     case -> its figures
    skipped   case -> what this machine lacks for it
    failed    case -> what went wrong; then the exit code is 1
    not_run   cases for which no time was left
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
if "--tiny" in sys.argv and not HAS_GPU and importlib.util.find_spec("transformer_engine"):
    # This precedes any import of Transformer Engine, whose fused optimizer and layers need a driver.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))
    import stand_in

    stand_in.install()

RESULTS = Path(__file__).resolve().parents[1] / "results"
# Dense bf16 products with fp32 sums, FLOP/s, by what the device's name has in it (data sheets, SXM form).
BF16_PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}
# Arguments that do not change what a case measures.
CONTROLS = ("json", "save", "results", "again", "budget_s", "case_s", "only", "worker", "ends")
GRACE_S = 10.0
PR_SET_PDEATHSIG = 1  # prctl(2): the kernel ends a worker whose starter died
CASES, REPORTS = "cases.json", "reports.jsonl"
LEAST_ROUNDS = 3

Row = dict[str, Any]
Rows = Mapping[str, Row]


class Missing(Exception):
    """Raised if this machine lacks something that a case needs."""


class OutOfTime(Exception):
    """Raised if a case would not end within the budget."""


@dataclass(frozen=True)
class Benchmark:
    """`cases`: names in order. `measuring`: context entered once per worker; yields the function from a case to its
    figures. `complaints`: case -> why its figures cannot be right, given the others'. `summary`: more fields of the
    result. `is_on_device`: the worker itself computes on the GPU; if not, it starts programs that do."""

    name: str
    file: str
    packages: tuple[str, ...]
    cases: Callable[[argparse.Namespace], Sequence[str]]
    measuring: Callable[[argparse.Namespace], AbstractContextManager[Callable[[str], Row]]]
    complaints: Callable[[Rows], Mapping[str, str]] = lambda rows: {}
    summary: Callable[[argparse.Namespace, Rows], Mapping[str, Any]] = lambda arguments, rows: {}
    is_on_device: bool = True


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all GPU benchmarks share."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", action="store_true", help="print one JSON object on one line")
    found.add_argument("--save", action="store_true", help="keep the result after every case")
    found.add_argument("--results", type=Path, default=RESULTS, help="directory in which results are kept")
    found.add_argument("--again", action="store_true", help="run also what the kept result has")
    found.add_argument("--only", default="", help="cases of these names, or that begin so, comma separated")
    found.add_argument("--budget-s", type=float, default=480.0, help="seconds after which no case begins")
    found.add_argument("--case-s", type=float, default=180.0, help="seconds after which a case is ended")
    found.add_argument("--tiny", action="store_true", help="small sizes on any machine, to check the program")
    found.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return found


def absolute(text: str) -> Path:
    """Path of an interpreter, which servers start from another directory; links stay, as an environment's is one."""
    return Path(text).absolute()


def shown(path: Path) -> str:
    """Name a path for a result: relative to the checkout's root, or only the file name if it lies elsewhere."""
    root = Path(__file__).resolve().parents[2]
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """The whole program, of the process that is started and of the workers."""
    if arguments.worker is not None:
        work(benchmark, arguments)
        return
    result = Run(benchmark, arguments).result()
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    sys.exit(1 if result.get("failed") else 0)


# ---- the process that is started


@dataclass
class Run:
    """Results so far."""

    benchmark: Benchmark
    arguments: argparse.Namespace
    rows: dict[str, Row] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)  # cases that would not have ended within the budget
    place: dict[str, Any] = field(default_factory=dict)  # the machine and the versions, as workers say

    def result(self) -> dict[str, Any]:
        """Run the cases that are not known yet."""
        if not self.arguments.tiny and not torch.cuda.is_available():
            why = "torch sees no CUDA device; --tiny checks the program without one"
            return {"benchmark": self.benchmark.name, "skipped": why}
        ends = time.monotonic() + self.arguments.budget_s
        while (left := self._left()) and time.monotonic() < ends:
            self._run_worker(ends)
            if self._left() == left:
                self.failed[left[0]] = "the worker ended before its first case"
        return self._described()

    def _wanted(self) -> list[str]:
        asked = tuple(filter(None, self.arguments.only.split(",")))
        names = list(self.benchmark.cases(self.arguments))
        chosen = {
            one: [name for name in names if name == one or (one not in names and name.startswith(one))] for one in asked
        }
        unknown = [one for one, found in chosen.items() if not found]
        if unknown:
            raise SystemExit(f"no case begins with {unknown[0]!r}; there are {', '.join(names)}")
        return [name for name in names if not asked or any(name in found for found in chosen.values())]

    def _without_result(self) -> list[str]:
        return [name for name in self._wanted() if name not in {**self.rows, **self.skipped, **self.failed}]

    def _left(self) -> list[str]:
        return [name for name in self._without_result() if name not in self.late]

    def _run_worker(self, ends: float) -> None:
        with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as temporary:
            command = [sys.executable, "-W", "ignore", self.benchmark.file, *sys.argv[1:], "--worker", temporary]
            # In a separate session, so that what it started ends with it.
            worker = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
            try:
                self._listen(worker, Path(temporary), ends)
            finally:
                end(worker)

    def _listen(self, worker: subprocess.Popen[bytes], directory: Path, ends: float) -> None:
        """Until the worker is done, or has to be ended."""
        num_read, current, since = 0, "", time.monotonic()
        while True:
            is_over = worker.poll() is not None
            for report in _reports(directory / REPORTS)[num_read:]:
                num_read, current, since = num_read + 1, report.get("begins", ""), time.monotonic()
                self._take(report)
                if "place" in report:
                    _write(directory / CASES, json.dumps({"cases": self._left(), "ends": ends}))
            now = time.monotonic()
            if current and now - since > self.arguments.case_s:
                self.failed[current] = f"it took more than {self.arguments.case_s:g} s"
                return
            if is_over and current:
                self.failed[current] = f"the worker ended with code {worker.returncode}"
            if is_over or (now > ends and not current):
                return
            time.sleep(0.05)

    def _take(self, report: Mapping[str, Any]) -> None:
        if "place" in report:
            self.place = dict(report["place"])
            self._take_kept()
        if "late" in report:
            self.late.add(report["case"])
        for kind, known in (("figures", self.rows), ("skipped", self.skipped), ("failed", self.failed)):
            if kind in report:
                known[report["case"]] = report[kind]
                self._keep()

    def _settings(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self.arguments).items() if name not in CONTROLS}
        return {name: shown(value) if isinstance(value, Path) else value for name, value in values.items()}

    @property
    def _is_kept(self) -> bool:
        return self.arguments.save and not self.arguments.tiny

    def _file(self) -> Path:
        machine = self.place["machine"].lower().replace(" ", "_")
        return self.arguments.results / f"{self.benchmark.name}_{machine}.json"

    def _take_kept(self) -> None:
        """Return the results of an earlier run with the same settings and versions."""
        if self.arguments.again or not self._is_kept or not self._file().is_file():
            return
        kept = json.loads(self._file().read_text(encoding="utf-8"))
        same = {**self.place, "settings": self._settings()}
        if all(kept.get(name) == value for name, value in same.items()):
            self.rows = {**kept["cases"], **self.rows}

    def _keep(self) -> None:
        if self._is_kept and self.rows:
            self.arguments.results.mkdir(parents=True, exist_ok=True)
            _write(self._file(), json.dumps(self._described(), indent=2) + "\n")

    def _described(self) -> dict[str, Any]:
        wrong = self.benchmark.complaints(self.rows)
        right = {name: row for name, row in self.rows.items() if name not in wrong}
        return {
            "benchmark": self.benchmark.name,
            **self.place,
            "settings": self._settings(),
            **self.benchmark.summary(self.arguments, right),
            "cases": right,
            "skipped": self.skipped,
            "failed": {**self.failed, **wrong},
            "not_run": self._without_result(),
        }


def _reports(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def end(worker: subprocess.Popen[bytes]) -> None:
    """End a process and its session, first so that it can end what it started."""
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


# ---- workers


def work(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Report the place, then every case of the list that is given for it; ends early if CUDA no longer answers."""
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(1))  # leaves the contexts, which end servers
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    directory: Path = arguments.worker
    with (directory / REPORTS).open("w", encoding="utf-8") as file, ExitStack() as stack:

        def report(**fields: Any) -> None:
            file.write(json.dumps(fields) + "\n")
            file.flush()

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        report(place={"machine": machine_name(device), "versions": versions(benchmark.packages)})
        while not (directory / CASES).exists():
            time.sleep(0.02)
        work_left = json.loads((directory / CASES).read_text(encoding="utf-8"))
        cases, arguments.ends = work_left["cases"], work_left["ends"]  # the clock is the machine's
        if not cases:
            return
        report(begins=cases[0])
        found: list[Callable[[str], Row]] = []
        obstacle = _outcome(lambda case: found.append(stack.enter_context(benchmark.measuring(arguments))) or {}, "")
        for case in cases:
            if time.monotonic() > arguments.ends:
                return
            report(begins=case)
            report(case=case, **(_outcome(found[0], case) if found else obstacle))
            if benchmark.is_on_device and not _recovers():
                return


def _outcome(measure: Callable[[str], Row], case: str) -> dict[str, Any]:
    try:
        return {"figures": measure(case)}
    except Missing as error:
        return {"skipped": str(error)}
    except OutOfTime:
        return {"late": True}
    except torch.cuda.OutOfMemoryError as error:
        return {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
    except Exception as error:  # noqa: BLE001 - a case that breaks is a line of the result, not its end
        return {"failed": f"{type(error).__name__}: {str(error)[:1000]}"}


def _recovers() -> bool:
    """Free memory; return False if a kernel's error has left no usable context."""
    for _ in range(2):  # The objects that the first collection ends release more.
        gc.collect()
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def rounds_of(arguments: argparse.Namespace) -> Iterator[int]:
    """Run `--rounds` rounds, or fewer if a third of `--case-s` has passed after the first few."""
    ends = time.monotonic() + arguments.case_s / 3
    for index in range(arguments.rounds):
        if index >= LEAST_ROUNDS and time.monotonic() > ends:
            return
        yield index


# ---- what a result says about where it was taken


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def bf16_peak(name: str) -> float | None:
    """FLOP/s; None for a device that is not in the table."""
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)


def finish(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(work_of: Callable[[], Any], device: torch.device, rounds: Iterator[int]) -> float:
    """Median seconds by the clock."""
    seconds = []
    for _ in rounds:
        finish(device)
        started = time.perf_counter()
        work_of()
        finish(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def always(measure: Callable[[str], Row]) -> AbstractContextManager[Callable[[str], Row]]:
    """Wrap `measure` for a benchmark whose cases share no resource."""
    return nullcontext(measure)
