"""A world without models for windows: an engine that honors `max_new_tokens` and a response's own length, in any order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rollout_world import RIGHT, WRONG, FakeEngine, FakeVerifier, Running, answer, decode, fraction

from megatron_dapo.config.algorithm_schema import WindowConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.collector import CollectorInputs, sample_seed
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams

STOPS = (RIGHT, WRONG)


def own_length(seed: int) -> int:
    """Tokens up to and with the stop token, 1 to 30."""
    return 1 + int(30 * fraction(seed, "length") ** 2)


def whole_response(prompt_ids: Sequence[int], seed: int) -> tuple[int, ...]:
    """The response without any limit."""
    return answer(prompt_ids, seed, own_length(seed))


class WindowEngine(FakeEngine):
    """An engine that ends responses at the limit of their request, too."""

    length, whole = staticmethod(own_length), staticmethod(whole_response)

    def __init__(self, jitter: int = 0, abort_rate: float = 0.0, version: int = 0) -> None:
        super().__init__(jitter, abort_rate, version)
        self.submitted: list[GenerationRequest] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit(requests)
        self.submitted += requests

    def _end(self, request: GenerationRequest) -> int:
        return min(own_length(request.seed), request.sampling.max_new_tokens)

    def _poll(self) -> list[Completion]:
        returned = []
        for name in self._random.sample(sorted(self._running), len(self._running)):
            running = self._running[name]
            self._generate(running, self._random.choice([0, 1, 3, 9]), leave=0)
            if len(running.versions) == self._end(running.request) or self._random.random() < self._abort_rate:
                returned.append(self._completion(self._running.pop(name)))
        return returned

    def _completion(self, running: Running) -> Completion:
        request, length = running.request, len(running.versions)
        reason = "abort"
        if length == self._end(request):
            reason = "stop" if length == own_length(request.seed) else "length"
        return self.completion_of(running, reason)

    def abort(self) -> list[Completion]:
        partials = [self._completion(running) for running in self._running.values()]
        self._running.clear()
        return partials


@dataclass(frozen=True)
class WindowTestSettings:
    """The options of a world, of both sections."""

    group_size: int = 4
    sampling: SamplingParams = SamplingParams(max_new_tokens=20, stop_token_ids=STOPS)
    seed: int = 11
    window_tokens: int = 8
    windows_per_step: int = 0
    on_exhausted: str = "train_partial"
    max_staleness: int = 0


@dataclass
class WindowWorld:
    """Everything one process of a run has. `restart` builds a new process from a checkpoint's JSON."""

    pass_rates: Sequence[float]
    settings: WindowTestSettings
    max_epochs: int | None = 1
    jitter: int = 0
    abort_rate: float = 0.0
    version: int = 0
    on_progress: object = None

    def __post_init__(self) -> None:
        self.prompts = {
            f"p{i}": Prompt(f"p{i}", ({"role": "user", "content": f"{i}"},), (3 + i, round(1000 * rate)), str(RIGHT))
            for i, rate in enumerate(self.pass_rates)
        }
        self.engine = WindowEngine(self.jitter, self.abort_rate, self.version)
        self.verifier = FakeVerifier()
        inputs = CollectorInputs(
            PromptStream(list(self.prompts), seed=7, max_epochs=self.max_epochs),
            self.prompts,
            self.engine,
            SampleScorer(self.verifier, decode),
            self.on_progress,
        )
        settings = self.settings
        self.collector = WindowCollector(
            inputs,
            RolloutConfig(
                group_size=settings.group_size,
                on_exhausted=settings.on_exhausted,
                max_staleness=settings.max_staleness,
            ),
            WindowConfig(tokens=settings.window_tokens, windows_per_step=settings.windows_per_step),
            settings.sampling,
            settings.seed,
        )

    def checkpoint(self, **arguments: object) -> str:
        state = {"collector": self.collector.state_dict(**arguments), "version": self.engine.policy_version}
        return json.dumps(state, default=np.ndarray.tolist)

    def restart(self, checkpoint: str, **changes: object) -> WindowWorld:
        state = json.loads(checkpoint)
        kept = {name: getattr(self, name) for name in self.__dataclass_fields__}
        world = WindowWorld(**{**kept, "version": state["version"], **changes})
        world.collector.load_state_dict(state["collector"])
        return world


def make_window_world(pass_rates: Sequence[float], **changes: object) -> WindowWorld:
    """`changes` are fields of WindowTestSettings or of WindowWorld."""
    names = WindowTestSettings.__dataclass_fields__
    settings = {name: changes.pop(name) for name in list(changes) if name in names}
    return WindowWorld(pass_rates, WindowTestSettings(**settings), **changes)


class BatchChecker:
    """Checks batches against the definition as they are handed out: each window once, in order, of the right tokens."""

    def __init__(self, settings: WindowTestSettings) -> None:
        self._settings = settings
        self.ends: dict[str, int] = {}  # sample id -> tokens handed out
        self.finished: set[str] = set()
        self.accuracies: dict[str, float] = {}

    def add(self, batch: RolloutBatch) -> None:
        limit, window = self._settings.sampling.max_new_tokens, self._settings.window_tokens
        names = [sample.sample_id for group in batch.groups for sample in group.samples]
        assert names == sorted(names) and len(set(names)) == len(names)
        for group in batch.groups:
            for sample in group.samples:
                group_id, index = sample.sample_id.split("/")
                assert group_id == group.group_id
                seed = sample_seed(self._settings.seed, group_id, int(index))
                whole = whole_response(group.prompt.token_ids, seed)
                start = self.ends.get(sample.sample_id, 0)
                end = min(start + window, limit, len(whole))
                assert sample.sample_id not in self.finished and sample.window.start == start
                assert (
                    sample.completion.token_ids.tolist() == list(whole[:end]) and len(sample.completion.logprobs) == end
                )
                assert sample.window.is_finished == (end == len(whole) or end == limit)
                self._check_score(sample, is_right=whole[:end][-1] == RIGHT)
                runs = sample.completion.versions
                assert [run.start for run in runs] == [0, *(run.end for run in runs[:-1])] and runs[-1].end == end
                self.ends[sample.sample_id] = end
                if sample.window.is_finished:
                    self.finished.add(sample.sample_id)
            new = [run.version for s in group.samples for run in s.completion.versions if run.end > s.window.start]
            assert group.policy_version == min(new)

    def _check_score(self, sample: object, is_right: bool) -> None:
        if not sample.window.is_finished:
            assert sample.completion.finish_reason == "abort" and not sample.reward_parts and sample.reward == 0.0
            assert (sample.score.outcome, sample.score.accuracy, sample.score.reward) == ("unfinished", 0.0, 0.0)
            return
        ended = sample.completion.token_ids[-1] in STOPS
        assert sample.completion.finish_reason == ("stop" if ended else "length")
        outcome = ("correct" if is_right else "wrong") if ended else "truncated"
        assert sample.score.outcome == outcome and sample.reward == (1.0 if is_right else -1.0)
