"""Steps that overlap generation with training, against closed forms and the simulated twin of the collectors."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist, fmean
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.overlap import Collection, QueuedStep, overlapped_seconds
from megatron_dapo.plan.rollout import EngineRates, Lengths
from megatron_dapo.plan.step import StepPlan, plan_step
from tests.examples import first
from tests.unit.plan.models import MODELS, run_of

# A decoding step of 10 ms, whatever runs; prefill and requests cost next to nothing.
FLAT = EngineRates((10e-3 - 2.5e-3) * 0.78 * GPUS["H20"].memory_bytes_s, 0.0, 1e-3, 1, GPUS["H20"])


def turns(**changes: Any) -> QueuedStep:
    given = {"responses": 8, "running": 64, "train": 6.0, "update": 1.0, "max_staleness": 1, "oversample": 1.0}
    return QueuedStep(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 10 + 1),  # a collection lasts 10 s and one update
        ({"train": 20.0}, 20 + 1),
        ({"max_staleness": 2, "oversample": 3.0}, 6 + 1),  # three batches at a time take no longer than one
        ({"max_staleness": 2, "oversample": 1.0}, 10 + 1),  # one batch at a time
        ({"responses": 16, "running": 8}, 20 + 1),  # half of them wait for a place
    ],
)
def test_steps_of_equal_responses(changes: dict[str, Any], expected: float) -> None:
    assert overlapped_seconds(FLAT, Lengths((1000,), 0.0), turns(**changes)).step == pytest.approx(expected, rel=0.05)


WHOLE, STREAMED = Collection(16), Collection(16, parts=16)


@pytest.mark.parametrize(
    ("max_staleness", "oversample", "ahead", "collection"),
    first(
        5,
        [
            (2, 3.0, 0.0, WHOLE),
            (1, 2.0, 0.5, STREAMED),
            (1, 2.0, 0.0, replace(STREAMED, parts=4)),
            (1, 2.0, 0.0, replace(STREAMED, in_flight=True)),
            (1, 1.5, 0.5, replace(STREAMED, order="guarded")),
            (1, 2.0, 0.0, WHOLE),
            (1, 1.5, 0.0, WHOLE),
            (1, 2.0, 0.5, WHOLE),
            (1, 2.0, 0.0, STREAMED),
            (2, 3.0, 0.0, STREAMED),
            (1, 2.0, 0.0, replace(STREAMED, order="guarded")),
            (2, 3.0, 0.0, replace(WHOLE, order="guarded")),
        ],
    ),
)
def test_the_plan_is_within_a_tenth_of_the_twin(
    twin: SimpleNamespace, max_staleness: int, oversample: float, ahead: float, collection: Collection
) -> None:
    """verl's 7B setting on four GPUs a server, with an eighth of its batch and its servers."""
    rates = EngineRates(15.2e9 / 4, 57344 / 4, 7.07e9, 4, GPUS["H20"])
    lengths = twin.simulation.Lengths(2000, 0.8, 28672, prompt_sigma=0.4)
    quantiles = [NormalDist().inv_cdf((index + 0.5) / 4096) for index in range(4096)]
    # The longest of a batch of 64 x 16 responses, as a run measures it.
    steps = [[max(lengths.of_group(64 * step + group, 16)) for group in range(64)] for step in range(12)]
    longest = fmean(map(max, steps))
    planned = Lengths(tuple(int(min(longest, 2000 * 2.718282 ** (0.8 * score))) for score in quantiles), 200.0)
    settings = twin.ours.Settings(
        engines=2,
        cost=twin.simulation.Cost.of(rates),
        lengths=lengths,
        prompts=64,
        group_size=16,
        train=106.0,
        sync=4.0,
        max_staleness=max_staleness,
        oversample=oversample,
        ahead=ahead,
        parts=collection.parts,
        order=collection.order,
        in_flight=collection.in_flight,
    )
    simulated = twin.ours.disaggregated(settings).step
    queued = QueuedStep(512, 10**6, 106.0, 4.0, max_staleness, oversample, ahead, collection)
    assert overlapped_seconds(rates, planned, queued).step == pytest.approx(simulated, rel=0.1)


def planned(stream: str = "off", **rollout: Any) -> StepPlan:
    sections: dict[str, Any] = {
        "rollout": {"engine": "sglang", "prompts_per_step": 64, "max_response_tokens": 8192, **rollout},
        "sglang": {"placement": "disaggregated", "weight_sync_transport": "p2p", "mem_fraction_static": 0.8},
        "algorithm": {"off_policy": {"correction": "tis"}},
        "parallel": {"num_processes": 8},
    }
    config = run_of(training={"micro_batch_tokens": 8192, "mini_batch_prompts": 16, "stream": stream}, **sections)
    return plan_step(config, parse_architecture(MODELS["7B"]), 8, Cluster(1), GPUS["H100"], 3000)


def test_a_step_lies_between_the_slower_side_and_both_in_turn() -> None:
    overlapping = planned(max_staleness=1, partial_rollout=True, oversample=2.0)
    generate, update = overlapping.of_phase("generate"), overlapping.of_phase("weight_update")
    assert overlapping.trainer == pytest.approx(sum(map(overlapping.of_phase, overlapping.seconds)) - generate - update)
    separate = planned()
    assert separate.overlapped is None
    # The queue and the phase of generation count the contexts that are computed again in different ways.
    assert 0.99 * (max(generate, overlapping.trainer) + update) < overlapping.total < separate.total


def test_a_run_that_streams_in_guarded_order_is_planned_as_one() -> None:
    rollout = {"max_staleness": 1, "partial_rollout": True, "oversample": 2.0}
    whole, streamed = planned(**rollout), planned("mini_batches", order="guarded", filter_groups=True, **rollout)
    assert streamed.total < whole.total


def test_more_staleness_never_takes_longer() -> None:
    steps = [planned(max_staleness=ahead, partial_rollout=True, oversample=1.0 + ahead).total for ahead in (1, 2, 3)]
    assert steps[0] * 1.01 >= steps[1] and steps[1] * 1.01 >= steps[2]
