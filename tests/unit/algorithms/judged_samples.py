"""A sample of an algorithm with a critic, for the tests of advantages and of the value path."""

from __future__ import annotations

import torch

from megatron_dapo.types import CriticContext, TrainSample, Window


def judged(
    name: str, length: int, reward: float, start: int = 0, is_finished: bool = True, prompt: int = 2
) -> TrainSample:
    """A response of `length` tokens whose window begins at `start`."""
    mask = torch.ones(length)
    mask[:start] = 0.0
    return TrainSample(
        name,
        int(name.split("/")[0]),
        torch.arange(1, prompt + length + 1),
        prompt,
        mask,
        torch.zeros(length),
        torch.full((length,), -1.0),
        critic_context=CriticContext(reward if is_finished else 0.0, reward > 0, Window(start, is_finished)),
    )
