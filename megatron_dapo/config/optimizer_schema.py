"""AdamW and its schedule: of the policy, and of the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from megatron_dapo.config.section import Bounds, NonNegativeFloat, NonNegativeInt, PositiveFloat, Section

Schedule = Literal["constant", "cosine", "linear"]
WarmupUnit = Literal["train_step", "optimizer_step"]


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate."""

    warmup_steps: NonNegativeInt = 0
    """Linear warm-up from 0 over this many steps, counted in warmup_unit."""

    warmup_unit: WarmupUnit = "train_step"
    """What warmup_steps and the decay count: train_step (rollout batches trained) or optimizer_step (mini-batches).
    Generation steps are never counted."""

    schedule: Schedule = "constant"
    """After warm-up: constant, or cosine / linear down to min_learning_rate at run.total_steps."""

    min_learning_rate: NonNegativeFloat = 0.0
    """Where cosine and linear end."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; not applied to biases and norms."""

    betas: Annotated[tuple[float, float], Bounds(ge=0, lt=1)] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest global norm of the gradient. 0: off."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic and its learning-rate schedule."""

    learning_rate: NonNegativeFloat = 2e-6
    """Peak learning rate of the critic."""
