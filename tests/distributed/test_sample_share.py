"""Every rank trains on its share of the samples exactly what it would train with all of them at hand."""

from __future__ import annotations

import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launcher import run_distributed, target_in

from megatron_dapo.algorithms.group_advantages import estimate_group_advantages
from megatron_dapo.algorithms.objective import PolicyObjective
from megatron_dapo.config import config_from_dict
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.parallel.coordination import coordinate
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.token_support import join_supports
from megatron_dapo.trainer import rollout
from megatron_dapo.trainer.actor_learner import PolicyLearner
from megatron_dapo.trainer.batch_header import header_of, samples_of
from megatron_dapo.trainer.offload import DeviceModels
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.rollout import Rollout
from megatron_dapo.types import (
    Completion,
    CriticContext,
    Group,
    MicroBatch,
    Prompt,
    Score,
    ScoredSample,
    TrainSample,
    VersionRange,
    Window,
)

VERSION = 7
LAYOUTS = {"tp2": {"tensor": 2}, "dp4": {}, "cp2": {"context": 2}, "pp2": {"pipeline": 2}}


def make_groups() -> list[Group]:
    """Groups of responses of many lengths, versions and outcomes, with windows and cut-off ones among them."""
    rng = random.Random(5)
    groups = []
    for number in range(9):
        prompt = Prompt(f"p{number}", (), tuple(rng.randrange(1000) for _ in range(rng.randint(1, 9))), "1")
        samples = []
        for index in range(rng.randint(1, 5)):
            length, cut = rng.randint(1, 40), rng.randint(0, 40)
            ranges = [(0, min(cut, length), rng.randint(3, 7)), (min(cut, length), length, 7)]
            tokens = [rng.randrange(1000) for _ in range(length)]
            completion = Completion(
                f"{number}/{index}",
                tokens,
                [-rng.random() for _ in range(length)],
                rng.choice(["stop", "length"]),
                tuple(VersionRange(*each) for each in ranges if each[1] > each[0]),
                # A group of a state that was saved before its run replayed the routing has none.
                None if number == 4 else drawn_routing(rng, len(prompt.token_ids) + length - 1),
                None if number == 5 else drawn_supports(rng, tokens),
            )
            window = Window(rng.choice([0, 0, rng.randrange(length)]), rng.random() < 0.8)
            reward = rng.choice([1.0, -1.0, 0.25])
            score = Score(float(reward == 1.0), reward, "correct")
            samples.append(ScoredSample(f"{number}/{index}", completion, "", score, {"verifier": reward}, window))
        groups.append(Group(f"{number:03d}", prompt, tuple(samples), 3, 1))
    return groups


def drawn_routing(rng: random.Random, num_tokens: int) -> np.ndarray:
    return np.array([[[rng.randrange(256) for _ in range(2)] for _ in range(3)] for _ in range(num_tokens)], np.uint8)


def drawn_supports(rng: random.Random, tokens: list[int]) -> np.ndarray:
    rows = [[token, *rng.sample(range(1000, 2000), rng.randrange(6))] for token in tokens]
    return join_supports(np.array([len(row) for row in rows]), np.array([word for row in rows for word in row]))


def whole_sample(group: Group, index: int, sample: ScoredSample) -> TrainSample:
    """Return a train sample token by token."""
    completion, start = sample.completion, sample.window.start
    filtered = sample.window.is_finished and completion.finish_reason != "stop"
    ages = [VERSION - run.version for run in completion.versions for _ in range(run.start, run.end)]
    return TrainSample(
        sample_id=sample.sample_id,
        group_index=index,
        tokens=torch.tensor([*group.prompt.token_ids, *completion.token_ids.tolist()]),
        prompt_length=len(group.prompt.token_ids),
        loss_mask=torch.tensor([float(place >= start and not filtered) for place in range(completion.num_tokens)]),
        advantages=torch.zeros(completion.num_tokens),
        rollout_logprobs=torch.tensor(completion.logprobs.tolist()),
        staleness=torch.tensor(ages).float(),
        critic_context=CriticContext(sample.reward, sample.score.accuracy > 0, sample.window),
        routing=None if completion.routing is None else torch.from_numpy(completion.routing),
        support=None if completion.support is None else torch.from_numpy(completion.support),
    )


def make_learner(layout: ParallelLayout) -> PolicyLearner:
    config = config_from_dict(
        {
            "model": {"path": "."},
            "data": {"train_paths": ["a"]},
            "run": {"total_steps": 10},
            "training": {"mini_batch_prompts": 4, "micro_batch_tokens": 96, "shuffle": True},
            "algorithm": {"positive_example_coefficient": 0.5},
        }
    )
    actor: Any = SimpleNamespace(
        layout=layout,
        rank=dist.get_rank(),
        part=SimpleNamespace(group=None),
        architecture=SimpleNamespace(attention_parity=0),
        replays_routing=True,
        reads_supports=True,
    )
    phases = Phases()
    return PolicyLearner(actor, None, PolicyObjective(config.algorithm), config, phases, DeviceModels({}, phases))


def packed(learner: PolicyLearner, samples: list[TrainSample], step: int) -> list[MicroBatch]:
    estimated = estimate_group_advantages(samples, learner._config.algorithm.advantage)
    return [each for mini_batch in learner.cut_batch(estimated.policy_samples, step) for each in mini_batch.micro_batches]


def equal(one: MicroBatch, other: MicroBatch) -> bool:
    pairs = [(getattr(one, entry.name), getattr(other, entry.name)) for entry in fields(MicroBatch)]
    return all(torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1] for pair in pairs)


def shares(arguments: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    coordination = coordinate(range(4), timeout_s=60)
    rollout._CHUNK_BYTES = arguments["chunk_bytes"]
    learner = make_learner(ParallelLayout(4, **arguments["layout"]))
    groups = make_groups()
    batch = RolloutBatch(tuple(groups), None, training_version=VERSION)
    collector = SimpleNamespace(next_batch=lambda num_groups, part_size: batch, generation_step=3)
    engine = SimpleNamespace(run_on_rank0=lambda body: body() if rank == 0 else None, prefix_reuse=PrefixReuse())
    engines: Any = SimpleNamespace(engine=engine, servers=None)
    generator = Rollout(engines, collector if rank == 0 else None, coordination, filter_overlong=True)
    step = arguments["step"]
    received = generator.generate(9, lambda samples: (learner.share(samples, step),) * 2).samples
    whole = [whole_sample(group, index, sample) for index, group in enumerate(groups) for sample in group.samples]
    own, expected = packed(learner, received, step), packed(learner, whole, step)
    held = [one.sample_id for one in received if not one.tokens.is_meta]
    # A rank that also has a critic packs all samples for it, and routing and supports are only for the policy.
    with_critic = generator.generate(9, lambda samples: (range(len(samples)), learner.share(samples, step))).samples
    records = {
        name: (
            [one.sample_id for one in with_critic if getattr(one, name) is not None and not getattr(one, name).is_meta],
            {one.sample_id for one in whole if getattr(one, name) is None},
        )
        for name in ("routing", "support")
    }
    # Packing is all that reads tokens and log-probs; a sample of another rank has none.
    with pytest.raises((NotImplementedError, RuntimeError)):
        packed(learner, samples_of(header_of(groups, VERSION)), step)
    return {
        "reports": coordination.gather(
            {
                "equal": len(own) == len(expected) > 0 and all(map(equal, own, expected)),
                "data": learner._coordinates.data,
                "held": held,
                "critics": sum(not one.tokens.is_meta for one in with_critic),
                "records": rank == 0
                or all(
                    having == [name for name in held if name not in without] for having, without in records.values()
                ),
                "all": [one.sample_id for one in whole],
                "elements": sum(one.tokens.untyped_storage().nbytes() for one in received if not one.tokens.is_meta),
                "tokens": sum(one.num_tokens for one in received if not one.tokens.is_meta),
            }
        )
    }


@pytest.mark.parametrize("chunk_bytes", [2800, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 1 << 23))])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_train_what_all_samples_train(layout: str, chunk_bytes: int) -> None:
    arguments = {"layout": LAYOUTS[layout], "chunk_bytes": chunk_bytes, "step": 2}
    reports = run_distributed(target_in(__file__, "shares"), 4, arguments)["reports"]
    assert all(report["equal"] for report in reports)
    assert all(report["records"] and report["critics"] == len(report["all"]) for report in reports)
    by_data: dict[int, list[str]] = {}
    for report in reports:
        assert by_data.setdefault(report["data"], report["held"]) == report["held"], (
            "peers of a data rank hold the same"
        )
        assert report["elements"] == 4 * report["tokens"], "nothing of a chunk stays"
    held = sorted(name for names in by_data.values() for name in names)
    # A mini-batch without a trained token makes no step, but nobody knows that before: its samples are held too.
    assert held == sorted(reports[0]["all"]), "every sample is on exactly one data rank"
