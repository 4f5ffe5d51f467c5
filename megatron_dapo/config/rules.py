"""Relations between fields as data, and their violations. An error prints exactly the formula that was checked."""

from __future__ import annotations

import functools
import ipaddress
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from urllib.parse import urlsplit

from megatron_dapo.config.schema import Config, leaf_fields
from megatron_dapo.config.section import Rule, Section
from megatron_dapo.models.stages import layers_of_stages
from megatron_dapo.rounding import nearest_divisor, round_up
from megatron_dapo.untrusted import one_line


@dataclass(frozen=True)
class Violation:
    """One broken rule: the field, the rule as a formula, the values that break it, and the fix."""

    path: str  # dotted path of the field to change
    formula: str  # the rule that does not hold, e.g. "rollout.prompts_per_step % training.mini_batch_prompts == 0"
    suggestion: str
    values: Mapping[str, Any] = field(default_factory=dict)  # every number of the formula
    reason: str = ""  # purpose of the rule, a clause that a user reads in place of the formula

    @property
    def rule(self) -> str:
        """The rule and the values that break it."""
        return f"expected {self.formula}" + (f"; have {_listed(self.values)}" if self.values else "")

    @property
    def detail(self) -> str:
        """The reason, or else the rule, and the values."""
        return f"{self.reason}; have {_listed(self.values)}" if self.reason else self.rule

    def __str__(self) -> str:
        if not self.reason:
            return f"{self.path}: {self.rule}. Fix: {self.suggestion}"
        value = f" = {self.values[self.path]!r}" if self.path in self.values else ""
        formula, _, condition = self.formula.partition(" if ")
        names, conditions = _NAME.findall(formula), set(_NAME.findall(condition)) & self.values.keys()
        names += conditions if len(conditions) <= _MAX_CONDITIONS else ()
        others = {name: value for name, value in self.values.items() if name != self.path and name in names}
        have = f" ({_listed(others)})" if others else ""
        return f"{self.path}{value}: {self.reason}{have}. Fix: {self.suggestion}"


_MAX_CONDITIONS = 2  # a rule's condition on more fields is left to `rule`


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in values.items())


@dataclass(frozen=True)
class UnusableInput(Violation):
    """A named input that cannot be used; `formula` is the whole message, with place and fix."""

    suggestion: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.formula}" + (f". Fix: {self.suggestion}" if self.suggestion else "")


@dataclass(frozen=True)
class Doubt(UnusableInput):
    """A named input that can be used, but should be looked at: a warning."""


class ConfigError(ValueError):
    """Everything that is wrong with a configuration. `violations` holds one entry per problem."""

    def __init__(self, violations: Sequence[Violation], source: str = "configuration") -> None:
        self.violations = tuple(violations)
        self.source = source
        count = f"{len(self.violations)} problem{'s' if len(self.violations) != 1 else ''}"
        lines = [f"{source}: {count}", *(f"  - {one_line(violation)}" for violation in self.violations)]
        super().__init__("\n".join(lines))

    def with_rules(self) -> str:
        """Return the message with the formula of each rule below its reason."""
        rules = {one_line(one): one_line(one.rule) for one in self.violations if one.reason}
        first, *lines = str(self).splitlines()
        return "\n".join([first, *(f"{line}\n      rule: {rules[line[4:]]}" if line[4:] in rules else line for line in lines)])


def value_of(config: Config, path: str) -> Any:
    """Return the value of a field or section, by its dotted path; "" is the root."""
    node: Any = config
    for name in path.split(".") if path else ():
        node = getattr(node, name)
    return node


# A dotted path such as parallel.tp_size, or a single word such as num_layers.
_NAME = re.compile(r"[a-z_]\w*(?:\.\w+)*")


def stages_fit(num_layers: int, stages: int, chunks: int, first: int, last: int) -> bool:
    """Return True if the layers split over pipeline stages, see `layers_of_stages`."""
    try:
        layers_of_stages(num_layers, stages, chunks, first, last)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether a host, or the host of a URL, is reachable only from its own node."""
    host = urlsplit(address).hostname if "://" in address else address
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


_FUNCTIONS = {
    **{one.__name__: one for one in (any, len, range, set, min, max, math.gcd, math.ceil)},
    **{one.__name__: one for one in (nearest_divisor, is_loopback, stages_fit)},
    "padded": round_up,
}


def fields_of(rule: Rule) -> tuple[str, ...]:
    """Return the dotted paths of all fields that a rule is about, the one to change first."""
    # A fix names the field to change first.
    return _fields_in(rule.path or rule.fix, rule.formula, rule.when, rule.reason)


@functools.cache
def _fields_in(*texts: str) -> tuple[str, ...]:
    # dict.fromkeys preserves the order.
    return tuple(dict.fromkeys(name for text in texts for name in _NAME.findall(text) if name in leaf_fields()))


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<rule>", "eval")


def violation_of(rule: Rule, fix: str, config: Config, facts: Mapping[str, Any]) -> Violation:
    """Return the violation of a rule, with its complete fix. `facts`: values of names that are no fields."""
    fields = fields_of(rule)
    words = [name for text in (rule.formula, rule.when) for name in _NAME.findall(text)]
    condition = f" if {rule.when}" if rule.when != "True" else ""
    return Violation(
        path=rule.path or fields[0],
        formula=rule.formula + condition,
        suggestion=fix,
        values={
            **{path: value_of(config, path) for path in fields},
            **{name: facts[name] for name in words if name in facts},
        },
        reason=rule.reason,
    )


def broken(
    rules: Sequence[Rule], config: Config, facts: Mapping[str, Any], out_of_range: Set[str] = frozenset()
) -> Iterator[Violation]:
    """Yield a violation for every rule between sections that does not hold. `facts`: numbers that are not fields, by
    their name in formulas."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    # All names are globals: a generator expression inside eval sees no others. The expressions are constants of this
    # package; without builtins, a mistyped one fails here rather than doing something else.
    names = {"__builtins__": {}, **_FUNCTIONS, **sections, **facts}
    for rule in rules:
        # A field outside its range is already reported; computing with it could only divide by 0 or mislead.
        if not out_of_range.isdisjoint(fields_of(rule)):
            continue
        if not eval(_compiled(rule.when), names) or eval(_compiled(rule.formula), names):
            continue
        fix = re.sub(r"{(.+?)}", lambda match: str(eval(match[1], names)), rule.fix)
        yield violation_of(rule, fix, config, facts)


def broken_in_sections(config: Config, out_of_range: Set[str] = frozenset()) -> Iterator[Violation]:
    """Yield a violation for every relation between fields of one section that does not hold."""
    for rule in broken_rules(config):
        if out_of_range.isdisjoint(fields_of(rule)):
            yield violation_of(rule, rule.fix, config, rule.values)


def broken_rules(section: Section) -> Iterator[Rule]:
    """Yield the rules of a section and of those below it that do not hold."""
    for name in type(section).model_fields:
        if isinstance(inner := getattr(section, name), Section):
            yield from broken_rules(inner)
    yield from section.broken_rules()
