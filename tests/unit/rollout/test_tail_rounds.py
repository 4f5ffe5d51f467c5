"""Tail batching: each prompt is trained once, by the policy that samples it; those whose groups end late, in long rounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.tail_rounds import TailRounds
from tests.examples import first

NUM_GROUPS, NUM_PROMPTS = 6, 60


def tail_world(make_world: Callable, num_prompts: int = NUM_PROMPTS, **changes: Any) -> Any:
    given = {"oversample": 1.5, "tail_rounds": True, "filter_groups": False, "max_epochs": 1}
    return make_world([0.5] * num_prompts, **{**given, **changes})


def prompts_of(batch: RolloutBatch) -> list[str]:
    return [group.prompt.prompt_id for group in batch.groups]


def is_long(batch: RolloutBatch) -> bool:
    return bool(batch.statistics.prompts["is_long_round"])


def test_each_prompt_is_trained_once_on_policy_and_long_rounds_have_those_that_were_put_off(make_world: Callable) -> None:
    world = tail_world(make_world, jitter=1)
    tried: set[str] = set()  # prompts of short rounds
    trained: list[str] = []
    kinds = []
    for version in range(100):
        world.engine.policy_version = version
        before = set(tried)
        started = world.collector.accounting().drawn
        batch = world.collector.collect(NUM_GROUPS, between_polls=lambda: balanced(world))
        if not batch.groups:
            break
        assert all(group.policy_version == version for group in batch.groups), "every token is on policy"
        assert all(len({run.version for run in one.completion.versions}) == 1 for g in batch.groups for one in g.samples)
        kinds.append(is_long(batch))
        if is_long(batch):
            assert set(prompts_of(batch)) <= before or batch.exhausted or len(trained) > NUM_PROMPTS - 2 * NUM_GROUPS
        else:
            assert world.collector.accounting().drawn - started == 9 and len(batch.groups) == NUM_GROUPS
        tried |= set(prompts_of(batch)) | set(world.collector.state_dict()["tail"]["put_off"])
        trained += prompts_of(batch)
        assert batch.statistics.prompts["put_off"] == len(world.collector.state_dict()["tail"]["put_off"])
    assert sorted(trained) == sorted(world.collector._prompts), "each prompt once"
    assert kinds.count(True) >= 2 and kinds.count(False) >= 4, kinds
    accounts = balanced(world)
    assert accounts.trained == NUM_PROMPTS and accounts.queued_again == accounts.drawn - NUM_PROMPTS > 0


def balanced(world: Any) -> Any:
    accounts = world.collector.accounting()
    assert accounts.is_balanced, accounts
    return accounts


def test_a_short_round_takes_the_groups_that_end_first(make_world: Callable) -> None:
    """Those that are not trained had not ended when the batch was full."""
    world = tail_world(make_world, jitter=4)
    ended: list[str] = []
    poll = world.engine.poll

    def noted() -> list[Any]:
        found = poll()
        ended.extend(one.request_id.split("/")[0] for one in found if one.finish_reason != "abort")
        return found

    world.engine.poll = noted
    batch = world.collector.collect(NUM_GROUPS)
    complete = [name for name, count in Counter(ended).items() if count == 4]
    assert {group.group_id for group in batch.groups} <= set(complete) and len(complete) < 9
    assert world.engine.num_unfinished == 0


def test_a_long_round_waits_for_all(make_world: Callable) -> None:
    world = tail_world(make_world, jitter=2)
    batch = world.collector.collect(NUM_GROUPS)
    while not is_long(batch):
        waiting = world.collector.state_dict()["tail"]["put_off"]
        world.engine.policy_version += 1
        batch = world.collector.collect(NUM_GROUPS)
    assert sorted(prompts_of(batch)) == sorted(waiting[:NUM_GROUPS]) and len(batch.groups) == NUM_GROUPS


def test_rejected_groups_are_replaced(make_world: Callable) -> None:
    world = make_world([0.0, 0.5, 1.0, 0.5] * 30, oversample=1.5, tail_rounds=True, max_epochs=1, jitter=3, max_num_gen_batches=0)
    trained: list[str] = []
    for version in range(8):
        world.engine.policy_version = version
        batch = world.collector.collect(NUM_GROUPS)
        assert len(batch.groups) == NUM_GROUPS
        trained += prompts_of(batch)
        balanced(world)
    assert len(set(trained)) == len(trained) and world.collector.accounting().filtered > 0


@pytest.mark.parametrize("trial", first(3, range(12)))
@pytest.mark.parametrize("partial_rollout", [False, True])
def test_killed_anywhere_and_resumed_each_prompt_is_trained_once(
    make_world: Callable, trial: int, partial_rollout: bool
) -> None:
    """Kills within rounds of both kinds and between them; states of rounds under way, and of batches not yet trained."""
    chance = random.Random(trial)
    world = tail_world(make_world, jitter=trial, partial_rollout=partial_rollout, abort_rate=0.05)
    trained: list[str] = []
    saved, num_saved, events = world.checkpoint(), 0, Counter[str]()

    def disturb() -> None:
        nonlocal saved, num_saved
        balanced(world)
        draw = chance.random()
        if draw < 0.04:
            world.collector.hold()
            events["holds"] += 1
        elif draw < 0.1:
            saved, num_saved = world.checkpoint(), len(trained)
        elif draw < 0.14:
            raise InterruptedError

    while True:
        world.engine.polls_until_crash = chance.choice([None, None, 3, 9]) if sum(events.values()) < 40 else None
        try:
            batch = world.collector.collect(NUM_GROUPS, between_polls=disturb if sum(events.values()) < 40 else None)
        except (ConnectionError, InterruptedError):
            events["kills"] += 1
            world.engine.polls_until_crash = None
            if chance.random() < 0.6:
                world = world.restart(saved, jitter=chance.randrange(2**32))
                del trained[num_saved:]
            continue
        if not batch.groups:
            break
        if chance.random() < 0.1:
            world.collector.give_back(batch)
            events["given back"] += 1
            continue
        events["long" if is_long(batch) else "short"] += 0
        trained += prompts_of(batch)
        world.engine.policy_version += 1
        saved, num_saved = world.checkpoint(), len(trained)
    assert sorted(trained) == sorted(world.collector._prompts)
    assert events["kills"] > 2 and {"long", "short"} <= set(events), events


def test_a_run_without_tail_rounds_takes_the_prompts_that_were_put_off(make_world: Callable) -> None:
    world = tail_world(make_world, jitter=1)
    batch = world.collector.collect(NUM_GROUPS)
    put_off = world.collector.state_dict()["tail"]["put_off"]
    plain = tail_world(make_world, oversample=1.0, tail_rounds=False)
    plain.collector.load_state_dict(world.collector.state_dict())
    plain.engine.policy_version = 1
    assert prompts_of(plain.collector.collect(NUM_GROUPS))[: len(put_off)] == put_off and put_off
    assert not set(put_off) & set(prompts_of(batch))


def test_the_end_of_the_data_makes_a_round_a_long_one() -> None:
    rounds = TailRounds(is_on=True)
    rounds.begin(4)
    for name in ("a", "b"):
        rounds.put_off(name)
    assert rounds.takes_first_ended and rounds.next(lambda: ("c", 8), 8) == ("c", 8)
    assert rounds.next(lambda: None, 8) == ("a", 8) and rounds.is_long
    rounds.begin(4)
    assert rounds.is_long, "a round that goes on keeps its kind"
    rounds.end()
    rounds.begin(4)
    assert not rounds.is_long and rounds.statistics() == {"put_off": 1, "is_long_round": 0.0}
    rounds.begin(1)
