"""Installed versions against a tested lock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from megatron_dapo.doctor.finding import Finding, conflict, ok, warning

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 12)
_FILE = re.compile(r"(cpu|cuda)-py(\d)(\d+)\.txt")


@dataclass(frozen=True)
class Lock:
    """Versions that ran together. `name`: the file's; `pins`: canonical package name -> version."""

    name: str
    device: str  # cpu or cuda
    python: tuple[int, int]
    pins: Mapping[str, str]


def parse_lock(name: str, text: str) -> Lock | None:
    """The lock in a requirements file; None where the file's name is not that of a lock of the trainer."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    requirements = [Requirement(line) for line in lines if line]
    pins = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}
    return Lock(name, match[1], (int(match[2]), int(match[3])), pins)


def choose_lock(locks: Sequence[Lock], device: str, python: tuple[int, int]) -> Lock | None:
    """The lock for this kind of device: the one for this Python, else the newest."""
    fitting = [lock for lock in locks if lock.device == device]
    return max(fitting, key=lambda lock: (lock.python == python, lock.python), default=None)


def python_finding(version: tuple[int, int, int], lock: Lock | None) -> Finding:
    """Whether the interpreter is supported, and the one of the lock."""
    text = ".".join(map(str, version))
    supported = f"{_text(OLDEST_PYTHON)} to {_text(NEWEST_PYTHON)}"
    if not OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        fix = f"make the environment with Python {_text(lock.python if lock else NEWEST_PYTHON)}"
        return conflict("python", f"{text}; supported are {supported}", fix)
    if lock is not None and version[:2] != lock.python:
        return warning("python", f"{text}; {lock.name} was tested with {_text(lock.python)}", "use that Python")
    return ok("python", f"{text}; supported are {supported}")


def package_findings(
    lock: Lock | None, installed: Mapping[str, str], required: Mapping[str, Requirement]
) -> list[Finding]:
    """One finding a package, those that the package needs first.

    `installed`: canonical name -> version. `required`: canonical name -> what setup.py asks for.
    """
    if lock is None:
        findings = [warning("lock", "no tested lock lies beside this installation", "install from the repository")]
    else:
        findings = [ok("lock", f"{lock.name}: {len(lock.pins)} packages")]
    pins = lock.pins if lock else {}
    names = [*required, *(name for name in pins if name not in required)]
    return findings + [_package(name, installed.get(name), pins.get(name), required.get(name)) for name in names]


def _package(name: str, installed: str | None, locked: str | None, required: Requirement | None) -> Finding:
    label = f"package {name}"
    words = f"installed {installed or 'not'}, locked {locked or 'not'}"
    install = f"pip install '{name}=={locked}'" if locked else f"pip install '{required}'"
    if required is not None and not _satisfies(installed, required):
        return conflict(label, f"{words}, needed {required}", install)
    if locked is not None and _public(installed) != _public(locked):
        return warning(label, words, install)
    return ok(label, words)


def _satisfies(installed: str | None, required: Requirement) -> bool:
    return installed is not None and required.specifier.contains(installed, prereleases=True)


def _public(version: str | None) -> str | None:
    """Without the local part that names a build, as in 2.13.0+cpu."""
    try:
        return Version(version).public if version else None
    except InvalidVersion:
        return version


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
