"""Picture of a planned step: a bar of memory a phase, and a bar of the step's seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from megatron_dapo.plan.cluster import GIB
from megatron_dapo.plan.step import StepPlan
from megatron_dapo.svg import GRAY, document, text

_LEFT, _WIDTH, _ROW, _TOP = 110, 760, 30, 40
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994455", "#6699cc", "#997700")
_NARROW = 60  # a part of fewer points has no name in it


def to_svg(plan: StepPlan) -> str:
    """Return the picture as an SVG document; the names of narrow parts are their tooltips."""
    limit = max(plan.cluster.gpu_bytes, plan.peak)
    parts = [text(10, 18, f"Memory of a GPU by phase, of {plan.cluster.gpu_gib:g} GiB", anchor="start")]
    top = _TOP
    for phase in plan.memory.phases:
        sizes = {name: num_bytes / GIB for name, num_bytes in phase.parts.items()}
        parts += _bar(top, phase.phase, sizes, limit / GIB, "GiB")
        top += _ROW
    right = _LEFT + _WIDTH * plan.cluster.gpu_bytes / limit
    parts.append(f'<line x1="{right:.1f}" y1="{_TOP - 6}" x2="{right:.1f}" y2="{top}" stroke="#cc3311"/>')
    parts.append(text(10, top + 24, f"Seconds of a step, {plan.total:.0f} in all", anchor="start"))
    seconds = {phase: plan.of_phase(phase) for phase in plan.seconds}
    parts += _bar(top + 40, "step", seconds, sum(seconds.values()), "s")
    return document(_LEFT + _WIDTH + 20, top + 40 + _ROW, parts)


def _bar(top: int, name: str, sizes: Mapping[str, float], limit: float, unit: str) -> Iterator[str]:
    """Yield a row of parts side by side, `limit` being the whole width."""
    yield text(_LEFT - 8, top + 16, name, GRAY, "end")
    left = float(_LEFT)
    for index, (part, size) in enumerate(sizes.items()):
        width, color = _WIDTH * size / limit, _COLORS[index % len(_COLORS)]
        label = f"{part} {size:.1f} {unit}"
        yield (
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 8}" fill="{color}">'
            f"<title>{escape(label)}</title></rect>"
        )
        if width > max(_NARROW, 7 * len(part)):
            yield text(left + width / 2, top + 15, part, "#ffffff")
        left += width
