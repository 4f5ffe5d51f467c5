"""Draw a run's accuracy and response length over train steps as an SVG, only from metrics.jsonl and evaluations.jsonl.

python tools/plot_run.py runs/quickstart docs/quickstart.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.svg import BLUE, GRAY, document, text

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 60, 34, 44
COLORS = {"accuracy": BLUE, "held_out": "#d1242f", "length": GRAY}

Points = Sequence[tuple[float, float]]


def read_series(path: Path, name: str) -> list[tuple[float, float]]:
    """(train step, value) of every record that has the metric."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(record["train_step"], record[name]) for record in records if record.get(name) is not None]


class Axes:
    """Maps train steps to x, and values between 0 and `top` to y."""

    def __init__(self, last_step: float, top: float) -> None:
        self.last_step, self.top = max(last_step, 1.0), top

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top


def polyline(points: Points, axes: Axes, color: str) -> str:
    path = " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'


def dots(points: Points, axes: Axes, color: str) -> list[str]:
    parts = []
    for step, value in points:
        x, y = axes.x(step), axes.y(value)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>')
        anchor = "start" if step < axes.last_step / 2 else "end"
        parts.append(text(x, y - 10, f"{value:.2f}", color, anchor))
    return parts


def grid(accuracy: Axes, length: Axes) -> list[str]:
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = accuracy.y(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:.2f}", anchor="end"))
        parts.append(text(WIDTH - RIGHT + 8, y + 4, f"{tick * length.top:.0f}", COLORS["length"], "start"))
    for quarter in range(5):
        step = round(accuracy.last_step * quarter / 4)
        parts.append(text(accuracy.x(step), HEIGHT - BOTTOM + 18, str(step)))
    return parts


def draw(run_directory: Path) -> str:
    """The SVG document."""
    train = read_series(run_directory / "metrics.jsonl", "rollout/accuracy_generated")
    lengths = read_series(run_directory / "metrics.jsonl", "rollout/response_tokens_mean")
    held_out = read_series(run_directory / "evaluations.jsonl", "eval/avg_at_k")
    last_step = max(step for step, _ in train)
    accuracy = Axes(last_step, 1.0)
    length = Axes(last_step, 40.0 * (1 + max(value for _, value in lengths) // 40))
    legend = [
        text(LEFT, 18, "accuracy of sampled responses", COLORS["accuracy"], "start"),
        text(WIDTH / 2, 18, "held-out accuracy", COLORS["held_out"]),
        text(WIDTH - RIGHT, 18, "response tokens, mean", COLORS["length"], "end"),
        text(WIDTH / 2, HEIGHT - 8, "train step"),
    ]
    body = [
        *grid(accuracy, length),
        polyline(lengths, length, COLORS["length"]),
        polyline(train, accuracy, COLORS["accuracy"]),
        *dots(held_out, accuracy, COLORS["held_out"]),
        *legend,
    ]
    return document(WIDTH, HEIGHT, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(draw(arguments.run_directory), encoding="utf-8")


if __name__ == "__main__":
    main()
