"""Reward of problems that reasoning-gym made: its own verifier, in the reward's process.

    reward.verifier = "megatron_dapo.rewards.verifiers.reasoning_gym:reward"

The answer is the text after the response's last "Answer:" or, without one, between its last <answer> tags. Rows from
other sources, which no task made, are compared with their gold answer as in the preset `dapo`, so one mixture may have
both.
"""

from __future__ import annotations

import json
import re

from megatron_dapo.rewards.result import RewardResult, RewardSample
from megatron_dapo.rewards.verifiers import dapo

ENTRY = "reasoning_gym"  # the column, see data/made_problems.py
RIGHT = 0.99  # partial credit below it is a reward, but no right answer
_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_TAG = re.compile(r"(?s)<answer>(.*?)</answer>")


def reward(sample: RewardSample) -> RewardResult:
    """Return reasoning-gym's score of the answer, in [0, 1]; 0 for a response without one."""
    made = sample.extra_info.get(ENTRY)
    if not isinstance(made, dict):
        found = dapo.score(sample.response, sample.answer)
        return RewardResult(
            float(found.outcome == "correct"), extracted=found.extracted, is_correct=found.outcome == "correct"
        )
    answers = _LINE.findall(sample.response) or _TAG.findall(sample.response)
    if not answers:
        return RewardResult(0.0, is_correct=False)
    import reasoning_gym

    answer = answers[-1].strip()
    score = float(reasoning_gym.get_score_answer_fn(made["task"])(answer, json.loads(made["entry"])))
    return RewardResult(score, extracted=answer, is_correct=score >= RIGHT)
