"""Parts of SVG pictures, without a drawing library: the document, texts, and bars. Equal numbers give equal text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

INK, GRAY, BLUE = "#24292f", "#8c959f", "#1f6feb"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 260, 46, 40, 30  # a bar chart, in pixels


def document(width: int, height: int, parts: Sequence[str], font_size: int = 12) -> str:
    """Return an SVG document of `width` x `height` pixels on a white background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="{font_size}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def text(x: float, y: float, content: str, color: str = INK, anchor: str = "middle") -> str:
    """Return a text whose baseline is at y and whose `anchor` (start, middle, end) is at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(content)}</text>'


def bars(title: str, labels: Sequence[str], series: Mapping[str, Sequence[int]]) -> str:
    """Return a bar chart of one or two series by name, one count per label, side by side."""
    colors = (GRAY, BLUE)[-len(series) :]
    top = max((value for values in series.values() for value in values), default=0) or 1
    width, height = (_WIDTH - _LEFT - 10) / max(1, len(labels)), _HEIGHT - _BOTTOM - _TOP
    parts = [text(_LEFT, 18, f"{title}, at most {top:,}", anchor="start")]
    for number, (name, values) in enumerate(series.items()):
        parts.append(text(_WIDTH - 90 * (len(series) - number), 18, name, colors[number], "start"))
        for place, value in enumerate(values):
            x, bar = _LEFT + width * (place + 0.1 + 0.8 * number / len(series)), height * value / top
            parts.append(
                f'<rect x="{x:.1f}" y="{_TOP + height - bar:.1f}" width="{0.8 * width / len(series):.1f}" '
                f'height="{bar:.1f}" fill="{colors[number]}"><title>{escape(labels[place])}: {value:,}</title></rect>'
            )
    places = range(len(labels))
    parts += [text(_LEFT + width * (place + 0.5), _HEIGHT - 22, labels[place]) for place in places]
    return document(_WIDTH, _HEIGHT, parts, font_size=11)
