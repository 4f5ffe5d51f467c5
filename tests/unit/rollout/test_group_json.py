"""Groups as JSON values and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_dapo.rollout.serialization import group_from_json, group_to_json
from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, VersionRange, Window


def group(window: Window) -> Group:
    versions = (VersionRange(0, 2, 3), VersionRange(2, 3, 4))
    completion = Completion("g/1", (5, 6, 7), (-0.1, -1 / 3, -1e-9), "abort", versions)
    sample = ScoredSample("g/1", completion, "text", Score(0.0, 0.0, "unfinished"), {}, window)
    return Group("g", Prompt("p", ({"role": "user", "content": "?"},), (1, 2), "7"), (sample,), 3, 9)


@pytest.mark.parametrize("window", [Window(), Window(2, False), Window(2, True)])
def test_a_group_is_restored_with_its_windows(window: Window) -> None:
    assert group_from_json(json.loads(json.dumps(group_to_json(group(window)), default=np.ndarray.tolist))) == group(
        window
    )
