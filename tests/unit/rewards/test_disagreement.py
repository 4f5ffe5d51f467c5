from __future__ import annotations

import json

import pytest

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool.disagreement import ShadowedPool
from megatron_dapo.rewards.pool.pool import VerifierPool
from megatron_dapo.rewards.verifiers import lenient

ITEMS = [
    ("agree", "Answer: 42", "42", False),
    ("notation", "x" * 400 + "\nAnswer: **42**", "42", False),
    ("boxed", "\\boxed{42}", "42", False),
    ("both wrong", "Answer: 41", "42", False),
    ("cut off", "Answer: **42**", "42", True),
]


@pytest.fixture
def records():
    return []


@pytest.fixture
def pool(records):
    reward = RewardConfig(timeout_seconds=20.0)
    pools = VerifierPool("dapo", reward), VerifierPool("lenient", reward)
    with ShadowedPool(*pools, records.append, max_waiting=8) as shadowed:
        yield shadowed


def test_every_disagreement_is_recorded_and_the_reward_is_the_primarys(pool, records):
    scores = pool.score_many(ITEMS)
    assert [scores[key].outcome for key, *_ in ITEMS] == ["correct", "wrong", "unparsable", "wrong", "truncated"]
    assert pool.drain(timeout_s=60.0)
    assert [record.key for record in records] == ["notation", "boxed"]
    record = json.loads(json.dumps(records[0].record()))
    assert record["response_tail"].endswith("Answer: **42**") and len(record["response_tail"]) == 300
    assert (record["answer"], record["outcome"], record["shadow_outcome"]) == ("42", "wrong", "correct")
    assert (record["extracted"], record["shadow_extracted"]) == ("**42**", "42**")
    assert record["verifier"] == "dapo-1" and record["shadow_verifier"].startswith(f"lenient-{lenient.REVISION}")
    assert pool.statistics().num_disagreements == 2


def test_a_shadow_too_far_behind_is_skipped_and_counted(pool, records):
    pool.score_many([(i, "\\boxed{42}", "42", False) for i in range(9)])
    assert pool.drain(timeout_s=60.0)
    assert records == []
    assert (pool.statistics().num_compared, pool.statistics().num_skipped) == (0, 9)
