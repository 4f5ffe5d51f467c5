"""Makes a configuration from another one; it is validated like one that is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_dapo.config.rules import ConfigError, Violation
from megatron_dapo.config.schema import Config


def derive(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return `config` with `changes`, nested by section or by dotted path. ConfigError for a name or a type that the
    schema does not have."""
    try:
        return Config.model_validate(_merged(config, changes))
    except ValidationError as error:
        problems = [
            Violation(".".join(map(str, one["loc"])), one["msg"], "correct the derived value", {"value": one["input"]})
            for one in error.errors(include_url=False)
        ]
        raise ConfigError(problems, "derived configuration") from None


def _merged(node: BaseModel | Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `node` with `changes`. Sections without a change stay as they are and are not validated again."""
    values = dict(node)
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        changed = {rest: value} if rest else value
        is_section = isinstance(changed, Mapping) and isinstance(values.get(name), BaseModel | Mapping)
        values[name] = _merged(values[name], changed) if is_section else changed
    return values


def as_critic(config: Config) -> Config:
    """Return the configuration with the critic's layout, tokens, fields and optimizer in the place of the policy's."""
    changes = {
        "parallel": config.critic_parallel,
        "critic.parallel.num_processes": 0,
        "training.micro_batch_tokens": config.critic.micro_batch_tokens or config.training.micro_batch_tokens,
        "megatron": config.critic_megatron,
        "optimizer": config.critic.optimizer,
    }
    return derive(config, changes)
