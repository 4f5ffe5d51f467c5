"""Violations of a configuration as data, and the error that lists all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.config.schema import Config


@dataclass(frozen=True)
class Violation:
    """One broken rule: where, the rule as a formula, the values that break it, and what to change."""

    path: str  # dotted path of the field to change
    formula: str  # the rule that does not hold, e.g. "rollout.prompts_per_step % training.mini_batch_prompts == 0"
    suggestion: str
    values: Mapping[str, Any] = field(default_factory=dict)  # every number of the formula

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {value!r}" for name, value in self.values.items())
        return (
            f"{self.path}: expected {self.formula}"
            + (f"; have {values}" if values else "")
            + f". Fix: {self.suggestion}"
        )


class ConfigError(ValueError):
    """All that is wrong with a configuration. `violations` holds one entry a problem."""

    def __init__(self, violations: Sequence[Violation], source: str = "configuration") -> None:
        self.violations = tuple(violations)
        self.source = source
        count = f"{len(self.violations)} problem{'s' if len(self.violations) != 1 else ''}"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {violation}" for violation in self.violations))


def value_of(config: Config, path: str) -> Any:
    """Return the value of a field or section, by its dotted path; "" is the root."""
    node: Any = config
    for name in path.split(".") if path else ():
        node = getattr(node, name)
    return node
