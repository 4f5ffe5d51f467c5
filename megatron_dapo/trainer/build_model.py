"""What policy, reference and critic have in common, from the configuration: their type, recompute and precision."""

from __future__ import annotations

from megatron_dapo.config.schema import Config
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.precision import Precision


def model_settings(config: Config) -> ModelSettings:
    """Of every trained model of the run."""
    asked = config.precision
    precision = Precision(
        asked.recipe, asked.num_layers_at_start_in_bf16, asked.num_layers_at_end_in_bf16, asked.fp8_param
    )
    return ModelSettings(config.model.dtype, config.model.recompute_granularity, precision)
