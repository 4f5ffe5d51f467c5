"""The typed configuration tree, its loader and its validator. Imports neither torch nor any package module above layer
0."""

from megatron_dapo.config.inputs import missing_inputs
from megatron_dapo.config.loader import (
    LoadedConfig,
    config_from_dict,
    layout_overrides,
    load_config,
    read_resolved,
    write_resolved,
)
from megatron_dapo.config.rules import ConfigError, Violation
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import require_valid, schedule_steps, validate
