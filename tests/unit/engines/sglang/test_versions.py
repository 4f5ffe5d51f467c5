"""Supported SGLang versions, and the differences between them."""

from __future__ import annotations

import pytest

from megatron_dapo.engines.sglang.versions import api_version_of


@pytest.mark.parametrize(
    ("version", "needs_update_session"),
    [("0.5.17", False), ("0.5.18", False), ("0.5.20.post1", False), ("0.5.21", True), ("v0.5.21rc1", True)],
)
def test_supported_versions(version: str, needs_update_session: bool) -> None:
    api_version = api_version_of(version)
    assert (api_version.version, api_version.needs_update_session) == (version, needs_update_session)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.5.16", "older than what is supported, 0.5.17 to 0.5.21: install sglang==0.5.17"),
        ("0.4.99", "older"),
        ("0.5.22", "newer than what is supported, 0.5.17 to 0.5.21: install sglang==0.5.21"),
        ("0.6.0", "newer"),
        ("1.0.0.dev3", "newer"),
        ("", "expected three numbers"),
        ("0.5", "expected three numbers"),
        ("main", "expected three numbers"),
    ],
)
def test_other_versions_are_refused(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        api_version_of(version)
