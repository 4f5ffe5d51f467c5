"""Scoring of completions: decoded text, the verifier's score, and the parts that add up to the reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dapo.rewards.pool.disagreement import ShadowedPool
from megatron_dapo.rewards.pool.pool import Scorer, VerifierPool, score_request
from megatron_dapo.rewards.pool.repetition import repetition_numbers
from megatron_dapo.rollout.open_group import OpenGroup
from megatron_dapo.types import Completion, Group, Prompt, Repetition, Score, ScoredSample, Window

VERIFIER_PART = "verifier"
RewardAddend = Callable[[Completion, str, Score], float]


@dataclass(frozen=True)
class UnscoredSample:
    """A response to a prompt, before the verifier has seen it."""

    sample_id: str
    prompt: Prompt
    completion: Completion


@dataclass(frozen=True)
class SampleScorer:
    """Decodes responses, has them verified, and adds the other reward terms to the verifier's.

    Args:
        scorer: the verifier, usually a pool of processes.
        decode: response token ids -> text (special tokens left out).
        addends: name of a reward term -> function of a finished response, its text and its score. They never change the
            accuracy, by which groups are filtered.
        meter: the pool whose processes measure repetition during generation, where that delays no train step. None:
            this process measures it.
    """

    scorer: Scorer
    decode: Callable[[Any], str]  # takes token ids [T]
    addends: Mapping[str, RewardAddend] = field(default_factory=dict)
    meter: VerifierPool | ShadowedPool | None = None

    def score(self, samples: Sequence[UnscoredSample]) -> dict[str, ScoredSample]:
        """Return the scored samples by sample id.

        Raises ValueError if the verifier leaves a response out or calls a truncated one correct.
        """
        texts = {sample.sample_id: self.decode(sample.completion.token_ids) for sample in samples}
        scores = self.scorer.score_many(
            [score_request(s.sample_id, s.prompt, s.completion, texts[s.sample_id], self.scorer) for s in samples]
        )
        missing = [sample.sample_id for sample in samples if sample.sample_id not in scores]
        if missing:
            raise ValueError(
                f"the verifier returned no score for {len(missing)} of {len(samples)} responses, such as {missing[0]}"
            )
        found = self._measure({sample.sample_id: sample.completion.token_ids for sample in samples})
        return {
            s.sample_id: self._scored(s, texts[s.sample_id], scores[s.sample_id], found[s.sample_id]) for s in samples
        }

    def unfinished(self, sample: UnscoredSample, window_start: int) -> ScoredSample:
        """Return a response that continues after its window, which began at token `window_start`, without scoring it."""
        text = self.decode(sample.completion.token_ids)
        score, window = Score(0.0, 0.0, "unfinished"), Window(window_start, False)
        repetition = self._measure({sample.sample_id: sample.completion.token_ids})[sample.sample_id]
        return ScoredSample(sample.sample_id, sample.completion, text, score, {}, window, repetition)

    def _measure(self, token_ids: Mapping[str, np.ndarray]) -> Mapping[str, Repetition]:
        if self.meter is not None:
            return self.meter.measure_repetition(token_ids)
        return {key: Repetition(*repetition_numbers(tokens)) for key, tokens in token_ids.items()}

    def _scored(self, sample: UnscoredSample, text: str, score: Score, repetition: Repetition) -> ScoredSample:
        if sample.completion.is_truncated and score.accuracy > 0:
            raise ValueError(
                f"sample {sample.sample_id}: the verifier gave accuracy {score.accuracy} to a truncated response "
                f"({sample.completion.finish_reason}); a truncated response is never correct: "
                "return accuracy 0 where is_truncated is set"
            )
        parts = {VERIFIER_PART: score.reward}
        parts |= {name: addend(sample.completion, text, score) for name, addend in self.addends.items()}
        return ScoredSample(sample.sample_id, sample.completion, text, score, parts, repetition=repetition)


def score_groups(scorer: SampleScorer, complete: Sequence[OpenGroup], serving: int) -> Iterator[Group]:
    """Score complete groups in one call of the verifier and yield them in the given order.

    `serving` is the policy version for a group without any token.
    """
    scored = scorer.score(
        [
            UnscoredSample(f"{group.group_id}/{index}", group.prompt, group.completions[index])
            for group in complete
            for index in range(len(group.completions))
        ]
    )
    for group in complete:
        samples = tuple(scored[f"{group.group_id}/{index}"] for index in range(len(group.completions)))
        versions = [run.version for sample in samples for run in sample.completion.versions]
        # A group is as old as its oldest token.
        yield Group(group.group_id, group.prompt, samples, min(versions, default=serving), group.generation_step)
