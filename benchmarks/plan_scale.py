"""Seconds and memory of a weight sync's plan at scale, and its bytes against those that really move.

    python benchmarks/plan_scale.py [--json] [--tiny] [--only NAME] [--skip-check]

Every case runs in a separate process: one rank's view (what it sends and receives, the digest), then the table of
all ranks. `max_seconds` and `max_gb` (resident set, torch's 0.2 GB included) are the largest over the cases. The check moves
a small model of each case's proportions between four processes (gloo) and compares each process's counted bytes with
the plan's. Sizes are those of the public config.json files of Qwen2.5-32B and Qwen3-235B-A22B.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import options
import torch
import torch.distributed as dist

from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import SglangLayout, sglang_layout
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.execution import execute_distributed
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.traffic import traffic_table

DENSE = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# What makes the small model of the check; proportions (heads to key-value heads, odd vocabulary) stay.
SMALL_DENSE = {"vocab_size": 1188, "hidden_size": 40, "intermediate_size": 216, "num_hidden_layers": 4, "head_dim": 8}
SMALL_EXPERTS = {
    "vocab_size": 1187,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 8,
    "moe_intermediate_size": 24,
}


@dataclass(frozen=True)
class Case:
    """A trainer layout and the engines on its ranks."""

    config: Mapping[str, Any]
    parallel: ParallelLayout
    engine_tp: int
    engine_ep: int = 1

    def layouts(self, dtype: torch.dtype) -> tuple[MegatronLayout, SglangLayout]:
        architecture = parse_architecture(self.config)
        engines = self.parallel.world_size // self.engine_tp
        source = megatron_layout(architecture, self.parallel, dtype)
        return source, sglang_layout(architecture, self.engine_tp, dtype, engines, expert_parallel=self.engine_ep)


MOE_PARALLEL = ParallelLayout(1024, tensor=4, pipeline=2, expert=16, expert_tensor=1)
CASES = {
    "qwen2.5-32b-128": Case(DENSE, ParallelLayout(128, tensor=8, pipeline=4), 8),
    "qwen2.5-32b-1024": Case(DENSE, ParallelLayout(1024, tensor=8, pipeline=4), 8),
    "qwen2.5-32b-16384": Case(DENSE, ParallelLayout(16384, tensor=8, pipeline=4), 8),
    "qwen3-235b-a22b-1024": Case(EXPERTS, MOE_PARALLEL, 16),
    "qwen3-235b-a22b-1024-ep16": Case(EXPERTS, MOE_PARALLEL, 16, 16),
}
CHECKS = {
    "dense": Case({**DENSE, **SMALL_DENSE}, ParallelLayout(4, tensor=2, pipeline=2), 2),
    "dense-tp4": Case({**DENSE, **SMALL_DENSE}, ParallelLayout(4, pipeline=2), 4),
    "experts": Case({**EXPERTS, **SMALL_EXPERTS}, ParallelLayout(4, tensor=2, expert=4, expert_tensor=1), 2),
    "experts-ep2": Case({**EXPERTS, **SMALL_EXPERTS}, ParallelLayout(4, pipeline=2, expert=2), 4, 2),
}

TINY_CASE, TINY_CHECK = "qwen2.5-32b-128", "experts-ep2"


def measure(name: str) -> dict[str, Any]:
    """Seconds and memory of one case in this process."""
    case = CASES[name]
    start = time.perf_counter()
    source, engine = case.layouts(torch.bfloat16)
    reshard = plan(source, engine)
    digest = reshard.digest.hex()
    # A rank inside the world: the first ranks of a node or a stage are special cases.
    rank = case.parallel.world_size // 2 + 3
    traffic = reshard.traffic(rank)
    one_rank = time.perf_counter() - start
    table = traffic_table(reshard)
    assert traffic == (table.sent[rank], table.received[rank], table.local[rank]), "the table differs from the rank"
    shard = sum(spec.num_bytes for spec in engine.local_specs(0).values())
    return {
        "ranks": case.parallel.world_size,
        "trainer": case.parallel.describe(),
        "engine": f"TP{case.engine_tp} EP{case.engine_ep}",
        "seconds": time.perf_counter() - start,
        "seconds_one_rank": one_rank,
        "cpu_seconds": time.process_time(),
        "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "shard_bytes": shard,
        "sent_mean": float(table.sent.double().mean()),
        "sent_max": int(table.sent.max()),
        "received_max": int(table.received.max()),
        "bytes_ratio": float((table.received + table.local).max()) / shard,
        "pairs": len(table.source),
        "digest": digest,
    }


def _check_worker(rank: int, case: Case, store: str, answers: Any) -> None:
    """Moves a case's small model and counts; answers (rank, counted, planned, elements that are wrong)."""
    torch.set_num_threads(1)
    limit = timedelta(minutes=3)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=limit)
    source, engine = case.layouts(torch.float32)
    reshard = plan(source, engine)
    held = {n: torch.full(s, float(rank + 1)) for n, s in source.local_shapes(rank).items()}
    filled = {n: torch.zeros(s) for n, s in engine.local_shapes(rank).items()}
    counted = execute_distributed(reshard, held, filled, dist.group.WORLD, bucket_bytes=4096)
    table = traffic_table(reshard)
    planned = (int(table.sent[rank]), int(table.received[rank]), int(table.local[rank]))
    padding = sum(box.volume for boxes in engine.padding(rank).values() for box in boxes)
    # Senders hold values of at least 1, so a 0 was never written.
    unfilled = sum(int((tensor == 0).sum()) for tensor in filled.values()) - padding
    answers.put((rank, tuple(counted), planned, unfilled))
    dist.barrier()
    dist.destroy_process_group()


def check(case: Case) -> dict[str, Any]:
    """Planned against counted bytes of four processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            context.Process(target=_check_worker, args=(rank, case, f"{directory}/store", answers)) for rank in range(4)
        ]
        for worker in workers:
            worker.start()
        try:
            results = sorted(answers.get(timeout=300) for _ in workers)
            for worker in workers:
                worker.join(60)
        finally:
            for worker in workers:
                worker.kill()
    differences = [[abs(a - b) for a, b in zip(counted, planned)] for _, counted, planned, _ in results]
    return {
        "bytes_moved": sum(counted[0] for _, counted, _, _ in results),
        "largest_difference": max(max(row) for row in differences),
        "unfilled_elements": sum(unfilled for *_, unfilled in results),
    }


# A case in this process would report the memory of the largest case before it: ru_maxrss never falls.
def _in_own_process(name: str) -> dict[str, Any]:
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--json", "--case", name]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True).stdout
    return json.loads(output)


def main() -> None:
    parser = options.parser(__doc__, f"{TINY_CASE} and the check {TINY_CHECK}")
    parser.add_argument("--only", choices=CASES, action="append", help="cases to run; default: all")
    parser.add_argument("--skip-check", action="store_true", help="leave out the run of four processes")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case)))
        return
    checks = {TINY_CHECK: CHECKS[TINY_CHECK]} if arguments.tiny else CHECKS
    only = [TINY_CASE] if arguments.tiny else arguments.only or list(CASES)
    cases = {name: _in_own_process(name) for name in only}
    result: dict[str, Any] = {
        "max_seconds": max(case["seconds"] for case in cases.values()),
        "max_gb": max(case["gb"] for case in cases.values()),
        "cases": cases,
    }
    if not arguments.skip_check:
        result["checks"] = {name: check(case) for name, case in checks.items()}
        result["bytes_difference"] = max(c["largest_difference"] for c in result["checks"].values())
    options.show(result, arguments)


if __name__ == "__main__":
    main()
