"""Whatever order the engine ends responses in, a batch, its statistics and the state after it are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms import prompt_filter
from megatron_dapo.config.rollout_schema import BudgetConfig, PromptFilterConfig
from megatron_dapo.types import Completion
from tests.examples import examples

MIXED = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]
BUDGET = BudgetConfig(enabled=True, min_size=2, max_size=8)
BOUNDS = PromptFilterConfig(name="bounds", margin=0.25, audit_share=0.2)
MODEL = PromptFilterConfig(name="model", margin=0.4, audit_share=0.3)

# The next responses to end, of the names in flight. A name is GROUP/INDEX, and groups are numbered in start order.
ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "all at once": sorted,
    "oldest group first": lambda names: [min(names)],
    "newest group first": lambda names: [max(names)],
    "last response of each group last": lambda names: [min(names, key=lambda name: name.split("/")[::-1])],
}


class OrderedPolls:
    """Replaces the engine's polls: responses end in the order that `choose` says."""

    def __init__(self, engine: Any, choose: Callable[[list[str]], list[str]]) -> None:
        self._engine, self._choose = engine, choose

    def __call__(self) -> list[Completion]:
        running = self._engine._running
        return [self._engine._finish(running.pop(name)) for name in self._choose(list(running))]


def history(world: Any, num_groups: int, num_steps: int) -> list[Any]:
    """Collect `num_steps` batches; return each with its statistics, the rejected groups and the state after it."""
    found = []
    for _ in range(num_steps):
        batch = world.collector.collect(num_groups)
        groups = [(group.group_id, group.prompt.prompt_id, group.samples) for group in batch.groups]
        found.append((groups, batch.filtered, batch.statistics, batch.exhausted, json.loads(world.checkpoint())))
        world.engine.policy_version += 1
    return found


def part(completion: Completion, text: str, score: Any) -> float:
    """Give rewards whose floating-point sum depends on the order of its terms."""
    return float(completion.logprobs.sum()) / 3


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pass_rates=st.lists(st.sampled_from(MIXED), min_size=1, max_size=12),
    num_groups=st.integers(1, 6),
    budget=st.sampled_from([BudgetConfig(), BUDGET]),
    order=st.sampled_from(["shuffled", "priority"]),
    kind=st.sampled_from([PromptFilterConfig(), BOUNDS, MODEL]),
    dynamic_sampling=st.sampled_from(["hard", "soft"]),
    max_num_gen_batches=st.sampled_from([0, 3]),
    ends=st.sampled_from(list(ORDERS)),
    seed=st.integers(1, 2**32),
)
def test_a_batch_does_not_depend_on_which_response_ends_first(
    make_world: Callable,
    monkeypatch: pytest.MonkeyPatch,
    pass_rates: list[float],
    num_groups: int,
    budget: BudgetConfig,
    order: str,
    kind: PromptFilterConfig,
    dynamic_sampling: str,
    max_num_gen_batches: int,
    ends: str,
    seed: int,
) -> None:
    monkeypatch.setattr(prompt_filter, "_MIN_VISITS", 4)
    monkeypatch.setattr("megatron_dapo.rollout.shortage.MAX_FRUITLESS_ROUNDS", 5)
    arguments = {
        "max_epochs": None,
        "budget": budget,
        "prompt_order": order,
        "prompt_filter": kind,
        "dynamic_sampling": dynamic_sampling,
        "max_num_gen_batches": max_num_gen_batches,
        "addends": {"part": part},
    }
    world, other = make_world(pass_rates, jitter=seed, **arguments), make_world(pass_rates, **arguments)
    other.engine.poll = OrderedPolls(other.engine, ORDERS[ends])
    for step, (one, two) in enumerate(zip(history(world, num_groups, 5), history(other, num_groups, 5), strict=True)):
        assert one == two, f"batch {step}"


@pytest.mark.parametrize("partial_rollout", [False, True])
def test_a_state_within_a_collection_has_what_it_observed(make_world: Callable, partial_rollout: bool) -> None:
    """The groups decided before a signal count in the history, and the order of priority is continued."""
    settings = {"prompt_order": "priority", "budget": BUDGET, "partial_rollout": partial_rollout}
    world = make_world(MIXED * 2, max_epochs=None, **settings)
    for _ in range(4):
        world.collector.collect(4)
    world.engine.poll = OrderedPolls(world.engine, ORDERS["newest group first"])
    num_polls = iter(range(40))

    def stop() -> None:
        if next(num_polls) == 12:
            raise InterruptedError

    before = {name: record.num_visits for name, record in world.collector._source._records.items()}
    with pytest.raises(InterruptedError):
        world.collector.collect(4, between_polls=stop)
    observed = [entry.prompt_id for entry in world.collector._source._observed]
    assert observed
    resumed = world.restart(world.checkpoint())
    drawn: list[str] = []
    draw = resumed.collector._source._next_in_order
    resumed.collector._source._next_in_order = lambda: (drawn.append(draw()), drawn[-1])[1]
    assert list(resumed.collector._source._ranked) == list(world.collector._source._ranked)
    resumed.collector.collect(4)
    after = resumed.collector._source._records
    assert all(after[name].num_visits > before[name] for name in observed)
