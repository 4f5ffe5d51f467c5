"""Curves of the variants, as SVG: means over seeds, with their range as a band. Drawn by matplotlib (extra `plots`)."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]
Curve = tuple[list[float], list[float]]  # x, y


@dataclass(frozen=True)
class Picture:
    """One picture: a curve of every variant."""

    title: str
    curve: str  # name in a record; "": the held-out evaluations
    by_tokens: bool = False  # x axis: generated tokens so far, instead of the train step

    def curve_of(self, record: Record) -> Curve:
        """Return the curve of one run."""
        if not self.curve:
            return record["evaluated"]["train_step"], record["evaluated"]["accuracy"]
        x = list(accumulate(record["generated_tokens"])) if self.by_tokens else record["train_step"]
        return x, record["curves"][self.curve]


# Keyed by file name.
PICTURES = {
    "accuracy": Picture("held-out accuracy", ""),
    "accuracy_by_tokens": Picture("accuracy of sampled responses", "rollout/accuracy_generated", by_tokens=True),
    "entropy": Picture("entropy, nats", "actor/entropy"),
    "length": Picture("response tokens, mean", "rollout/response_tokens_mean"),
}


def draw(variants: Mapping[str, Mapping[int, Record]]) -> dict[str, str]:
    """Draw each of PICTURES as an SVG document from records by variant and seed; none without matplotlib or records."""
    trained = {name: list(runs.values()) for name, runs in variants.items() if any(r["curves"] for r in runs.values())}
    if not trained:
        return {}
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            "no pictures: matplotlib is not installed (pip install 'megatron-dapo[plots]', or make .venv-plots)"
        )
        return {}
    documents = {}
    # Keep text as text, and give equal records equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megatron_dapo"}):
        for file, picture in PICTURES.items():
            figure = Figure(figsize=(7.0, 4.0), layout="constrained")
            axes, has_band = figure.subplots(), False
            for name, records in trained.items():
                x, columns = aligned([picture.curve_of(record) for record in records])
                (line,) = axes.plot(x, [sum(column) / len(column) for column in columns], label=name, linewidth=1.6)
                if len(records) > 1:
                    low, high = [min(column) for column in columns], [max(column) for column in columns]
                    has_band = True
                    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
            axes.set(title=picture.title, xlabel="generated tokens" if picture.by_tokens else "train step")
            axes.grid(alpha=0.3)
            legend = "line: mean of the seeds, band: lowest to highest seed" if has_band else None
            axes.legend(fontsize=8, title=legend, title_fontsize=8)
            stream = io.StringIO()
            figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
            documents[file] = stream.getvalue()
    return documents


def aligned(curves: list[Curve]) -> tuple[list[float], list[tuple[float, ...]]]:
    """Return x, mean over the curves, and each point's values, up to the end of the shortest curve, without points that
    any of them lacks."""
    num_points = min(len(x) for x, _ in curves)
    points = [[(x[index], y[index]) for x, y in curves] for index in range(num_points)]
    whole = [point for point in points if all(y is not None for _, y in point)]
    x = [sum(each for each, _ in point) / len(point) for point in whole]
    return x, [tuple(y for _, y in point) for point in whole]
