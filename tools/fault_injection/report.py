"""The results file of chaos runs, one JSON object a line, and its sum."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.fault_injection.cells import CELLS, CRASH, SILENCE, SLURM, STOP, SURVIVED, Cell

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "chaos.jsonl"


def commit() -> tuple[str, bool]:
    """Return the checkout's commit, and True if tracked files differ from it, the results apart."""
    head = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    return head, bool(
        _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def read(path: Path, commits: Sequence[str]) -> list[dict[str, Any]]:
    """Return the records of commits, given by the beginnings of their names; all of them for none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines if line]
    return [each for each in records if not commits or any(each["commit"].startswith(name) for name in commits)]


def counts(records: Sequence[dict[str, Any]]) -> dict[Cell, int]:
    """Return how many faults are on record for each cell."""
    return dict(Counter((each["fault"], each["phase"]) for each in records if each["kind"] == "fault"))


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of `--json`; None if nothing was measured."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    faults, runs, equalities, soaks = (kinds.get(name, []) for name in ("fault", "run", "equality", "soak"))
    of_kind = {kind: [each for each in faults if each["kind_of_fault"] == kind] for kind in (CRASH, SILENCE, SURVIVED, STOP, SLURM)}  # fmt: skip
    named = [each["named"] for each in of_kind[CRASH] + of_kind[SILENCE]]
    wall_s = sum(each["wall_seconds"] for each in runs)
    # A failure declared without a fault, and one of a run that must survive its fault.
    alarms = sum(each["false_alarms"] for each in soaks) + len(kinds.get("false alarm", []))
    return {
        "num_faults": len(faults),
        "num_cells": len(counts(faults)),
        "num_cells_of_table": len(CELLS),
        "culprit_named_share": _share(named),
        "crash_detect_seconds_p95": _percentile([each.get("detect_seconds") for each in of_kind[CRASH]], 0.95),
        "hang_detect_seconds_max": _percentile([each.get("detect_seconds") for each in of_kind[SILENCE]], 1.0),
        "slurm_only_seconds_max": _percentile([each.get("slurm_seconds") for each in of_kind[SLURM]], 1.0),
        "stop_seconds_max": _percentile([each.get("detect_seconds") for each in of_kind[STOP]], 1.0),
        "survived_share": _share([each["ok"] for each in of_kind[SURVIVED]]),
        "stopped_in_order_share": _share([each["ok"] for each in of_kind[STOP]]),
        "continued_share": _share([each["continued"] for each in faults]),
        "num_stuck": len(kinds.get("stuck", [])),
        "false_alarms": alarms,
        "soak_seconds": sum(each["seconds"] for each in soaks),
        "unaccounted_responses": sum(each["unaccounted_responses"] for each in runs + equalities) if runs else None,
        "runs_equal_share": _share([each["equal"] for each in equalities]),
        "orphans": sum(len(each["orphans"]) for each in runs) if runs else None,
        "ettr": _ettr(runs),
        **_ettr_by_restart(runs),
        "faults_per_hour": round(3600 * sum(each["num_faults"] for each in runs) / wall_s, 1) if wall_s else None,
        "recovery_seconds_p50": _percentile([each.get("recovery_seconds") for each in faults], 0.5),
    }


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for everything that fell short."""
    lines = []
    for each in records:
        cell = f"{each.get('fault')} x {each.get('phase')} on {each.get('node')}, rank {each.get('rank')}"
        if each["kind"] == "fault" and not each.get("named", True):
            lines.append(f"{cell}: not named; told {each.get('told')}: {each['line']}")
        elif each["kind"] == "fault" and not each.get("ok", True):
            lines.append(f"{cell}: not as it must be: {each.get('line') or each}")
        if each["kind"] == "fault" and not each["continued"]:
            lines.append(f"{cell}: the run did not continue")
        if each["kind"] == "run" and (each["orphans"] or each["unaccounted_responses"]):
            lines.append(
                f"{each['run']}: {each['unaccounted_responses']} unaccounted responses; orphans {each['orphans']}"
            )
        if each["kind"] == "equality" and (not each["equal"] or each["unaccounted_responses"]):
            lines.append(f"{each['run']}: {each['difference']}")
        if each["kind"] in ("stuck", "false alarm") or (each["kind"] == "soak" and each["false_alarms"]):
            lines.append(f"{each['kind']}: {each.get('message') or each.get('line') or each.get('lines')}")
    return lines


def _ettr(runs: Sequence[dict[str, Any]]) -> float | None:
    """Return the effective training time ratio of runs: seconds of the steps that count, by wall time."""
    wall_s = sum(each["wall_seconds"] for each in runs)
    return round(sum(each["useful_seconds"] for each in runs) / wall_s, 4) if wall_s else None


def _ettr_by_restart(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios with role restart and with whole-job restart, of runs with servers that had the same faults."""
    plans = [
        [each["plan"] for each in runs if each["configuration"] == name and len(each["plan"]) == each["num_faults"]]
        for name in ("servers", "servers_job")
    ]
    shared = [plan for plan in plans[0] if plan in plans[1]]
    if not shared:
        return {"ettr_role": None, "ettr_job": None, "ettr_reason": "no pair of runs with the same faults: --ettr"}
    of_shared = [each for each in runs if each["plan"] in shared]
    role, job = (
        _ettr([each for each in of_shared if each["configuration"] == name]) for name in ("servers", "servers_job")
    )
    return {"ettr_role": role, "ettr_job": job}


def _share(values: Sequence[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _percentile(values: Sequence[float | None], share: float) -> float | None:
    """Return the smallest value that at least this share does not exceed; a fault that was never noticed counts as 1e9."""
    ordered = sorted(1e9 if value is None else value for value in values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None
