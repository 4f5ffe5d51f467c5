"""A simulated twin of asynchronous training: published steps against simulated ones, then the product's own schedules.

    python benchmarks/asynchrony.py [--json] [--tiny]
    python benchmarks/asynchrony.py --ages RUN_DIR          the ages of a run's trained tokens against its twin's

Engines are queues (`twin/simulation.py`): a decoding step lasts max(bytes / bandwidth, operations / peak) + fixed + per
response, with the data sheet of an H20 and the shares of it that plans use. `twin/theirs.py` has verl's schedules as its
documentation and scripts describe them, `twin/published.py` its rows. `twin/ours.py` drives the product's own collectors on
a fake clock; `twin/schedules.py` models the same schedules on a whole batch (rows with `source` "model").

Three numbers are fitted, to five rows: median and spread of the response lengths, and the fixed seconds of a decoding
step. `published_max_error` is the largest |simulated / published - 1| of the steps of these rows, and
`published_max_generation_error` that of their generation (the trainer's wait if the engines are apart).
`others_within_aim` counts the rows that were not fitted and are within 15 %; `failed` names the others.

`ours` are steps of verl's 7B setting, 512 x 16 responses, trainer 106 s, weight update 4 s. `s1_seconds` and `s2_seconds` are
the shortest steps by start or guarded with a staleness of at most 1 and 2; `*_aborting_seconds` the shortest of those whose
updates stop all requests. In flight is `sglang.update_pause = "in_place"`. Rows with `share` below 1 have that share of the
batch and the engines. In every run accounts balance after every poll, no group is older than the bound, and none is trained
twice; `max_length_bias` is the largest of all rows but tail rounds. `model_error` compares the model with the collectors.

`agents`: idle slots of an engine by the number of open episodes, and the number that (generating + acting) / generating
asks for. `sensitivity`: each constant times 0.8 and 1.2, and the pairs of rows whose order changes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import options
from twin import agents, ours, schedules, theirs
from twin.ours import Outcome, Settings
from twin.published import FIT, FITTED, OTHERS, Row, compare, settings_of
from twin.recorded import compare_ages

AIM_OTHERS = 0.15
TRAIN, LOG_PROBS, SYNC = 106.0, 53.9, 4.0
PARTS = 16
IN_FLIGHT = "streamed, guarded, in flight"
# Schedules that both the collectors and the model have.
COLLECTED = {
    "whole batches, by start": schedules.Schedule(),
    "streamed, by start": schedules.Schedule(PARTS),
    "streamed, guarded": schedules.Schedule(PARTS, "guarded"),
    IN_FLIGHT: schedules.Schedule(PARTS, "guarded", keeps_cache=True),
}
WINDOW = 8192
TAIL_ROW, TAIL_OVERSAMPLE = "tail rounds", 1.1
SAME = 0.02  # rows that are no further apart have no order


def published_rows(rows: Sequence[Row], num_steps: int, divide: int) -> list[dict[str, Any]]:
    """Simulate published steps."""
    found = []
    for row in rows:
        compared = compare(row, settings_of(row, num_steps=num_steps, divide=divide))
        found.append(
            {
                "row": row.name,
                "is_fitted": row.is_fitted,
                "published": row.step,
                "simulated": round(compared.step, 1),
                "error": round(compared.error, 3),
                "published_generation": row.generation,
                "simulated_generation": round(compared.generation, 1),
                "generation_error": round(compared.generation_error, 3),
            }
        )
    return found


def setting(max_staleness: int, divide: int, num_steps: int, base: theirs.Settings | None = None) -> Settings:
    """Return our run of the 7B setting, as far ahead as the bound allows."""
    base = base or settings_of(replace(FITTED[-1], update=TRAIN), divide=divide)
    return Settings(
        engines=base.engines,
        cost=base.cost,
        lengths=base.lengths,
        prompts=base.prompts,
        group_size=base.group_size,
        train=base.update,
        sync=base.sync,
        max_staleness=max_staleness,
        oversample=1.0 + max_staleness,
        num_steps=num_steps,
    )


def our_row(name: str, source: str, divide: int, staleness: float, outcome: Outcome) -> dict[str, Any]:
    values = {
        key: {str(age): round(share, 4) for age, share in value.items()}
        if isinstance(value, Mapping)
        else value
        if value is None
        else round(value, 4)
        for key, value in asdict(outcome).items()
    }
    return {"row": name, "source": source, "share": 1 / divide, "staleness": staleness, **values}


def collector_rows(num_steps: int, divide: int) -> list[dict[str, Any]]:
    """Drive the product's collectors."""
    rows = []
    for staleness in (0, 1, 2):
        given = setting(staleness, divide, num_steps)
        for name, schedule in COLLECTED.items():
            if staleness or schedule.order == "start":
                run = replace(given, parts=schedule.parts, order=schedule.order, in_flight=schedule.keeps_cache)
                found = ours.disaggregated(run)
                rows.append(our_row(name, "collectors", divide, staleness, found))
        together = replace(given, engines=2 * given.engines, train=TRAIN + LOG_PROBS)
        rows.append(our_row("colocated", "collectors", divide, staleness, ours.colocated(together)))
    tail = replace(setting(0, divide, 3 * num_steps), tail_rounds=True, oversample=TAIL_OVERSAMPLE)
    rows.append(our_row(TAIL_ROW, "collectors", divide, 0, ours.disaggregated(tail)))
    for staleness in (0, 1):
        windows = replace(setting(staleness, divide, num_steps), window=WINDOW, oversample=1.0)
        rows.append(our_row("windows", "collectors", divide, staleness, ours.disaggregated(windows)))
    return rows


def model_rows(num_steps: int, divide: int) -> list[dict[str, Any]]:
    """Simulate the schedules of the collectors by the model, which is fast enough for a whole batch."""
    rows = []
    for staleness in (1, 2):
        for name, schedule in COLLECTED.items():
            found = schedules.simulate(setting(staleness, divide, num_steps), schedule)
            rows.append(our_row(name, "model", divide, staleness, found))
    half = schedules.Schedule(PARTS, "guarded", ahead=0.5)
    rows.append(
        our_row("streamed, guarded, ahead 0.5", "model", divide, 1, schedules.simulate(setting(1, divide, num_steps), half))
    )
    return rows


def verl_rows(num_steps: int, divide: int) -> list[dict[str, Any]]:
    """Simulate verl's schedule with the same trainer, for the ages of its samples."""
    found = []
    for row in FITTED[1:]:
        outcome = theirs.stream(settings_of(replace(row, update=TRAIN), num_steps=num_steps, divide=divide))
        found.append({"row": f"verl {row.name}", "source": "verl's schedule", "share": 1 / divide, **asdict(outcome)})
    return found


def agent_rows() -> dict[str, Any]:
    """Return the idle slots by open episodes, and what the rule asks for."""
    episodes = agents.Episodes(settings_of(FITTED[-1]).cost)
    asked = agents.rule(episodes)
    counts = sorted({*(episodes.slots * factor // 2 for factor in (1, 2, 3, 4, 6, 8)), asked})
    found = [asdict(agents.occupancy(episodes, count)) for count in counts]
    at_rule = next(one["idle_share"] for one in found if one["num_open"] == asked)
    return {"slots": episodes.slots, "open_by_rule": asked, "idle_share_by_rule": at_rule, "rows": found}


def sensitivity(num_steps: int, divide: int) -> dict[str, Any]:
    """Change each constant by 20 % and compare the order of the rows."""

    def rows(base: theirs.Settings) -> dict[str, float]:
        found = {
            f"verl {staleness}": theirs.stream(replace(base, staleness=staleness, is_partial=staleness > 0)).step
            for staleness in (0.0, 0.1, 0.5)
        }
        for staleness in (1, 2):
            given = setting(staleness, divide, num_steps, base)
            found[f"whole batches, {staleness}"] = schedules.simulate(given, schedules.Schedule()).step
            guarded = schedules.Schedule(PARTS, "guarded")
            found[f"streamed, guarded, {staleness}"] = schedules.simulate(given, guarded).step
        return found

    base = settings_of(replace(FITTED[-1], update=TRAIN), num_steps=num_steps, divide=divide)
    usual = rows(base)
    changed: dict[str, list[str]] = {}
    for name in ("weights", "context", "products", "fixed", "request", "prefill", "median", "sigma", "update", "sync"):
        for factor in (0.8, 1.2):
            found = rows(_scaled(base, name, factor))
            swapped = [f"{one} / {other}" for one, other in combinations(usual, 2) if _is_swapped(usual, found, one, other)]
            if swapped:
                changed[f"{name} x {factor}"] = swapped
    return {"usual": {name: round(seconds, 1) for name, seconds in usual.items()}, "swapped": changed}


def _scaled(base: theirs.Settings, name: str, factor: float) -> theirs.Settings:
    for part in (base, base.cost, base.lengths):
        if hasattr(part, name):
            changed = replace(part, **{name: factor * getattr(part, name)})
    if isinstance(changed, theirs.Settings):
        return changed
    return replace(base, **{"cost" if changed.__class__ is base.cost.__class__ else "lengths": changed})


def _is_swapped(usual: Mapping[str, float], found: Mapping[str, float], one: str, other: str) -> bool:
    before, after = usual[one] / usual[other] - 1, found[one] / found[other] - 1
    return before * after < 0 and min(abs(before), abs(after)) > SAME


def run(is_tiny: bool) -> dict[str, Any]:
    """Return all figures."""
    begin = time.process_time()
    num_steps, divide, small = (6, 16, 16) if is_tiny else (12, 1, 4)
    fitted = published_rows(FITTED, num_steps, divide)
    others = published_rows(OTHERS[:2] if is_tiny else OTHERS, num_steps, divide)
    failed = [row["row"] for row in others if abs(row["error"]) > AIM_OTHERS]
    real, model = collector_rows(num_steps, small), model_rows(num_steps, divide)
    compared = model_rows(num_steps, small)
    best = {
        (staleness, with_flight): min(
            row["step"] for row in model if row["staleness"] <= staleness and (with_flight or row["row"] != IN_FLIGHT)
        )
        for staleness in (1, 2)
        for with_flight in (True, False)
    }
    biases = [abs(row["length_bias"]) for row in [*real, *model] if row["length_bias"] is not None and row["row"] != TAIL_ROW]
    return {
        "benchmark": "asynchrony",
        "published_max_error": max(abs(row["error"]) for row in fitted),
        "published_max_generation_error": max(abs(row["generation_error"]) for row in fitted),
        "others_within_aim": len(others) - len(failed),
        "failed": failed,
        "s1_seconds": round(best[1, True], 1),
        "s2_seconds": round(best[2, True], 1),
        "s1_aborting_seconds": round(best[1, False], 1),
        "s2_aborting_seconds": round(best[2, False], 1),
        "max_length_bias": max(biases),
        "model_error": max(_model_errors(real, compared)),
        "fit": vars(FIT),
        "published": [*fitted, *others],
        "ours": [*real, *model],
        "verl": verl_rows(num_steps, divide),
        "agents": agent_rows(),
        "sensitivity": sensitivity(num_steps, 8 if not is_tiny else 32),
        "cpu_seconds": round(time.process_time() - begin, 1),
    }


def _model_errors(real: Sequence[Mapping[str, Any]], model: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return |model / collectors - 1| of the schedules that both have."""
    steps = {(row["row"], row["staleness"]): row["step"] for row in model}
    pairs = [(row["step"], steps.get((row["row"], row["staleness"]))) for row in real]
    return [round(abs(simulated / driven - 1), 3) for driven, simulated in pairs if simulated is not None]


def main() -> None:
    parser = options.parser(__doc__, "a sixteenth of the batch, a few steps")
    parser.add_argument("--ages", type=Path, metavar="RUN_DIR", help="a run with all of its samples on record")
    arguments = parser.parse_args()
    if arguments.ages is not None:
        options.show({"benchmark": "asynchrony", **compare_ages(arguments.ages)}, arguments)
        return
    gc.disable()  # Millions of small objects without cycles: looking for those takes a sixth of the time.
    options.show(run(arguments.tiny), arguments)


if __name__ == "__main__":
    main()
