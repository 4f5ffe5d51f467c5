"""Settings that policy, reference and critic share, from the configuration."""

from __future__ import annotations

from megatron_dapo.config.schema import Config
from megatron_dapo.megatron.model_config import ModelSettings


def model_settings(config: Config) -> ModelSettings:
    """Return the number formats and recomputation of every trained model of the run."""
    return ModelSettings(config.model.dtype, config.model.recompute_granularity, config.precision)
