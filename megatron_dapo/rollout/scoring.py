"""Scoring of completions: decoded text, the verifier's score, and the parts that add up to the reward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dapo.rewards.pool.disagreement import ShadowedPool
from megatron_dapo.rewards.pool.pool import Scorer, VerifierPool, score_request
from megatron_dapo.rewards.pool.repetition import repetition_numbers
from megatron_dapo.types import VERIFIER_PART, Completion, Group, Prompt, Repetition, Score, ScoredSample, Window

if TYPE_CHECKING:
    from megatron_dapo.rollout.open_group import OpenGroup

logger = logging.getLogger(__name__)

RewardAddend = Callable[[Completion, str, Score], float]


class RewardsFailed(RuntimeError):
    """Every reward of as many responses as a train step has failed: there is nothing to learn from."""


@dataclass
class FailureStreak:
    """Counts responses whose rewards failed one after another."""

    limit: int  # responses of a train step
    length: int = 0
    first: str = ""  # reason the first of them failed

    def observe(self, scores: Iterable[Score]) -> None:
        """Raise RewardsFailed once `limit` rewards in a row have failed or run out of time."""
        for score in scores:
            self.length = self.length + 1 if score.failure else 0
            self.first = (self.first or score.failure) if score.failure else ""
        if self.length >= self.limit:
            raise RewardsFailed(
                f"the rewards of {self.length} responses in a row failed, as many as a train step has ({self.limit}); the "
                f"first: {self.first}. Mend the function or the service of reward.verifier, then start again: the run "
                "goes on from its checkpoint"
            )


@dataclass(frozen=True)
class SampleScorer:
    """Decodes responses, has them verified, and adds the other reward terms to the verifier's.

    Args:
        scorer: the verifier, usually a pool of processes.
        decode: response token ids -> text (special tokens left out).
        addends: name of a reward term -> function of a finished response, its text and its score. They never change the
            accuracy, by which groups are filtered.
        meter: the pool whose processes measure repetition during generation, when that delays no train step. None:
            this process measures it.
        streak: ends a run whose rewards all fail. None: nothing does.
    """

    scorer: Scorer
    decode: Callable[[Any], str]  # takes token ids [T]
    addends: Mapping[str, RewardAddend] = field(default_factory=dict)
    meter: VerifierPool | ShadowedPool | None = None
    streak: FailureStreak | None = None

    def score(self, responses: Sequence[tuple[Prompt, Completion]]) -> dict[str, ScoredSample]:
        """Return the scored responses by their request ids, which become the sample ids.

        Raises ValueError if the verifier leaves a response out or calls a truncated one correct, RewardsFailed if all
        rewards of a step's size have failed.
        """
        texts = {response.request_id: self.decode(response.token_ids) for _, response in responses}
        scores = self.scorer.score_many(
            [score_request(one.request_id, prompt, one, self._answer(one, texts), self.scorer) for prompt, one in responses]
        )
        missing = [name for name in texts if name not in scores]
        if missing:
            raise ValueError(
                f"the verifier returned no score for {len(missing)} of {len(responses)} responses, such as {missing[0]}"
            )
        if self.streak is not None:
            self.streak.observe(scores[name] for name in texts)
        repetition = self._measure({response.request_id: response.sampled.token_ids for _, response in responses})
        return {
            response.request_id: self._scored(response, texts[name], scores[name], repetition[name])
            for name, (_, response) in zip(texts, responses, strict=True)
        }

    def _answer(self, response: Completion, texts: Mapping[str, str]) -> str:
        """Return what the verifier reads: the whole response, or the last turn of an episode."""
        return texts[response.request_id] if response.episode is None else self.decode(response.last_turn)

    def unfinished(self, response: Completion, window: Window) -> ScoredSample:
        """Return a response that continues after its window, without scoring it."""
        text, name = self.decode(response.token_ids), response.request_id
        score = Score(0.0, 0.0, "unfinished")
        repetition = self._measure({name: response.sampled.token_ids})[name]
        return ScoredSample(name, response, text, score, {}, window, repetition)

    def _measure(self, token_ids: Mapping[str, np.ndarray]) -> Mapping[str, Repetition]:
        if self.meter is not None:
            return self.meter.measure_repetition(token_ids)
        return {key: Repetition(*repetition_numbers(tokens)) for key, tokens in token_ids.items()}

    def _scored(self, response: Completion, text: str, score: Score, repetition: Repetition) -> ScoredSample:
        if response.is_truncated and score.accuracy > 0:
            raise ValueError(
                f"sample {response.request_id}: the verifier gave accuracy {score.accuracy} to a truncated response "
                f"({response.finish_reason}); a truncated response is never correct: "
                "return accuracy 0 if is_truncated is set"
            )
        parts = {VERIFIER_PART: score.reward}
        parts |= {name: addend(response, text, score) for name, addend in self.addends.items()}
        return ScoredSample(response.request_id, response, text, score, parts, repetition=repetition)


def score_groups(scorer: SampleScorer, complete: Sequence[OpenGroup], serving: int) -> Iterator[Group]:
    """Score complete groups in one call of the verifier and yield them in the given order.

    `serving` is the policy version for a group without any token.
    """
    scored = scorer.score(
        [(group.prompt, group.completions[index]) for group in complete for index in sorted(group.completions)]
    )
    for group in complete:
        samples = tuple(scored[group.completions[index].request_id] for index in sorted(group.completions))
        versions = [run.version for sample in samples for run in sample.completion.versions]
        # A group is as old as its oldest token.
        yield Group(group.group_id, group.prompt, samples, min(versions, default=serving), group.generation_step)


def warn_of_lost(samples: Iterable[ScoredSample]) -> int:
    """Return how many scores are lost, and log why: such responses are not trained."""
    lost = [sample for sample in samples if sample.score.is_lost]
    if lost:
        first = lost[0]
        logger.warning(
            "lost rewards: %d, the first that of %s; nothing is learned from these responses: %s",
            *(len(lost), first.sample_id, first.score.failure),
        )
    return len(lost)
