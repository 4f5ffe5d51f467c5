"""Policy, critic and learner of a recipe in ranks that a test has joined, and samples to learn from: no rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.config.loader import load_config
from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.trainer.build import build_actor, build_learner
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.topology import RunTopology, run_topology
from megatron_dapo.types import CriticContext, TrainSample, Window


@dataclass(frozen=True)
class Built:
    """The learners of one rank; no actor on a rank with a critic alone."""

    world: RunTopology
    actor: MegatronActor | None
    learner: Any


def build(recipe: str, overrides: Sequence[str]) -> Built:
    """Build the learners as a run does. Collective."""
    config = load_config(Path(recipe), list(overrides)).config
    world = run_topology(config)
    actor = build_actor(config, world)
    return Built(world, actor, build_learner(config, actor, world, Phases()))


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


def judged_samples(num_groups: int, vocab_size: int) -> list[TrainSample]:
    """The same with rewards of 1 and -1 in turn."""
    return [
        replace(sample, critic_context=CriticContext((-1.0) ** index, index % 2 == 0, Window()))
        for index, sample in enumerate(samples(num_groups, vocab_size))
    ]
