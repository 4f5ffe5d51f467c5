"""Runs in any number of processes: one step of policy and critic on a few responses, of which the last continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from learners import build, samples

from megatron_dapo.types import CriticContext, Window


def run(arguments: dict[str, Any]) -> dict[str, float]:
    """The step's metrics."""
    learner = build(arguments["recipe"], arguments["overrides"]).learner
    judged = [
        replace(sample, critic_context=CriticContext((-1.0) ** index, index % 2 == 0, Window(0, index == 0)))
        for index, sample in enumerate(samples(1, 40))
    ]
    return learner.learn(judged, 0)[1].metrics
