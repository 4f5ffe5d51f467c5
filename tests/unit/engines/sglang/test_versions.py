"""Supported SGLang versions, and the differences between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.versions import api_version_of, newest, require_labels, supported_range


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
    found = api_version_of(version)
    assert (found.version, found.needs_update_session, found.is_tested) == (version, needs_update_session, is_tested)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.22"])
def test_versions_without_labels_of_tokens_take_weights_without_requests_only(version: str) -> None:
    require_labels(api_version_of(version), "abort")
    for mode in ("retract", "in_place"):
        require_labels(api_version_of("0.5.23"), mode)
        with pytest.raises(ValueError, match=f'"{mode}" needs SGLang 0.5.23 or newer.*not {version}'):
            require_labels(api_version_of(version), mode)


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
