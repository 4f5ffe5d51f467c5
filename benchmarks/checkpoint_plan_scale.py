"""Time and memory to plan a checkpoint at scale: what each rank saves, and the index of all files.

    python benchmarks/checkpoint_plan_scale.py [--json] [--tiny]

Qwen2.5-32B in bf16 with the distributed optimizer, TP8 PP4. Every case runs in a separate process. `first_plan_seconds`
is measured on rank 0, which plans its own pieces and the index of all ranks; the other ranks skip the index.
`cached_plan_ms` is what planning costs a later save. `balance` is the largest number of elements saved by a rank over
the mean, `written_ratio` all saved elements over those of the model. Limits: 30 s, 5 ms, 1 GB of resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import options  # noqa: E402
import torch  # noqa: E402

from benchmarks.plan_scale import DENSE  # noqa: E402
from megatron_dapo.checkpoints.formats.saved_model import rank_file, state_index  # noqa: E402
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout  # noqa: E402
from megatron_dapo.checkpoints.layouts.state import StateLayout  # noqa: E402
from megatron_dapo.models.config_json import parse_architecture  # noqa: E402
from megatron_dapo.parallel.layout import ParallelLayout  # noqa: E402
from megatron_dapo.reshard.assignment import balance  # noqa: E402

SIZES, TINY_SIZES = (8192, 16384), (128,)


def measure(world_size: int) -> dict[str, Any]:
    """Plan one save in this process."""
    parallel = ParallelLayout(world_size, tensor=8, pipeline=4)
    start = time.perf_counter()
    weights = megatron_layout(parse_architecture(DENSE), parallel, torch.bfloat16)
    layout = StateLayout(weights, distributed=True)
    layout.saved(0)
    other_rank = time.perf_counter() - start
    files = {rank_file("policy", rank): layout.saved(rank) for rank in range(world_size)}
    index = state_index(weights.tensors, parallel, layout.distributed, files)
    first = time.perf_counter() - start
    start = time.perf_counter()
    assert layout.saved(0) is files[rank_file("policy", 0)], "the second plan is the first"
    cached = time.perf_counter() - start
    elements = [sum(shard.bounds.volume for shard in shards) for shards in files.values()]
    return {
        "ranks": world_size,
        "layout": parallel.describe(),
        "first_plan_seconds": first,
        "other_rank_seconds": other_rank,
        "cached_plan_ms": 1e3 * cached,
        "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "boxes": sum(map(len, files.values())),
        "index_mb": len(json.dumps(index)) / 1e6,
        "balance": balance(elements),
        "written_ratio": sum(elements) / sum(spec.num_elements for spec in weights.tensors.values()),
    }


# A case in this process would report the memory of the largest case before it: ru_maxrss never falls.
def _in_own_process(world_size: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", str(world_size)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout
    return json.loads(output)


def main() -> None:
    parser = options.parser(__doc__, f"{TINY_SIZES[0]} ranks")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case)))
        return
    cases = [_in_own_process(size) for size in (TINY_SIZES if arguments.tiny else SIZES)]
    result = {
        **{name: max(case[name] for case in cases) for name in ("first_plan_seconds", "cached_plan_ms")},
        "max_gb": max(case["gb"] for case in cases),
        "cases": cases,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
