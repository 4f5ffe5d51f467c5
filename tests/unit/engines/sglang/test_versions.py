"""Supported SGLang versions, and the differences between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.versions import ApiVersion, api_version_of, newest, supported_range


@pytest.mark.parametrize(
    ("version", "needs_update_session", "is_tested"),
    [
        ("0.5.17", False, True),
        ("0.5.20.post1", False, True),
        ("v0.5.21rc1", True, True),
        ("0.5.23.post1", True, True),
        ("0.5.24", True, False),
        ("0.6.0", True, False),
        ("1.0.0.dev3", True, False),
    ],
)
def test_versions(version: str, needs_update_session: bool, is_tested: bool) -> None:
    assert api_version_of(version) == ApiVersion(version, needs_update_session, is_tested)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.5.16", "older than what is supported, 0.5.17 to 0.5.23: install sglang==0.5.17"),
        ("0.4.99", "older"),
        ("", "expected three numbers"),
        ("0.5", "expected three numbers"),
        ("main", "expected three numbers"),
    ],
)
def test_other_versions_are_refused(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        api_version_of(version)


def test_files_name_the_tested_versions(repository: Path) -> None:
    *_, patch = newest().split(".")
    lock = (repository / f"requirements/sglang-{newest()}-cpu-py311.txt").read_text(encoding="utf-8")
    assert f"\nsglang=={newest()}\n" in lock
    oldest = supported_range().split()[0]
    assert f"\nsglang=={oldest}\n" in (repository / "requirements/sglang-cpu-py311.txt").read_text(encoding="utf-8")
    wanted = f'"sglang>={oldest},<0.5.{int(patch) + 1}"'
    assert wanted in (repository / "pyproject.toml").read_text(encoding="utf-8")
    for page in ("README.md", "docs/engines.md"):
        assert supported_range() in (repository / page).read_text(encoding="utf-8"), page
