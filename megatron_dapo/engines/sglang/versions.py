"""Supported versions of SGLang, and the differences between them that matter here."""

from __future__ import annotations

import re
from dataclasses import dataclass

OLDEST = (0, 5, 17)
NEWEST = (0, 5, 21)
FIRST_WITH_UPDATE_SESSION = (0, 5, 21)


@dataclass(frozen=True)
class ApiVersion:
    """The HTTP interface of one version of SGLang."""

    version: str
    needs_update_session: bool  # update_weights_from_tensor and _distributed only between begin_ and end_weight_update


def api_version_of(version: str) -> ApiVersion:
    """The api_version of SGLang `version`, as its /server_info tells it (release suffixes like .post1 are allowed).

    ValueError for what is no version, or is older or newer than what has been tried.
    """
    numbers = _numbers(version)
    if not OLDEST <= numbers <= NEWEST:
        older = numbers < OLDEST
        raise ValueError(
            f"SGLang {version} is {'older' if older else 'newer'} than what is supported, {_text(OLDEST)} to "
            f"{_text(NEWEST)}: install sglang=={_text(OLDEST if older else NEWEST)} in the engine's environment"
        )
    return ApiVersion(version, needs_update_session=numbers >= FIRST_WITH_UPDATE_SESSION)


def _numbers(version: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:[.+-].*|(?:rc|a|b)\d+.*)?", version)
    if match is None:
        raise ValueError(f"SGLang says its version is {version!r}: expected three numbers, like {_text(NEWEST)}")
    major, minor, patch = (int(group) for group in match.groups())
    return major, minor, patch


def _text(numbers: tuple[int, int, int]) -> str:
    return ".".join(map(str, numbers))
