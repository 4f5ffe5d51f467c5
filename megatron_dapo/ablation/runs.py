"""Runs of a grid: their effective settings and keys, their directories, and the records of finished ones.

A record is one line of results.jsonl. Its key is (commit, settings). The settings cover every value of the
configuration and the contents of its input files, but no names or output directories. Records of several machines and
calls can therefore share one file, and a run whose recipe, data or code has changed counts as another run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo._version import __version__
from megatron_dapo.ablation.grid import Grid, Variant
from megatron_dapo.config.loader import is_input
from megatron_dapo.config.rules import ConfigError, Violation, value_of
from megatron_dapo.config.schema import Config, leaf_fields
from megatron_dapo.config.section import is_function_path
from megatron_dapo.evaluation.protocol import FREE_FIELDS, EvaluationResult, differing_fields
from megatron_dapo.run.derive import pretraining_config
from megatron_dapo.run.plan import Machines, Plan, make_plan
from megatron_dapo.telemetry.summary import read_summary
from megatron_dapo.trainer.recorder import RunPaths

FORMAT = "megatron_dapo ablation 1"
RESULTS = "results.jsonl"
# Curves of a record; the first is of the held-out evaluations, with the train step as x.
CURVES = ("rollout/accuracy_generated", "actor/entropy", "rollout/response_tokens_mean", "quality/repetition_mean")
TOKENS = "throughput/generated_tokens"
# Names and locations, which do not change what a run learns.
_NOT_SETTINGS = ("run.name", "run.output_dir", "checkpoint.output_dir", "telemetry.progress", "telemetry.tensorboard")
# Sections that a critic's pretraining does not read: variants that differ only in these share a critic.
_NOT_OF_PRETRAINING = (
    "algorithm",
    "advantage_estimation",
    "window",
    "evaluation",
    "telemetry",
    "mismatch",
    "optimizer",
)
_WEIGHTS = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: Variant
    seed: int
    settings: str  # 16 hexadecimal digits
    overrides: tuple[str, ...]
    directory: Path
    critic_directory: Path | None  # output of value pretraining; None: not pretrained
    num_processes: int

    @property
    def label(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


def plan_runs(grid: Grid, machines: Machines, commit: str) -> list[Run]:
    """Return the runs of a grid, all variants of the first seed first. Checks every variant before any of them runs.

    Raises ConfigError with everything the validator rejects, each entry with its variant.
    """
    problems: list[Violation] = []
    runs = []
    for seed in grid.seeds:
        for variant in grid.variants:
            try:
                runs.append(_plan_run(grid, variant, seed, machines, commit))
            except ConfigError as error:
                problems += [] if seed != grid.seeds[0] else [_of_variant(variant, one) for one in error.violations]
    problems = problems or list(_twins(runs))
    if problems:
        raise ConfigError(problems, str(grid.path))
    return runs


def _twins(runs: Sequence[Run]) -> Iterator[Violation]:
    first: dict[str, Run] = {}
    for run in runs:
        if (twin := first.setdefault(run.settings, run)) is not run and run.seed == runs[0].seed:
            where = f"variant {run.variant.name!r}"
            yield Violation(where, f"other settings than those of {twin.variant.name!r}", "remove one of the two")


def _of_variant(variant: Variant, one: Violation) -> Violation:
    return Violation(f"variant {variant.name!r}: {one.path}", one.formula, one.suggestion, one.values)


def _plan_run(grid: Grid, variant: Variant, seed: int, machines: Machines, commit: str) -> Run:
    overrides = (*variant.overrides, f"run.seed={seed}", f"data.shuffle_seed={seed}")
    plan = make_plan(variant.recipe, overrides, None, None, machines)
    config = plan.loaded.config
    if not config.data.has_held_out or not config.evaluation.at_end:
        rule, fix = "a held-out evaluation at the end", "set data.eval_paths and evaluation.at_end = true"
        raise ConfigError([Violation("data.eval_paths", rule, fix)], str(variant.recipe))
    program = {"program": variant.program.name} if variant.program else {}
    settings = settings_hash(config, {"pretrains_value": variant.pretrains_value, **program})
    # Another commit's half-finished run is not continued.
    name = f"seed{seed}-{settings[:8]}-{commit[:8]}{'-changed' if commit.endswith(CHANGED) else ''}"
    critic = _critic_directory(grid, variant, overrides, machines, commit) if variant.pretrains_value else None
    directory = grid.output_dir / variant.directory / name
    return Run(variant, seed, settings, overrides, directory, critic, plan.num_processes)


def _critic_directory(grid: Grid, variant: Variant, overrides: Sequence[str], machines: Machines, commit: str) -> Path:
    def adapt(config: Config) -> Config:
        if not config.has_critic:
            fix = 'set algorithm.name = "ppo", "vapo" or "tppo", or pretrain_value = false'
            raise ConfigError([Violation("algorithm.name", "an algorithm with a critic", fix)], str(variant.recipe))
        return pretraining_config(config, grid.output_dir / "critics")

    plan: Plan = make_plan(variant.recipe, overrides, None, None, machines, adapt=adapt)
    return (
        grid.output_dir / "critics" / f"{settings_hash(plan.loaded.config, {}, _NOT_OF_PRETRAINING)[:8]}-{commit[:8]}"
    )


def settings_hash(config: Config, extra: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """Hash the values of `config` that differ from the schema's defaults, and the contents of its inputs.

    `without`: sections to leave out. A changed default is a change of the code, which the commit shows.
    """
    values: dict[str, Any] = dict(extra)
    for path in leaf_fields():
        section, _, name = path.rpartition(".")
        if (
            path in _NOT_SETTINGS
            or path.split(".")[0] in without
            or name not in type(value_of(config, section)).model_fields
        ):
            continue
        value = value_of(config, path)
        if is_input(path):
            value = [_content(Path(each)) for each in (value if isinstance(value, tuple) else (value,))]
        elif isinstance(value, str) and is_function_path(value) and Path(value.rpartition(":")[0]).is_file():
            value = _content(Path(value.rpartition(":")[0])) + value.rpartition(":")[2]
        elif value == leaf_fields()[path].get_default(call_default_factory=True):
            continue  # an option that a later version adds must not change the hash
        values[path] = value
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _content(path: Path) -> str:
    """Hash a file, or a directory's files; weight files only by name and size, as they may be large."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else (path,):
        if file.is_file():
            whole = file.suffix not in _WEIGHTS or not path.is_dir()
            digest.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size} ".encode())
            digest.update(file.read_bytes() if whole else b"")
    return digest.hexdigest()[:16]


CHANGED = "+changed"  # suffix of a commit whose tracked files were edited since


def code_commit(results: Path) -> str:
    """Return the commit of the package's checkout, plus CHANGED if tracked files other than `results` differ from it;
    the package's version outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return f"version {__version__}"
    apart = os.path.relpath(results.resolve(), root)
    outside = [] if apart.startswith("..") else [f":!{apart}"]
    return head + (CHANGED if _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *outside) else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # an installed package does not need git
        return ""
    return done.stdout.strip()


# ---- records


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a results file, without a line cut short by a kill. Of equal keys the last counts."""
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("format") == FORMAT:
            records[record["commit"], record["settings"]] = record
    return list(records.values())


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record on a new line, also after one cut short by a kill, and flush it to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with open(path, "a", encoding="utf-8") as stream:
        stream.write("\n" * torn + json.dumps(record) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def record_of(run: Run, grid: Grid, commit: str) -> dict[str, Any]:
    """Return the record of a finished run. Raises ValueError if its directory does not hold a finished run."""
    paths = RunPaths(run.directory)
    summary = read_summary(paths.summary)
    evaluations = {int(file.stem.partition("_")[2]): file for file in sorted(paths.evaluations.glob("step_*.json"))}
    if summary.train_steps not in evaluations:
        raise ValueError(
            f"{run.directory}: no evaluation after train step {summary.train_steps}; the run ended with: {summary.stopped}"
        )
    first, last = min(evaluations), summary.train_steps
    results = {step: _read(evaluations[step]) for step in sorted({first, last})}
    if unlike := differing_fields(results[first].protocol, results[last].protocol):
        raise ValueError(f"{run.directory}: evaluations by unlike protocols: {', '.join(unlike)}")
    rows = [json.loads(line) for line in paths.metrics.read_text(encoding="utf-8").splitlines()]
    held_out = [json.loads(line) for line in paths.evaluation_metrics.read_text(encoding="utf-8").splitlines()]
    return {
        "format": FORMAT,
        "grid": grid.name,
        "variant": run.variant.name,
        "seed": run.seed,
        "commit": commit,
        "settings": run.settings,
        "set": dict(run.variant.written),
        "stopped": summary.stopped,
        "train_steps": summary.train_steps,
        "train_seconds": round(summary.train_seconds, 1),
        "pretrain_seconds": _pretrain_seconds(run),
        "pretrain_tokens": _pretrain_tokens(run),
        "layout": summary.layout,
        "threads": os.cpu_count(),
        "protocol": _protocol(results[last]),
        # Accuracy of each problem, ordered by id: paired runs share the problems.
        "before": _accuracies(results[first]) if first == 0 else None,
        "after": _accuracies(results[last]),
        "evaluated": {
            "train_step": [row["train_step"] for row in held_out],
            "accuracy": [row["eval/avg_at_k"] for row in held_out],
        },
        "train_step": [row["train_step"] for row in rows],
        "generated_tokens": [row[TOKENS] for row in rows],
        "curves": {name: [None if row[name] is None else _rounded(row[name]) for row in rows] for name in CURVES},
        "kl": _rounded(rows[-1]["actor/kl_loss"]) if rows else None,
    }


def _pretrain_seconds(run: Run) -> float:
    """Return the seconds of training of the run's pretrained critic; 0 without one."""
    if run.critic_directory is None:
        return 0.0
    return round(read_summary(RunPaths(run.critic_directory).summary).train_seconds, 1)


def _pretrain_tokens(run: Run) -> float:
    """Return the tokens that the pretraining of the run's critic generated; 0 without one."""
    if run.critic_directory is None:
        return 0.0
    metrics = RunPaths(run.critic_directory).metrics
    rows = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return float(sum(json.loads(row)[TOKENS] for row in rows))


def _read(file: Path) -> EvaluationResult:
    return EvaluationResult.from_json(file.read_text(encoding="utf-8"))


def _accuracies(result: EvaluationResult) -> list[float]:
    ordered = sorted(result.problems, key=lambda problem: problem.problem_id)
    return [_rounded(sum(problem.accuracies) / len(problem.accuracies)) for problem in ordered]


def _protocol(result: EvaluationResult) -> str:
    """Hash the protocol and the problems: results with equal hashes can be paired."""
    protocol = {name: value for name, value in vars(result.protocol).items() if name not in FREE_FIELDS}
    ids = sorted(problem.problem_id for problem in result.problems)
    return hashlib.sha256(json.dumps([protocol, ids], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def matching(records: Iterable[Mapping[str, Any]], runs: Sequence[Run], commit: str | None) -> list[Mapping[str, Any]]:
    """Return the records of `runs`, matched by settings and `commit`; None: the newest of each run, of any commit.

    Each gets the name of its variant in this grid: equal settings are the same run, whatever it was called.
    """
    names = {run.settings: run.variant.name for run in runs}
    newest = {
        record["settings"]: {**record, "variant": names[record["settings"]]}
        for record in records
        if record["settings"] in names and commit in (None, record["commit"])
    }
    return list(newest.values())
