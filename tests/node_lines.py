"""Lines of a node's samples as `the sampler` writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from megatron_dapo.nodes.samples import NodeSample


def header_line(node: int, name: str, role: str, metrics: Sequence[str]) -> str:
    """Return the line that comes before samples of these `metrics`."""
    return json.dumps({"node": node, "name": name, "role": role, "metrics": list(metrics)}) + "\n"


def sample_line(sample: NodeSample, metrics: Sequence[str]) -> str:
    """Return a sample as a line; null for a metric without a value."""
    values = [sample.values.get(name) for name in metrics]
    numbers = [None if value is None or not math.isfinite(value) else value for value in values]
    return json.dumps({"t": round(sample.time, 3), "phase": sample.phase, "step": sample.step, "v": numbers}) + "\n"
