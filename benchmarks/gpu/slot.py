"""Everything worth measuring on a borrowed H100, in order of value, within a quarter of an hour.

    python benchmarks/gpu/slot.py a [--json] [--save] [--budget-s 540] [--only resume,colocated] [--engine-python PATH]
    python benchmarks/gpu/slot.py b ...
    python benchmarks/gpu/slot.py agents ...
    python benchmarks/gpu/slot.py c ...

`a`: what a colocated run does on one GPU (servers as the layouts start them, sleep and wake, memory by process, the
allocator, weight sync, resume). `b`: single questions (hardware queues, slots in GPU memory, experts under retraction,
variants of the head and of the step) and the rest of the suite. `agents`: episodes with a tool. `c`: asynchrony: a verified update
at the speed of memory, drafts from the policy's past, a streamed run. A case is a program of this repository. Its figures are
printed with the expected range and its source; `!` marks those outside.

A case begins only if its usual seconds on an H100 are left, and ends with the budget. Started again with `--save` and the
same `--results`, it continues with the cases that have no figures yet. Cases whose packages are missing are skipped and
run in a later call. How it runs and what a result holds: `program.py`. `--tiny` runs every case small on any machine,
with stand-ins for Transformer Engine's kernels if it is installed; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import program
from program import Benchmark, Missing, OutOfTime, Row

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "megatron-core", "transformer_engine")
END_OF_LOG = 1500  # characters of a failed program's output that its error quotes
SLOWEST = 3.0  # times the usual seconds after which a case is ended
# --tiny emulates kernels on CPUs, next to other work; both limits are long enough to catch only a hang.
TINY_SLOWEST, TINY_BUDGET_S = 30.0, 7200.0
BUDGET_S = 540.0


@dataclass(frozen=True)
class Expected:
    """A range, or one value (text, or a truth value), and where it comes from."""

    low: Any
    high: Any = None
    source: str = ""

    def holds(self, value: Any) -> bool:
        if self.high is None:
            return bool(value == self.low)
        return isinstance(value, (int, float)) and self.low <= value <= self.high

    def __str__(self) -> str:
        text = f"{self.low}" if self.high is None else f"{self.low:g} to {self.high:g}"
        return f"{text}{f' ({self.source})' if self.source else ''}"


@dataclass(frozen=True)
class Case:
    """A program of this repository with its arguments, and what is expected of its figures."""

    arguments: tuple[str, ...]
    seconds: float  # measured with an H100
    expected: Mapping[str, Expected] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # packages the trainer's interpreter needs
    needs_engine: bool = False


def tests(arguments: str, seconds: float, passed: int, **fields: Any) -> Case:
    """Tests, of which `passed` or more pass and none fails."""
    expected = {"failed": Expected(0), "passed": Expected(passed, 1000, "the suite of 2026-11")}
    return Case(("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments.split()), seconds, expected, **fields)


def steps(sides: str, arguments: str, seconds: float, expected: Mapping[str, Expected], **fields: Any) -> Case:
    command = ("benchmarks/gpu/step.py", "--only", sides, *arguments.split())
    return Case(command, seconds, expected, packages=TRAINER, **fields)


def colocated(arguments: str, seconds: float, start: Expected) -> Case:
    expected = {
        "colocated.start_s": start,
        "colocated.tokens_per_second": Expected(25000, 45000, "34,000 alone with Triton's attention, docs/gpu.md"),
        "colocated.mismatch": Expected(0.0, 0.03, "0.020, docs/gpu.md"),
        "colocated.sync_s": Expected(0.2, 0.7, "0.37, docs/gpu.md"),
        "colocated.alive_after_health": Expected(True, source="a sleeping server is paused"),
    }
    command = ("benchmarks/gpu/probes.py", "--only", "colocated", *arguments.split())
    return Case(command, seconds, expected, packages=TRAINER, needs_engine=True)


TRAINER = ("transformer_engine", "megatron.core")
PEAK = Expected(44.0, 47.5, "45.7, docs/gpu.md")
LENGTHS = "--rounds 16 --warm-up 4"
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
SLOTS: Mapping[str, Mapping[str, Case]] = {
    "a": {
        "resume": tests("tests/gpu/test_layers.py -k loaded_state -n 3", 50, 4, packages=TRAINER),
        "mixed_lengths": steps(
            "bf16",
            f"{LENGTHS} --syncs",
            65,
            {
                "bf16.step_ms": Expected(1450, 1700, "1,556, docs/gpu.md"),
                "bf16.peak_gb": PEAK,
                "bf16.fragmentation_gb": Expected(2.0, 10.0, "packed lengths that vary"),
            },
        ),
        "mixed_lengths_expandable": steps(
            "bf16",
            LENGTHS,
            60,
            {
                "bf16.step_ms": Expected(1450, 1700, "as without"),
                "bf16.peak_gb": PEAK,
                "bf16.fragmentation_gb": Expected(0.0, 2.0, "pages of 2 MiB"),
            },
            environment=EXPANDABLE,
        ),
        "doctor": Case(
            ("-m", "megatron_dapo.cli.main", "doctor", "examples/gpu/smoke.toml", "--json"),
            30,
            {"conflicts": Expected(0)},
            packages=TRAINER,
            needs_engine=True,
        ),
        "colocated_fa3": colocated("--attention fa3", 150, Expected(20, 120, "107 on a fresh machine, docs/gpu.md")),
        "weight_sync": Case(
            ("benchmarks/gpu/sync.py", "--rounds", "5"),
            40,
            {
                "gpu.gb_per_s": Expected(50, 80, "59, docs/gpu.md"),
                "host.gb_per_s": Expected(22, 40, "26, docs/gpu.md"),
                "gpu.verified_gb_per_s": Expected(5, 60, "6.3, docs/gpu.md"),
                "host.verified_gb_per_s": Expected(4, 30, "5.1, docs/gpu.md"),
            },
        ),
        "colocated_prefill_graphs": colocated(
            "--attention fa3 --prefill-graphs --cycles 2", 130, Expected(60, 120, "45 s more")
        ),
        "colocated_triton": colocated("--attention triton --cycles 3", 100, Expected(20, 60, "no graphs of prefill")),
    },
    "b": {
        "queues": Case(
            ("benchmarks/gpu/probes.py", "--only", "queues"),
            25,
            {
                "queues.short_ms_1": Expected(300, 1200, "one queue: it waits for the spinning kernel"),
                "queues.short_ms_8": Expected(0, 20, "a queue for each stream"),
            },
        ),
        "retraction": Case(
            ("benchmarks/gpu/probes.py", "--only", "retraction", "--attention", "triton"),
            80,
            {
                "retraction.complete": Expected(256),
                "retraction.retractions": Expected(1, 10000, "a cache of a third of the requests' tokens"),
                "retraction.deaths": Expected(0, source="an aborted answer without routing is an answer"),
                "retraction.served_after_abort": Expected(4),
            },
            needs_engine=True,
        ),
        "device_slots": tests("tests/gpu/test_shared_memory.py", 40, 6),
        "head_tests": tests("tests/gpu/test_head.py -k kept_or_tuned_or_main_grad -n 4", 60, 15),
        "head": Case(
            ("benchmarks/gpu/head.py", "--only", "triton", "--shape", "8192,4096,151936", "--rounds", "5"),
            50,
            {
                "triton.forward_backward_ms": Expected(64, 71, "67.2, docs/gpu.md"),
                "triton_kept.forward_backward_ms": Expected(48, 60, "55.4, docs/gpu.md"),
                "triton_tuned.forward_backward_ms": Expected(58, 66, "62.2, docs/gpu.md"),
                "triton_tuned_kept.forward_backward_ms": Expected(44, 56, "52.7, docs/gpu.md"),
            },
        ),
        "fp8_head_memory": steps(
            "bf16,fp8_blockwise_head",
            "--rounds 3 --warm-up 2",
            60,
            {
                "bf16.peak_gb": PEAK,
                "fp8_blockwise_head.peak_gb": Expected(44.0, 47.5, "that of bf16, and 0.39 for the head"),
            },
        ),
        "optimizer_on_host": steps(
            "bf16_on_host",
            "--rounds 3 --warm-up 2",
            60,
            {"bf16_on_host.peak_gb": Expected(25.5, 29.0, "that of bf16 less 18.5")},
        ),
        "layers": tests("tests/gpu/test_layers.py tests/gpu/test_attention.py -n 4", 110, 45, packages=TRAINER),
        "engine_memory": tests("tests/gpu/test_engine_memory.py", 60, 1, needs_engine=True),
        "head_suite": tests("tests/gpu/test_head.py -n 4", 120, 90),
    },
    "c": {
        "verified_update": Case(
            ("benchmarks/gpu/sync.py", "--rounds", "7"),
            50,
            {
                "gpu.verified_gb_per_s": Expected(40, 80, "6.3 with checksums tensor by tensor, docs/gpu.md"),
                "gpu.verified_vs_unverified": Expected(1.0, 1.5, "9.5, docs/gpu.md"),
                "gpu.checksum_gb_per_s": Expected(1000, 5000, "one pass over memory of 3.3 TB/s or more"),
                "host.verified_gb_per_s": Expected(20, 40, "5.1 and 26 without checksums, docs/gpu.md"),
            },
        ),
        "drafting": Case(
            ("benchmarks/gpu/speculation.py",),
            300,
            {
                "distribution.p_tokens": Expected(0.01, 1.0, "the same distribution with drafts"),
                "distribution.p_lengths": Expected(0.01, 1.0, "the same"),
                "distribution.p_other": Expected(0.0, 0.005, "temperature 0.9 is found"),
                "distribution.accepted": Expected(1.5, 8.0, "benchmarks/drafting.py"),
                "tail.speedup": Expected(1.5, 8.0, "the aim with 16 responses running"),
                "batch.speedup": Expected(0.8, 4.0, "verifying 256 x 8 tokens costs more"),
                "unknown.speedup": Expected(0.7, 1.05, "what drafts cost that are never accepted"),
            },
            needs_engine=True,
        ),
        "streamed": Case(
            ("benchmarks/gpu/streamed.py",),
            300,
            {
                "alternating.mismatch": Expected(0.0, 0.03, "0.020, docs/gpu.md"),
                "streamed.mismatch": Expected(0.0, 0.03, "the same"),
                "streamed.stale": Expected(0, 1, "max_staleness"),
                "guarded.stale": Expected(0, 1, "max_staleness"),
                "streamed.vs_alternating": Expected(0.5, 1.0, "both sides share the GPU"),
            },
            packages=TRAINER,
            needs_engine=True,
        ),
    },
    "agents": {
        "agents": Case(
            ("benchmarks/gpu/agents.py", "--attention", "triton"),
            240,
            {
                "episodes.engine_busy": Expected(0.9, 1.0, "0.997 on a CPU, benchmarks/README.md"),
                "episodes.cached_share": Expected(0.95, 1.0, "0.965 on a CPU, benchmarks/README.md"),
                "episodes.mismatch": Expected(0.0, 0.02, "0.020 between trainer and server, docs/gpu.md"),
                "episodes.lost": Expected(0, source="an update parks episodes"),
            },
            needs_engine=True,
        ),
    },
}


def cases(arguments: argparse.Namespace) -> Sequence[str]:
    return list(SLOTS[arguments.slot])


def measuring(arguments: argparse.Namespace) -> AbstractContextManager[Callable[[str], Row]]:
    return program.always(lambda name: measure(name, SLOTS[arguments.slot][name], arguments))


def measure(name: str, case: Case, arguments: argparse.Namespace) -> Row:
    """Run the program of a case; print its figures and return them, with those that are not as expected."""
    require(case, arguments)
    left = arguments.ends - time.monotonic()
    if left < case.seconds and not arguments.tiny:
        raise OutOfTime
    start = time.monotonic()
    code, output, log = run(name, command(case, arguments), case, arguments, min(limit_s(case, arguments), left))
    try:
        row = figures_of(case, output, code)
    except ValueError as error:  # JSONDecodeError is a ValueError
        raise RuntimeError(f"{error}; the end of its output: {log[-END_OF_LOG:]}") from None
    row["seconds"] = time.monotonic() - start
    row["unexpected"] = [figure for figure, one in case.expected.items() if not one.holds(row.get(figure))]
    print("\n".join(table(name, case, row)), flush=True)
    return row


def limit_s(case: Case, arguments: argparse.Namespace) -> float:
    """Return the seconds after which a case is ended."""
    return (TINY_SLOWEST if arguments.tiny else SLOWEST) * case.seconds


def require(case: Case, arguments: argparse.Namespace) -> None:
    """Missing if a package is not there."""
    for package in case.packages if not arguments.tiny else ():
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            raise Missing(f"{package} is not installed")
    if not case.needs_engine:
        return
    python = arguments.engine_python
    if python is None or not python.is_file():
        raise Missing(f"{python} is no interpreter: --engine-python names that with SGLang")
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode:
        raise Missing(f"{python} has no SGLang")


def command(case: Case, arguments: argparse.Namespace) -> list[str]:
    """Return the command line of a case."""
    words = [word.replace("_or_", " or ") for word in case.arguments]
    engine = arguments.engine_python
    if "pytest" in words:
        words += ["--stand-in"] if arguments.tiny and importlib.util.find_spec("transformer_engine") else []
    elif "doctor" in words:
        words += ["--set", f"sglang.python={engine}"]
    else:
        words += ["--json", "--case-s", f"{limit_s(case, arguments):g}", *(["--tiny"] if arguments.tiny else [])]
        words += ["--engine-python", str(engine)] if case.needs_engine else []
    return [sys.executable, "-W", "ignore", *words]


def run(
    name: str, words: Sequence[str], case: Case, arguments: argparse.Namespace, seconds: float
) -> tuple[int, str, str]:
    """Return exit code, standard output, and both outputs, which stay in a file when results are kept. OutOfTime if the
    budget ends it, TimeoutError if it takes far longer than usual."""
    environment = {**os.environ, **case.environment}
    if arguments.engine_python is not None:
        environment["MEGATRON_DAPO_ENGINE_PYTHON"] = str(arguments.engine_python)
    directory = arguments.worker if not arguments.save else arguments.results
    directory.mkdir(parents=True, exist_ok=True)
    output, log = directory / f"slot_{arguments.slot}_{name}.out", directory / f"slot_{arguments.slot}_{name}.log"
    with output.open("w", encoding="utf-8") as out, log.open("w", encoding="utf-8") as errors:
        started = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=errors, start_new_session=True)
        try:
            started.wait(seconds)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= arguments.ends - 1.0:
                raise OutOfTime from None
            raise TimeoutError(f"it took more than {seconds:.0f} s, usually it takes {case.seconds:g}") from None
        finally:
            program.end(started)
    printed = output.read_text(encoding="utf-8", errors="replace")
    return started.returncode, printed, printed + log.read_text(encoding="utf-8", errors="replace")


def figures_of(case: Case, output: str, code: int) -> Row:
    """Return the figures that a program printed. ValueError if there are none."""
    if "pytest" in case.arguments:
        return test_figures(output, code)
    lines = output.splitlines()
    if not lines:
        raise ValueError(f"it printed nothing and ended with code {code}")
    result = json.loads(lines[-1])
    if "doctor" in case.arguments:
        conflicts = [one for one in result["findings"] if one["verdict"] == "conflict"]
        return {"conflicts": len(conflicts), "findings": conflicts, "implementations": result["implementations"]}
    if not result.get("cases"):
        if result.get("failed") or not result.get("skipped"):
            raise ValueError(f"no figures: {result.get('failed')}")
        raise Missing(str(result["skipped"]))
    return {
        **{
            f"{name.split()[0]}.{figure}": value
            for name, row in result["cases"].items()
            for figure, value in row.items()
        },
        **{kind: result[kind] for kind in ("failed", "skipped") if result[kind]},
    }


def test_figures(output: str, code: int) -> Row:
    """Return how many tests passed, failed and were skipped, and those that failed."""
    lines = output.splitlines()
    counts = (
        {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
        if lines
        else {}
    )
    if not counts or code not in (0, 1):
        raise ValueError(f"pytest ended with code {code}")
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "failures": failures,
    }


def table(name: str, case: Case, row: Mapping[str, Any]) -> list[str]:
    """Return a line for each expected figure, and for each other number."""
    lines = [f"{name}: {row['seconds']:.0f} s, usually {case.seconds:g}"]
    for figure, expected in case.expected.items():
        mark = "!" if figure in row["unexpected"] else " "
        lines.append(f" {mark} {figure:40} {shown(row.get(figure)):>12}   expected {expected}")
    others = {
        key: value for key, value in row.items() if key not in case.expected and key not in ("seconds", "unexpected")
    }
    lines += [f"   {figure:40} {shown(value):>12}" for figure, value in others.items()]
    return lines


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:400]


def slot(name: str) -> Benchmark:
    return Benchmark(f"gpu_slot_{name}", __file__, PACKAGES, cases, measuring, is_on_device=False)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.add_argument("slot", choices=sorted(SLOTS))
    parser.set_defaults(case_s=1e9)  # each case has its own limit
    parser.add_argument("--engine-python", type=program.absolute, help="interpreter with SGLang")
    parser.set_defaults(budget_s=None)
    parsed = parser.parse_args(arguments)
    if parsed.budget_s is None:
        parsed.budget_s = TINY_BUDGET_S if parsed.tiny else BUDGET_S
    return parsed


if __name__ == "__main__":
    parsed = parse()
    program.run(slot(parsed.slot), parsed)
