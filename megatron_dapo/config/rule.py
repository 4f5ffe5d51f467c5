"""What every rule of the validator is made of: the values of fields, and a violation that holds them."""

from __future__ import annotations

from typing import Any

from megatron_dapo.config.errors import Violation
from megatron_dapo.config.schema import Config


def value_of(config: Config, path: str) -> Any:
    """The value of a field or section, by its dotted path; "" is the root."""
    node: Any = config
    for name in path.split(".") if path else ():
        node = getattr(node, name)
    return node


def violation(config: Config, path: str, formula: str, suggestion: str, *others: str, **facts: Any) -> Violation:
    """A violation whose values are the fields `path` and `others`, plus facts that are no fields."""
    values = {name: value_of(config, name) for name in (path, *others)}
    return Violation(path=path, formula=formula, suggestion=suggestion, values={**values, **facts})


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted` (the smaller one of two equally close)."""
    divisors = [d for d in range(1, number + 1) if number % d == 0] if number > 0 else [1]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
