"""Weights from a trainer into an engine on the same GPU, against the device's own copy.

    python benchmarks/gpu/sync.py [--json] [--save] [--model 1.5b] [--engine-python PATH] [--bucket-mb 256] [--only gpu]

The trainer's part of a Qwen2.5-shaped model in bf16 (TP1: all of it) is sent by `WeightSync` over the shared-memory
transport. The engine is a stock SGLang server if --engine-python names an interpreter that has one, otherwise its
weight loader in a separate process; either holds the parameters on the same GPU. The two bucket slots lie

    gpu     in GPU memory that both open by a CUDA IPC handle
    host    in shared memory of the machine: every byte crosses the bus twice

    seconds            until every byte is in the engine's parameters; medians over runs
    verified_seconds   the whole update as in training: pause, bytes, checksums of all parameters on both sides, resume
    gb_per_s           bytes of the engine's parameters / seconds
    verified_gb_per_s  the same by verified_seconds
    verified_vs_unverified
                       verified_seconds / seconds
    checksum_gb_per_s  checksums of all parameters at one end, in one pass
    checksum_gb_per_s_by_tensor
                       the same by torch's operations, waiting for each tensor, as it was done before
    copy_gb_per_s      the same bytes from one tensor of the device to another, bucket by bucket, counted once
    vs_copy            seconds / those of the copy; a sync through slots writes every byte twice, so 2 is the floor

How it runs and what a result holds: `program.py`. `--tiny` checks the program on any machine (with slots in host memory
if there is no GPU); its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import program
import torch
import torch.distributed as dist
from program import Benchmark, Missing, Row, finish, median_s, rounds_of

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

from step import MODELS, QWEN
from weight_sink import DEADLINE_S, SinkClient, SinkControl

from megatron_dapo.bridge.protocol.checksums import CountedSlice, slice_sums
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan
from megatron_dapo.bridge.transports.base import ServerControl, SyncDeadline, SyncRequest, transfer
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, WeightSync
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import EngineStartError, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.checksum import slice_checksum
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.slices import whole

PACKAGES = ("torch", "sglang")
DTYPE = torch.bfloat16
SLOTS = ("gpu", "host")
TINY_BUCKET = 1 << 18
START_MARGIN_S = 30.0  # part of a case's time reserved for everything but the server's start


class Trainer:
    """The weights and the updates that carry them."""

    def __init__(self, directory: Path, device: torch.device, bucket_bytes: int, control: ServerControl) -> None:
        architecture = read_architecture(directory / "model")
        tensors = megatron_layout(architecture, ParallelLayout(1), DTYPE)
        self.engine = sglang_layout(architecture, 1, DTYPE, device=device.type)
        self.parameters = {
            name: torch.randn(shape, device=device).to(DTYPE) for name, shape in tensors.local_shapes(0).items()
        }
        self.control, self.version = control, 0
        self._plan = SyncPlan(plan(tensors, self.engine, ranks_per_node=1), self.engine, bucket_bytes)
        self._device = device

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.engine.local_specs(0).values())

    def update(self, slots: str) -> WeightSync:
        """A state machine whose transport has its slots there."""
        handles, everyone = EngineHandles([0], {0: self.control}), Coordination(dist.group.WORLD)
        place = self._device if slots == "gpu" else torch.device("cpu")
        transport = SharedMemoryTransport(self._plan, handles, 0, NodeTopology(1, 1), everyone, device=place)
        return WeightSync(self._plan, handles, transport, everyone)

    def sync_verified(self, update: WeightSync) -> float:
        """Seconds of a whole update."""
        self.version += 1
        found = update.update(self.version, self.parameters)
        if not found.is_complete:
            raise RuntimeError(found.describe())
        return found.seconds

    def sync(self, update: WeightSync) -> float:
        """Seconds until every byte is in the engine's parameters, without the final checksums timed by the engine."""
        self.version += 1
        order = SyncRequest(f"bytes-{self.version}", "bytes", self.version, (0,))
        self.control.begin_weight_update()
        with without_trainer_checksums():
            finish(self._device)
            start = time.perf_counter()
            outcome = transfer(update.transport, order, self.parameters, SyncDeadline(DEADLINE_S))
            seconds = time.perf_counter() - start
        if outcome.failures:
            raise RuntimeError(f"the engine failed: {outcome.failures}")
        self.control.end_weight_update()
        return seconds - max((report.seconds for report in outcome.replies.get(0, ())), default=0.0)

    def checksums(self, rounds: Callable[[], Iterator[int]]) -> dict[str, float]:
        """GB/s of the checksums of the trainer's parameters, and of computing them tensor by tensor."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}
        parts = [CountedSlice(tensor, whole(shapes[name]), shapes[name]) for name, tensor in self.parameters.items()]
        sums = slice_sums(parts).tolist()
        assert sums == [slice_checksum(*part) for part in parts], "the two ways disagree"
        num_bytes = sum(part.values.nbytes for part in parts)
        together = median_s(lambda: slice_sums(parts).tolist(), self._device, rounds())
        each = median_s(lambda: [slice_checksum(*part) for part in parts], self._device, rounds())
        return {
            "checksum_gb_per_s": num_bytes / together / 1e9,
            "checksum_gb_per_s_by_tensor": num_bytes / each / 1e9,
        }

    def copy(self, bucket_bytes: int, rounds: Iterator[int]) -> float:
        """Seconds of the device's own copy of as many bytes."""
        source = torch.ones(self.num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.zeros_like(source)
        buckets = list(zip(target.split(bucket_bytes), source.split(bucket_bytes), strict=True))

        def copy() -> None:
            for one, other in buckets:
                one.copy_(other)

        copy()
        return median_s(copy, self._device, rounds)


@contextmanager
def without_trainer_checksums() -> Iterator[None]:
    names = ("add", "add_plan")
    originals = {name: getattr(ExpectedChecksums, name) for name in names}
    for name in names:
        setattr(ExpectedChecksums, name, lambda *unused: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ExpectedChecksums, name, original)


# ---- engines


def start_loader(directory: Path, device: torch.device, stack: ExitStack) -> ServerControl:
    """The weight loader of one engine rank in a separate process."""
    file = directory / "specification.json"
    specification = {
        "directory": str(directory),
        "model": str(directory / "model"),
        "dtype": "bfloat16",
        "engine_tensor": 1,
        "device": device.type,
    }
    file.write_text(json.dumps(specification), encoding="utf-8")
    log = (directory / "sink.log").open("wb")
    stack.callback(log.close)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-W", "ignore", str(PEERS / "weight_sink.py"), str(file), "0"]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return SinkControl([SinkClient(directory / "sink0.sock")])


def start_server(
    directory: Path, device: torch.device, python: Path, timeout_s: float, stack: ExitStack
) -> ServerControl:
    """A stock SGLang server with random weights."""
    settings = ServerSettings(
        python=python,
        model_path=directory / "model",
        key_file=create_key(directory),
        log_dir=directory,
        device=device.type,  # type: ignore[arg-type]
        dtype="bfloat16",
        prefill_cuda_graph=False,
        max_running_requests=4,
        max_total_tokens=4096,
        memory_fraction=0.3 if device.type == "cuda" else None,  # leaves room for the trainer's weights
        random_weights=True,
        start_timeout_s=timeout_s,
    )
    server = SglangServer.start(settings)
    stack.callback(server.stop)
    info = server.wait_until_healthy()
    return SglangClient(server.url, read_key(server.key_file), api_version=info.api_version)


# ---- measuring


def measure(trainer: Trainer, slots: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure in turns, after one warm-up of each."""
    update = trainer.update(slots)
    ways: Mapping[str, Callable[[WeightSync], float]] = {
        "seconds": trainer.sync,
        "verified_seconds": trainer.sync_verified,
    }
    for way in ways.values():
        way(update)
    rows = [{name: way(update) for name, way in ways.items()} for _ in rounds_of(arguments)]
    return {name: statistics.median(row[name] for row in rows) for name in ways}


def figures(row: Mapping[str, float], num_bytes: int, copy_seconds: float) -> dict[str, float]:
    return {
        **row,
        "gb_per_s": num_bytes / row["seconds"] / 1e9,
        "verified_gb_per_s": num_bytes / row["verified_seconds"] / 1e9,
        "verified_vs_unverified": row["verified_seconds"] / row["seconds"],
        "copy_seconds": copy_seconds,
        "copy_gb_per_s": num_bytes / copy_seconds / 1e9,
        "vs_copy": row["seconds"] / copy_seconds,
    }


@contextmanager
def measuring(arguments: argparse.Namespace) -> Iterator[Callable[[str], Row]]:
    """Start one engine for all cases and yield the function that measures one."""
    device = torch.device("cuda" if program.HAS_GPU else "cpu")  # a real server has no stand-in device
    bucket_bytes = TINY_BUCKET if arguments.tiny else arguments.bucket_mb << 20
    python = arguments.engine_python
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="gpu-sync-") as temporary, ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        directory = Path(temporary)
        write_config(directory / "model", "tiny" if arguments.tiny else arguments.model)
        try:
            control = (
                start_server(directory, device, python, arguments.case_s - START_MARGIN_S, stack)
                if python
                else start_loader(directory, device, stack)
            )
        except EngineStartError as error:
            raise Missing(f"the SGLang server did not start: {error}") from None
        trainer = Trainer(directory, device, bucket_bytes, control)
        copy_seconds = trainer.copy(bucket_bytes, rounds_of(arguments))
        checksums = trainer.checksums(lambda: rounds_of(arguments))

        def measure_case(slots: str) -> Row:
            if slots == "gpu" and device.type != "cuda":
                raise Missing("torch sees no CUDA device")
            found = figures(measure(trainer, slots, arguments), trainer.num_bytes, copy_seconds)
            return {**found, **checksums, "bytes": trainer.num_bytes, "bucket_bytes": bucket_bytes}

        yield measure_case


def write_config(directory: Path, model: str) -> None:
    directory.mkdir()
    config = {**QWEN, **MODELS[model], "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def summary(arguments: argparse.Namespace, rows: program.Rows) -> dict[str, Any]:
    own = "weight loader in a separate process, no server"
    return {"engine": "SGLang" if arguments.engine_python else own}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.set_defaults(case_s=300.0)
    parser.add_argument("--model", choices=[name for name in MODELS if name != "tiny"], default="1.5b")
    parser.add_argument(
        "--engine-python", type=program.absolute, help="interpreter with SGLang; without it there is no server"
    )
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of every way, after one to warm up")
    return parser.parse_args(arguments)


SYNC = Benchmark("gpu_sync", __file__, PACKAGES, lambda arguments: list(SLOTS), measuring, summary=summary)

if __name__ == "__main__":
    program.run(SYNC, parse())
