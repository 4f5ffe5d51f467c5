"""Runs in two processes: the learner of a configuration is fed batches whose loss is NaN on one rank only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.config.loader import load_config
from megatron_dapo.parallel.collectives import all_gather_json
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.trainer.build_learner import build_actor, build_learner
from megatron_dapo.trainer.learner import TooManySkips
from megatron_dapo.trainer.run_world import run_world
from megatron_dapo.types import TrainSample


def samples(num_groups: int, vocab_size: int) -> list[TrainSample]:
    """Groups of two responses with opposite advantages; on-policy log-probs do not matter here."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(2 * num_groups):
        prompt, response = 5 + index % 3, 6 + index % 5
        made.append(
            TrainSample(
                sample_id=f"{index // 2}/{index % 2}",
                group_index=index // 2,
                tokens=torch.randint(3, vocab_size, (prompt + response,), generator=generator),
                prompt_length=prompt,
                loss_mask=torch.ones(response),
                advantages=torch.full((response,), 1.0 if index % 2 else -1.0),
                rollout_logprobs=torch.full((response,), -1.0),
            )
        )
    return made


def spoilt_on(rank: int, clean: list[TrainSample]) -> list[TrainSample]:
    if dist.get_rank() != rank:
        return clean
    return [replace(sample, advantages=sample.advantages * float("nan")) for sample in clean]


def run(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank saw, in rank order."""
    overrides = [*arguments["overrides"], "parallel.num_processes=2", "training.max_consecutive_skips=3"]
    config = load_config(Path(arguments["recipe"]), overrides).config
    world = run_world(config)
    actor = build_actor(config, world)
    learner = build_learner(config, actor, world, PhaseTimer(list(PHASES)).phase)
    clean = samples(2, 40)  # one mini-batch of two groups

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in actor.state_shards()[0].items()}

    seen: dict[str, Any] = {"changed": []}
    for step, spoilt_rank in enumerate((None, 1, 0, None)):
        before = state()
        learner.learn(clean if spoilt_rank is None else spoilt_on(spoilt_rank, clean), step)
        after = state()
        # Before the first step there are no moments.
        seen["changed"].append(sum(not torch.equal(tensor, after[name]) for name, tensor in before.items()))
    seen["after_recovery"] = vars(learner.counters).copy()
    before = state()
    try:
        for step in range(4, 10):
            learner.learn(spoilt_on(1, clean), step)
        seen["error"] = ""
    except TooManySkips as error:
        seen["error"] = str(error)
    seen["at_the_end"] = vars(learner.counters).copy()
    seen["changed_at_the_end"] = sum(not torch.equal(tensor, state()[name]) for name, tensor in before.items())
    return all_gather_json(seen)
