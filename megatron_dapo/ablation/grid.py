"""Grid files: variants of a recipe and seeds.

    recipe = "../quickstart/quickstart.toml"    # relative to the grid's directory
    seeds = [1, 2, 3]
    baseline = "GRPO"

    [set]                                       # overrides of every variant
    run.total_steps = 12

    [[variants]]
    name = "GRPO"
    set = { algorithm.loss.clip_ratio_high = 0.2 }

    [[variants]]
    name = "+ clip-higher"
    after = "GRPO"                              # GRPO's overrides come first
    set = { algorithm.loss.clip_ratio_high = 0.28 }

Order: the recipe, [set], the variants named by `after`, the variant's own `set`, --set. Seed s of a variant is run.seed = s
and data.shuffle_seed = s, so runs with the same seed see their prompts in the same order.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_dapo.config.loader import overrides_of, read_toml
from megatron_dapo.config.rules import ConfigError, Violation
from megatron_dapo.config.section import Section

BEFORE_TRAINING = "before training"  # the baseline is each run's evaluation of its initial policy


class VariantTable(Section):
    """One [[variants]] table of a grid file."""

    name: str
    """Label in tables and pictures; must be unique."""

    set: dict[str, Any] = {}
    """Overrides of the recipe, as nested tables or dotted keys."""

    after: str = ""
    """An earlier variant whose overrides are applied before this one's and whose recipe is inherited. "": none."""

    recipe: str = ""
    """Recipe of this variant, relative to the grid's directory. "": that of `after`, or the grid's if there is none."""

    pretrain_value: bool = False
    """Pretrain the critic first (`megatron-dapo pretrain-value`) and train from it. Variants whose pretraining has the same
    settings share one critic per seed. Not inherited by `after`."""

    program: str = ""
    """Python program, relative to the grid's directory, that trains instead of `megatron-dapo train`: another library's
    trainer. It is called like `train`, with RECIPE --set a.b=c... --output-dir DIR, follows the recipe's values and
    writes the same metrics, evaluations and summary. "": none."""


class GridTable(Section):
    """A grid file."""

    name: str = ""
    """Label of the report. "": the file's name."""

    question: str = ""
    """Text above the report's table."""

    recipe: str
    """Recipe that the variants override, from the grid's directory."""

    seeds: tuple[int, ...]
    """Seeds to train every variant with."""

    baseline: str = ""
    """Variant that all others are compared with, or "before training". "": the first one."""

    output_dir: str = ""
    """Directory of the runs, relative to the current directory. "": runs/ablations/<name>."""

    set: dict[str, Any] = {}
    """Overrides of every variant."""

    variants: tuple[VariantTable, ...]
    """The variants, in the order of the report."""


@dataclass(frozen=True)
class Variant:
    """A recipe and its overrides."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]  # arguments of --set, without seed and output directory
    written: Mapping[str, Any]  # the variant's own overrides as the grid writes them, dotted
    pretrains_value: bool = False
    program: Path | None = None  # trains instead of `megatron-dapo train`

    @property
    def directory(self) -> str:
        """Name of the variant's directory."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_") or "variant"


@dataclass(frozen=True)
class Grid:
    """Variants and seeds of a grid file."""

    path: Path
    name: str
    question: str
    seeds: tuple[int, ...]
    baseline: str
    output_dir: Path
    variants: tuple[Variant, ...]


def read_grid(path: Path, overrides: Sequence[str] = ()) -> Grid:
    """Read a grid file; `overrides` apply to every variant.

    Raises ConfigError with an entry for each unknown key, wrong type and conflicting variant.
    """
    table = _checked(read_toml(path), path)
    name, directory = table.name or path.stem, path.parent
    if problems := list(_problems(table, directory)):
        raise ConfigError(problems, str(path))
    shared = overrides_of(table.set, directory)
    built: dict[str, Variant] = {}
    own: dict[str, tuple[str, ...]] = {}
    for each in table.variants:
        inherited = own[each.after] if each.after else ()
        own[each.name] = (*inherited, *overrides_of(each.set, directory))
        recipe = (
            directory / each.recipe if each.recipe else built[each.after].recipe if each.after else directory / table.recipe
        )
        built[each.name] = Variant(
            name=each.name,
            recipe=recipe,
            overrides=(*shared, *own[each.name], *overrides),
            written=_dotted(each.set),
            pretrains_value=each.pretrain_value,
            program=(directory / each.program).resolve() if each.program else None,
        )
    output = Path(table.output_dir or f"runs/ablations/{name}")
    baseline = table.baseline or table.variants[0].name
    return Grid(path, name, table.question, table.seeds, baseline, output, tuple(built.values()))


def _checked(tree: dict[str, Any], path: Path) -> GridTable:
    try:
        return GridTable.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise ConfigError([_violation(entry) for entry in error.errors(include_url=False)], str(path)) from None


def _violation(entry: Mapping[str, Any]) -> Violation:
    where = ".".join(str(part + 1) if isinstance(part, int) else part for part in entry["loc"])
    if entry["type"] == "missing":
        return Violation(where, "a value (there is no default)", f"set {where}")
    if entry["type"] == "extra_forbidden":
        known = VariantTable if entry["loc"][0] == "variants" else GridTable
        close = difflib.get_close_matches(str(entry["loc"][-1]), known.model_fields, n=1)
        keys = ", ".join(known.model_fields)
        return Violation(where, f"a known key ({keys})", f"did you mean {close[0]}?" if close else "remove it")
    rule = entry["msg"].removeprefix("Input should be ")
    return Violation(where, rule, "change it", {where: entry.get("input")})


def _problems(table: GridTable, directory: Path) -> Iterator[Violation]:
    names = [each.name for each in table.variants]
    if not names:
        yield Violation("variants", "at least one variant", "add a table [[variants]]")
    if not table.seeds or len(set(table.seeds)) < len(table.seeds):
        yield Violation(
            "seeds", "one or more different numbers", "write seeds = [1, 2, 3]", {"seeds": list(table.seeds)}
        )
    directories = [Variant(name, Path(), (), {}).directory for name in names]
    for index, each in enumerate(table.variants):
        where = f"variants.{index + 1}"
        if directories[index] in directories[:index] or each.name == BEFORE_TRAINING:
            yield Violation(
                f"{where}.name", "a unique name, in letters and digits", "rename it", {"name": each.name}
            )
        if each.after and each.after not in names[:index]:
            fix = f"write one of {', '.join(names[:index])}" if index else "remove it"
            yield Violation(f"{where}.after", "an earlier variant", fix, {"after": each.after})
        if each.program and not (directory / each.program).is_file():
            yield Violation(f"{where}.program", "a file", "correct the path", {"program": str(directory / each.program)})
        if each.program and each.pretrain_value:
            yield Violation(f"{where}.program", "no pretrain_value with it", "remove one of the two")
    if table.baseline and table.baseline not in (*names, BEFORE_TRAINING):
        fix = f"write one of {', '.join((*names, BEFORE_TRAINING))}"
        yield Violation("baseline", "one of the variants", fix, {"baseline": table.baseline})


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(_dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return flat
