"""What the benchmarks share: the options that each of them has, the result as JSON, and the overrides of a tiny train step."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

# Responses keep their length: shorter ones would all be cut and wrong, and no group would teach anything.
TINY_STEP = ("rollout.prompts_per_step=4", "training.mini_batch_prompts=4", "rollout.group_size=4")
# Random weights solve nothing: what differs within a group is how improbable responses were.
RANDOM_WEIGHTS = (
    "rollout.filter_groups=false",
    "rollout.oversample=1.0",
    "rollout.max_staleness=0",
    "reward.perplexity_penalty.enabled=true",
    "reward.perplexity_penalty.start=0.01",
    "reward.perplexity_penalty.end=20.0",
)
# No evaluation at any step.
NO_EVALUATION = (
    "data.eval_paths=[]",
    "evaluation.interval=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)


def parser(description: str | None, tiny: str) -> argparse.ArgumentParser:
    """Return a parser with --json and --tiny, whose help is `tiny`."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", action="store_true", help="print the JSON object on one line")
    found.add_argument("--tiny", action="store_true", help=f"{tiny}: checks the program")
    return found


def show(result: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Print the result of a benchmark."""
    print(json.dumps(result, indent=None if arguments.json else 1))


def wilson_interval(num_right: float, num_tried: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share; (0, 1) of nothing tried."""
    if not num_tried:
        return 0.0, 1.0
    z, share = 1.959964, num_right / num_tried
    center = share + z**2 / (2 * num_tried)
    half = z * math.sqrt(share * (1 - share) / num_tried + z**2 / (4 * num_tried**2))
    scale = 1 + z**2 / num_tried
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)
