"""A recorded run against the twin of its schedule: the ages of the trained tokens.

Engines that share the trainer's devices generate and train in turns, so ages depend on the schedule and on the lengths of the
responses, not on seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twin.ours import SCALE, Run, Settings
from twin.simulation import Cost, Lengths

NUM_WARM = 2  # first steps, whose responses are young


@dataclass(frozen=True)
class RecordedLengths(Lengths):
    """Lengths of a run's responses by the number of their group; groups that it did not train repeat others."""

    by_group: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def of_group(self, number: int, size: int, draw: int = 0) -> list[int]:
        known = dict(self.by_group)
        found = known.get(number) or self.by_group[number % len(self.by_group)][1]
        return [SCALE * length for length in found]


def compare_ages(directory: Path) -> dict[str, Any]:
    """Return the shares of the trained tokens by age of a run and of its twin, and their total variation."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))["config"]
    rollout = config["rollout"]
    if rollout["engine"] == "sglang" and config["sglang"]["placement"] == "disaggregated":
        raise ValueError(f"{directory}: servers with their own devices: ages depend on seconds, which a run does not repeat")
    records = [json.loads(line) for line in (directory / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = len(records) / rollout["prompts_per_step"] / rollout["group_size"] / max(one["train_step"] for one in records)
    if trained < 1:
        raise ValueError(f"{directory}: {trained:.0%} of the trained responses are on record; set telemetry.samples_per_step")
    num_steps = max(one["train_step"] for one in records)
    run = Run(_settings(rollout, records, num_steps), is_colocated=True)
    run.outcome()
    simulated = _shares(run.token_ages[NUM_WARM:])
    recorded = _shares(_ages_by_step(records, num_steps)[NUM_WARM:])
    ages = sorted({*simulated, *recorded})
    return {
        "steps": num_steps - NUM_WARM,
        "recorded": {str(age): round(recorded.get(age, 0.0), 4) for age in ages},
        "simulated": {str(age): round(simulated.get(age, 0.0), 4) for age in ages},
        "total_variation": round(sum(abs(recorded.get(age, 0.0) - simulated.get(age, 0.0)) for age in ages) / 2, 4),
    }


def _settings(rollout: Mapping[str, Any], records: Sequence[Mapping[str, Any]], num_steps: int) -> Settings:
    lengths: dict[int, dict[int, int]] = {}
    for one in records:
        group, index = map(int, one["sample_id"].split("/"))
        lengths.setdefault(group, {})[index] = len(one["response_ids"])
    by_group = tuple((group, tuple(found[index] for index in sorted(found))) for group, found in sorted(lengths.items()))
    return Settings(
        engines=1,
        cost=Cost(weights=1 / SCALE, context=0.0, products=0.0, fixed=0.0, request=0.0),
        lengths=RecordedLengths(1.0, 0.0, SCALE * rollout["max_response_tokens"], prompt=0, by_group=by_group),
        prompts=rollout["prompts_per_step"],
        group_size=rollout["group_size"],
        train=1.0,
        sync=0.0,
        max_staleness=rollout["max_staleness"],
        oversample=rollout["oversample"],
        ahead=rollout["ahead"],
        tail_rounds=rollout["tail_rounds"],
        order=rollout["order"],
        num_steps=num_steps,
        num_warm=NUM_WARM,
    )


def _ages_by_step(records: Iterable[Mapping[str, Any]], num_steps: int) -> list[Counter[int]]:
    found = [Counter[int]() for _ in range(num_steps)]
    for one in records:
        for run in one["versions"]:
            found[one["train_step"] - 1][one["train_step"] - 1 - run["version"]] += run["end"] - run["start"]
    return found


def _shares(steps: Iterable[Counter[int]]) -> dict[int, float]:
    total: Counter[int] = sum(steps, Counter())
    return {age: count / total.total() for age, count in total.items()}
