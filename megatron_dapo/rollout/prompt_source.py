"""Chooses the next prompt and its group size: order, budget by difficulty, and the filter for hopeless prompts.

    prompt stream --> order (shuffled, priority) --> filter (none, bounds, model) --> budget --> (prompt, responses)
                              ^                            ^                            ^
                              +------- history of each prompt: what its groups scored --+

All decisions use only visits of earlier collections and come before the first response of this one; see
`algorithms.sampling_budget`. What a collection observes is applied at its end, in order of group ids, so that the choice
of prompts does not depend on which group ended first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_dapo.algorithms.dynamic_sampling import wasted_fraction
from megatron_dapo.algorithms.prompt_filter import UsefulnessModel
from megatron_dapo.algorithms.prompt_priority import MEMORY, ucb_priority
from megatron_dapo.algorithms.sampling_budget import PassRate, fit_total, wanted_size
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.statistics import KEPT
from megatron_dapo.types import FilterDecision, Group

CONFIDENCE = 0.95  # confidence that a prompt is hopeless or trivial, for prompt_filter.name = "bounds"
FEATURES = (
    "constant",
    "contrast",
    "pass_rate",
    "length",
    "truncated_share",
    "surprise",
    "age",
)  # inputs of the filter's model
FIRST_COOL_DOWN = 10  # policy versions for which a prompt is first left out; doubles each time


@dataclass
class PromptRecord:
    """The history of one prompt."""

    passes: float = 0.0  # faded counts, as of `version`
    failures: float = 0.0
    version: int = 0  # policy trained at its last visit
    num_visits: int = 0
    num_scores: int = 0
    scores: list[float] = field(default_factory=list)  # the newest, in [-1, 1], if order = "priority"
    mean_tokens: float = 0.0  # mean over its last group, like the two below
    truncated_share: float = 0.0
    surprise: float = 0.0  # mean -log-prob of the sampled tokens under the policy
    num_skipped: int = 0  # times in a row
    waits_until: int = 0  # policy version

    def pass_rate(self, version: int) -> PassRate:
        """Return the estimate for policy `version`."""
        return PassRate(self.passes, self.failures).faded(max(0, version - self.version))


@dataclass(frozen=True)
class Observation:
    """What a scored group tells about its prompt."""

    group_id: str
    prompt_id: str
    decision: FilterDecision
    accuracies: tuple[float, ...]
    mean_tokens: float
    truncated_share: float
    surprise: float  # mean -log-prob of the sampled tokens under the policy

    @classmethod
    def of(cls, group: Group, decision: FilterDecision) -> Observation:
        """Return what `group` tells."""
        completions = [sample.completion for sample in group.samples]
        num_tokens = sum(completion.num_sampled for completion in completions)
        return cls(
            group.group_id,
            group.prompt.prompt_id,
            decision,
            tuple(sample.score.accuracy for sample in group.samples),
            num_tokens / len(completions),
            sum(completion.is_truncated for completion in completions) / len(completions),
            -sum(float(completion.sampled.logprobs.sum()) for completion in completions) / max(1, num_tokens),
        )


class PromptSource:
    """Hands out prompts with the sizes of their groups.

    Args:
        stream: yields prompt ids and takes back those that were not trained.
        config: the [rollout] section.
        num_prompts: size of the data set.
        seed: seed of the audits.
    """

    def __init__(self, stream: PromptStream, config: RolloutConfig, num_prompts: int, seed: int) -> None:
        self._stream = stream
        self._rollout = config
        self._num_prompts = num_prompts
        self._seed = seed
        self._records: dict[str, PromptRecord] = {}
        self._plan: deque[tuple[str, int]] = deque()  # drawn by the budget, not yet handed out
        self._ranked: deque[str] = deque()  # this collection's prompts, by priority
        self._observed: list[Observation] = []  # groups scored in this collection
        self._predicted: dict[str, tuple[float, bool]] = {}  # prompt handed out -> (P(useful), would be skipped)
        self._model = UsefulnessModel(FEATURES)
        self._version = 0
        self._counts = {"skipped": 0, "audited": 0, "tokens_saved": 0}  # counts of this collection

    @property
    def _keeps_history(self) -> bool:
        rollout = self._rollout
        return rollout.prompt_order == "priority" or rollout.budget.enabled or rollout.prompt_filter.name != "none"

    def begin(self, version: int) -> None:
        """Start or continue a collection for policy `version`: refit the filter's model."""
        self._version = version
        self._counts = dict.fromkeys(self._counts, 0)
        if self._rollout.prompt_filter.name == "model":
            self._model.fit()

    def next(self, num_groups: int) -> tuple[str, int] | None:
        """Return the next prompt and the size of its group; None at the end of the data.

        With a budget, prompts are drawn `num_groups` at a time, and their sizes add up to num_groups * group_size.
        """
        if not self._rollout.budget.enabled:
            prompt_id = self._draw()
            return None if prompt_id is None else (prompt_id, self._rollout.group_size)
        if not self._plan:
            drawn: list[str] = []
            while len(drawn) < num_groups and (prompt_id := self._draw()) is not None:
                drawn.append(prompt_id)
            budget, size = self._rollout.budget, self._rollout.group_size
            rates = [self._record(prompt_id).pass_rate(self._version).mean for prompt_id in drawn]
            wanted = [wanted_size(rate, budget.min_size, budget.max_size) for rate in rates]
            sizes = fit_total(wanted, size * len(drawn), budget.min_size, budget.max_size)
            self._plan.extend(zip(drawn, sizes, strict=True))
        return self._plan.popleft() if self._plan else None

    def observe(self, group: Group, decision: FilterDecision) -> None:
        """Note a scored group of this collection for `finish`."""
        self._observed.append(Observation.of(group, decision))

    def finish(self, num_rewrites: int) -> None:
        """End a collection: report its decisions to the stream and learn from its groups, in order of group ids.

        `num_rewrites` is the number of rewrites drawn that still may be trained.
        """
        for observed in sorted(self._observed, key=lambda observed: observed.group_id):
            self._stream.judged(observed.prompt_id, observed.decision, num_rewrites)
            if self._keeps_history:
                self._learn(observed)
        self._observed.clear()
        self._ranked.clear()

    def _learn(self, observed: Observation) -> None:
        record, is_kept = self._record(observed.prompt_id), observed.decision == KEPT
        if (predicted := self._predicted.pop(observed.prompt_id, None)) is not None:
            self._model.observe(*predicted, is_kept)
        num_responses = len(observed.accuracies)
        passes = sum(accuracy > 0 for accuracy in observed.accuracies)
        if record.num_visits and self._rollout.prompt_filter.name == "model":
            self._model.add(self._features(record), is_kept)
        rate = record.pass_rate(self._version).seen(passes, num_responses - passes)
        record.passes, record.failures, record.version = rate.passes, rate.failures, self._version
        record.num_visits += 1
        record.num_scores += num_responses
        if self._rollout.prompt_order == "priority":
            scores = [2 * accuracy - 1 for accuracy in observed.accuracies]
            record.scores = [*record.scores, *scores][-MEMORY:]
        record.mean_tokens, record.truncated_share = observed.mean_tokens, observed.truncated_share
        record.surprise = observed.surprise
        if is_kept:
            record.num_skipped = record.waits_until = 0

    def statistics(self) -> dict[str, float]:
        """Return the numbers of this collection and the filter's quality so far, by their names in the metrics."""
        return {**self._counts, **self._model.quality(self._rollout.prompt_filter.audit_share)}

    # The next prompt

    def _draw(self) -> str | None:
        for attempt in range(2 * self._num_prompts + 1):
            prompt_id = self._next_in_order()
            if prompt_id is None or not self._is_skipped(prompt_id) or attempt == 2 * self._num_prompts:
                return prompt_id
        return None

    def _next_in_order(self) -> str | None:
        is_first_pass = self._stream.num_drawn < self._num_prompts
        if self._rollout.prompt_order == "shuffled" or is_first_pass or self._stream.num_requeued:
            return self._stream.next()
        if not self._ranked:
            step = max(1, self._version + 1)
            # Break ties by name, so that every process has the same order.
            order = sorted(
                (-ucb_priority(record.scores, record.num_scores, step), prompt_id)
                for prompt_id, record in self._records.items()
                if record.scores
            )
            self._ranked.extend(prompt_id for _, prompt_id in order)
        # Data smaller than the first collection: no group of it has been observed yet.
        return self._ranked.popleft() if self._ranked else self._stream.next()

    def _is_skipped(self, prompt_id: str) -> bool:
        """Return True if the filter leaves the prompt out this time; a share of such prompts is tried anyway."""
        settings, record = self._rollout.prompt_filter, self._records.get(prompt_id)
        if settings.name == "none" or record is None or not record.num_visits:
            return False
        rate = record.pass_rate(self._version)
        if settings.name == "bounds":
            is_hopeless = rate.probability_below(settings.margin) > CONFIDENCE
            flagged = is_hopeless or rate.probability_below(1 - settings.margin) < 1 - CONFIDENCE
            useful = 1 - wasted_fraction(rate.mean, self._rollout.group_size)
        elif (predicted := self._model.predict(self._features(record))) is not None:
            useful, flagged = predicted, predicted < settings.margin
        else:
            return False
        if flagged and self._version < record.waits_until:
            return self._skip(record)
        if flagged:
            # A resumed run draws the same number.
            if random.Random(f"{self._seed}/{prompt_id}/{self._version}").random() >= settings.audit_share:
                record.waits_until = self._version + FIRST_COOL_DOWN * 2 ** min(record.num_skipped, 6)
                record.num_skipped += 1
                return self._skip(record)
            self._counts["audited"] += 1
        self._predicted[prompt_id] = (useful, flagged)
        return False

    def _skip(self, record: PromptRecord) -> bool:
        self._counts["skipped"] += 1
        self._counts["tokens_saved"] += round(record.mean_tokens * self._rollout.group_size)
        return True

    def _record(self, prompt_id: str) -> PromptRecord:
        return self._records.setdefault(prompt_id, PromptRecord())

    def _features(self, record: PromptRecord) -> list[float]:
        rate = record.pass_rate(self._version)
        length = record.mean_tokens / self._rollout.max_response_tokens
        contrast, age = rate.mean * (1 - rate.mean), min(self._version - record.version, 50) / 50
        return [1.0, 4 * contrast, rate.mean, length, record.truncated_share, record.surprise, age]

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state, with the history only if this run uses one."""
        observed = {"observed": [asdict(entry) for entry in self._observed]}
        if not self._keeps_history:
            return observed
        return {
            **observed,
            "records": {prompt_id: asdict(record) for prompt_id, record in self._records.items()},
            "plan": [list(entry) for entry in self._plan],
            "ranked": list(self._ranked),
            "predicted": {prompt_id: list(entry) for prompt_id, entry in self._predicted.items()},
            "model": self._model.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Invert `state_dict`. State that this run does not use is ignored, and planned prompts are then queued again.

        ValueError if the filter's model has other features.
        """
        plan = deque((prompt_id, size) for prompt_id, size in state.get("plan", ()))
        if not self._rollout.budget.enabled:
            for prompt_id, _ in plan:
                self._stream.requeue(prompt_id)
            plan.clear()
        self._plan = plan
        self._observed = [Observation(**entry) for entry in state["observed"]]
        self._ranked = deque(state.get("ranked", ()))
        self._records = {prompt_id: PromptRecord(**record) for prompt_id, record in state.get("records", {}).items()}
        self._predicted = {prompt_id: (entry[0], entry[1]) for prompt_id, entry in state.get("predicted", {}).items()}
        if "model" in state and self._rollout.prompt_filter.name != "none":
            self._model.load_state_dict(state["model"])
