"""Versions against locks, with made-up and with the real locks."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_dapo.doctor import gather
from megatron_dapo.doctor.machine import (
    NEWEST_PYTHON,
    OLDEST_PYTHON,
    Lock,
    choose_lock,
    package_findings,
    parse_lock,
    python_finding,
)

LOCK = Lock("cpu-py311.txt", "cpu", (3, 11), {"torch": "2.13.0", "pytest": "9.2.0"})
REQUIRED = {"torch": Requirement("torch>=2.6"), "rich": Requirement("rich>=13.8")}


def verdicts(installed: dict[str, str], lock: Lock | None = LOCK) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in package_findings(lock, installed, REQUIRED)}


def test_a_lock_is_its_pins() -> None:
    lock = parse_lock("cuda-py312.txt", "# torch==1.0\ntorch==2.11.0  # CUDA 13\ntransformer-engine[pytorch]==2.20.2\n")
    assert lock == Lock("cuda-py312.txt", "cuda", (3, 12), {"torch": "2.11.0", "transformer-engine": "2.20.2"})
    assert parse_lock("sglang-cpu-py311.txt", "torch==1.0") is None


def test_the_lock_of_the_device_and_the_python_is_chosen() -> None:
    others = [Lock("cpu-py310.txt", "cpu", (3, 10), {}), Lock("cuda-py312.txt", "cuda", (3, 12), {}), LOCK]
    assert choose_lock(others, "cpu", (3, 10)) is others[0]
    assert choose_lock(others, "cpu", (3, 12)) is LOCK
    assert choose_lock(others, "cuda", (3, 10)) is others[1]
    assert choose_lock([LOCK], "cuda", (3, 11)) is None


def test_the_repository_has_a_lock_for_each_device() -> None:
    locks = {lock.device: lock for lock in gather.locks()}
    assert set(locks) == {"cpu", "cuda"}
    for lock in locks.values():
        assert "torch" in lock.pins and "megatron-core" in lock.pins
    assert set(gather.required_packages()) <= set(locks["cpu"].pins) | {"tomli"}


def test_requirements_without_an_install(tmp_path: Path) -> None:
    assert any(text.startswith("torch") for text in gather._project_requirements(gather.ROOT / "pyproject.toml"))
    assert gather._project_requirements(tmp_path / "pyproject.toml") == []


def test_supported_pythons_are_those_of_the_metadata() -> None:
    text = (gather.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    after = (NEWEST_PYTHON[0], NEWEST_PYTHON[1] + 1)
    assert f'requires-python = ">={OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]},<{after[0]}.{after[1]}"' in text


@pytest.mark.parametrize(
    "version, verdict", [((3, 11, 7), "ok"), ((3, 12, 0), "warning"), ((3, 13, 0), "conflict"), ((3, 9, 9), "conflict")]
)
def test_python(version: tuple[int, int, int], verdict: str) -> None:
    assert python_finding(version, LOCK).verdict == verdict


def test_packages_as_locked_are_ok_whatever_the_build() -> None:
    found = verdicts({"torch": "2.13.0+cpu", "rich": "15.0.0", "pytest": "9.2.0"})
    assert found == {"lock": "ok", "package torch": "ok", "package rich": "ok", "package pytest": "ok"}


def test_other_versions_warn_and_what_cannot_work_conflicts() -> None:
    found = verdicts({"torch": "2.12.0"})
    assert found["package torch"] == "warning"  # enough, but not what was tested
    assert found["package pytest"] == "warning"  # a run does not need it
    assert found["package rich"] == "conflict"  # it needs this
    assert verdicts({"torch": "2.5.0", "rich": "15"})["package torch"] == "conflict"


def test_a_finding_names_both_versions_and_the_command() -> None:
    (finding,) = [f for f in package_findings(LOCK, {"torch": "2.12.0"}, REQUIRED) if f.name == "package torch"]
    assert finding.detail == "installed 2.12.0, locked 2.13.0" and finding.fix == "pip install 'torch==2.13.0'"


def test_without_a_lock_what_is_needed_is_still_checked() -> None:
    assert verdicts({"torch": "2.12.0"}, lock=None) == {
        "lock": "warning",
        "package torch": "ok",
        "package rich": "conflict",
    }
