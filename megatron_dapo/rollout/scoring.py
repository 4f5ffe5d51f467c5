"""From completions to scored samples: text, the verifier's word, and the parts the reward is the sum of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_dapo.types import Completion, Prompt, Score, ScoredSample, Window

VERIFIER_PART = "verifier"
OVERLONG_PART = "overlong"


class Scorer(Protocol):
    """The verifier, usually a pool of processes."""

    def score_many(self, items: Iterable[tuple[Hashable, str, str, bool]]) -> Mapping[Hashable, Score]:
        """Scores by key of (key, response text, gold answer, is_truncated). Blocks until all are there."""


@dataclass(frozen=True)
class UnscoredSample:
    """A finished response to a prompt."""

    sample_id: str
    prompt: Prompt
    completion: Completion


@dataclass(frozen=True)
class SampleScorer:
    """Decodes, verifies and shapes.

    Args:
        scorer: the verifier.
        decode: response token ids -> text (special tokens left out).
        overlong_penalty: response length in tokens -> what is added to the reward (0 or negative), or None. It never
            touches the accuracy, on which groups are filtered.
    """

    scorer: Scorer
    decode: Callable[[Sequence[int]], str]
    overlong_penalty: Callable[[int], float] | None = None

    def score(self, samples: Sequence[UnscoredSample]) -> dict[str, ScoredSample]:
        """By sample id. ValueError where the verifier leaves a response out or calls a truncated one correct."""
        texts = {sample.sample_id: self.decode(sample.completion.token_ids) for sample in samples}
        scores = self.scorer.score_many(
            [(s.sample_id, texts[s.sample_id], s.prompt.answer, s.completion.is_truncated) for s in samples]
        )
        missing = [sample.sample_id for sample in samples if sample.sample_id not in scores]
        if missing:
            raise ValueError(
                f"the verifier returned no score for {len(missing)} of {len(samples)} responses, such as {missing[0]}"
            )
        return {s.sample_id: self._scored(s, texts[s.sample_id], scores[s.sample_id]) for s in samples}

    def unfinished(self, sample: UnscoredSample, window_start: int) -> ScoredSample:
        """A response that goes on behind its window, which began at token `window_start`: no verifier sees it."""
        text = self.decode(sample.completion.token_ids)
        return ScoredSample(
            sample.sample_id, sample.completion, text, Score(0.0, 0.0, "unfinished"), {}, Window(window_start, False)
        )

    def _scored(self, sample: UnscoredSample, text: str, score: Score) -> ScoredSample:
        if sample.completion.is_truncated and score.accuracy > 0:
            raise ValueError(
                f"sample {sample.sample_id}: the verifier gave accuracy {score.accuracy} to a truncated response "
                f"({sample.completion.finish_reason}); a truncated response is never correct: "
                "return accuracy 0 where is_truncated is set"
            )
        parts = {VERIFIER_PART: score.reward}
        if self.overlong_penalty is not None:
            parts[OVERLONG_PART] = self.overlong_penalty(len(sample.completion.token_ids))
        return ScoredSample(sample.sample_id, sample.completion, text, score, parts)
