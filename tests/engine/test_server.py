"""The real server: served weights, access by key, seeds, and cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from megatron_dapo.engines.sglang import protocol
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import AttachedServer, EngineStartError, Expectation, SglangServer
from tools.listening import listening_sockets

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def server(seeded_servers: Callable[[int], list[Any]]) -> SglangServer:
    return seeded_servers(1)[0].server


@pytest.fixture(scope="module")
def http(server: SglangServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {read_key(server.key_file)}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120, trust_env=False) as client:
        yield client


def running(pids: list[int]) -> list[int]:
    """Return the processes that have not ended; an ended orphan may still wait for init to reap it."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def generate(http: httpx.Client, prompts: list[list[int]], seeds: list[int], num_tokens: int) -> list[dict[str, Any]]:
    sampling = [
        {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": seed} for seed in seeds
    ]
    answer = http.post("/generate", json={"input_ids": prompts, "sampling_params": sampling, "return_logprob": True})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(generations: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(generation["output_ids"]) for generation in generations]


def reference_logprobs(model_path: Path, token_ids: list[int]) -> torch.Tensor:
    """Log-probs of the next token after each position, [T, V], by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def test_the_protocol_probe_passes(server: SglangServer, http: httpx.Client) -> None:
    has_session = server.info.api_version.needs_update_session
    missing = [] if has_session else ["no POST /begin_weight_update", "no POST /end_weight_update"]
    assert protocol.problems(http, server.info.vocab_size) == missing


def test_info_describes_the_server(server: SglangServer, moe_model: Path) -> None:
    assert server.info is not None and server.is_alive()
    assert (server.info.vocab_size, server.info.dtype, server.info.tensor_parallel) == (300, "float32", 1)
    assert server.info.architecture == "Qwen3MoeForCausalLM" and server.info.seeded and server.info.routing
    assert Path(server.info.model_path) == moe_model


def test_attaching_by_url_checks_the_server_and_never_stops_it(server: SglangServer) -> None:
    attached = AttachedServer(server.url, server.key_file, Expectation.of(server.settings))
    assert attached.wait_until_healthy() == server.info
    attached.stop()
    assert attached.is_alive() and server.is_alive()


@pytest.mark.parametrize(
    ("wanted", "refusal"),
    [
        ({"max_support": 12}, "records up to 0 ids that a token was drawn from, and rollout.top_k is 12"),
        ({"update_pause": "retract"}, 'sglang.update_pause = "retract" needs SGLang 0.5.23 or newer'),
    ],
)
def test_a_server_without_labels_is_refused(
    server: SglangServer, labels_tokens: bool, wanted: dict[str, Any], refusal: str
) -> None:
    if labels_tokens:
        pytest.skip("this SGLang labels tokens")
    with pytest.raises(EngineStartError, match=refusal):
        AttachedServer(server.url, server.key_file, replace(server.expectation, **wanted)).wait_until_healthy()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": PROMPT}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("/init_weights_update_group", {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2}),
        ("/pause_generation", {}),
        ("/abort_request", {"abort_all": True}),
        ("/flush_cache", {}),
        ("/release_memory_occupation", {}),
    ],
)
@pytest.mark.parametrize("key", [None, "wrong"])
def test_requests_without_the_key_are_refused(
    server: SglangServer, path: str, body: dict[str, Any], key: str | None
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 401


def test_the_key_is_in_no_log_command_line_or_environment(server: SglangServer, http: httpx.Client) -> None:
    generate(http, [PROMPT], [0], 2)
    key = read_key(server.key_file).encode()
    assert key not in server.log.read_bytes()
    pids = server.pids()
    assert len(pids) >= 3  # server, scheduler, detokenizer
    for pid in pids:
        assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert key not in Path(f"/proc/{pid}/environ").read_bytes()


def test_listens_on_loopback_alone(server: SglangServer) -> None:
    """The HTTP server, and the store of its scheduler's ranks."""
    sockets = listening_sockets(server.pid)
    assert int(server.url.rsplit(":", 1)[1]) in {socket.port for socket in sockets} and len(sockets) >= 2
    assert all(socket.is_loopback for socket in sockets), sorted(sockets)


def test_no_process_of_it_imports_sglang_again(server: SglangServer) -> None:
    """On a CPU they are forked: one that is spawned has the command line of multiprocessing."""
    assert not [pid for pid in server.pids() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_no_process_of_it_has_a_secret_of_the_starters_environment(server: SglangServer) -> None:
    for pid in server.pids():
        assert os.environ["WANDB_API_KEY"].encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(http: httpx.Client) -> None:
    alone = [tokens(generate(http, [PROMPT], [seed], 48))[0] for seed in range(4)]
    mixed = [PROMPT[:-1] + [20 + index] for index in range(12)]
    batch = tokens(generate(http, [PROMPT] * 4 + mixed, list(range(4)) + [9] * 12, 48))
    assert batch[:4] == alone
    assert len(set(alone)) == 4
    assert len(set(batch[4:])) == 12


def test_seeds_draw_from_the_models_distribution(http: httpx.Client, moe_model: Path) -> None:
    num_draws = 2000
    probabilities = reference_logprobs(moe_model, PROMPT)[-1].exp().double()
    drawn = torch.zeros_like(probabilities)
    for first in range(0, num_draws, 250):
        for (token,) in tokens(generate(http, [PROMPT] * 250, list(range(first, first + 250)), 1)):
            drawn[token] += 1
    likely = probabilities * num_draws >= 5
    expected = torch.cat([probabilities[likely], probabilities[~likely].sum()[None]]) * num_draws
    found = torch.cat([drawn[likely], drawn[~likely].sum()[None]])
    chi_square, freedom = float(((found - expected) ** 2 / expected).sum()), len(expected) - 1
    assert freedom >= 10
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.long
def test_two_ranks_serve_and_the_death_of_one_is_noticed(
    server_factory: Callable[..., SglangServer], tiny_model_untied: Path
) -> None:
    """Two ranks serve the directory's weights, the death of one is noticed, and no process is left."""
    server = server_factory(tiny_model_untied, tensor_parallel=2)
    assert server.info is not None and server.info.tensor_parallel == 2
    headers = {"Authorization": f"Bearer {read_key(server.key_file)}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120, trust_env=False) as http:
        (generation,) = generate(http, [PROMPT], [0], 16)
    output = torch.tensor(generation["output_ids"])
    expected = reference_logprobs(tiny_model_untied, PROMPT + output.tolist())[len(PROMPT) - 1 : -1]
    served = torch.tensor([entry[0] for entry in generation["meta_info"]["output_token_logprobs"]])
    assert (expected.gather(1, output[:, None])[:, 0] - served).abs().max() < 2e-5

    pids = server.pids()
    names = {pid: b"".join(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) for pid in pids}
    schedulers = [pid for pid, name in names.items() if name.startswith(b"sglang::scheduler")]
    assert len(schedulers) == 2
    os.kill(schedulers[1], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.is_alive()
    assert "engine" in server.exit_reason() and "first cause: " in server.exit_reason().splitlines()[-1]
    server.stop()
    assert not running(pids)


@pytest.mark.long
def test_a_killed_starter_leaves_nothing_of_its_server(
    tiny_model: Path, tmp_path: Path, engine_python: Path, repository: Path
) -> None:
    """No process, scratch directory or shared memory is left. The server has random weights: its directory holds none."""
    directory = tmp_path / "no_weights"
    directory.mkdir()
    (directory / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(engine_python), str(directory), str(tmp_path)],
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(repository)),
        start_new_session=True,
    )
    try:
        assert starter.stdout is not None
        line = starter.stdout.readline()
        assert line, (tmp_path / "engine_0.log").read_text()[-3000:]
        report = json.loads(line)
        assert len(report["pids"]) >= 3 and running(report["pids"]) == report["pids"]
    finally:
        starter.kill()
        starter.wait()
    deadline = time.monotonic() + 90
    while _left(report) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _left(report)


_STARTER = """
import json, sys, time
from pathlib import Path
from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.processes import leftovers
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings

python, model, directory = map(Path, sys.argv[1:])
settings = ServerSettings(
    python=python, model_path=model, key_file=create_key(directory), log_dir=directory, random_weights=True,
    start_timeout_s=280,
)
server = SglangServer.start(settings)
server.wait_until_healthy()
pids = server.pids()
files = [str(file) for pid in pids for file in leftovers(pid)] + [str(server._scratch)]
print(json.dumps({"pids": pids, "files": files}), flush=True)
time.sleep(600)
"""


def _left(report: dict[str, Any]) -> list[Any]:
    return running(report["pids"]) + [file for file in report["files"] if Path(file).exists()]
