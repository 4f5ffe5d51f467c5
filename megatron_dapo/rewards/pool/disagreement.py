"""A second verifier that records where it disagrees with the one that rewards. No reward waits for it.

Typical use: reward with `dapo`, which is strict about notation, and shadow with `lenient`. The records then show right
answers in a form that the reward rejects (or wrong ones that it accepts).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_dapo.rewards.pool.mixture import MixturePool
from megatron_dapo.rewards.pool.pool import ScoreRequest, VerifierPool
from megatron_dapo.types import Repetition, Score

RESPONSE_TAIL_CHARACTERS = 300


@dataclass(frozen=True)
class Disagreement:
    """One response on which two verifiers disagree, with enough of it to see which one is right."""

    key: str
    response_tail: str
    answer: str
    verifier: str  # versions, not names
    outcome: str
    extracted: str | None
    shadow_verifier: str
    shadow_outcome: str
    shadow_extracted: str | None

    def record(self) -> dict[str, Any]:
        """Return the disagreement as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class ShadowStatistics:
    """Counts of responses since the pool was opened."""

    num_compared: int
    num_disagreements: int
    num_skipped: int  # the shadow was too far behind


class ShadowedPool:
    """Scores like `primary`; `shadow` scores the same responses later and never delays a reward.

    Args:
        on_disagreement: called with each `Disagreement`, from a thread of the pools, in the order of the calls.
        max_waiting: responses the shadow may be behind before new ones are skipped (and counted).

    It owns both pools: closing it closes them.
    """

    def __init__(
        self,
        primary: VerifierPool | MixturePool,
        shadow: VerifierPool | MixturePool,
        on_disagreement: Callable[[Disagreement], None],
        max_waiting: int = 16384,
    ) -> None:
        self.primary = primary
        self.shadow = shadow
        self.version, self.takes_sample = primary.version, primary.takes_sample or shadow.takes_sample
        self.takes_token_ids = primary.takes_token_ids or shadow.takes_token_ids
        self._on_disagreement = on_disagreement
        self._max_waiting = max_waiting
        self._changed = threading.Condition()  # guards the counters below
        self._num_waiting = self._num_compared = self._num_disagreements = self._num_skipped = 0

    def score_many(self, items: Iterable[ScoreRequest]) -> dict[Hashable, Score]:
        """Return the primary's scores, see `VerifierPool.score_many`."""
        return self.submit(items).result()

    def submit(self, items: Iterable[ScoreRequest]) -> Future[dict[Hashable, Score]]:
        """Start scoring and return the future of the primary's scores."""
        items = list(items)
        scores = self.primary.submit(items)
        if self._reserve(len(items)):
            shadow_scores = self.shadow.submit(items)
            # The two pools finish in any order: compare when the second is done.
            scores.add_done_callback(
                lambda _: shadow_scores.add_done_callback(lambda _: self._compare(items, scores, shadow_scores))
            )
        return scores

    def measure_repetition(self, token_ids: Mapping[str, np.ndarray]) -> dict[str, Repetition]:
        """Measure in the primary's processes, see `VerifierPool.measure_repetition`."""
        return self.primary.measure_repetition(token_ids)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every response so far was compared; return False if `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_waiting == 0, timeout_s)

    def statistics(self) -> ShadowStatistics:
        """Return the counts so far."""
        with self._changed:
            return ShadowStatistics(self._num_compared, self._num_disagreements, self._num_skipped)

    def close(self) -> None:
        """Close both pools."""
        self.primary.close()
        self.shadow.close()

    def __enter__(self) -> ShadowedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, num_items: int) -> bool:
        with self._changed:
            has_room = self._num_waiting + num_items <= self._max_waiting
            self._num_waiting += num_items if has_room else 0
            self._num_skipped += 0 if has_room else num_items
        return has_room

    def _compare(
        self,
        items: Sequence[ScoreRequest],
        scores: Future[dict[Hashable, Score]],
        shadow_scores: Future[dict[Hashable, Score]],
    ) -> None:
        found: list[Disagreement] = []
        has_both = scores.exception() is None and shadow_scores.exception() is None
        try:
            if has_both:
                found = self._disagreements(items, scores.result(), shadow_scores.result())
            for disagreement in found:
                self._on_disagreement(disagreement)
        finally:
            with self._changed:
                self._num_waiting -= len(items)
                self._num_compared += len(items) if has_both else 0
                self._num_disagreements += len(found)
                self._changed.notify_all()

    def _disagreements(
        self, items: Sequence[ScoreRequest], scores: Mapping[Hashable, Score], shadow_scores: Mapping[Hashable, Score]
    ) -> list[Disagreement]:
        return [
            Disagreement(
                key=str(key),
                response_tail=response[-RESPONSE_TAIL_CHARACTERS:],
                answer=answer,
                verifier=self.primary.version,
                outcome=scores[key].outcome,
                extracted=scores[key].extracted,
                shadow_verifier=self.shadow.version,
                shadow_outcome=shadow_scores[key].outcome,
                shadow_extracted=shadow_scores[key].extracted,
            )
            for key, response, answer, *_ in items
            if scores[key].accuracy != shadow_scores[key].accuracy
        ]
