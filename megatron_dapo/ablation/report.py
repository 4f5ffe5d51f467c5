"""The report of a grid: the results of each variant, and its paired difference from the baseline.

Estimator: run s of a variant and run s of the baseline share the seed, the order of prompts, the held-out problems and
the seeds of the held-out responses. d[s, i] is the difference of their accuracies on problem i.

    difference          mean of d over seeds and problems
    interval of seeds   Student's t over one mean per seed: covers new trainings, tested on these problems
    interval of problems  bootstrap over problems of the means over seeds: covers other problems, for these trainings

An effect counts as shown if the interval of seeds excludes 0.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.ablation.grid import BEFORE_TRAINING, Grid
from megatron_dapo.ablation.pictures import draw
from megatron_dapo.evaluation.estimators import Estimate, bootstrap_mean, student_mean

Record = Mapping[str, Any]
_LAST_SHARE = 0.25  # share of the train steps; figures for the end of a run are means over them
HEADER = (
    "variant",
    "seeds",
    "held-out accuracy",
    "difference",
    "over seeds",
    "over problems",
    "effect",
    "accuracy while training",
    "its difference",
    "entropy",
    "response tokens",
    "repetition",
    "generated tokens",
    "train time",
)
METHOD = (
    "Held-out accuracy: after training, mean over problems and seeds, with Student's 95 % interval over seeds. Difference: "
    "from the baseline, in pairs that share seed, prompts' order, problems and the responses' seeds; over seeds: Student's "
    "95 % interval of one mean a seed (new trainings, these problems); over problems: bootstrap over problems of the means "
    "over seeds (other problems, these trainings). A variant has an effect if the interval over seeds excludes 0; intervals "
    "are not corrected for the number of variants. Accuracy while training: of all sampled responses, mean over train "
    "steps. Entropy (nats), response tokens and repetition: last quarter of the train steps. Train time: without evaluations, "
    "checkpoints and start; after a plus sign, that of pretraining the critic."
)


@dataclass(frozen=True)
class PairedDifference:
    """A variant minus the baseline, over the seeds that both have."""

    num_pairs: int
    over_seeds: Estimate
    over_problems: Estimate

    @property
    def verdict(self) -> str:
        """ "better", "worse", or why neither is shown."""
        if self.num_pairs < 2:
            return "one seed: no interval"
        if self.over_seeds.low > 0:
            return "better"
        return "worse" if self.over_seeds.high < 0 else "no effect shown"


def paired_difference(variant: Mapping[int, Record], baseline: Mapping[int, Record]) -> PairedDifference | None:
    """Return the difference of held-out accuracies of records by seed; None without a common seed.

    Raises ValueError for pairs evaluated with different protocols or problems.
    """
    seeds = sorted(variant.keys() & baseline.keys())
    if not seeds:
        return None
    for seed in seeds:
        if variant[seed]["protocol"] != baseline[seed]["protocol"]:
            names = f"{variant[seed]['variant']} and {baseline[seed]['variant']}"
            raise ValueError(f"{names}, seed {seed}: evaluated by unlike protocols; give all variants one [evaluation]")
    pairs = [(variant[seed]["after"], baseline[seed]["after"]) for seed in seeds]
    by_seed = [[after - base for after, base in zip(*pair, strict=True)] for pair in pairs]
    by_problem = [sum(column) / len(column) for column in zip(*by_seed, strict=True)]
    means = [sum(row) / len(row) for row in by_seed]
    return PairedDifference(len(seeds), student_mean(means), bootstrap_mean(by_problem))


def by_variant(grid: Grid, records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Return the records of each variant by seed, in the grid's order. If the policy before training is the
    baseline, it comes first, with the evaluation that each run began with."""
    found: dict[str, dict[int, Record]] = {variant.name: {} for variant in grid.variants}
    for record in records:
        found[record["variant"]][record["seed"]] = record
    if grid.baseline != BEFORE_TRAINING:
        return found
    before: dict[int, Record] = {
        record["seed"]: {**record, "variant": BEFORE_TRAINING, "after": record["before"], **_NOTHING_TRAINED}
        for record in records
        if record["before"] is not None
    }
    return {BEFORE_TRAINING: before, **found}


_NOTHING_TRAINED = {"curves": {}, "train_step": [], "generated_tokens": [], "train_seconds": 0.0}


def rows(grid: Grid, records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return the table's rows as texts in the order of HEADER, also for variants without a record."""
    variants = by_variant(grid, records)
    return [_row(name, runs, variants[grid.baseline], name == grid.baseline) for name, runs in variants.items()]


def _row(name: str, runs: Mapping[int, Record], baseline: Mapping[int, Record], is_baseline: bool) -> tuple[str, ...]:
    records = list(runs.values())
    if not records:
        return (name, "0", *[""] * (len(HEADER) - 2))
    accuracy = student_mean([sum(record["after"]) / len(record["after"]) for record in records])
    difference = None if is_baseline else paired_difference(runs, baseline)
    common = [
        seed for seed in sorted(runs.keys() & baseline.keys()) if runs[seed]["curves"] and baseline[seed]["curves"]
    ]
    learning = [_mean(runs[seed], _LEARNING, 1.0) - _mean(baseline[seed], _LEARNING, 1.0) for seed in common]
    trains = bool(records[0]["curves"])
    return (
        name,
        str(len(records)),
        _interval(accuracy),
        f"{difference.over_seeds.value:+.3f}" if difference else "",
        _range(difference.over_seeds) if difference and difference.num_pairs > 1 else "",
        _range(difference.over_problems) if difference else "",
        "baseline" if is_baseline else difference.verdict if difference else "no common seed",
        _over_runs(records, _LEARNING, 1.0) if trains else "",
        _signed(student_mean(learning)) if learning and not is_baseline else "",
        *(_over_runs(records, each, _LAST_SHARE) if trains else "" for each in _LATE),
        f"{sum(sum(record['generated_tokens']) for record in records) / len(records) / 1e3:,.0f} k" if trains else "",
        _seconds(records) if trains else "",
    )


_LEARNING = "rollout/accuracy_generated"
_LATE = ("actor/entropy", "rollout/response_tokens_mean", "quality/repetition_mean")


def _mean(record: Record, curve: str, last_share: float) -> float:
    values = [value for value in record["curves"][curve] if value is not None]
    late = values[-max(1, round(last_share * len(values))) :]
    return sum(late) / len(late) if late else float("nan")


def _over_runs(records: Sequence[Record], curve: str, last_share: float) -> str:
    return f"{sum(_mean(record, curve, last_share) for record in records) / len(records):.3g}"


def _seconds(records: Sequence[Record]) -> str:
    """Return the mean seconds of training, followed by those of the critics' pretraining."""
    # Records of earlier commits lack the seconds of pretraining.
    own, before = (sum(each.get(name, 0.0) for each in records) for name in ("train_seconds", "pretrain_seconds"))
    return f"{own / len(records):.0f} s" + (f" + {before / len(records):.0f} s" if before else "")


def _range(estimate: Estimate) -> str:
    return f"[{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f}" + (f" {_range(estimate)}" if estimate.low < estimate.high else "")


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3f}" + (
        f" [{estimate.low:.3f}, {estimate.high:.3f}]" if estimate.low < estimate.high else ""
    )


# ---- documents


def write_report(grid: Grid, records: Sequence[Record], directory: Path, command: str) -> list[Path]:
    """Write report.md with its pictures next to it, and a self-contained report.html; return both paths.

    `command`: the command that regenerates the report.
    """
    directory.mkdir(parents=True, exist_ok=True)
    table, pictures = rows(grid, records), draw(by_variant(grid, records))
    facts = list(_facts(grid, records, command))
    for name, svg in pictures.items():
        (directory / f"{name}.svg").write_text(svg, encoding="utf-8")
    documents = {
        "report.md": _markdown(grid, table, facts, pictures),
        "report.html": _html(grid, table, facts, pictures),
    }
    for name, text in documents.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in documents]


def _facts(grid: Grid, records: Sequence[Record], command: str) -> Iterator[str]:
    variants = by_variant(grid, records)
    baseline = variants[grid.baseline]
    differences = {name: paired_difference(runs, baseline) for name, runs in variants.items() if name != grid.baseline}
    unshown = [name for name, each in differences.items() if each and each.verdict not in ("better", "worse")]
    if unshown:
        yield f"No effect is shown at this scale for: {', '.join(unshown)}."
    missing = [
        f"{variant.name}, seed {seed}"
        for variant in grid.variants
        for seed in grid.seeds
        if seed not in variants[variant.name]
    ]
    if missing:
        yield f"Not on record yet: {'; '.join(missing)}."
    yield METHOD
    commits = sorted({record["commit"] for record in records})
    layouts = sorted({record["layout"] for record in records})
    yield f"Commit: {', '.join(commits) or 'none'}. Layout: {', '.join(layouts) or 'none'}. Made by `{command}`."


def _markdown(grid: Grid, table: Sequence[Sequence[str]], facts: Sequence[str], pictures: Mapping[str, str]) -> str:
    lines = [f"# {grid.name}", "", *([grid.question, ""] if grid.question else [])]
    lines += [_pipes(HEADER), _pipes(["---"] * len(HEADER)), *map(_pipes, table), ""]
    lines += [part for fact in facts for part in (fact, "")]
    lines += [part for name in pictures for part in (f"![{name}]({name}.svg)", "")]
    return "\n".join(lines)


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #24292f; }
table { border-collapse: collapse; font-size: 13px; } td, th { border: 1px solid #d0d7de; padding: 4px 8px; text-align: left; }
th { background: #f6f8fa; } svg { max-width: 49%; height: auto; }"""


def _html(grid: Grid, table: Sequence[Sequence[str]], facts: Sequence[str], pictures: Mapping[str, str]) -> str:
    title = html.escape(grid.name)
    body = [f"<h1>{title}</h1>", *(f"<p>{html.escape(text)}</p>" for text in [grid.question] if text)]
    body += ["<table>", _cells("th", HEADER), *(_cells("td", row) for row in table), "</table>"]
    body += [f"<p>{html.escape(fact)}</p>" for fact in facts]
    # Inlined without the XML header, so the page is one self-contained file.
    body += [svg[svg.index("<svg") :] for svg in pictures.values()]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return "\n".join([f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>', *body, "</body></html>", ""])


def _cells(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
