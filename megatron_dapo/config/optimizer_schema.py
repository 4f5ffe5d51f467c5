"""AdamW and its schedule: of the policy, and of the critic."""

from __future__ import annotations

from typing import Literal

from megatron_dapo.config.section import Section

Schedule = Literal["constant", "cosine", "linear"]
WarmupUnit = Literal["train_step", "optimizer_step"]


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = 1e-6
    """Peak learning rate."""

    warmup_steps: int = 0
    """Linear warm-up from 0 over this many steps, counted in warmup_unit."""

    warmup_unit: WarmupUnit = "train_step"
    """What warmup_steps and the decay count: train_step (rollout batches trained) or optimizer_step (mini-batches).
    Generation steps are never counted."""

    schedule: Schedule = "constant"
    """After warm-up: constant, or cosine / linear down to min_learning_rate at run.total_steps."""

    min_learning_rate: float = 0.0
    """Where cosine and linear end."""

    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to biases and norms."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    clip_grad: float = 1.0
    """Largest global norm of the gradient. 0: off."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic and its learning-rate schedule."""

    learning_rate: float = 2e-6
    """Peak learning rate of the critic."""
