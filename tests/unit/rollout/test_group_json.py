"""Groups as JSON values and back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_dapo.rollout.serialization import group_from_json, group_to_json, join_state, split_state
from megatron_dapo.types import (
    Completion,
    Episode,
    Group,
    Prompt,
    Score,
    ScoredSample,
    Segment,
    Turn,
    TurnCall,
    VersionRange,
    Window,
)


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


def test_an_episode_is_restored_bit_for_bit_with_its_segments() -> None:
    call = TurnCall("calculate", "bad_arguments", 0.25)
    turns = (Turn(0, 1, 2, calls=(call,), reward=0.5), Turn(2, 3, 3, "length", trained=False))
    segment = Segment((1, 5), (8, 9), (-0.1, -1 / 3), (VersionRange(0, 2, 4),), (Turn(0, 2, 2),), 0, "summary")
    episode = Episode("max_turns", turns, (segment, segment), 1.0, True, {"format": 0.5}, 1, {"acting": 0.1}, "ab")
    (sample,) = group(Window()).samples
    completion = replace(sample.completion, prompt_ids=(3, 4), episode=episode)
    whole = replace(group(Window()), samples=(replace(sample, completion=completion),))
    document, tensors = split_state(group_to_json(whole))
    text = json.dumps(document)
    assert "logprobs" not in text and tensors["token_ids"].tolist() == [5, 6, 7, 8, 9, 8, 9]
    restored = group_from_json(join_state(json.loads(text), tensors))
    assert restored == whole
    changed = replace(segment, logprobs=np.nextafter(segment.logprobs, np.float32(1)))
    assert replace(completion, episode=replace(episode, segments=(segment, changed))) != completion
    assert replace(completion, prompt_ids=None) != completion
    # A response of one turn has no field more than before.
    (plain,) = group_to_json(group(Window()))["samples"]
    assert list(plain["completion"]) == ["request_id", "token_ids", "logprobs", "finish_reason", "versions"]
