"""What policy, reference and critic have in common, from the configuration: their type, recompute and precision."""

from __future__ import annotations

from megatron_dapo.config.schema import Config
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.precision import Precision


def model_settings(config: Config) -> ModelSettings:
    """Of every trained model of the run."""
    asked = config.precision
    precision = Precision(asked.recipe, asked.bf16_first_layers, asked.bf16_last_layers, asked.fp8_parameters)
    return ModelSettings(config.model.dtype, config.model.recompute, precision)
