"""Weights from a trainer into an engine on the same GPU, against the device's own copy.

    python benchmarks/gpu/sync.py [--json] [--save] [--model 1.5b] [--engine-python PATH] [--bucket-mb 256] [--slots gpu,host]

The trainer's part of a Qwen2.5-shaped model in bf16 (TP1: all of it) is delivered by `EngineUpdate` over the colocated
transport. The engine is a stock SGLang server where --engine-python names an interpreter that has one, else its weight
loader in a process of its own; either holds the parameters on the same GPU. The two bucket slots lie

    gpu     in memory of the GPU that both open by a CUDA IPC handle
    host    in shared memory of the machine: every byte crosses the bus twice

    seconds            until every byte is in the engine's parameters; medians over runs
    verified_seconds   of the whole update as in training: pause, bytes, checksums of all parameters on both sides, resume
    gb_per_s           bytes of the engine's parameters / seconds
    copy_gb_per_s      the same bytes from one tensor of the device to another, bucket by bucket, counted once
    vs_copy            seconds / those of the copy; a delivery through slots writes every byte twice, so 2 is the floor

What is skipped stands in `skipped` with its reason; `--save` writes benchmarks/results/gpu_sync_<machine>.json. `--tiny`
checks the program on any machine (slots in host memory where there is no GPU); its figures mean nothing.
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

import torch
import torch.distributed as dist
from machine import machine_name, report, versions

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

from step import MODELS, QWEN
from weight_sink import DEADLINE_S, SinkClient, SinkControl

from megatron_dapo.bridge.architecture import ModelArchitecture
from megatron_dapo.bridge.delivery_plan import DeliveryPlan, ExpectedChecksums
from megatron_dapo.bridge.engine_update import EngineUpdate, Fleet
from megatron_dapo.bridge.megatron_layout import megatron_layout
from megatron_dapo.bridge.sglang_layout import sglang_layout
from megatron_dapo.bridge.transports.base import Deadline, EngineControl, GroupCoordinator, Order
from megatron_dapo.bridge.transports.colocated import ColocatedTransport
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import EngineStartError, ServerSettings, SglangServer
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.nodes import Nodes
from megatron_dapo.parallel.reshard.planner import plan

PACKAGES = ("torch", "sglang")
DTYPE = torch.bfloat16
SLOTS = ("gpu", "host")
TINY_BUCKET = 1 << 18


class Trainer:
    """The weights and the updates that carry them."""

    def __init__(self, folder: Path, device: torch.device, bucket_bytes: int, control: EngineControl) -> None:
        architecture = ModelArchitecture.from_folder(folder / "model")
        tensors = megatron_layout(architecture, ParallelLayout(1), DTYPE)
        self.engine = sglang_layout(architecture, 1, DTYPE, device=device.type)
        self.parameters = {
            name: torch.randn(shape, device=device).to(DTYPE) for name, shape in tensors.local_shapes(0).items()
        }
        self.control, self.version = control, 0
        self._plan = DeliveryPlan(plan(tensors, self.engine, ranks_per_node=1), self.engine, bucket_bytes)
        self._device = device

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.engine.local_specs(0).values())

    def update(self, slots: str) -> EngineUpdate:
        """A state machine whose transport has its slots there."""
        fleet, everyone = Fleet([0], {0: self.control}), GroupCoordinator(dist.group.WORLD)
        place = self._device if slots == "gpu" else torch.device("cpu")
        transport = ColocatedTransport(self._plan, fleet, 0, Nodes(1, 1), everyone, device=place)
        return EngineUpdate(self._plan, fleet, transport, everyone)

    def deliver_verified(self, update: EngineUpdate) -> float:
        """Seconds of a whole update."""
        self.version += 1
        found = update.update(self.version, self.parameters)
        if not found.is_complete:
            raise RuntimeError(found.describe())
        return found.seconds

    def deliver(self, update: EngineUpdate) -> float:
        """Seconds until every byte is in the engine's parameters; the checksums at the end are the engine's own report."""
        self.version += 1
        order = Order(f"bytes-{self.version}", "bytes", self.version, (0,))
        self.control.begin_weight_update()
        with without_trainer_checksums():
            _finish(self._device)
            start = time.perf_counter()
            outcome = update.transport.deliver(order, self.parameters, Deadline(DEADLINE_S))
            seconds = time.perf_counter() - start
        if outcome.failures:
            raise RuntimeError(f"the engine failed: {outcome.failures}")
        self.control.end_weight_update()
        return seconds - max((report.seconds for report in outcome.reports.get(0, ())), default=0.0)

    def copy(self, bucket_bytes: int) -> float:
        """Seconds of the device's own copy of as many bytes."""
        source = torch.ones(self.num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.zeros_like(source)
        _finish(self._device)
        start = time.perf_counter()
        for one, other in zip(target.split(bucket_bytes), source.split(bucket_bytes), strict=True):
            one.copy_(other)
        _finish(self._device)
        return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def without_trainer_checksums() -> Iterator[None]:
    names = ("add", "add_bucket", "add_plan")
    originals = {name: getattr(ExpectedChecksums, name) for name in names}
    for name in names:
        setattr(ExpectedChecksums, name, lambda *unused: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ExpectedChecksums, name, original)


# ---- engines


def start_loader(folder: Path, device: torch.device, stack: ExitStack) -> EngineControl:
    """The weight loader of one engine rank in a process of its own."""
    file = folder / "specification.json"
    specification = {
        "folder": str(folder),
        "model": str(folder / "model"),
        "dtype": "bfloat16",
        "engine_tensor": 1,
        "device": device.type,
    }
    file.write_text(json.dumps(specification), encoding="utf-8")
    log = (folder / "sink.log").open("wb")
    stack.callback(log.close)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-W", "ignore", str(PEERS / "weight_sink.py"), str(file), "0"]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return SinkControl([SinkClient(folder / "sink0.sock")])


def start_server(folder: Path, device: torch.device, python: Path, stack: ExitStack) -> EngineControl:
    """A stock SGLang server with random weights."""
    settings = ServerSettings(
        python=python,
        model_path=folder / "model",
        key_file=create_key(folder),
        log_folder=folder,
        device=device.type,  # type: ignore[arg-type]
        dtype="bfloat16",
        max_running_requests=4,
        max_total_tokens=4096,
        memory_fraction=0.3 if device.type == "cuda" else None,  # the trainer's weights are there as well
        random_weights=True,
        start_timeout_s=600.0,
    )
    server = SglangServer.start(settings)
    stack.callback(server.stop)
    info = server.wait_until_healthy()
    return SglangClient(server.url, read_key(server.key_file), dialect=info.dialect)


# ---- measuring


def measure(trainer: Trainer, slots: str, runs: int) -> dict[str, float]:
    """After one to warm up each, in turns."""
    update = trainer.update(slots)
    ways: Mapping[str, Callable[[EngineUpdate], float]] = {
        "seconds": trainer.deliver,
        "verified_seconds": trainer.deliver_verified,
    }
    rows: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 1):
        for name, way in ways.items():
            rows[name].append(way(update))
    return {name: statistics.median(row[1:]) for name, row in rows.items()}


def figures(row: Mapping[str, float], num_bytes: int, copy_seconds: float) -> dict[str, float]:
    return {
        **row,
        "gb_per_s": num_bytes / row["seconds"] / 1e9,
        "verified_gb_per_s": num_bytes / row["verified_seconds"] / 1e9,
        "vs_copy": row["seconds"] / copy_seconds,
    }


def run_engine(arguments: argparse.Namespace, folder: Path, device: torch.device) -> dict[str, Any]:
    bucket_bytes = TINY_BUCKET if arguments.tiny else arguments.bucket_mb << 20
    rows: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        python = arguments.engine_python
        control = start_server(folder, device, python, stack) if python else start_loader(folder, device, stack)
        trainer = Trainer(folder, device, bucket_bytes, control)
        copies = [trainer.copy(bucket_bytes) for _ in range(arguments.runs + 1)][1:]
        copy_seconds = statistics.median(copies)
        for slots in arguments.slots.split(","):
            if slots not in SLOTS:
                raise ValueError(f"slots {slots!r} are unknown; choose of {', '.join(SLOTS)}")
            if slots == "gpu" and device.type != "cuda":
                skipped[slots] = "torch sees no CUDA device"
                continue
            try:
                rows[slots] = figures(measure(trainer, slots, arguments.runs), trainer.num_bytes, copy_seconds)
            except (RuntimeError, ValueError) as error:
                skipped[slots] = f"{type(error).__name__}: {error}"
        num_bytes = trainer.num_bytes
    return {
        "bytes": num_bytes,
        "bucket_bytes": bucket_bytes,
        "engine": "SGLang" if python else "weight loader in a process of its own, no server",
        "copy_seconds": copy_seconds,
        "copy_gb_per_s": num_bytes / copy_seconds / 1e9,
        "slots": rows,
        "skipped": skipped,
    }


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    if not cuda and not arguments.tiny:
        return {"benchmark": "gpu_sync", "skipped": "torch sees no CUDA device; --tiny checks the program without one"}
    device = torch.device("cuda" if cuda else "cpu")
    model = "tiny" if arguments.tiny else arguments.model
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-sync-") as temporary:
            folder = Path(temporary)
            (folder / "model").mkdir()
            config = {**QWEN, **MODELS[model], "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
            (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
            result = run_engine(arguments, folder, device)
    except EngineStartError as error:
        return {"benchmark": "gpu_sync", "skipped": f"the SGLang server did not start: {error}"}
    finally:
        dist.destroy_process_group()
    return {
        "benchmark": "gpu_sync",
        "machine": machine_name(device),
        "model": model,
        "runs": arguments.runs,
        **result,
        "versions": versions(PACKAGES),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write it to benchmarks/results/")
    parser.add_argument("--model", choices=[name for name in MODELS if name != "tiny"], default="1.5b")
    parser.add_argument("--engine-python", type=Path, help="interpreter with SGLang; without it there is no server")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--slots", default=",".join(SLOTS), help="where buckets lie, comma separated")
    parser.add_argument("--runs", type=int, default=7, help="timed runs of every way, after one to warm up")
    parser.add_argument("--tiny", action="store_true", help="a small model on any machine, to check the program")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    report(run_all(arguments), arguments.json, arguments.save and not arguments.tiny)


if __name__ == "__main__":
    main()
