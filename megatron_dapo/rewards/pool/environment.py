"""Scores of episodes that their environments rewarded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool.pool import ScoreRequest
from megatron_dapo.rewards.pool.repetition import repetition_numbers
from megatron_dapo.types import Episode, Outcome, Repetition, Score


class EnvironmentRewards:
    """Verifier "environment": the reward that an episode was given, without processes.

    A truncated episode is not correct, whatever its environment said; its reward is that of its turns.
    """

    verifier = "environment"
    version = "environment"
    takes_sample = True
    takes_token_ids = False
    takes_episode = True
    counts: Mapping[str, int] = MappingProxyType({})

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward

    def score_many(self, items: Iterable[ScoreRequest]) -> dict[object, Score]:
        """Return the scores by key. ValueError for a response that is no episode."""
        return {item.key: self._score(item) for item in items}

    def _score(self, item: ScoreRequest) -> Score:
        episode = (item.sample or {}).get("episode")
        if not isinstance(episode, Episode):
            raise ValueError(f"response {item.key} is no episode: reward.verifier = 'environment' rewards episodes only")
        given = episode.reward
        is_correct = bool(episode.is_correct) and not item.is_truncated
        reward = given if given is not None else self._reward.correct if is_correct else self._reward.incorrect
        outcome: Outcome = "truncated" if item.is_truncated else "correct" if is_correct else "wrong"
        return Score(float(is_correct), reward, outcome, detail={"end": episode.end, "parts": dict(episode.parts)})

    def measure_repetition(self, token_ids: Mapping[str, np.ndarray]) -> dict[str, Repetition]:
        """See `VerifierPool`; measured in this process."""
        return {key: Repetition(*repetition_numbers(tokens)) for key, tokens in token_ids.items()}

    def validate_answers(self, answers: Iterable[str]) -> dict[str, str]:
        """Return no answer: environments take any."""
        return {}

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> EnvironmentRewards:
        return self

    def __exit__(self, *_: object) -> None:
        pass
