"""A world without models: prompts of known difficulty, an engine that finishes in any order, a verifier that reads the
answer.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.injection import Injection
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.batch import CollectProgress
from megatron_dapo.rollout.buffer import ReplayBuffer
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import RewardAddend, SampleScorer
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams, Score, VersionRange

RIGHT, WRONG = 1, 2
SAMPLING = SamplingParams(max_new_tokens=16)
SEED = 11


def fraction(*key: object) -> float:
    """A number in [0, 1) that depends only on `key`."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little") / 2**56


def response_length(seed: int) -> int:
    return 2 + int(10 * fraction(seed, "length"))


def answer(prompt_ids: Sequence[int], seed: int, length: int) -> tuple[int, ...]:
    """A response of `length` tokens, the last of which is right at the prompt's pass rate."""
    is_right = fraction(seed, "answer") < prompt_ids[1] / 1000
    body = [10 + int(1000 * fraction(seed, place)) for place in range(length - 1)]
    return (*body, RIGHT if is_right else WRONG)


def whole_response(prompt_ids: Sequence[int], seed: int) -> tuple[int, ...]:
    """The whole response, however often it is stopped."""
    return answer(prompt_ids, seed, response_length(seed))


@dataclass
class Running:
    """A request and the version that sampled each of its tokens so far."""

    request: GenerationRequest
    versions: list[int]


class FakeEngine:
    """Responses depend on their seed; how fast they come depends on `jitter`. Pass rate: second prompt token / 1000."""

    length, whole = staticmethod(response_length), staticmethod(whole_response)

    def __init__(self, jitter: int = 0, abort_rate: float = 0.0, version: int = 0) -> None:
        self.policy_version = version
        self.polls_until_crash: int | None = None
        self._random = random.Random(jitter)
        self._abort_rate = abort_rate
        self._running: dict[str, Running] = {}
        self.seeds: dict[str, int] = {}
        self.num_generated = 0  # tokens
        self.max_groups_in_flight = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            assert request.request_id not in self._running, f"{request.request_id} is running"
            assert self.seeds.setdefault(request.request_id, request.seed) == request.seed
            self._running[request.request_id] = Running(request, self._prefix_versions(request))
        self.max_groups_in_flight = max(self.max_groups_in_flight, len({name.split("/")[0] for name in self._running}))

    def _prefix_versions(self, request: GenerationRequest) -> list[int]:
        prefix = request.prefix
        if prefix is None:
            return []
        assert prefix.finish_reason == "abort" and 0 < len(prefix.token_ids) < self._end(request)
        assert prefix.token_ids.tolist() == list(self.whole(request.prompt_ids, request.seed)[: len(prefix.token_ids)])
        return [run.version for run in prefix.versions for _ in range(run.start, run.end)]

    def poll(self) -> list[Completion]:
        if self.polls_until_crash is not None:
            self.polls_until_crash -= 1
            if self.polls_until_crash < 0:
                raise ConnectionError("the engine went away")
        return self._poll()

    def _end(self, request: GenerationRequest) -> int:
        """Tokens of the response when this request ends."""
        return self.length(request.seed)

    def _poll(self) -> list[Completion]:
        names = [name for name in self._running if self._random.random() < 0.3]
        self._random.shuffle(names)
        finished = [self._finish(self._running.pop(name)) for name in names]
        for running in self._running.values():
            self._generate(running, self._random.choice([0, 0, 1, 2]), leave=1)
        return finished

    def _generate(self, running: Running, num_tokens: int, leave: int) -> None:
        """Generate at most `num_tokens` more, up to `leave` before the end."""
        num_tokens = max(0, min(num_tokens, self._end(running.request) - leave - len(running.versions)))
        running.versions += [self.policy_version] * num_tokens
        self.num_generated += num_tokens

    def _finish(self, running: Running) -> Completion:
        if self._random.random() < self._abort_rate:
            self._generate(running, 1, leave=1)
            return self.completion_of(running, "abort")
        self._generate(running, 1000, leave=0)
        return self.completion_of(running, "stop")

    def completion_of(self, running: Running, reason: str) -> Completion:
        """Return the tokens that `running` has so far."""
        request, sampled, length = running.request, running.versions, len(running.versions)
        logprobs = tuple(-fraction(request.seed, "logprob", place) for place in range(length))
        starts = [place for place in range(length) if place == 0 or sampled[place] != sampled[place - 1]]
        versions = [VersionRange(start, end, sampled[start]) for start, end in zip(starts, [*starts[1:], length])]
        tokens = self.whole(request.prompt_ids, request.seed)[:length]
        return Completion(request.request_id, tokens, logprobs, reason, tuple(versions))

    def abort(self) -> list[Completion]:
        partials = [self.completion_of(running, "abort") for running in self._running.values()]
        self._running.clear()
        return partials


class FakeVerifier:
    def score_many(self, items: Iterable[tuple[str, str, str, bool]]) -> dict[str, Score]:
        return {key: self._score(text, answer, cut) for key, text, answer, cut, _ in items}

    def _score(self, text: str, answer: str, is_truncated: bool) -> Score:
        if is_truncated:
            return Score(0.0, -1.0, "truncated")
        right = text.split()[-1] == answer
        return Score(float(right), 1.0 if right else -1.0, "correct" if right else "wrong", text.split()[-1])


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


@dataclass
class World:
    """Everything one process of a run has. `restart` builds a new process from a checkpoint's JSON."""

    pass_rates: Sequence[float]
    settings: RolloutConfig
    sampling: SamplingParams = SAMPLING
    max_epochs: int | None = 1
    jitter: int = 0
    abort_rate: float = 0.0
    addends: Mapping[str, RewardAddend] = field(default_factory=dict)
    on_progress: Callable[[CollectProgress], None] | None = None
    version: int = 0
    injection: Callable[[], Injection] | None = None  # made anew by every process
    rewrites: Sequence[Prompt] = ()

    def __post_init__(self) -> None:
        prompts = [
            Prompt(f"p{i}", ({"role": "user", "content": f"{i}"},), (3 + i, round(1000 * rate)), str(RIGHT))
            for i, rate in enumerate(self.pass_rates)
        ]
        self.engine = FakeEngine(self.jitter, self.abort_rate, self.version)
        injection = None if self.injection is None else self.injection()
        self.stream = PromptStream([prompt.prompt_id for prompt in prompts], 7, self.max_epochs, injection)
        inputs = CollectorInputs(
            stream=self.stream,
            prompts={prompt.prompt_id: prompt for prompt in (*prompts, *self.rewrites)},
            engine=self.engine,
            scorer=SampleScorer(FakeVerifier(), decode, self.addends),
            on_progress=self.on_progress,
        )
        self.collector = GroupCollector(inputs, self.settings, self.sampling, seed=SEED)

    @property
    def buffer(self) -> ReplayBuffer:
        return self.collector._buffer

    @property
    def max_staleness(self) -> int:
        return self.settings.max_staleness

    def checkpoint(self) -> str:
        state = {"collector": self.collector.state_dict(), "version": self.engine.policy_version}
        return json.dumps(state, default=np.ndarray.tolist)

    def restart(self, checkpoint: str, **changes: object) -> World:
        state = json.loads(checkpoint)
        kept = {name: getattr(self, name) for name in self.__dataclass_fields__}
        world = World(**{**kept, "version": state["version"], **changes})
        world.collector.load_state_dict(state["collector"])
        return world


def make_world(pass_rates: Sequence[float], *, group_size: int = 4, **changes: object) -> World:
    """`changes` are fields of the [rollout] section or of World."""
    section = {name: changes.pop(name) for name in list(changes) if name in RolloutConfig.model_fields}
    return World(pass_rates, RolloutConfig(group_size=group_size, **section), **changes)
