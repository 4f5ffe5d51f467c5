"""A collection of windows being made: every response of it is brought to the end of its window, or to its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_dapo.engines.base import RolloutEngine
from megatron_dapo.rollout.batch import Exhaustion
from megatron_dapo.rollout.batch_collector import sample_seed
from megatron_dapo.rollout.continuation import is_partial, next_request
from megatron_dapo.rollout.scoring import SampleScorer, UnscoredSample
from megatron_dapo.rollout.settings import WindowSettings
from megatron_dapo.rollout.window_pool import Place, WindowPool, behind_window
from megatron_dapo.types import Completion, GenerationRequest, ScoredSample, Window


class WindowCollection:
    """The windows of `places`, responses of the pool, in this order. Their tokens stand in the pool as the engine
    returns them, so that a collection can be made again from its places; finished responses are then scored again.
    """

    def __init__(
        self,
        places: Sequence[Place],
        exhausted: Exhaustion,
        pool: WindowPool,
        engine: RolloutEngine,
        scorer: SampleScorer,
        settings: WindowSettings,
    ) -> None:
        self.places = list(places)
        self.exhausted = exhausted
        self.num_new_tokens = 0  # since the last call of `generate`
        self.scored: dict[Place, ScoredSample] = {}  # finished ones
        self._pool = pool
        self._engine = engine
        self._scorer = scorer
        self._settings = settings
        self._in_flight: set[Place] = set()  # submitted and not returned
        self._returned: list[Place] = []  # to be looked at

    @property
    def num_in_flight(self) -> int:
        """Responses that the engine works on."""
        return len(self._in_flight)

    def generate(self, between_polls: Callable[[], None]) -> None:
        """Bring every response to the end of its window, or to its own. `between_polls` is called after every poll; it
        may call `hold`.
        """
        self.num_new_tokens = 0
        self._returned = list(self.places)
        self._forget_fruitless()
        self._settle()
        while self._in_flight:
            self._take(self._engine.poll())
            self._settle()
            between_polls()
            self._settle()  # what was held meanwhile goes on

    def hold(self) -> None:
        """Stop the engine and keep what there is of every window."""
        if self._in_flight:
            self._take(self._engine.abort())
            # Those that an engine has forgotten go on from what is held.
            self._returned += sorted(self._in_flight)
            self._in_flight.clear()
            self._forget_fruitless()

    def samples(self) -> dict[Place, ScoredSample]:
        """All windows in order of their places, once they are made."""
        return {place: self._sample(place) for place in sorted(self.places)}

    def _forget_fruitless(self) -> None:
        """Being stopped from here is no fault of the engine's."""
        for group in self._pool.groups:
            group.responses.num_fruitless.clear()

    def _take(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            group_id, _, index = completion.request_id.rpartition("/")
            place = (group_id, int(index))
            assert place in self._in_flight, f"the engine returned {completion.request_id}, which is not in flight"
            ended = behind_window(completion, self._limit(place), self._settings.sampling)
            self.num_new_tokens += self._pool[group_id].responses.add(place[1], ended)
            self._in_flight.remove(place)
            self._returned.append(place)

    def _settle(self) -> None:
        """Score what has come to its end; let the rest go on to the end of its window."""
        returned, self._returned = self._returned, []
        requests = {place: self._request(place) for place in returned if self._goes_on(place)}
        if requests:
            self._in_flight.update(requests)
            self._engine.submit(list(requests.values()))
        finished = {
            place: self._unscored(place) for place in returned if self._is_finished(place) and place not in self.scored
        }
        if finished:
            samples = self._scorer.score(list(finished.values()))
            self.scored.update((place, samples[sample.sample_id]) for place, sample in finished.items())

    def _limit(self, place: Place) -> int:
        """Response tokens at the end of the window."""
        group_id, index = place
        start = self._pool[group_id].starts[index]
        return min(self._settings.sampling.max_new_tokens, start + self._settings.window_tokens)

    def _is_finished(self, place: Place) -> bool:
        held = self._pool[place[0]].completion(place[1])
        return held is not None and not is_partial(held)

    def _goes_on(self, place: Place) -> bool:
        held = self._pool[place[0]].completion(place[1])
        return held is None or (is_partial(held) and len(held.token_ids) < self._limit(place))

    def _request(self, place: Place) -> GenerationRequest:
        group_id, index = place
        sampling = replace(self._settings.sampling, max_new_tokens=self._limit(place))
        seed = sample_seed(self._settings.seed, group_id, index)
        return next_request(self._pool[group_id].responses, index, sampling, seed)

    def _unscored(self, place: Place) -> UnscoredSample:
        group_id, index = place
        group = self._pool[group_id]
        completion = group.completion(index)
        assert completion is not None, f"response {group_id}/{index} was generated"
        return UnscoredSample(f"{group_id}/{index}", group.responses.prompt, completion)

    def _sample(self, place: Place) -> ScoredSample:
        group_id, index = place
        start = self._pool[group_id].starts[index]
        scored = self.scored.get(place)
        if scored is not None:
            return replace(scored, window=Window(start, True))
        return self._scorer.unfinished(self._unscored(place), start)
