"""What a single GPU can show of a run that shares it between trainer and servers. Each case prints its figures.

    python benchmarks/gpu/probes.py [--json] [--save] [--only queues] [--engine-python PATH]
                                    [--attention fa3] [--sampling pytorch] [--prefill-graphs]

    queues        Two streams: the first has a spinning kernel and another one after it, the second a single short kernel.
                  With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) the short kernel waits for the spinning one,
                  which is how streams of several communicators deadlock; with 8 it does not. Reports the milliseconds
                  until the short kernel is done
    colocated     A server as the layouts start it, next to a trainer of the same 1.5 B model: start, sleep, train step,
                  verified weight sync and generation, five times; memory by process in each state; mean |log-prob
                  difference| between the two; GET /health while the server sleeps, and whether it serves again after
    retraction    A server with three layers of Qwen3-30B-A3B returns the experts of every token. Its cache is too small
                  for its requests, so SGLang retracts some; then requests are aborted in the middle

How it runs and what a result holds: `program.py`. `--tiny` checks the program on any machine; its figures mean nothing.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import program
import step
import torch
import torch.distributed as dist
from program import Benchmark, Missing, Row, finish
from rollout import Work, engine_of, requests_of

from megatron_dapo.bridge.sync_plan import SyncPlan
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, WeightSync
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.engines.sglang.client import ColocatedClient, SglangClient
from megatron_dapo.engines.sglang.cluster import SharedDevice
from megatron_dapo.engines.sglang.engine import SglangEngine
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import EngineStartError, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.coordination import coordinate
from megatron_dapo.parallel.mini_batch import build_micro_batches
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.parallel.packing import MicroBatchLimits
from megatron_dapo.reshard.planner import plan
from megatron_dapo.rounding import GIB
from megatron_dapo.types import Completion, GenerationRequest, RoutingShape

PACKAGES = ("torch", "megatron-core", "transformer_engine", "sglang")
CASES = ("queues", "colocated", "retraction")
SPIN = 1 << 30  # cycles: about 0.6 s
HEALTH_S, SETTLE_S = 5.0, 3.0
START_MARGIN_S = 60.0  # part of a case's time reserved for everything but the server's start

# Prints the milliseconds until the short kernel is done, and until the spinning one is.
QUEUES = """
import json, sys, time, torch
first, second = torch.cuda.Stream(), torch.cuda.Stream()
short = torch.zeros(1, device="cuda")
for spin in (1 << 20, int(sys.argv[1])):  # the first time loads the kernels
    begin = time.perf_counter()
    with torch.cuda.stream(first):
        torch.cuda._sleep(spin)
        torch.cuda._sleep(1 << 10)
    with torch.cuda.stream(second):
        short.add_(1)
    second.synchronize()
    done = time.perf_counter() - begin
    first.synchronize()
    whole = time.perf_counter() - begin
print(json.dumps({"short_ms": 1e3 * done, "spinning_ms": 1e3 * whole}))
"""


# ---- queues


def queues(arguments: argparse.Namespace, device: torch.device) -> Row:
    """Starts one process per setting, as CUDA reads the number of queues only once, at its start."""
    if device.type != "cuda":
        raise Missing("torch sees no CUDA device")
    row = {}
    for connections in (1, 8):
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        command = [sys.executable, "-c", QUEUES, str(SPIN)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        found = json.loads(done.stdout.splitlines()[-1])
        row |= {f"{name}_{connections}": value for name, value in found.items()}
    return row


# ---- servers


@contextmanager
def serving(
    directory: Path, device: torch.device, arguments: argparse.Namespace, **fields: Any
) -> Iterator[tuple[SglangServer, SglangClient, dict[str, Any]]]:
    """A server with the kernels named in the arguments, its client, and figures of its start."""
    if arguments.engine_python is None:
        raise Missing("--engine-python names no interpreter with SGLang")
    settings = ServerSettings(
        python=arguments.engine_python,
        model_path=directory / "model",
        key_file=create_key(directory),
        log_dir=directory,
        device=device.type,  # type: ignore[arg-type]
        dtype="bfloat16",
        attention_backend=arguments.attention,
        sampling_backend=arguments.sampling,
        prefill_cuda_graph=arguments.prefill_graphs,
        random_weights=True,
        start_timeout_s=arguments.case_s - START_MARGIN_S,
        **fields,
    )
    start = time.perf_counter()
    server = SglangServer.start(settings)
    try:
        try:
            info = server.wait_until_healthy()
        except EngineStartError as error:
            raise RuntimeError(f"the server did not start: {error}") from None
        figures = {"start_s": time.perf_counter() - start, "kv_tokens": info.max_total_tokens}
        make = ColocatedClient if settings.memory_saver else SglangClient
        yield server, make(server.url, read_key(server.key_file), api_version=info.api_version), figures
    finally:
        server.stop()


def write_model(directory: Path, config: Mapping[str, Any]) -> ModelArchitecture:
    directory.mkdir()
    full = {**step.QWEN, **config, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(full), encoding="utf-8")
    return read_architecture(directory)


# ---- colocated


class Trainer:
    """An actor whose weights a server on the same GPU gets."""

    def __init__(
        self, directory: Path, device: torch.device, arguments: argparse.Namespace, client: SglangClient
    ) -> None:
        self.architecture = read_architecture(directory / "model")
        self.actor, self.layout = step.build(step.SIDES["bf16"], self.architecture, "none")
        self._work = step.Work(700, 256, 200) if arguments.tiny else step.Work(16384, 8192, 8192)
        self._client, self._device, self._version = client, device, 0
        engine = sglang_layout(self.architecture, 1, torch.bfloat16, device=device.type)
        sync_plan = SyncPlan(
            plan(self.actor.tensors, engine, ranks_per_node=1), engine, (1 if arguments.tiny else 64) << 20
        )
        handles, everyone = EngineHandles([0], {0: client}), coordinate([0], 600.0)
        transport = SharedMemoryTransport(
            sync_plan, handles, 0, NodeTopology(1, 1), everyone, device=torch.device("cpu")
        )
        release = SharedDevice(0, 30.0).make_room_for_cache if device.type == "cuda" else None
        self._sync = WeightSync(sync_plan, handles, transport, everyone, release_cache=release)

    def train(self, number: int) -> float:
        """Return the seconds of a step."""
        samples = step.make_samples(step.draw_lengths(self._work, number), self.architecture.vocab_size)
        limits = MicroBatchLimits(max_tokens=self._work.micro_batch_tokens)
        parts = build_micro_batches(samples, step.token_mean(samples), self.layout, 0, limits)
        finish(self._device)
        start = time.perf_counter()
        self.actor.train_step(parts, step.policy_gradient, 1.0, step.LEARNING_RATE)
        finish(self._device)
        return time.perf_counter() - start

    def sync(self) -> float:
        """Return the seconds of a verified sync, which wakes a sleeping server."""
        self._version += 1
        report = self._sync.update(self._version, self.actor.named_local_parameters())
        if not report.is_complete:
            raise RuntimeError(report.describe())
        return report.seconds

    def generate(self, work: Work, number: int) -> float:
        """Return the response tokens per second of a round."""
        engine = engine_of(self._client, self.architecture.vocab_size, work, version=self._version)
        start, completions = time.perf_counter(), collect(engine, requests_of(work, number))
        engine.close()
        return sum(len(one.token_ids) for one in completions) / (time.perf_counter() - start)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that a server gets."""
        return 2 * self.architecture.num_parameters

    def mismatch(self, number: int) -> float:
        """Return the mean |log-prob difference| of actor and server over a random sequence."""
        [sample] = step.make_samples([192], self.architecture.vocab_size)
        generator = torch.Generator().manual_seed(number)
        sample.tokens.copy_(
            torch.randint(2, self.architecture.vocab_size - 1, sample.tokens.shape, generator=generator)
        )
        served = torch.tensor(self._client.prompt_logprobs(sample.tokens.tolist()))
        [part] = build_micro_batches([sample], [1.0], self.layout, 0, MicroBatchLimits(max_tokens=256))
        [outputs] = self.actor.forward_logprobs([part], 1.0)
        assert outputs is not None, "a pipeline of one stage"
        trained = outputs.logprobs.float().cpu()[part.loss_mask.bool()]
        return float((trained - served[-len(trained) :]).abs().mean())


def colocated(arguments: argparse.Namespace, device: torch.device) -> Row:
    work, on_gpu = Work(4, 8, 16) if arguments.tiny else Work(256, 64, 256), device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="gpu-colocated-") as temporary, process_group(device):
        directory = Path(temporary)
        write_model(directory / "model", step.MODELS["tiny" if arguments.tiny else "1.5b"])
        fields = {"max_running_requests": work.num_requests, "memory_saver": on_gpu}
        fields["memory_fraction"] = arguments.memory_fraction if on_gpu else None
        with serving(directory, device, arguments, **fields) as (server, client, row):
            names = {os.getpid(): "trainer", **dict.fromkeys(server.pids(), "server")}
            memory = row["memory_gib"] = {"started": memory_by_process(names)}
            cycles: list[dict[str, float]] = []
            trainer: Trainer | None = None
            for number in range(arguments.cycles):
                found: dict[str, float] = {}
                if isinstance(client, ColocatedClient):
                    found["sleep_s"] = seconds_of(client.sleep)
                    memory[f"asleep_{number}"] = memory_by_process(names)
                trainer = trainer or Trainer(directory, device, arguments, client)
                found["train_s"] = trainer.train(number)
                memory[f"trained_{number}"] = memory_by_process(names)
                if cycles and number == arguments.cycles - 1:
                    row["health_asleep"], row["alive_after_health"] = health(server)
                    if not row["alive_after_health"]:
                        break
                found["sync_s"] = trainer.sync()
                memory[f"awake_{number}"] = memory_by_process(names)
                found["mismatch"] = trainer.mismatch(number)
                found["tokens_per_second"] = trainer.generate(work, number)
                cycles.append(found)
            steady = cycles[1:] or cycles
            row |= {name: statistics.median(one[name] for one in steady) for name in steady[0]}
            return {**row, "sync_gb_per_s": trainer.num_bytes / row["sync_s"] / 1e9, "cycles": cycles}


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def health(server: SglangServer) -> tuple[str, bool]:
    """Return the status or the kind of error of GET /health, and whether all processes still run some seconds later."""
    headers = {"Authorization": f"Bearer {read_key(server.key_file)}"}
    try:
        answer = str(httpx.get(f"{server.url}/health", headers=headers, timeout=HEALTH_S).status_code)
    except httpx.HTTPError as error:
        answer = type(error).__name__
    time.sleep(SETTLE_S)
    return answer, server.is_alive()


def memory_by_process(names: Mapping[int, str]) -> dict[str, float]:
    """Return the GiB of GPU memory by process name, as the driver counts them, and in total; empty without a driver."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, float] = {}
    for line in lines:
        pid, _, mebibytes = line.partition(",")
        name = names.get(int(pid), "others")
        found[name] = found.get(name, 0.0) + float(mebibytes) / 1024
    if program.HAS_GPU:
        free, total = torch.cuda.mem_get_info()
        found |= {"taken": (total - free) / GIB, "torch_reserved": torch.cuda.memory_reserved() / GIB}
    return {name: round(value, 2) for name, value in found.items()}


# ---- retraction


def retraction(arguments: argparse.Namespace, device: torch.device) -> Row:
    """Let responses outgrow the cache: the first round is answered whole, the second aborted half-way."""
    work = Work(16, 8, 48) if arguments.tiny else Work(256, 32, 512)
    # A server admits requests on the guess that responses end early; these do not.
    tokens = 480 if arguments.tiny else 48 * 1024
    with tempfile.TemporaryDirectory(prefix="gpu-retraction-") as temporary:
        directory = Path(temporary)
        config = {**step.MODELS["30b-a3b"], **(step.TINY_EXPERTS if arguments.tiny else {})}
        architecture = write_model(directory / "model", config)
        experts = architecture.experts
        assert experts is not None, "a mixture of experts"
        shape = RoutingShape(architecture.num_layers, experts.num_experts_per_token, experts.num_experts)
        fields = {"max_running_requests": work.num_requests, "max_total_tokens": tokens, "routing": True}
        fields["memory_fraction"] = 0.5 if device.type == "cuda" else None
        with serving(directory, device, arguments, **fields) as (_, client, row):
            client.update_weight_version(0)
            engine = engine_of(client, architecture.vocab_size, work, shape)
            start, whole = time.perf_counter(), collect(engine, requests_of(work, 0, with_routing=True))
            row["tokens_per_second"] = sum(len(one.token_ids) for one in whole) / (time.perf_counter() - start)
            row["complete"] = len(whole)
            aborted = collect(engine, requests_of(work, 1, with_routing=True), share=0.25)
            row["finished_before_abort"] = sum(one.finish_reason != "abort" for one in aborted)
            row["aborted_with_tokens"] = sum(
                bool(len(one.token_ids)) for one in aborted if one.finish_reason == "abort"
            )
            row["aborted_without_tokens"] = len(aborted) - row["finished_before_abort"] - row["aborted_with_tokens"]
            row["deaths"] = engine.statistics.num_deaths
            row["served_after_abort"] = len(collect(engine, requests_of(Work(4, 8, 16), 2)))
            engine.close()
            row["retractions"] = sum(
                log.read_text(errors="replace").count("retracted_reqs: ") for log in directory.glob("*.log")
            )
            return row


def collect(engine: SglangEngine, requests: Sequence[GenerationRequest], share: float = 1.0) -> list[Completion]:
    """Return the completions of requests. Once `share` of them have finished, the others are aborted."""
    engine.submit(requests)
    completions: list[Completion] = []
    while engine.num_unfinished:
        completions += engine.poll()
        if share < 1.0 and len(completions) >= share * len(requests):
            return completions + engine.abort()
    return completions


PROBES: Mapping[str, Callable[[argparse.Namespace, torch.device], Row]] = {
    "queues": queues,
    "colocated": colocated,
    "retraction": retraction,
}


def measuring(arguments: argparse.Namespace) -> Any:
    device = torch.device("cuda" if program.HAS_GPU else "cpu")  # a real server has no stand-in device
    return program.always(lambda case: PROBES[case](arguments, device))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.set_defaults(case_s=240.0)
    parser.add_argument("--engine-python", type=program.absolute, help="interpreter with SGLang")
    parser.add_argument("--attention", default="fa3", help="the servers' attention_backend")
    parser.add_argument("--sampling", default="pytorch", help="the servers' sampling_backend")
    parser.add_argument("--prefill-graphs", action="store_true", help="capture graphs of prefill, too")
    parser.add_argument("--cycles", type=int, default=5, help="of the colocated server's sleep and wake")
    parser.add_argument("--memory-fraction", type=float, default=0.4, help="the colocated server's mem_fraction_static")
    return parser.parse_args(arguments)


PROBE = Benchmark("gpu_probes", __file__, PACKAGES, lambda arguments: CASES, measuring)

if __name__ == "__main__":
    program.run(PROBE, parse())
