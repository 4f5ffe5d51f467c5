"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "conflict"]


@dataclass(frozen=True)
class Finding:
    """One check's word. A conflict stops a run or makes it wrong; a warning may. Both say what to do."""

    name: str
    verdict: Verdict
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.verdict == "ok" or self.fix, f"{self.name}: a {self.verdict} without a fix"


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warning(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "warning", detail, fix)


def conflict(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "conflict", detail, fix)


def first_conflict(findings: Iterable[Finding]) -> Finding | None:
    """The first one, in the order of the checks: later ones may follow from it."""
    return next((finding for finding in findings if finding.verdict == "conflict"), None)
