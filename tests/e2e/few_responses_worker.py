"""Runs in any number of processes: one step of policy and critic on a few responses, of which the last goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from not_finite_worker import samples

from megatron_dapo.config.loader import load_config
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.trainer.build_learner import build_actor, build_learner
from megatron_dapo.trainer.run_world import run_world
from megatron_dapo.types import Judgement, Window


def run(arguments: dict[str, Any]) -> dict[str, float]:
    """The step's metrics."""
    config = load_config(Path(arguments["recipe"]), arguments["overrides"]).config
    world = run_world(config)
    actor = build_actor(config, world)
    learner = build_learner(config, actor, world, PhaseTimer(list(PHASES)).phase)
    judged = [
        replace(sample, judgement=Judgement((-1.0) ** index, index % 2 == 0, Window(0, index == 0)))
        for index, sample in enumerate(samples(1, 40))
    ]
    return learner.learn(judged, 0).metrics
