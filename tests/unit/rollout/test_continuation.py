"""Partial rollouts: stopped responses continue where they were, within the staleness bound; nothing is lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.open_group import (
    MAX_FRUITLESS,
    OpenGroup,
    fresh_completions,
    next_request,
    open_group_from_json,
    open_group_to_json,
    settled,
)
from megatron_dapo.types import (
    Completion,
    Episode,
    FinishReason,
    GenerationRequest,
    Prompt,
    SamplingParams,
    Turn,
    VersionRange,
)

MIXED = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]
PROMPT = Prompt("p", (), (1, 2, 3), "42")


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state after a round trip through JSON."""
    return json.loads(json.dumps(state, default=np.ndarray.tolist))


def completion(tokens: tuple[int, ...], reason: FinishReason = "abort", version: int = 0) -> Completion:
    versions = (VersionRange(0, len(tokens), version),) if tokens else ()
    return Completion("g/0", tokens, tuple(-0.5 for _ in tokens), reason, versions)


def num_tokens(batch: RolloutBatch) -> int:
    return sum(len(sample.completion.token_ids) for group in batch.groups for sample in group.samples)


@pytest.mark.parametrize("jitter", range(4))
@pytest.mark.parametrize("oversample", [1.0, 1.5, 3.0])
def test_bound_0_gives_the_batches_of_the_synchronous_run(make_world: Callable, jitter: int, oversample: float) -> None:
    worlds = [
        make_world(MIXED * 20, oversample=oversample, jitter=jitter, partial_rollout=partial_rollout)
        for partial_rollout in (False, True)
    ]
    for _ in range(6):
        expected, actual = (world.collector.collect(6) for world in worlds)
        assert actual == expected
        for world in worlds:
            world.engine.policy_version += 1
    states = [world.collector.state_dict() for world in worlds]
    assert plain(states[0]) == plain(states[1]) and not states[1]["open_groups"]


def test_stopped_responses_continue_and_no_token_is_generated_twice(make_world: Callable) -> None:
    world = make_world([0.5] * 400, oversample=3.0, max_staleness=50, partial_rollout=True, filter_groups=False)
    trained = num_continued = 0
    for _ in range(12):
        batch = world.collector.collect(4)
        statistics = batch.statistics
        assert statistics.num_discarded_tokens == statistics.num_aborted == statistics.num_stale == 0
        assert statistics.num_unfinished == world.collector.accounting().unfinished
        num_continued += statistics.num_continued
        trained += num_tokens(batch)
        world.engine.policy_version += 1
    spans = [sample.completion.versions for group in batch.groups for sample in group.samples]
    assert num_continued > 20 and max(map(len, spans)) >= 2, "some response took several versions"
    state = world.collector.state_dict()
    held = [len(c["token_ids"]) for group in state["open_groups"] for c in group["completions"].values()]
    surplus = [len(s["completion"]["token_ids"]) for group in state["buffer"]["groups"] for s in group["samples"]]
    assert world.engine.num_generated == trained + sum(held) + sum(surplus)


def test_tokens_of_a_collection_are_those_it_generated(make_world: Callable) -> None:
    world = make_world(MIXED * 40, oversample=2.0, max_staleness=2, partial_rollout=True)
    for _ in range(8):
        before = world.engine.num_generated
        assert world.collector.collect(4).statistics.num_tokens == world.engine.num_generated - before
        world.engine.policy_version += 1


def test_unfinished_groups_go_first_and_finished_responses_of_theirs_stay(make_world: Callable) -> None:
    world = make_world([0.5] * 90, group_size=8, oversample=4.0, max_staleness=5, partial_rollout=True)
    for _ in range(10):
        world.collector.collect(2)
        held = {group["group_id"]: group["completions"] for group in world.collector.state_dict()["open_groups"]}
        finished = {
            f"{name}/{index}"
            for name, parts in held.items()
            for index, c in parts.items()
            if c["finish_reason"] == "stop"
        }
        if finished and len(held) > 2:
            break
        world.engine.policy_version += 1
    assert finished and len(held) > 2
    submitted: list[GenerationRequest] = []
    submit = world.engine.submit
    world.engine.submit = lambda requests: (submitted.extend(requests), submit(requests))
    world.engine.policy_version += 1
    world.collector.collect(len(held) + 4)
    names = [request.request_id for request in submitted]
    assert not finished & set(names)
    num_open = 8 * len(held) - len(finished)
    assert {name.split("/")[0] for name in names[:num_open]} == set(held)
    assert {name.split("/")[0] for name in names[num_open:]}.isdisjoint(held)
    for request in submitted[:num_open]:
        group_id, index = request.request_id.split("/")
        tokens = request.prefix.token_ids if request.prefix else ()
        assert list(tokens) == list(held[group_id][index]["token_ids"])


def test_a_response_over_the_bound_starts_again_and_is_counted(make_world: Callable) -> None:
    """Finished at version 0, partial at versions 0 and 1: which stay when version 2 is to be trained, bound 1."""
    world = make_world([0.5] * 10, group_size=3, max_staleness=1, partial_rollout=True, filter_groups=False)
    group = OpenGroup("000000000000", world.collector._prompts["p0"], 1, size=3)
    done = completion((5, 6, 1), "stop", version=0)
    world.engine.policy_version = 2
    mixed = replace(completion((5, 6), version=0), versions=(VersionRange(0, 1, 0), VersionRange(1, 2, 1)))
    fresh = completion((5,), version=1)
    group.completions = {0: replace(done, request_id=f"{group.group_id}/0"), 1: mixed, 2: fresh}
    world.collector._open.restore(group)
    world.collector._counters.num_started = 1
    submitted: dict[str, GenerationRequest] = {}

    def stop_after_submit(requests: list[GenerationRequest]) -> None:
        submitted.update((request.request_id, request) for request in requests)
        raise ConnectionError

    world.engine.submit = stop_after_submit
    with pytest.raises(ConnectionError):
        world.collector.collect(1)
    assert [submitted[f"{group.group_id}/{index}"].prefix for index in range(3)] == [None, None, fresh]
    assert world.collector._builder.num_discarded_tokens == 5
    assert world.collector.accounting().is_balanced and world.collector.accounting().queued_again == 0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_engine_that_dies_costs_no_token(make_world: Callable, max_staleness: int) -> None:
    """The engine gives responses back unfinished by itself; the batches are those of an engine that never does."""
    arguments = {"max_staleness": max_staleness, "partial_rollout": True}
    calm, shaken = make_world(MIXED * 20, **arguments), make_world(MIXED * 20, abort_rate=0.3, **arguments)
    for _ in range(4):
        expected, actual = calm.collector.collect(6), shaken.collector.collect(6)
        assert [group.samples for group in actual.groups] == [group.samples for group in expected.groups]
        assert actual.statistics.num_continued > 0 == actual.statistics.num_aborted
    assert shaken.engine.num_generated == calm.engine.num_generated
    assert shaken.collector.accounting() == calm.collector.accounting()


def test_an_engine_that_finishes_nothing_is_an_error(make_world: Callable) -> None:
    world = make_world([0.5] * 20, max_staleness=1, partial_rollout=True)
    world.engine.poll = world.engine.abort
    with pytest.raises(RuntimeError, match=rf"gave up {MAX_FRUITLESS + 1} times in a row"):
        world.collector.collect(2)
    assert world.collector.accounting().is_balanced


def test_waiting_in_the_queue_for_many_collections_is_no_error(make_world: Callable) -> None:
    world = make_world([0.5] * 200, oversample=2.0, max_staleness=100, partial_rollout=True, filter_groups=False)
    poll, num_holds = world.engine.poll, 0

    def hold() -> None:
        nonlocal num_holds
        num_holds += 1
        world.collector.hold()

    def serve_all_but_one() -> list[Completion]:
        if num_holds > MAX_FRUITLESS + 4:
            return poll()
        stuck = world.engine._running.pop("000000000000/0", None)
        done = poll()
        if stuck is not None:
            world.engine._running["000000000000/0"] = stuck
        return done

    world.engine.poll = serve_all_but_one
    assert len(world.collector.collect(2, between_polls=hold).groups) == 2


def test_holding_between_polls_changes_no_batch(make_world: Callable) -> None:
    """A weight update in the middle of a collection; the tokens after it have the new version."""
    plain, held = (make_world(MIXED * 20, max_staleness=1, partial_rollout=True, jitter=jitter) for jitter in (0, 5))
    num_holds = 0

    def update() -> None:
        nonlocal num_holds
        num_holds += 1
        held.collector.hold()
        accounting = held.collector.accounting()
        assert accounting.is_balanced and held.engine.num_unfinished == accounting.in_flight == 0
        if num_holds == 3:
            held.engine.policy_version += 1

    expected, actual = plain.collector.collect(8), held.collector.collect(8, training_version=1, between_polls=update)
    assert num_holds > 3 and actual.training_version == 1
    tokens = [[sample.completion.token_ids.tolist() for sample in group.samples] for group in expected.groups]
    assert tokens == [[sample.completion.token_ids.tolist() for sample in group.samples] for group in actual.groups]
    assert held.engine.num_generated == plain.engine.num_generated
    versions = {run.version for group in actual.groups for s in group.samples for run in s.completion.versions}
    assert versions == {0, 1} and {group.policy_version for group in actual.groups} == {0, 1}


def test_an_error_between_polls_ends_the_collection_and_loses_nothing(make_world: Callable) -> None:
    world = make_world([0.5] * 40, group_size=8, max_staleness=1, partial_rollout=True)

    def fail() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        world.collector.collect(4, between_polls=fail)
    assert world.collector.accounting().is_balanced and world.collector.accounting().in_flight == 4
    before = world.engine.num_generated
    assert len(world.collector.collect(4).groups) == 4
    assert before > 0 and world.collector.accounting().drawn < 10


def test_a_batch_for_a_version_out_of_reach_is_refused(make_world: Callable) -> None:
    world = make_world([0.5] * 40, max_staleness=1, partial_rollout=True)
    world.engine.policy_version = 3
    for version in (2, 5):
        with pytest.raises(ValueError, match=f"policy version {version} cannot be sampled by version 3"):
            world.collector.collect(2, training_version=version)


@pytest.mark.parametrize("partial_rollout", [False, True])
def test_state_keeps_unfinished_groups_exactly(make_world: Callable, partial_rollout: bool) -> None:
    world = make_world([0.5] * 60, group_size=8, oversample=3.0, max_staleness=2, partial_rollout=True)
    world.collector.collect(3)
    before = world.collector.accounting()
    assert before.unfinished > 0 == before.in_flight
    later = world.restart(
        world.checkpoint(), settings=world.settings.model_copy(update={"partial_rollout": partial_rollout})
    )
    after = later.collector.accounting()
    assert after.is_balanced and after.drawn == before.drawn
    if partial_rollout:
        assert after == before and later.checkpoint() == world.checkpoint()
    else:
        assert (after.unfinished, after.queued_again) == (0, before.queued_again + before.unfinished)
        assert len(later.stream.state_dict()["requeued"]) == after.queued_again


def test_a_run_with_shorter_or_fewer_responses_does_not_resume_with_longer_ones(make_world: Callable) -> None:
    world = make_world([0.5] * 60, group_size=8, oversample=3.0, max_staleness=2, partial_rollout=True)
    world.collector.collect(3)
    fewer = {"settings": world.settings.model_copy(update={"group_size": 4})}
    for changes in (fewer, {"sampling": SamplingParams(max_new_tokens=1)}):
        later = world.restart(world.checkpoint(), **changes)
        accounting = later.collector.accounting()
        assert accounting.is_balanced and accounting.unfinished < world.collector.accounting().unfinished


def test_a_state_of_another_version_is_refused(make_world: Callable) -> None:
    world = make_world([0.5] * 40, partial_rollout=True)
    state = json.loads(world.checkpoint())["collector"]
    with pytest.raises(ValueError, match=r"version 7, this program reads 3; resume with the release"):
        world.collector.load_state_dict({**state, "version": 7})


def test_untrained_batches_are_saved_as_returned(make_world: Callable) -> None:
    first, second = (make_world(MIXED * 20, oversample=2.0, max_staleness=3, partial_rollout=True) for _ in range(2))
    batches = [[world.collector.collect(4) for _ in range(2)] for world in (first, second)]
    state = first.collector.state_dict(untrained=batches[0])
    for batch in reversed(batches[1]):
        second.collector.give_back(batch)
    assert plain(state) == plain(second.collector.state_dict())
    assert first.collector.accounting().trained == 8, "the collector itself is unchanged"


def test_a_response_stopped_at_its_end_is_finished() -> None:
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(9,))
    reasons = {(): "abort", (4,): "abort", (4, 9): "stop", (9, 4): "abort", (4, 5, 6): "length", (4, 5, 9): "stop"}
    for tokens, reason in reasons.items():
        assert settled(completion(tokens), sampling).finish_reason == reason
    assert settled(completion((4, 5, 6), "stop"), sampling).finish_reason == "stop"


def test_only_responses_that_extend_their_prefix_are_accepted() -> None:
    group = OpenGroup("g", PROMPT, 1, size=1)
    assert group.add(0, completion((4, 5))) == 2
    assert group.add(0, completion((4, 5, 6))) == 1
    with pytest.raises(ValueError, match="continue after 3 tokens"):
        group.add(0, completion((4, 5, 7, 8), "stop"))
    assert group.add(0, completion((4, 5, 6, 8), "stop")) == 1 and group.is_complete


def test_the_age_of_a_response_is_that_of_its_oldest_token() -> None:
    young, old, empty = completion((4,), version=3), completion((4, 5), version=1), completion(())
    parts = {0: young, 1: old, 2: empty}
    assert set(fresh_completions(parts, 1, 4)) == {0, 1, 2}
    assert set(fresh_completions(parts, 2, 4)) == {0, 2}
    assert set(fresh_completions(parts, 4, 4)) == {2}, "without a token it is as old as the weights served"
    assert fresh_completions(parts, 5, 4) == {}


def test_a_request_continues_only_after_tokens() -> None:
    group = OpenGroup("g", PROMPT, 1, {0: completion((4, 5)), 1: completion(())})
    sampling = SamplingParams()
    assert next_request(group, 0, sampling, 7) == GenerationRequest("g/0", (1, 2, 3), sampling, 7, completion((4, 5)))
    assert next_request(group, 1, sampling, 7).prefix is None and next_request(group, 2, sampling, 7).prefix is None


def test_open_groups_survive_json() -> None:
    group = OpenGroup("g", PROMPT, 3, {0: completion((4, 5)), 2: completion((), version=1)})
    restored = open_group_from_json(
        json.loads(json.dumps(open_group_to_json(group), default=np.ndarray.tolist)), {"p": PROMPT}
    )
    assert vars(restored) == vars(group)


def test_an_episode_whose_environment_acts_is_no_fault_of_the_engine():
    """It comes back without a new token as often as weights change; one that began anew has other tokens."""
    group = OpenGroup("g", Prompt("p", (), (1,), "7"), 0, size=1)
    held = Completion("g/0", (4, 5), (-1.0, -1.0), "abort", (VersionRange(0, 2, 0),), episode=Episode("abort", (Turn(0, 2, 2),)))
    for _ in range(2 * MAX_FRUITLESS):
        group.add(0, held)
    anew = replace(held, token_ids=(6, 7), episode=replace(held.episode, attempt=1))
    assert group.add(0, anew) == 2
    with pytest.raises(ValueError, match="the engine was to continue after 2 tokens and returned others"):
        group.add(0, replace(anew, token_ids=(8, 7)))
