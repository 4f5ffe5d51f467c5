"""Runs in two processes: train steps on whole batches, and on the same batches part by part, from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import learners
import pytest
import torch

from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.parallel.collectives import max_over
from megatron_dapo.trainer import actor_learner
from megatron_dapo.trainer.learner import Learner
from megatron_dapo.types import TrainSample

NUM_STEPS, NUM_GROUPS, PART_SIZE = 5, 6, 2


def run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the largest differences from the parameters after steps on whole batches, and both metrics of the last step."""
    whole, expected = _train(arguments, _learn_whole)
    streamed, found = _train(arguments, _learn_parts)
    result = {"difference": _difference(whole, streamed), "metrics": found, "expected": expected}
    for name, mutation in MUTATIONS.items() if arguments["mutate"] else ():
        with mutation():
            result[name] = _difference(whole, _train(arguments, _learn_parts)[0])
    return result


def _train(
    arguments: dict[str, Any], learn: Callable[..., Any]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    built = learners.build(arguments["recipe"], arguments["overrides"])
    assert built.actor is not None
    metrics: dict[str, float] = {}
    for step in range(NUM_STEPS):
        metrics = learn(built.learner, _batch(step, built.actor.architecture.vocab_size), step)
    return {name: one.detach().clone() for name, one in built.actor.named_local_parameters().items()}, {
        name: float(value) for name, value in metrics.items()
    }


def _batch(step: int, vocab_size: int) -> list[TrainSample]:
    """Other tokens in every step, rewards of 1 and -1, and log-probs of an engine that is a little off."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for one in learners.judged_samples(NUM_GROUPS, vocab_size):
        tokens = torch.randint(3, vocab_size, one.tokens.shape, generator=generator)
        logprobs = -5.0 + torch.rand(one.num_response_tokens, generator=generator)
        made.append(replace(one, tokens=tokens, rollout_logprobs=logprobs))
    return made


def _learn_whole(learner: Learner, batch: list[TrainSample], step: int) -> dict[str, float]:
    return learner.learn(batch, step)[1].metrics


def _learn_parts(learner: Learner, batch: list[TrainSample], step: int) -> dict[str, float]:
    def parts() -> Iterator[list[TrainSample]]:
        for start in range(0, NUM_GROUPS, PART_SIZE):
            part = [one for one in batch if start <= one.group_index < start + PART_SIZE]
            yield [replace(one, group_index=one.group_index - start) for one in part]

    return learner.learn_parts(parts(), step)[1].metrics


def _difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    assert expected.keys() == found.keys()
    own = max(float((expected[name].double() - found[name].double()).abs().max()) for name in expected)
    return float(max_over({"difference": own})["difference"])


@contextmanager
def _whole_denominator() -> Iterator[None]:
    """Divide a part's loss by the tokens of the whole batch."""
    correct = actor_learner.loss_weights

    def wrong(samples: list[TrainSample], *arguments: Any) -> list[float]:
        return [weight * PART_SIZE / NUM_GROUPS for weight in correct(samples, *arguments)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_learner, "loss_weights", wrong)
        yield


@contextmanager
def _current_weights() -> Iterator[None]:
    """Compute old log-probs with weights that earlier parts have changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronActor, "with_weights", lambda self, weights: nullcontext())
        yield


MUTATIONS = {"whole_denominator": _whole_denominator, "current_weights": _current_weights}
