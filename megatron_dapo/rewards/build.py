"""The verifiers of a run from its section [reward], and the test that they read what the prompts ask for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool.environment import EnvironmentRewards
from megatron_dapo.rewards.pool.mixture import MixtureComponent, MixturePool
from megatron_dapo.rewards.pool.pool import VerifierPool, score_request
from megatron_dapo.rewards.verifiers.self_test import check_contract
from megatron_dapo.types import Completion, Prompt

logger = logging.getLogger(__name__)

SELF_TEST_PROMPTS = 64  # spread over the data set
NUM_TRIALS = 2  # a function of batches that returns one reward for all of them passes with one
TRIAL_RESPONSE = "Answer: 42"  # a reward function of samples is tried with it


def open_verifier_pool(
    reward: RewardConfig, verifier: str | None = None
) -> VerifierPool | MixturePool | EnvironmentRewards:
    """Start the processes that score this run's responses by `verifier` (default: reward.verifier, which may be a mixture)."""
    name = verifier or reward.verifier
    if name == "environment":
        return EnvironmentRewards(reward)
    if name != "mix":
        return VerifierPool(name, reward)
    with ExitStack() as stack:  # closes the pools that started if one fails to
        components = [
            MixtureComponent(part, stack.enter_context(VerifierPool(one.verifier, reward)), one.weight)
            for part, one in zip(reward.part_names, reward.mix, strict=True)
        ]
        deciding = next((part for part, one in zip(reward.part_names, reward.mix) if one.decides), components[0].name)
        mixture = MixturePool(components, deciding)
        stack.pop_all()
    return mixture


def self_test(reward: RewardConfig, tokenizer: Any, pool: Any, prompts: Sequence[Prompt]) -> None:
    """Check that prompts, some of those given, request the answer format that the verifier reads. ValueError if not.

    A function of samples may reward whatever it likes: it is called with two (a function of batches with both at once), and has to
    return a reward for each. Of a mixture each component is tested.
    """
    if isinstance(pool, MixturePool):
        for component in pool.components:
            self_test(reward, tokenizer, component.pool, prompts)
        return
    if isinstance(pool, EnvironmentRewards):
        return  # it reads no answers
    if pool.takes_sample:
        completion = Completion("trial", np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", ())
        scores = pool.score_many(
            [score_request(f"trial/{i}", prompts[0], completion, TRIAL_RESPONSE, pool) for i in range(NUM_TRIALS)]
        )
        failures = [score.failure for score in scores.values() if score.failure]
        if failures:
            raise ValueError(
                f"self-test: verifier {pool.verifier!r} called with the first prompt and the response {TRIAL_RESPONSE!r}, "
                f"{NUM_TRIALS} times: {failures[0]}"
            )
        logger.info("self-test: verifier %s rewards a trial response by %g", pool.verifier, scores["trial/0"].reward)
        return
    # Spread over the data set: files of different sources may ask for different formats.
    checked = prompts[:: max(1, -(-len(prompts) // SELF_TEST_PROMPTS))]
    texts = [(tokenizer.decode(list(prompt.token_ids)), prompt.answer) for prompt in checked]
    formats = check_contract(texts, pool, pool.verifier, reward.answer_format)
    logger.info("self-test: verifier %s reads %s in %d prompts", pool.verifier, " and ".join(formats), len(texts))
