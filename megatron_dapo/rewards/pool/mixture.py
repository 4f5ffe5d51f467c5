"""A weighted mixture of verifiers with separate processes: one that fails or is late only costs its own part."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_dapo.rewards.pool.pool import ScoreRequest, VerifierPool
from megatron_dapo.types import Repetition, Score

FAILED_OUTCOMES = ("timeout", "error")


@dataclass(frozen=True)
class MixtureComponent:
    """A verifier of a mixture."""

    name: str  # name of its part in samples and metrics
    pool: VerifierPool
    weight: float = 1.0


class MixturePool:
    """Rewards with the sum of weight times reward; `deciding` names the component that decides what is correct.

    A score's detail has the parts of the reward: a component's part is its weighted reward or, as NAME/PART, its own
    weighted parts. It also has the components' errors, by name. Closing the mixture closes the components' pools.
    """

    def __init__(self, components: Sequence[MixtureComponent], deciding: str) -> None:
        self.components, self._deciding = tuple(components), deciding
        names = [one.name for one in components]
        if len(set(names)) != len(names) or deciding not in names:
            raise ValueError(
                f"a mixture needs components of different names, and one of them decides; got {names}, {deciding!r}"
            )
        self.verifier = "mix"
        self.version = " + ".join(f"{one.weight:g} x {one.pool.version}" for one in components)
        self.takes_sample = any(one.pool.takes_sample for one in components)
        self.takes_token_ids = any(one.pool.takes_token_ids for one in components)

    def score_many(self, items: Iterable[ScoreRequest]) -> dict[Hashable, Score]:
        """Return the scores by key, see `VerifierPool.score_many`."""
        return self.submit(items).result()

    def submit(self, items: Iterable[ScoreRequest]) -> Future[dict[Hashable, Score]]:
        """Start all components on the items and return the future of the mixed scores."""
        items = list(items)
        futures = {one.name: one.pool.submit(items) for one in self.components}
        mixed: Future[dict[Hashable, Score]] = Future()
        mixed.set_running_or_notify_cancel()
        lock, open_futures = threading.Lock(), set(futures)

        def on_done(name: str, _: Future[dict[Hashable, Score]]) -> None:
            with lock:
                open_futures.discard(name)
                if open_futures or mixed.done():
                    return
            try:
                scores = {name: future.result() for name, future in futures.items()}
                mixed.set_result({item[0]: self._mixed({n: s[item[0]] for n, s in scores.items()}) for item in items})
            except Exception as error:  # a pool was closed or broke; the caller gets the error
                mixed.set_exception(error)

        for name, future in futures.items():
            future.add_done_callback(partial(on_done, name))
        return mixed

    def _mixed(self, scores: Mapping[str, Score]) -> Score:
        """Return the mixture of one response's scores."""
        parts: dict[str, float] = {}
        for one in self.components:
            score = scores[one.name]
            own = score.detail.get("parts") or {}
            parts |= {f"{one.name}/{part}": one.weight * value for part, value in own.items()}
            parts |= {} if own else {one.name: one.weight * score.reward}
        decided = scores[self._deciding]
        failed = {
            name: str(score.detail.get("error", score.outcome))
            for name, score in scores.items()
            if score.outcome in FAILED_OUTCOMES
        }
        details = {
            name: rest
            for name, score in scores.items()
            if (rest := {key: value for key, value in score.detail.items() if key not in ("parts", "error")})
        }
        detail = {
            "parts": parts,
            **({"failed": failed} if failed else {}),
            **({"components": details} if details else {}),
        }
        return Score(decided.accuracy, sum(parts.values()), decided.outcome, decided.extracted, detail)

    def measure_repetition(self, token_ids: Mapping[str, np.ndarray]) -> dict[str, Repetition]:
        """Measure in the first component's processes, see `VerifierPool.measure_repetition`."""
        return self.components[0].pool.measure_repetition(token_ids)

    def validate_answers(self, answers: Iterable[str]) -> dict[str, str]:
        """Return the gold answers that some component cannot use, each with the reason."""
        answers = list(answers)
        problems: dict[str, str] = {}
        for one in self.components:
            problems |= {answer: f"{one.name}: {why}" for answer, why in one.pool.validate_answers(answers).items()}
        return problems

    def close(self) -> None:
        """Close every component's pool."""
        for one in self.components:
            one.pool.close()

    def __enter__(self) -> MixturePool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
