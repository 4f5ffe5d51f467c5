"""Checkpoints of this project against megatron-core's torch_dist and torch's DCP: 4 processes, 1 GB of state, one disk.

    python benchmarks/checkpoints.py [--json] [--tiny] [--runs 5] [--output DIRECTORY]

A random Qwen2 in fp32 with the distributed optimizer at TP2 x DP2. In one run, taking turns in the same processes:

    ours         `BackgroundSaves` of the actor's state; checksums of all files are written, and verified by a load
    torch_dist   megatron-core, fully reshardable, asynchronous, parallel over data-parallel ranks, no checksums
    dcp          torch.distributed.checkpoint.async_save of as many bytes, sharded as FSDP2 does, no checksums
    bytecheckpoint
                 0.0.2, fast_saving, as many bytes under FSDP2, if `make .venv-bytecheckpoint` installed it
    copy         the same tensors into memory that is already allocated

A save runs next to a run whose steps are matrix products: first a rollout, in which nothing changes, then steps. Files
are evicted from the page cache before they are loaded into existing tensors. Ours and torch_dist fill each parameter on
both data-parallel ranks, a third more bytes than they read; dcp and bytecheckpoint hold each element once, as FSDP2
does.

    blocked_vs_sync   seconds our run waits / the fastest side's save, from its start to the commit
    blocked_vs_copy   seconds our run waits / the copy
    step_slowdown     a step while we write / one without, times the share of the CPUs that our writers leave
    written_ratio     bytes of our files / bytes of the state, each counted once
    read_ratio        bytes that our ranks read in a load / bytes of the state
    balance           bytes written by the busiest rank / the mean
    save_vs_best, load_vs_best, reshard_vs_best
                      the other sides' best seconds / ours: to the commit; in the layout that saved; at PP2 x DP2

Medians.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import options
from peers.packages import installed_packages, with_packages
from peers.ranks import run_ranks

PEERS = Path(__file__).resolve().parent / "peers"
BYTECHECKPOINT = "bytecheckpoint"
NUM_PROCESSES = 4
TIMEOUT_S = 1500.0
SAVED = {"tensor": 2, "pipeline": 1}
RESHARDED = {"tensor": 1, "pipeline": 2}

# 12 bytes a parameter in fp32 with moments: 1.0 GB.
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 10240,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = {"vocab_size": 1024, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2}
PRODUCTS, TINY_PRODUCTS = 60, 10


def run_phase(specification: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run the ranks of one phase and return rank 0's report. Raises RuntimeError with a failed rank's output."""
    prefix = directory / specification["phase"]
    packages = with_packages(*filter(None, (PEERS, installed_packages(BYTECHECKPOINT))))
    specification = {**specification, "report": f"{prefix}.json"}
    program = PEERS / "checkpoint_rank.py"
    return run_ranks(program, specification, NUM_PROCESSES, prefix, {"PYTHONPATH": packages}, TIMEOUT_S)


def result_of(saved: dict[str, Any], resharded: dict[str, float]) -> dict[str, Any]:
    """Return the report of both phases."""
    sides = saved["sides"]
    ours, peers = sides["ours"], [side for name, side in sides.items() if name != "ours"]
    slowdown = ours["step_seconds"] / saved["step_seconds_alone"] * (1 - ours["writer_share"])
    return {
        "blocked_vs_sync": ours["blocked_seconds"] / min(side["save_seconds"] for side in sides.values()),
        "blocked_vs_copy": ours["blocked_seconds"] / saved["copy_seconds"],
        "step_slowdown": slowdown,
        "written_ratio": saved["written_bytes"] / saved["unique_bytes"],
        "read_ratio": saved["read_bytes"] / saved["unique_bytes"],
        "balance": saved["balance"],
        "save_vs_best": min(side["save_seconds"] for side in peers) / ours["save_seconds"],
        "load_vs_best": min(side["load_seconds"] for side in peers) / ours["load_seconds"],
        "reshard_vs_best": min(seconds for name, seconds in resharded.items() if name != "ours") / resharded["ours"],
        "state_bytes": saved["unique_bytes"],
        "copy_seconds": saved["copy_seconds"],
        "step_seconds": saved["step_seconds_alone"],
        "sides": sides,
        "reshard_seconds": resharded,
        "bytecheckpoint": "measured" if BYTECHECKPOINT in sides else "not installed: make .venv-bytecheckpoint",
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "machine": platform.processor() or platform.machine(),
    }


def main() -> None:
    parser = options.parser(__doc__, "a few megabytes, one run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, help="where checkpoints and logs are written; default: a temporary directory"
    )
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = arguments.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / "model").mkdir(parents=True, exist_ok=True)
        model = {**MODEL, **(TINY if arguments.tiny else {})}
        (directory / "model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
        shared = {
            "model": str(directory / "model"),
            "directory": str(directory),
            "runs": 1 if arguments.tiny else arguments.runs,
            "products": TINY_PRODUCTS if arguments.tiny else PRODUCTS,
        }
        saved = run_phase({**shared, **SAVED, "phase": "save"}, directory)
        resharded = run_phase({**shared, **RESHARDED, "phase": "reshard"}, directory)
    result = result_of(saved, resharded)
    options.show(result, arguments)


if __name__ == "__main__":
    main()
