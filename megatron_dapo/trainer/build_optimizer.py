"""The learning-rate schedule from a section of the configuration: the policy's or the critic's."""

from __future__ import annotations

from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.trainer.learning_rate import LearningRateSchedule


def learning_rate_schedule(optimizer: OptimizerConfig, total_steps: int) -> LearningRateSchedule:
    """`total_steps`: of the run, in the optimizer's warmup_unit."""
    return LearningRateSchedule(
        peak=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        total_steps=total_steps,
        shape=optimizer.schedule,
        minimum=optimizer.min_learning_rate,
    )
