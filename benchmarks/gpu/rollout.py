"""Tokens per second and KV cache of an SGLang server on a GPU while a trainer's process uses the same GPU.

    python benchmarks/gpu/rollout.py --engine-python PATH [--json] [--save] [--model 1.5b] [--only alone,deterministic]

A Qwen2.5-shaped model with random weights answers 256 requests of 64 prompt tokens with 512 tokens each, log-probs
included, through this project's client and engine. Cases:

    alone                 nothing else uses the GPU
    beside_host_wait      a process with a CUDA context waits on the host, as a trainer's ranks do while rank 0 collects
    beside_device_wait    a process waits in a kernel that spins, as a rank inside an NCCL collective does
    started_beside_40gb   the KV cache only: the server starts while another process holds 40 GB, like a trainer that is
                          built before its servers are ready
    deterministic         SGLang's deterministic inference: tokens depend on a request's seed, not on its batch

    tokens_per_second   response tokens of a round / its seconds; the median over rounds, after a warm-up round
    kv_tokens           tokens that the server's KV cache holds

How it runs and what a result holds: `program.py`. `--tiny` checks the program on any machine; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import program
import torch
from program import Benchmark, Missing, Row, rounds_of
from step import MODELS
from sync import write_config

from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import EngineStartError, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.types import GenerationRequest, RoutingShape, SamplingParams

PACKAGES = ("torch", "sglang")
MEMORY_FRACTION = 0.4
START_MARGIN_S = 60.0  # part of a case's time reserved for everything but the server's start
# Argument 1: bytes to hold; argument 2: whether to spin. A kernel of 2**28 cycles spins for about 0.15 s.
NEIGHBOR = """
import sys, threading, torch
held = torch.zeros(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), done.set()), daemon=True).start()
while sys.argv[2] == "spin" and not done.is_set():
    torch.cuda._sleep(1 << 28)
    torch.cuda.synchronize()
done.wait()
"""


@dataclass(frozen=True)
class Neighbor:
    """Another process on the GPU."""

    held_bytes: int = 1 << 20
    is_spinning: bool = False


@dataclass(frozen=True)
class Case:
    """A server and its neighbor, which is there while the server starts or while it generates."""

    is_deterministic: bool = False
    while_starting: Neighbor | None = None
    while_generating: Neighbor | None = None


# Cases of one server follow one another: it is started once for them.
CASES: Mapping[str, Case] = {
    "alone": Case(),
    "beside_host_wait": Case(while_generating=Neighbor()),
    "beside_device_wait": Case(while_generating=Neighbor(is_spinning=True)),
    "deterministic": Case(is_deterministic=True),
    "started_beside_40gb": Case(while_starting=Neighbor(held_bytes=40 * 10**9)),
}


@dataclass(frozen=True)
class Work:
    """Requests of a round and their lengths, in tokens."""

    num_requests: int
    prompt_tokens: int
    response_tokens: int


@contextmanager
def beside(neighbor: Neighbor | None) -> Iterator[None]:
    """Keep the neighbor alive inside the context."""
    if neighbor is None:
        yield
        return
    command = [sys.executable, "-c", NEIGHBOR, str(neighbor.held_bytes), "spin" if neighbor.is_spinning else "wait"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", "the neighbor did not start"
        yield
    finally:
        process.kill()
        process.wait()


class Server:
    """One SGLang server at a time, restarted when a case needs different settings."""

    def __init__(self, directory: Path, device: torch.device, arguments: argparse.Namespace) -> None:
        self._directory, self._device, self._arguments = directory, device, arguments
        self._stack = ExitStack()
        self._started: tuple[bool, Neighbor | None] | None = None
        self.kv_tokens = 0

    def start(self, case: Case) -> None:
        """Start what the case needs, unless it runs. Raises Missing with the server's error if it does not start."""
        wanted = case.is_deterministic, case.while_starting
        if self._started == wanted:
            return
        self.stop()
        work = work_of(self._arguments)
        settings = ServerSettings(
            python=self._arguments.engine_python,
            model_path=self._directory / "model",
            key_file=create_key(self._directory),
            log_dir=self._directory,
            device=self._device.type,  # type: ignore[arg-type]
            dtype="bfloat16",
            prefill_cuda_graph=False,
            max_running_requests=work.num_requests,
            memory_fraction=MEMORY_FRACTION if self._device.type == "cuda" else None,
            seeded=case.is_deterministic,
            random_weights=True,
            start_timeout_s=self._arguments.case_s - START_MARGIN_S,
        )
        try:
            with beside(case.while_starting):
                server = SglangServer.start(settings)
                self._stack.callback(server.stop)
                info = server.wait_until_healthy()
        except EngineStartError as error:
            raise Missing(f"the SGLang server did not start: {error}") from None
        self.kv_tokens, self._started = info.max_total_tokens, wanted
        client = SglangClient(server.url, read_key(server.key_file), api_version=info.api_version)
        client.update_weight_version(0)
        self._engine = engine_of(client, info.vocab_size, work)
        self._stack.callback(self._engine.close)

    def generate(self, number: int) -> float:
        """Answer the requests of round `number` and return response tokens per second."""
        start = time.perf_counter()
        work = work_of(self._arguments)
        self._engine.submit(requests_of(work, number))
        num_tokens = 0
        while self._engine.num_unfinished:
            num_tokens += sum(len(done.token_ids) for done in self._engine.poll())
        return num_tokens / (time.perf_counter() - start)

    def stop(self) -> None:
        self._stack.close()
        self._started = None


def engine_of(
    client: SglangClient, vocab_size: int, work: Work, routing: RoutingShape | None = None, version: int = 0
) -> SglangEngine:
    """Return the engine of one server, which serves this version."""
    length = work.prompt_tokens + work.response_tokens
    engine = SglangEngine([client], SglangEngineSettings(length, vocab_size, work.num_requests, routing=routing))
    engine.set_policy_version(version)
    return engine


def requests_of(work: Work, number: int, with_routing: bool = False) -> list[GenerationRequest]:
    """Return the requests of round `number`, with random prompts."""
    generator = torch.Generator().manual_seed(number)
    prompts = torch.randint(2, 500, (work.num_requests, work.prompt_tokens), generator=generator).tolist()
    sampling = SamplingParams(max_new_tokens=work.response_tokens)
    return [
        GenerationRequest(
            f"{number}/{index}",
            tuple(prompt),
            sampling,
            seed=number * work.num_requests + index,
            with_routing=with_routing,
        )
        for index, prompt in enumerate(prompts)
    ]


@contextmanager
def measuring(arguments: argparse.Namespace) -> Iterator[Callable[[str], Row]]:
    device = torch.device("cuda" if program.HAS_GPU else "cpu")  # a real server has no stand-in device
    if arguments.engine_python is None:
        raise Missing("--engine-python names no interpreter with SGLang")
    with tempfile.TemporaryDirectory(prefix="gpu-rollout-") as temporary:
        write_config(Path(temporary) / "model", "tiny" if arguments.tiny else arguments.model)
        server = Server(Path(temporary), device, arguments)

        def measure_case(name: str) -> Row:
            case = CASES[name]
            if device.type != "cuda" and (case.while_starting or case.while_generating):
                raise Missing("torch sees no CUDA device")
            server.start(case)
            if case.while_starting:
                return {"kv_tokens": server.kv_tokens}
            with beside(case.while_generating):
                server.generate(0)
                speeds = [server.generate(1 + number) for number in rounds_of(arguments)]
            return {"tokens_per_second": statistics.median(speeds), "rounds": speeds, "kv_tokens": server.kv_tokens}

        try:
            yield measure_case
        finally:
            server.stop()


def summary(arguments: argparse.Namespace, rows: program.Rows) -> dict[str, Any]:
    """Return the ratio of each case's tokens per second to those of the case named `alone`."""
    speeds = {name: row["tokens_per_second"] for name, row in rows.items() if "tokens_per_second" in row}
    return {"vs_alone": {name: speed / speeds["alone"] for name, speed in speeds.items()} if "alone" in speeds else {}}


def work_of(arguments: argparse.Namespace) -> Work:
    return Work(4, 8, 16) if arguments.tiny else Work(256, 64, 512)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.set_defaults(case_s=240.0)
    parser.add_argument("--model", choices=[name for name in MODELS if name != "tiny"], default="1.5b")
    parser.add_argument("--engine-python", type=program.absolute, help="interpreter with SGLang")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of every case, after one to warm up")
    return parser.parse_args(arguments)


ROLLOUT = Benchmark("gpu_rollout", __file__, PACKAGES, lambda arguments: list(CASES), measuring, summary=summary)

if __name__ == "__main__":
    program.run(ROLLOUT, parse())
