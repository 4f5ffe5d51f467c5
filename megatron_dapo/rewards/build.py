"""The verifiers of a run from its section [reward], and the test that they read what the prompts ask for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool.mixture import MixtureComponent, MixturePool
from megatron_dapo.rewards.pool.pool import VerifierPool, score_request
from megatron_dapo.rewards.verifiers.self_test import check_contract
from megatron_dapo.rewards.verifiers.verifier import SET_PRESETS
from megatron_dapo.types import Completion, Prompt

logger = logging.getLogger(__name__)

SELF_TEST_PROMPTS = 64  # spread over the data set
MODEL_ENVIRONMENT = ["CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE"]  # passed to reward_model
TRIAL_RESPONSE = "Answer: 42"  # a reward function of samples is tried with it


def open_verifier_pool(reward: RewardConfig, verifier: str | None = None) -> VerifierPool | MixturePool:
    """Start the processes that score this run's responses by `verifier` (default: reward.verifier, which may be a mixture)."""
    name = verifier or reward.verifier
    return _open_mixture(reward) if name == "mix" else _open_pool(reward, name)


def _open_pool(reward: RewardConfig, name: str) -> VerifierPool:
    # Each process gets the settings and the key of its preset only.
    presets = {name: getattr(reward, name).model_dump(mode="json")} if name in SET_PRESETS else {}
    keys = [own["key_variable"] for own in presets.values() if own.get("key_variable")]
    keys += MODEL_ENVIRONMENT if name == "reward_model" else []
    pool = VerifierPool(
        name,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_seconds,
        memory_limit_mb=reward.memory_limit_mb,
        file_limit_mb=reward.file_limit_mb,
        max_processes=reward.max_processes,
        more_environment=[*reward.environment, *keys],
        concurrency=reward.concurrency,
        reward_correct=reward.correct,
        reward_incorrect=reward.incorrect,
        batch_size=reward.batch_size,
        token_ids=reward.token_ids,
        presets=presets,
    )
    logger.info("verifier %s", pool.version)
    return pool


def _open_mixture(reward: RewardConfig) -> MixturePool:
    """Start the processes of every table [[reward.mix]]."""
    with ExitStack() as stack:  # closes the pools that started if one fails to
        components = [
            MixtureComponent(name, stack.enter_context(_open_pool(reward, one.verifier)), one.weight)
            for name, one in zip(reward.part_names, reward.mix, strict=True)
        ]
        deciding = next((name for name, one in zip(reward.part_names, reward.mix, strict=True) if one.decides), None)
        mixture = MixturePool(components, deciding or components[0].name)
        stack.pop_all()
    return mixture


def self_test(reward: RewardConfig, tokenizer: Any, pool: Any, prompts: Sequence[Prompt]) -> None:
    """Check that prompts, some of those given, request the answer format that the verifier reads. ValueError if not.

    A function of samples may reward whatever it likes: it is called once, and has to return a reward. Of a mixture each component
    is tested.
    """
    if isinstance(pool, MixturePool):
        for component in pool.components:
            self_test(reward, tokenizer, component.pool, prompts)
        return
    if pool.takes_sample:
        completion = Completion("trial", np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", ())
        score = pool.score_many([score_request("trial/0", prompts[0], completion, TRIAL_RESPONSE, pool)])["trial/0"]
        if score.outcome in ("error", "timeout"):
            raise ValueError(
                f"self-test: verifier {pool.verifier!r} called with the first prompt and the response {TRIAL_RESPONSE!r}: "
                f"{score.detail.get('error', score.outcome)}"
            )
        logger.info("self-test: verifier %s rewards a trial response by %g", pool.verifier, score.reward)
        return
    # Spread over the data set: files of different sources may ask for different formats.
    checked = prompts[:: max(1, len(prompts) // SELF_TEST_PROMPTS)]
    texts = [(tokenizer.decode(list(prompt.token_ids)), prompt.answer) for prompt in checked]
    report = check_contract(texts, pool, pool.verifier, reward.answer_format)
    logger.info(
        "self-test: verifier %s reads %s in %d prompts",
        pool.verifier,
        " and ".join(report.formats),
        report.num_prompts,
    )
