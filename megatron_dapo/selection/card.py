"""The data card: what was sampled, what was kept and why not more, in Markdown with separate pictures (SVG)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_dapo.algorithms.selection import (
    CAPPED,
    DUPLICATE,
    KEPT,
    LENGTH,
    SIMILAR,
    WRONG,
    choose_at_random,
    mean_distance,
    ngram_embedding,
)
from megatron_dapo.evaluation.estimators import bootstrap_mean
from megatron_dapo.selection.choose import NOT_DRAWN, Chosen
from megatron_dapo.svg import bars

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
REASONS: Mapping[str, str] = {
    WRONG: "wrong, truncated or without an answer",
    LENGTH: "outside the length bounds or their prompt's quantiles",
    DUPLICATE: "nearly equal to a shorter one",
    SIMILAR: "of a cluster that has its responses",
    CAPPED: "beyond the prompt's cap",
    NOT_DRAWN: "not drawn by the random selection",
    KEPT: "kept",
}


def statistics(chosen: Sequence[Chosen], seed: int) -> dict[str, Any]:
    """Return the figures of a data set, JSON-serializable. Intervals are bootstrap ones of 95 %, over prompts."""
    fates = Counter(fate for one in chosen for fate in one.fates)
    correct = [length for one in chosen for length, right in _lengths(one) if right]
    kept = [one.candidates.lengths[index] for one in chosen for index in one.kept]
    clusters = [len(set(one.diverse.clusters.values())) for one in chosen]
    distances = [pair for one in chosen if len(one.kept) > 1 for pair in [_distances(one, seed)]]
    return {
        "prompts": len(chosen),
        "prompts_with_examples": sum(bool(one.kept) for one in chosen),
        "responses": sum(len(one.samples) for one in chosen),
        "fates": {fate: fates[fate] for fate in REASONS if fates[fate]},
        "pass_rate_mean": float(np.mean([one.candidates.pass_rate for one in chosen])) if chosen else 0.0,
        "tokens_correct": _quantiles(correct),
        "tokens_kept": _quantiles(kept),
        "clusters_per_prompt": _counted(clusters),
        "kept_per_prompt": _counted([len(one.kept) for one in chosen]),
        "distance_kept": _interval([own for own, _ in distances], seed),
        "distance_random": _interval([other for _, other in distances], seed),
        "distance_difference": _interval([own - other for own, other in distances], seed),
        "prompts_compared": len(distances),
    }


def _lengths(one: Chosen) -> list[tuple[int, bool]]:
    candidates = one.candidates
    return list(zip(candidates.lengths, candidates.is_correct, strict=True))


def _distances(one: Chosen, seed: int) -> tuple[float, float]:
    """Return the mean distance between the kept responses to a prompt, and between equally many random correct ones.

    Uses word n-grams whatever embedding the selection uses, because that embedding would favor its own selection.
    """
    candidates = one.candidates
    drawn = choose_at_random(candidates, len(one.kept), f"{seed}/card/{one.prompt.prompt_id}")
    own, other = (
        mean_distance(np.stack([ngram_embedding(candidates.texts[index]) for index in indices]))
        for indices in (one.kept, drawn)
    )
    return own, other


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    return {f"{quantile:g}": float(np.quantile(values, quantile)) for quantile in QUANTILES} if values else {}


def _counted(values: Sequence[int]) -> dict[str, int]:
    counts = Counter(values)
    return {str(value): counts[value] for value in sorted(counts)}


def _interval(values: Sequence[float], seed: int) -> dict[str, float]:
    """Return the mean and its interval; empty if there are no values."""
    return asdict(bootstrap_mean(values, seed=seed)) if values else {}


def pictures(chosen: Sequence[Chosen]) -> dict[str, str]:
    """Return SVG documents by name: fates, lengths before and after, clusters and pass rates by prompt."""
    fates = Counter(fate for one in chosen for fate in one.fates)
    correct = [length for one in chosen for length, right in _lengths(one) if right]
    kept = [one.candidates.lengths[index] for one in chosen for index in one.kept]
    edges = np.unique(np.linspace(min(correct, default=0), max(correct, default=1) + 1, 17).astype(int))
    lengths = {name: np.histogram(v, edges)[0].tolist() for name, v in (("correct", correct), ("kept", kept))}
    clusters = _counted([len(set(one.diverse.clusters.values())) for one in chosen])
    rates = np.histogram([one.candidates.pass_rate for one in chosen], np.linspace(0, 1, 11))[0].tolist()
    names = [fate for fate in REASONS if fates[fate]]
    return {
        "fates": bars("responses by fate", names, {"responses": [fates[name] for name in names]}),
        "lengths": bars("response tokens", [str(edge) for edge in edges[:-1]], lengths),
        "clusters": bars("prompts by number of clusters", list(clusters), {"prompts": list(clusters.values())}),
        "pass_rates": bars("prompts by pass rate", [f"{i / 10:g}" for i in range(10)], {"prompts": rates}),
    }


def card(figures: Mapping[str, Any], settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the card: `figures` of `statistics`, the settings as (name, value), and the names of the pictures."""
    total = max(1, figures["responses"])
    num_kept = figures["fates"].get(KEPT, 0)
    rows = [
        f"| {REASONS[fate]} (`{fate}`) | {count:,} | {count / total:.1%} |" for fate, count in figures["fates"].items()
    ]
    return "\n".join(
        [
            "# Examples by rejection sampling",
            "",
            f"{num_kept:,} examples of {figures['prompts_with_examples']:,} prompts, from {figures['responses']:,} responses to "
            f"{figures['prompts']:,} prompts; mean pass rate {figures['pass_rate_mean']:.3f}.",
            "",
            "| response | number | share |",
            "|---|---|---|",
            *rows,
            "",
            "| tokens | " + " | ".join(f"q{quantile:g}" for quantile in QUANTILES) + " |",
            "|---" * (len(QUANTILES) + 1) + "|",
            *(_quantile_row(name, figures[f"tokens_{name}"]) for name in ("correct", "kept")),
            "",
            *_diversity(figures),
            "",
            *(part for name in names for part in (f"![{name}]({name}.svg)", "")),
            "| setting | value |",
            "|---|---|",
            *(f"| {name} | `{value}` |" for name, value in settings.items()),
            "",
            "`examples.jsonl` is read by `megatron-dapo sft`; `responses.jsonl` has every response with its fate. Equal settings, model "
            "and data give equal files.",
            "",
        ]
    )


def _quantile_row(name: str, quantiles: Mapping[str, float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.0f}" for value in quantiles.values()) + " |"


def _diversity(figures: Mapping[str, Any]) -> list[str]:
    """Describe how different the responses to a prompt are, and whether a random selection of equal size is less so."""
    if not figures["prompts_compared"]:
        return ["No prompt has two examples, so that their diversity means nothing."]
    difference = figures["distance_difference"]
    words = "more" if difference["low"] > 0 else "less" if difference["high"] < 0 else "neither more nor less"
    return [
        f"Responses to a prompt are {words} unlike each other than as many correct ones drawn at random: mean 1 - cosine of word "
        f"n-grams {_shown(figures['distance_kept'])} against {_shown(figures['distance_random'])}, difference {_shown(difference)} "
        f"({figures['prompts_compared']:,} prompts with two or more; 95 % intervals over prompts).",
    ]


def _shown(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"
