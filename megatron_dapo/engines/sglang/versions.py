"""Tested versions of SGLang, and the differences between them that matter here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_dapo.config.sglang_schema import UpdatePause

# The tests against a real server run with both. Versions between them are taken as they are.
OLDEST = (0, 5, 17)
NEWEST = (0, 5, 23)
FIRST_WITH_UPDATE_SESSION = (0, 5, 21)
FIRST_WITH_SUPPORTS = (0, 5, 21)  # return_sampling_mask
FIRST_WITH_TOKEN_LABELS = (0, 5, 23)  # older ones between the tested two were not looked at


@dataclass(frozen=True)
class ApiVersion:
    """The HTTP interface of one version of SGLang."""

    version: str
    needs_update_session: bool  # update_weights_from_tensor and _distributed only between begin_ and end_weight_update
    labels_tokens: bool = False  # answers have the label of each token's weights, and retracted requests let a cache be flushed
    says_supports: bool = False  # returns the ids that top-p and top-k left for each token
    is_tested: bool = True  # False: newer than NEWEST, to be probed (`protocol`)


def api_version_of(version: str) -> ApiVersion:
    """Return the API of SGLang `version`, as in its /server_info (release suffixes like .post1 are allowed).

    ValueError if it is no version, or older than OLDEST.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:[.+-].*|(?:rc|a|b)\d+.*)?", version)
    if match is None:
        raise ValueError(f"SGLang says its version is {version!r}: expected three numbers, like {_text(NEWEST)}")
    major, minor, patch = (int(group) for group in match.groups())
    numbers = major, minor, patch
    if numbers < OLDEST:
        raise ValueError(
            f"SGLang {version} is older than what is supported, {supported_range()}: install sglang=={_text(OLDEST)} in the "
            "engine's environment"
        )
    return ApiVersion(
        version,
        needs_update_session=numbers >= FIRST_WITH_UPDATE_SESSION,
        labels_tokens=numbers >= FIRST_WITH_TOKEN_LABELS,
        says_supports=numbers >= FIRST_WITH_SUPPORTS,
        is_tested=numbers <= NEWEST,
    )


def supported_range() -> str:
    """Return the oldest and the newest tested version as text."""
    return f"{_text(OLDEST)} to {_text(NEWEST)}"


def require_labels(api_version: ApiVersion, update_pause: UpdatePause) -> None:
    """Raise ValueError if answers of this version cannot say which weights sampled each token."""
    if update_pause != "abort" and not api_version.labels_tokens:
        oldest = _text(FIRST_WITH_TOKEN_LABELS)
        raise ValueError(
            f'sglang.update_pause = "{update_pause}" needs SGLang {oldest} or newer, which labels each token with the weights '
            f'that sampled it, not {api_version.version}: install sglang=={oldest} or set sglang.update_pause = "abort"'
        )


def newest() -> str:
    """Return the newest tested version as text."""
    return _text(NEWEST)


def _text(numbers: tuple[int, int, int]) -> str:
    return ".".join(map(str, numbers))
