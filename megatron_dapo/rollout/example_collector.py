"""Collector of given responses: follows the prompt stream's order and needs no engine, verifier or filter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dapo.data.examples import Example
from megatron_dapo.rollout.batch import CollectProgress, RolloutBatch
from megatron_dapo.rollout.collector import Collector, CollectorInputs, GroupCounters, PromptAccounting
from megatron_dapo.rollout.statistics import KEPT, StatisticsBuilder
from megatron_dapo.types import Completion, Group, Score, ScoredSample, VersionRange

STATE_VERSION = "given 1"
GIVEN = Score(accuracy=1.0, reward=1.0, outcome="correct")


class ExampleCollector(Collector):
    """Hands out examples as groups of one response with reward 1, as if the policy being trained had sampled it.

    Their log-probs are 0, because no engine computed any. `inputs.prompts` are the examples' prompts, by the same ids.
    """

    _counters: GroupCounters

    def __init__(self, inputs: CollectorInputs, examples: Mapping[str, Example]) -> None:
        super().__init__(inputs, GroupCounters())
        self._examples = examples

    def _collect(self, num_groups: int, training_version: int | None) -> RolloutBatch:
        # Report before drawing anything: a run that is asked to stop ends here.
        self._after_poll(CollectProgress(0, num_groups, 0, 0, 0, 0))
        version = self._counters.train_step if training_version is None else training_version
        self._counters.generation_step += 1
        builder = StatisticsBuilder()
        groups: list[Group] = []
        while len(groups) < num_groups and (name := self._stream.next()) is not None:
            groups.append(self._group(self._examples[name], version))
            builder.add_scored(groups[-1], KEPT)
            builder.num_started += 1
        return self._hand_out(
            RolloutBatch(
                tuple(groups),
                builder.build(num_begun_earlier=0, num_carried_over=0, num_unfinished=0),
                exhausted="prompts" if len(groups) < num_groups else "",
                should_stop=not groups,
                training_version=version,
            )
        )

    def _group(self, example: Example, version: int) -> Group:
        group_id = f"{self._counters.num_started:08d}"
        self._counters.num_started += 1
        tokens, sample_id = example.token_ids, f"{group_id}/0"
        completion = Completion(
            sample_id, tokens, np.zeros(len(tokens), np.float32), "stop", (VersionRange(0, len(tokens), version),)
        )
        sample = ScoredSample(sample_id, completion, example.text, GIVEN, {"given": GIVEN.reward})
        return Group(group_id, example.prompt, (sample,), version, self._counters.generation_step)

    def hold(self) -> None:
        """See `Collector`: nothing is ever in flight."""

    def give_back(self, batch: RolloutBatch) -> None:
        """See `Collector`: the next call draws the batch's examples first."""
        for group in batch.groups:
            self._stream.requeue(group.prompt.prompt_id)
        self._counters.num_queued_again += len(batch.groups)
        self._take_back(batch)

    def accounting(self) -> PromptAccounting:
        """See `Collector`."""
        counters = self._counters
        return PromptAccounting(counters.num_started, counters.num_trained, 0, counters.num_queued_again, 0, 0, 0)

    def state_dict(self, untrained: Sequence[RolloutBatch] = ()) -> dict[str, Any]:
        """See `Collector`."""
        again = [group.prompt.prompt_id for batch in untrained for group in batch.groups]
        stream, counters = self._stream.state_dict(), self._counters_without(untrained)
        return {
            "version": STATE_VERSION,
            "stream": {**stream, "requeued": [*stream["requeued"], *again]},
            "counters": {**counters, "num_queued_again": counters["num_queued_again"] + len(again)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collector`. ValueError for the state of another kind of collector."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"collector state has version {state.get('version')}, given responses have {STATE_VERSION!r}: the checkpoint "
                "is of a run that samples; name another output directory"
            )
        self._stream.load_state_dict(state["stream"])
        self._counters = GroupCounters(**state["counters"])

    @staticmethod
    def _num_trained_by(batch: RolloutBatch) -> int:
        return len(batch.groups)
