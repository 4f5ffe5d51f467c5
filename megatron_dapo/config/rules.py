"""Relations between fields as data, and their violations. An error prints exactly the formula that was checked."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megatron_dapo.config.schema import Config, leaf_fields
from megatron_dapo.models.stages import layers_of_stages
from megatron_dapo.untrusted import one_line


@dataclass(frozen=True)
class Violation:
    """One broken rule: the field, the rule as a formula, the values that break it, and the fix."""

    path: str  # dotted path of the field to change
    formula: str  # the rule that does not hold, e.g. "rollout.prompts_per_step % training.mini_batch_prompts == 0"
    suggestion: str
    values: Mapping[str, Any] = field(default_factory=dict)  # every number of the formula

    @property
    def detail(self) -> str:
        """The rule and the values that break it."""
        values = ", ".join(f"{name} = {value!r}" for name, value in self.values.items())
        return f"expected {self.formula}" + (f"; have {values}" if values else "")

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}. Fix: {self.suggestion}"


@dataclass(frozen=True)
class UnusableInput(Violation):
    """A named input that cannot be used; `formula` is the whole message, with place and fix."""

    suggestion: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.formula}" + (f". Fix: {self.suggestion}" if self.suggestion else "")


class ConfigError(ValueError):
    """Everything that is wrong with a configuration. `violations` holds one entry per problem."""

    def __init__(self, violations: Sequence[Violation], source: str = "configuration") -> None:
        self.violations = tuple(violations)
        self.source = source
        count = f"{len(self.violations)} problem{'s' if len(self.violations) != 1 else ''}"
        lines = [f"{source}: {count}", *(f"  - {one_line(violation)}" for violation in self.violations)]
        super().__init__("\n".join(lines))


def value_of(config: Config, path: str) -> Any:
    """Return the value of a field or section, by its dotted path; "" is the root."""
    node: Any = config
    for name in path.split(".") if path else ():
        node = getattr(node, name)
    return node


# A dotted path such as parallel.tp_size, or a single word such as num_layers.
_NAME = re.compile(r"[a-z_]\w*(?:\.\w+)*")


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` closest to `wanted` (the smaller one of two equally close)."""
    divisors = [d for d in range(1, number + 1) if number % d == 0] if number > 0 else [1]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def stages_fit(num_layers: int, stages: int, chunks: int, first: int, last: int) -> bool:
    """Return True if the layers split over pipeline stages, see `layers_of_stages`."""
    try:
        layers_of_stages(num_layers, stages, chunks, first, last)
    except ValueError:
        return False
    return True


def padded(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return math.ceil(number / multiple) * multiple


def is_function_path(name: str) -> bool:
    """Return whether `name` has the form package.module:function or path/to/file.py:function."""
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        return function.isidentifier()
    return bool(function) and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))


def is_loopback(address: str) -> bool:
    """Return whether a host, or the host of a URL, is reachable only from its own node."""
    host = urlsplit(address).hostname if "://" in address else address
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


_FUNCTIONS = {
    **{one.__name__: one for one in (any, len, range, set, min, max, math.gcd, math.ceil)},
    **{one.__name__: one for one in (nearest_divisor, padded, is_function_path, is_loopback, stages_fit)},
}


@dataclass(frozen=True)
class Rule:
    """A relation that must hold if `where` holds; both are Python expressions over the configuration's sections, the
    facts passed to `broken`, and the functions above."""

    formula: str
    fix: str  # an expression in braces is replaced by its value
    where: str = "True"
    reason: str = ""
    path: str = ""  # the field to change; "": the first one that `fix` names

    def fields(self) -> list[str]:
        """Return the dotted paths of all fields that the rule is about, the one to change first."""
        # A fix names the field to change first; dict.fromkeys preserves that order.
        texts = (self.path or self.fix, self.formula, self.where, self.reason)
        return list(dict.fromkeys(name for text in texts for name in _NAME.findall(text) if name in leaf_fields()))


def broken(
    rules: Sequence[Rule], config: Config, facts: Mapping[str, Any], out_of_range: Set[str] = frozenset()
) -> Iterator[Violation]:
    """Yield a violation for every rule that does not hold. `facts`: numbers that are not fields, by their name in
    formulas."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    # All names are globals: a generator expression inside eval sees no others. The expressions are constants of this
    # package; without builtins, a mistyped one fails here rather than doing something else.
    names = {"__builtins__": {}, **_FUNCTIONS, **sections, **facts}
    for rule in rules:
        fields = rule.fields()
        # A field outside its range is already reported; computing with it could only divide by 0 or mislead.
        if not out_of_range.isdisjoint(fields) or not eval(rule.where, names) or eval(rule.formula, names):
            continue
        words = [name for text in (rule.formula, rule.where) for name in _NAME.findall(text)]
        where = f" where {rule.where}" if rule.where != "True" else ""
        yield Violation(
            path=rule.path or fields[0],
            formula=rule.formula + where + (f" ({rule.reason})" if rule.reason else ""),
            suggestion=re.sub(r"{(.+?)}", lambda match: str(eval(match[1], names)), rule.fix),
            values={
                **{path: value_of(config, path) for path in fields},
                **{name: facts[name] for name in words if name in facts},
            },
        )
