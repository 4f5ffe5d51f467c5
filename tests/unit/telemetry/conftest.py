"""A small group of scored responses."""

from __future__ import annotations

import pytest

from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, VersionRange


def make_group(name: str, size: int) -> Group:
    prompt = Prompt(
        prompt_id=name,
        messages=({"role": "user", "content": "1+1?"},),
        token_ids=(1, 2),
        answer="2",
        data_source="unit",
    )
    samples = tuple(
        ScoredSample(
            sample_id=f"{name}/{index}",
            completion=Completion(
                f"{name}/{index}", (5, 6 + index), (-0.1, -0.2), "stop", (VersionRange(0, 1, 3), VersionRange(1, 2, 4))
            ),
            text=f"Answer: {index} \u2264 \n",
            score=Score(
                accuracy=float(index == 2),
                reward=1.0,
                outcome="correct" if index == 2 else "wrong",
                extracted=str(index),
            ),
            reward_parts={"verifier": 1.0, "overlong": -0.25},
        )
        for index in range(size)
    )
    return Group(group_id=name, prompt=prompt, samples=samples, policy_version=3, generation_step=9)


@pytest.fixture
def groups() -> list[Group]:
    return [make_group(f"g{index}", 4) for index in range(10)]
