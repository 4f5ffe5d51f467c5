"""Weights from Megatron TP2 x PP2 (4 processes) into an engine at TP2, against mbridge's export and a plain copy.

    python benchmarks/weight_sync.py [--json] [--quick | --tiny] [--runs 7] [--transports p2p,shared_memory]
                                     [--engine-python PATH] [--peer-packages PATH] [--output DIRECTORY]

A random Qwen2 of about 1 GB. In one run, taking turns on the same cores and in the same processes:

    ours      `WeightSync` over each transport; the engine is a stock SGLang server if --engine-python names an
              environment that has one, otherwise its two ranks' weight loaders in separate processes
    mbridge   `export_weights` of the same live parameters: every tensor whole on every rank, which is where mbridge
              ends and an engine's update begins. It is checked to export the same bits
    floor     the same bytes between the same pairs of ranks over the same transport, from and into plain buffers:
              messages of a bucket (p2p); copied into shared memory and out of it (shared_memory)

    bytes_ratio   largest bytes received by an engine rank / bytes of its shard
    vs_mbridge    mbridge's seconds / ours
    vs_floor      our seconds / the floor's

Medians; of the ratios to the floor and to an unverified update, medians of pairs that follow each other. Our seconds end
when every byte is in the engine's parameters. `with_verification_*` count the whole state machine as it runs in training,
from pause to serving, with the checksums of all parameters computed on both sides and compared; `verify_seconds` is the
difference. `verified_vs_unverified` is that update over the same one without a checksum at either end, each run taking its
turn; a server cannot leave its checksums out, so the key is null with --engine-python. `read_vs_unverified` is the same if
both ends only read the weights once more, by torch's sum. `delta_*`: verified updates that send only what changed, 2 % of
the elements since the version before; `delta_bytes_ratio` is their bytes over those of a full update.
`checksum_gb_per_s`: the checksum of 66 MB compiled, by NumPy, and only reading them. The keys at the top are those of the
first transport; each has its own under `transports`. mbridge is installed from its lock into `.venv-mbridge`, on top of
this environment's packages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from operator import truediv
from pathlib import Path
from typing import Any

import options
import torch
from peers.packages import peer_packages, with_packages

from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings

PEERS = Path(__file__).resolve().parent / "peers"
TENSOR, PIPELINE, ENGINE_TENSOR = 2, 2, 2
NUM_LAYERS, QUICK_LAYERS = 14, 2
QUICK_RUNS = 2
TIMEOUT_S = 1800.0

# The widths of Qwen2.5-0.5B, untied; a vocabulary that Megatron has to pad.
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32100,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# The same proportions in a few megabytes; the vocabulary still needs padding.
TINY_WIDTHS = {"vocab_size": 1187, "hidden_size": 112, "intermediate_size": 608}


# ---- processes


def start(command: Sequence[str], log: Path, stack: ExitStack, **variables: str) -> subprocess.Popen[bytes]:
    """Start a process that is killed when `stack` closes."""
    environment = {"PYTHONPATH": with_packages(PEERS), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **environment, **variables}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def start_server(python: Path, directory: Path, dtype: str, stack: ExitStack) -> dict[str, str]:
    """A stock SGLang server with random weights."""
    key_file = create_key(directory)
    settings = ServerSettings(
        python=python,
        model_path=directory / "model",
        key_file=key_file,
        log_dir=directory,
        tensor_parallel=ENGINE_TENSOR,
        dtype=dtype,
        max_running_requests=4,
        max_total_tokens=4096,
        random_weights=True,
        start_timeout_s=TIMEOUT_S,
    )
    server = SglangServer.start(settings, 0)
    stack.callback(server.stop)
    info = server.wait_until_healthy()
    return {"url": server.url, "key_file": str(key_file), "version": info.api_version.version}


def run_trainers(packages: Path, specification: Path, directory: Path, stack: ExitStack) -> None:
    """Run all trainer ranks with `packages` (mbridge) on their path. Raises RuntimeError with a failed rank's output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = TENSOR * PIPELINE
    command = [sys.executable, "-W", "ignore", str(PEERS / "weight_trainer.py"), str(specification)]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["PYTHONPATH"] = with_packages(PEERS, packages)
    logs = [directory / f"trainer{rank}.log" for rank in range(size)]
    trainers = [
        start(command, log, stack, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank, log in enumerate(logs)
    ]
    for process, log in zip(trainers, logs):
        if process.wait(TIMEOUT_S):
            text = log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"a trainer ended with code {process.returncode}:\n{text[-3000:]}")


# ---- the comparison


def summary(result: dict[str, Any], name: str) -> dict[str, Any]:
    """The figures of one transport."""
    rows, median = result["rows"], statistics.median
    ours, updates, unverified = rows["bytes"][name], [row["update"] for row in rows["ours"][name]], rows["unverified"][name]
    has_unverified = min(unverified) > 0  # not with a server
    seconds, verified = median(ours), median(updates)
    mbridge, floor = median(rows["mbridge"]), median(rows["floor"][name])
    received, shards = result["received_bytes"][name], result["shard_bytes"]
    full, *deltas = rows["deltas"][name]
    delta = median(row["update"] for row in deltas)
    return {
        "bytes_ratio": max(received[str(rank)] / size for rank, size in enumerate(shards)),
        "vs_mbridge": mbridge / seconds,
        "vs_floor": median(map(truediv, ours, rows["floor"][name])),
        "seconds": seconds,
        "verify_seconds": verified - seconds,
        "verified_vs_unverified": median(map(truediv, updates, unverified)) if has_unverified else None,
        "read_vs_unverified": 1 + median(map(truediv, rows["read"][name], unverified)) if has_unverified else None,
        "with_verification_seconds": verified,
        "floor_seconds": floor,
        "with_verification_vs_mbridge": mbridge / verified,
        "with_verification_vs_floor": verified / floor,
        "delta_seconds": delta,
        "delta_vs_full": delta / verified,
        "delta_bytes_ratio": median(row["bytes"] for row in deltas) / full["bytes"],
    }


def compare(result: dict[str, Any], transports: Sequence[str]) -> dict[str, Any]:
    """All keys; those of the first transport at the top."""
    figures = {name: summary(result, name) for name in transports}
    rows = result["rows"]
    return {
        **figures[transports[0]],
        "transport": transports[0],
        "transports": figures,
        "mbridge_seconds": statistics.median(rows["mbridge"]),
        "checksum_gb_per_s": result["checksum_gb_per_s"],
        "model_bytes": result["model_bytes"],
        "shard_bytes": result["shard_bytes"],
        "received_bytes": result["received_bytes"],
        "rows": rows,
    }


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    transports = arguments.transports.split(",")
    short = arguments.quick or arguments.tiny
    layers = QUICK_LAYERS if short else NUM_LAYERS
    (directory / "model").mkdir()
    widths = TINY_WIDTHS if arguments.tiny else {}
    config = {**MODEL, **widths, "num_hidden_layers": layers, "torch_dtype": arguments.dtype}
    (directory / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    packages = arguments.peer_packages or peer_packages("mbridge")
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        server = (
            start_server(arguments.engine_python, directory, arguments.dtype, stack)
            if arguments.engine_python
            else None
        )
        specification = {
            "directory": str(directory),
            "model": str(directory / "model"),
            "dtype": arguments.dtype,
            "tensor": TENSOR,
            "pipeline": PIPELINE,
            "engine_tensor": ENGINE_TENSOR,
            # Tiny shards still fill several buckets.
            "bucket_bytes": 1 << 18 if arguments.tiny else arguments.bucket_mb << 20,
            "transports": transports,
            "runs": QUICK_RUNS if short else arguments.runs,
            "server": server,
        }
        file = directory / "specification.json"
        file.write_text(json.dumps(specification), encoding="utf-8")
        for rank in range(ENGINE_TENSOR):
            command = [sys.executable, "-W", "ignore", str(PEERS / "weight_sink.py"), str(file), str(rank)]
            start(command, directory / f"sink{rank}.log", stack)
        run_trainers(packages, file, directory, stack)
        result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    return {
        **compare(result, transports),
        "engine": f"SGLang {server['version']}, TP{ENGINE_TENSOR}" if server else "weight loaders, no server",
        "mbridge": result["mbridge"],
        "dtype": arguments.dtype,
        "runs": specification["runs"],
        "bucket_mb": arguments.bucket_mb,
        "load_average": [load_before, os.getloadavg()[0]],
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def parse_arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "the same with narrow layers")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers, {QUICK_RUNS} runs")
    parser.add_argument("--runs", type=int, default=7, help="timed runs of every way, after one to warm up")
    parser.add_argument("--transports", default="p2p,shared_memory", help="the first one gives the keys at the top")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--engine-python", type=Path, help="interpreter with SGLang; without it there is no server")
    parser.add_argument(
        "--peer-packages", type=Path, help="directory with mbridge; default: .venv-mbridge, installed if absent"
    )
    parser.add_argument("--output", type=Path, help="directory for logs; default: a temporary one")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as temporary:
        directory = arguments.output or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        result = measure(arguments, directory)
    options.show(result, arguments)


if __name__ == "__main__":
    main()
