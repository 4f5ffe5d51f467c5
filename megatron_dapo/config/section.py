"""Base class and field types of all configuration sections: immutable, documented, no silent conversions, ranges in the
annotations, relations between its fields in a method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

Offload = Literal["none", "optimizer", "all"]  # part of a model that is offloaded while another one works


@dataclass(frozen=True)
class Bounds:
    """Bounds on the values of a field, or on each item of a list.

    The validator reads it, not pydantic (as it would `Field(ge=1)`): pydantic raises before a whole configuration exists,
    and the relations between fields would be left out of the list of what is wrong.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int = 0  # length of a text or list; not combined with the others

    def hold(self, value: Any) -> bool:
        """Return whether `value` is within the bounds; a word such as "off" always is."""
        if self.min_length:
            return len(value) >= self.min_length
        if isinstance(value, str):
            return True
        return all(self._holds_number(number) for number in (value if isinstance(value, tuple) else (value,)))

    def _holds_number(self, number: float) -> bool:
        above = (self.ge is None or number >= self.ge) and (self.gt is None or number > self.gt)
        return above and (self.le is None or number <= self.le) and (self.lt is None or number < self.lt)

    def __str__(self) -> str:
        if self.min_length:
            return "not empty"
        low = f"[{self.ge:g}" if self.ge is not None else f"({self.gt:g}" if self.gt is not None else ""
        high = f"{self.le:g}]" if self.le is not None else f"{self.lt:g})" if self.lt is not None else ""
        high = "2**63)" if self.lt == 2**63 else high  # 9.22337e+18 would be a different number
        if low and high:
            return f"in {low}, {high}"
        one_sided = {">=": self.ge, ">": self.gt, "<=": self.le, "<": self.lt}
        return next(f"{sign} {number:g}" for sign, number in one_sided.items() if number is not None)


PositiveInt = Annotated[int, Bounds(ge=1)]
NonNegativeInt = Annotated[int, Bounds(ge=0)]
Seed = Annotated[int, Bounds(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Bounds(gt=0)]
NonNegativeFloat = Annotated[float, Bounds(ge=0)]
AtLeastOne = Annotated[float, Bounds(ge=1)]
Fraction = Annotated[float, Bounds(ge=0, le=1)]
ProbabilityMass = Annotated[float, Bounds(gt=0, le=1)]


def is_function_path(name: str) -> bool:
    """Return whether `name` has the form package.module:function or path/to/file.py:function."""
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        return function.isidentifier()
    return bool(function) and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))


class RelativeToRecipe:
    """Marks a path that, if relative, starts from the directory of the recipe file that sets it, or, if there is nothing,
    from the current directory."""


class FunctionOfRecipe:
    """Marks a user's function: the file of path/to/file.py:name starts where `RelativeToRecipe` says."""


class WordOfCommand:
    """Marks the words of a command: one that is a file starts where `RelativeToRecipe` says."""


InputPath = Annotated[Path, RelativeToRecipe()]
FunctionPath = Annotated[str, FunctionOfRecipe()]
CommandWord = Annotated[str, WordOfCommand()]


@dataclass(frozen=True)
class Rule:
    """A relation that must hold if `when` holds, as users read it: Python expressions over the configuration's sections.

    A section yields its own rules that do not hold (`Section.broken_rules`). `rules.broken` evaluates those between
    sections, and expressions in braces in their `fix`.
    """

    formula: str
    fix: str
    when: str = "True"
    reason: str = ""
    path: str = ""  # the field to change; "": the first one that `fix` names
    values: Mapping[str, Any] = field(default_factory=dict)  # values of names in the formula that are not fields


class Section(BaseModel):
    """Immutable, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",  # a misspelled key would silently leave its default
        strict=True,  # otherwise "1" would pass as 1, and 1 as true
        allow_inf_nan=False,  # TOML allows both
        use_attribute_docstrings=True,
    )

    def broken_rules(self) -> Iterator[Rule]:
        """Yield the relations between fields of this section that do not hold. Values may be out of their ranges."""
        yield from ()
