"""Tokens per second of a stock SGLang server and of the embedded engine on the traffic of a recipe.

    python benchmarks/rollout_throughput.py [--json] [--tiny] [--recipe examples/quickstart/quickstart.toml] [--rounds 3]
        [--engine-python .venv-sglang/bin/python] [--embedded-ranks 2] [--servers 1]

METHOD. The traffic is what one collection of the recipe submits at first: prompts_per_step prompts of its training data
times group_size, its temperature, stop tokens and max_response_tokens, the weights of its model directory in float32;
round r takes the r-th prompts_per_step prompts, the same for both sides, after one round that does not count. Both sides
are up before the first round and take turns on the same machine, the idle one asleep; the side that begins changes from
round to round. A round's clock runs from the submission to the last response, in the process that drives: for SGLang
through this project's client and engine over HTTP, log-probs included; for the embedded engine over pipes to
--embedded-ranks processes of one thread each, which get whole groups in turn, as in a run where each trainer rank
generates with the whole model. Tokens are those of the responses; the two draw other random numbers, so responses
differ. Reported is each side's total tokens / total seconds over the rounds, and `sglang_vs_embedded`, their ratio.
Other programs on the machine slow both sides, not always equally: `rounds` shows the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import options
import torch

from megatron_dapo.config.loader import load_config
from megatron_dapo.data.dataset import load_prompts
from megatron_dapo.data.model_inputs import read_model_inputs
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.types import GenerationRequest, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SPARE_POSITIONS = 16


@dataclass(frozen=True)
class Traffic:
    """The model and the requests of every round."""

    model_directory: Path
    vocab_size: int
    max_length: int
    slots: int  # one embedded engine's
    max_running: int  # one server's
    rounds: tuple[tuple[GenerationRequest, ...], ...]


def read_traffic(arguments: argparse.Namespace) -> Traffic:
    """Read the recipe's first prompts as requests of every round, with one round in front that does not count."""
    config = load_config(arguments.recipe, options.TINY_STEP if arguments.tiny else ()).config
    rollout = config.rollout
    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    prompts = load_prompts(config.data.train_paths, inputs.tokenizer, config.data.max_prompt_tokens).prompts
    sampling = SamplingParams(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_response_tokens,
        stop_token_ids=inputs.stop_tokens.token_ids,
    )
    per_round = rollout.prompts_per_step
    rounds = tuple(
        tuple(
            GenerationRequest(f"{place:04d}/{index}", prompt.token_ids, sampling, seed=place * 1000 + index)
            for place, prompt in enumerate(prompts[number * per_round : (number + 1) * per_round])
            for index in range(rollout.group_size)
        )
        for number in range(arguments.rounds + 1)
    )
    vocab_size = json.loads((config.model.path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    return Traffic(config.model.path, vocab_size, longest, rollout.slots_per_rank, 256, rounds)


# ---- SGLang


def start_servers(
    traffic: Traffic, python: Path, num_servers: int, stack: ExitStack, controls: list[SglangClient] | None = None
) -> SglangEngine:
    """Start servers with the model's weights and return this project's engine over them; add their clients to `controls`."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    settings = ServerSettings(
        python=python,
        model_path=traffic.model_directory,
        key_file=create_key(directory),
        log_dir=directory / "logs",
        max_running_requests=traffic.max_running,
        max_total_tokens=traffic.max_running * (traffic.max_length + SPARE_POSITIONS),
        start_timeout_s=600.0,
    )
    servers = [SglangServer.start(settings, index) for index in range(num_servers)]
    for server in servers:
        stack.callback(server.stop)
    for server in servers:
        server.wait_until_healthy()
    clients = [SglangClient(server.url, read_key(server.key_file)) for server in servers]
    for client in clients:
        client.update_weight_version(0)
    if controls is not None:
        controls += clients
    engine = SglangEngine(
        clients,
        SglangEngineSettings(traffic.max_length, traffic.vocab_size, max_in_flight=traffic.max_running),
    )
    stack.callback(engine.close)
    engine.set_policy_version(0)
    return engine


def run_sglang(engine: SglangEngine, requests: Sequence[GenerationRequest]) -> int:
    """Generate all requests and return the number of response tokens."""
    engine.submit(requests)
    num_tokens = 0
    while engine.num_unfinished:
        num_tokens += sum(len(done.token_ids) for done in engine.poll())
    return num_tokens


# ---- the embedded engine, one process a rank


class EmbeddedRanks:
    """Processes of this file that generate what they read as JSON lines."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack):
        command = [sys.executable, __file__, "--serve-embedded", *(["--tiny"] if arguments.tiny else [])]
        command += ["--recipe", str(arguments.recipe), "--rounds", str(arguments.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._ranks = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(arguments.embedded_ranks)
        ]
        for rank in self._ranks:
            stack.callback(rank.kill)
        for rank in self._ranks:
            assert self._read(rank)["ready"], "an embedded rank did not start"

    def run(self, number: int) -> int:
        """Generate round `number` and return the number of response tokens."""
        for index, rank in enumerate(self._ranks):
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"round": number, "rank": index, "num_ranks": len(self._ranks)}) + "\n")
            rank.stdin.flush()
        return sum(self._read(rank)["num_tokens"] for rank in self._ranks)

    @staticmethod
    def _read(rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        assert line, f"an embedded rank ended with exit code {rank.wait()}"
        return json.loads(line)


def serve_embedded(traffic: Traffic) -> None:
    """Run as one rank: generate this rank's groups of every round read from stdin."""
    torch.set_num_threads(1)
    engine = load_embedded(traffic)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        requests = traffic.rounds[command["round"]]
        # Whole groups: the engine shares a prompt only within a group.
        own = [r for r in requests if int(r.request_id.split("/")[0]) % command["num_ranks"] == command["rank"]]
        engine.submit(own)
        num_tokens = 0
        while engine.num_unfinished:
            num_tokens += sum(len(done.token_ids) for done in engine.poll())
        print(json.dumps({"num_tokens": num_tokens}), flush=True)


def load_embedded(traffic: Traffic) -> EmbeddedEngine:
    """Return an embedded engine with the weights of the model directory."""
    from transformers import AutoModelForCausalLM

    settings = EmbeddedEngineSettings(max_slots=traffic.slots, max_length=traffic.max_length)
    engine = EmbeddedEngine.from_directory(traffic.model_directory, settings)
    source = AutoModelForCausalLM.from_pretrained(traffic.model_directory, dtype=torch.float32).state_dict()
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(source[name])
    engine.set_policy_version(0)
    return engine


# ---- both


def timed(run: Callable[[], int]) -> dict[str, float]:
    start = time.perf_counter()
    num_tokens = run()
    seconds = time.perf_counter() - start
    return {"tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / seconds}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both sides in turns, see METHOD."""
    traffic = read_traffic(arguments)
    with ExitStack() as stack:
        ranks = EmbeddedRanks(arguments, stack)
        engine = start_servers(traffic, arguments.engine_python, arguments.servers, stack)
        sides: dict[str, Callable[[int], int]] = {
            "sglang": lambda number: run_sglang(engine, traffic.rounds[number]),
            "embedded": ranks.run,
        }
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(len(traffic.rounds)):
            # The side that starts alternates, so that drift of the machine hits both.
            order = list(sides) if number % 2 else list(reversed(sides))
            rounds.append({name: timed(lambda name=name, number=number: sides[name](number)) for name in order})
    return summary(rounds[1:], traffic, arguments)


def summary(
    rounds: Sequence[dict[str, dict[str, float]]], traffic: Traffic, arguments: argparse.Namespace
) -> dict[str, Any]:
    totals = {
        name: sum(r[name]["tokens"] for r in rounds) / sum(r[name]["seconds"] for r in rounds)
        for name in ("sglang", "embedded")
    }
    return {
        "benchmark": "rollout_throughput",
        "sglang_tokens_per_second": totals["sglang"],
        "embedded_tokens_per_second": totals["embedded"],
        "sglang_vs_embedded": totals["sglang"] / totals["embedded"],
        "num_responses_a_round": len(traffic.rounds[0]),
        "sampling": asdict(traffic.rounds[0][0].sampling),
        "rounds": rounds,
        "servers": arguments.servers,
        "embedded_ranks": arguments.embedded_ranks,
        "recipe": arguments.recipe.name,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = options.parser(__doc__, "16 responses, one round")
    parser.add_argument("--recipe", type=Path, default=ROOT / "examples/quickstart/quickstart.toml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".venv-sglang/bin/python")
    parser.add_argument("--embedded-ranks", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--serve-embedded", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds, arguments.embedded_ranks = 1, 1
    if arguments.serve_embedded:
        serve_embedded(read_traffic(arguments))
        return
    result = measure(arguments)
    options.show(result, arguments)


if __name__ == "__main__":
    main()
