"""Rewrites in the place of groups that dynamic sampling dropped: harder after all right, easier after all wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout_world import RIGHT, World

from megatron_dapo.config.data_schema import InjectionConfig
from megatron_dapo.config.rollout_schema import BudgetConfig
from megatron_dapo.data.injection import TEMPLATE, Injection
from megatron_dapo.types import Prompt

GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "golden" / "golden.json").read_text())["seeds"]
Rates = Mapping[str, float]  # template -> pass rate of the rewrites by it


def with_rewrites(
    make_world: Callable[..., World], rates: Sequence[float], rewrites: Mapping[int, Rates], rate: float, **changes: Any
) -> World:
    """A world whose prompt number i has the rewrites `rewrites[i]`."""
    ids = {f"p{i}": {template: f"p{i}~{template}" for template in own} for i, own in rewrites.items()}
    prompts = [
        Prompt(name, ({"role": "user", "content": name},), (9, round(1000 * own[template])), str(RIGHT), extra={TEMPLATE: template})
        for i, own in rewrites.items()
        for template, name in ids[f"p{i}"].items()
    ]  # fmt: skip
    make = lambda: Injection(ids, InjectionConfig(rate=rate), 5, changes["prompts_per_step"])  # noqa: E731
    return make_world(rates, injection=make, rewrites=prompts, **changes)


def trained(batch: Any) -> list[str]:
    return [group.prompt.prompt_id for group in batch.groups]


def golden_world(make_world: Callable[..., World], rate: float) -> World:
    """The prompts of the golden step, which has 16 responses a prompt."""
    case = GOLDEN["adversarial_injection"]
    outcomes = case["pass1 (n,correct)"]
    assert list(outcomes) == [f"q{number}" for number in range(1, 6)]
    rates = [right / count for count, right in outcomes.values()]
    harder, easier = case["children"], case["children"]["q3~hint"]
    children = {
        0: {"noise": harder["q1~adv"][1] / 16},
        3: {"noise": harder["q4~adv"][1] / 16},
        2: {"answer_range": easier[1] / 16},
        1: {"noise": 0.5},  # never wanted
    }
    sizes = {"group_size": 16, "prompts_per_step": 4, "max_num_gen_batches": 10}
    return with_rewrites(make_world, rates, children, rate, on_exhausted="train_partial", **sizes)


def test_the_golden_step_trains_the_same_groups(make_world: Callable[..., World]) -> None:
    """Prompts q1 to q5 are p0 to p4; q4's rewrite is all right again. Rewrites come in the next collection."""
    case = GOLDEN["adversarial_injection"]
    names = {"q2": "p1", "q5": "p4", "q1~adv": "p0~noise", "q3~hint": "p2~answer_range"}
    world = golden_world(make_world, rate=1.0)
    found = [*trained(world.collector.collect(4)), *trained(world.collector.collect(4))]
    assert sorted(found) == sorted(names[name] for name in case["trained_groups"])
    assert sum("~" in name for name in found) / len(found) == case["injected_fraction"]


def test_the_golden_cap_leaves_one_rewrite_in_the_batch(make_world: Callable[..., World]) -> None:
    assert "<= 0.25" in GOLDEN["adversarial_injection"]["cap"]
    world = golden_world(make_world, rate=0.25)
    assert sorted(trained(world.collector.collect(4))) == ["p1", "p4"]
    assert sum("~" in name for name in world.stream.state_dict()["requeued"]) == 1


ENDLESS = {"max_epochs": None, "max_num_gen_batches": 0, "prompts_per_step": 8}


def solved_world(make_world: Callable[..., World], rate: float = 0.25, **changes: Any) -> World:
    """Half of the prompts are always solved; of their rewrites by noise all groups are kept, by distractor none."""
    children = {i: {"noise": 0.5, "distractor": 1.0} for i in range(0, 32, 2)}
    return with_rewrites(make_world, [1.0, 0.5] * 16, children, rate, **{**ENDLESS, **changes})


@pytest.mark.parametrize(
    "changes", [{}, {"oversample": 2.0, "max_staleness": 1}, {"oversample": 2.0, "max_staleness": 2, "partial_rollout": True}]
)  # fmt: skip
@pytest.mark.parametrize("jitter", [0, 1])
def test_no_batch_has_more_rewrites_than_its_share(
    make_world: Callable[..., World], changes: dict[str, Any], jitter: int
) -> None:
    world = solved_world(make_world, jitter=jitter, **changes)
    batches = [trained(world.collector.collect(8)) for _ in range(30)]
    counts = [sum("~" in name for name in batch) for batch in batches]
    assert max(counts) <= 2 and sum(counts) > 30
    assert all(len(batch) == 8 for batch in batches) and world.collector.accounting().is_balanced
    templates = Counter(name.split("~")[1] for batch in batches for name in batch if "~" in name)
    assert set(templates) == {"noise"}, "a group that is all right is not trained, whoever made its prompt"


def test_templates_whose_groups_are_kept_are_chosen_more_often(make_world: Callable[..., World]) -> None:
    world = solved_world(make_world, rate=1.0)
    drawn: list[str] = []
    draw = world.stream.next
    world.stream.next = lambda: [drawn.append(name := draw()), name][1]  # type: ignore[method-assign]
    for _ in range(60):
        world.collector.collect(8)
    templates = [name.split("~")[1] for name in drawn if "~" in name]
    assert len(templates) > 200
    early, late = Counter(templates[:10]), Counter(templates[100:])
    assert early["distractor"] >= 2 and 0 < late["distractor"] < 0.1 * late["noise"]


def test_the_ramp_starts_at_nothing(make_world: Callable[..., World]) -> None:
    world = solved_world(make_world)
    injection = world.stream._injection
    injection._ramp_prompts = 400
    counts = []
    while world.stream.num_drawn < 800:
        visits = world.stream.num_drawn
        counts.append((visits, sum("~" in name for name in trained(world.collector.collect(8)))))
    assert all(count == 0 for visits, count in counts if visits < 150)
    assert all(count <= 1 for visits, count in counts if visits < 350)
    assert max(count for visits, count in counts if visits > 450) == 2


def test_rewrites_do_not_depend_on_which_group_was_fast(make_world: Callable[..., World]) -> None:
    worlds = [solved_world(make_world, jitter=jitter) for jitter in range(4)]
    batches = [[trained(world.collector.collect(8)) for _ in range(10)] for world in worlds]
    assert batches[1:] == batches[:-1] and any("~" in name for batch in batches[0] for name in batch)


def test_a_resumed_run_chooses_the_same_rewrites(make_world: Callable[..., World]) -> None:
    changes = {"oversample": 1.0, "max_staleness": 0}
    whole = solved_world(make_world, **changes)
    expected = [trained(whole.collector.collect(8)) for _ in range(12)]
    first = solved_world(make_world, **changes)
    assert [trained(first.collector.collect(8)) for _ in range(5)] == expected[:5]
    second = first.restart(first.checkpoint())
    assert [trained(second.collector.collect(8)) for _ in range(7)] == expected[5:]
    assert any("~" in name for batch in expected[5:] for name in batch)


def test_prompts_that_a_budget_had_planned_are_drawn_without_it(make_world: Callable[..., World]) -> None:
    planned = make_world([0.5] * 32, budget=BudgetConfig(enabled=True, min_size=2, max_size=8), **ENDLESS)
    planned.collector.collect(8)
    planned.collector._source.next(8)  # A signal may end a collection here.
    state = json.loads(planned.checkpoint())["collector"]
    waiting = [name for name, _ in state["source"]["plan"]]
    later = solved_world(make_world)
    later.collector.load_state_dict(state)
    assert waiting and later.stream.state_dict()["requeued"][-len(waiting) :] == waiting
