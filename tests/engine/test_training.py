"""Whole runs with real servers: no sample is lost or trained twice when an engine or a trainer rank dies, servers outlive a trainer
that is started again, and end with the run."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fp8_world import CUT_HEADS, PARITY, RANDOM_MODEL_SETTINGS, ROUNDING, save_quickstart_model
from sglang_runs import ENVIRONMENT, command

from megatron_dapo.launch.local import worker_pid_file
from tools.listening import watch_sockets
from tools.prove_resume import write_recipe

NUM_STEPS, GROUPS, GROUP_SIZE = 3, 6, 4
RUN_S = 540.0


@dataclass
class Run:
    """`megatron-dapo train` with SGLang servers."""

    directory: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def engines(self) -> Path:
        return self.directory / "engines"

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def count_in_log(self, log: str, text: str) -> int:
        """Count occurrences of `text` in an engine's log."""
        path = self.engines / log
        return path.read_text(errors="replace").count(text) if path.is_file() else 0

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + RUN_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}: {self.tail()}"
            assert time.monotonic() < deadline, f"waited {RUN_S} s for {what}: {self.tail()}"
            time.sleep(0.02)

    def kill_engine(self) -> None:
        """kill -9 of the server's processes that hold the model."""
        schedulers = [p for p in psutil.Process(self.process.pid).children(recursive=True) if _is_scheduler(p)]
        assert schedulers, "no scheduler process of SGLang runs"
        for scheduler in schedulers:
            scheduler.kill()

    def servers(self) -> list[psutil.Process]:
        """Return the main processes of the run's servers, whoever is their parent."""
        processes = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
        return [
            process
            for process in processes
            if "megatron_dapo.engines.sglang.serve" in process.info["cmdline"]
            and any(argument.startswith(str(self.directory)) for argument in process.info["cmdline"])
        ]

    def worker(self, rank: int) -> psutil.Process:
        return psutil.Process(int(worker_pid_file(self.directory, rank).read_text()))

    def finish(self) -> dict[str, Any]:
        assert self.process.wait(RUN_S) == 0, self.tail()
        return json.loads((self.directory / "summary.json").read_text())

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


def _is_scheduler(process: psutil.Process) -> bool:
    try:
        return "scheduler" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture
def train(engine_python: Path, tmp_path: Path) -> Callable[..., Run]:
    """`train("a.b=c", ..., restarts=1)`: a started run, ended after the test."""
    runs: list[Run] = []

    def start(*overrides: str, restarts: int = 0, layout: str = "tp2") -> Run:
        settings = (
            "sglang.weight_sync_bucket_mb=1",  # The model has 2.9 MB: a sync takes several buckets.
            f"run.total_steps={NUM_STEPS}",
            "checkpoint.export_huggingface=false",
            *overrides,
        )
        directory, log = tmp_path / "run", tmp_path / "run.log"
        started = command(write_recipe(tmp_path), directory, engine_python, *settings, layout=layout)
        started.append(f"--restarts={restarts}")
        with open(log, "wb") as stream:
            process = subprocess.Popen(started, stdout=stream, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        runs.append(Run(directory, process, log))
        return runs[-1]

    yield start
    for run in runs:
        family = psutil.Process(run.process.pid).children(recursive=True) if run.process.poll() is None else []
        run.process.kill()
        for process in family:
            process.kill()


def check_samples(run: Run, num_steps: int = NUM_STEPS) -> None:
    """Check that every step trained the right number of responses, none twice, each token with a version that existed."""
    samples = run.rows("samples.jsonl")
    ids = [sample["sample_id"] for sample in samples]
    assert len(set(ids)) == len(ids) == num_steps * GROUPS * GROUP_SIZE
    for step in range(1, num_steps + 1):
        assert sum(sample["train_step"] == step for sample in samples) == GROUPS * GROUP_SIZE
    for sample in samples:
        ranges = sample["versions"]
        assert ranges[0]["start"] == 0 and all(a["end"] == b["start"] for a, b in zip(ranges, ranges[1:]))
        assert all(sample["train_step"] - 2 <= span["version"] < sample["train_step"] for span in ranges)


def check_nothing_is_left(run: Run) -> None:
    """Check that no process outlives the run."""
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(run.directory) in " ".join(process.info["cmdline"] or [])
    ]
    assert not left, f"left behind: {left}"


@pytest.mark.parametrize(
    ("num_kills", "num_steps", "layout"), [(1, 1, "tp1"), pytest.param(2, 3, "tp2", marks=pytest.mark.long)]
)
def test_killed_engine_costs_neither_samples_nor_the_run(
    train: Callable[..., Run], num_kills: int, num_steps: int, layout: str
) -> None:
    """kill -9 once in the middle of a rollout, once in the middle of a weight update."""
    run = train(*ON_POLICY, f"run.total_steps={num_steps}", "optimizer.warmup_steps=0", layout=layout)
    run.wait_until("the first rollout", lambda: run.count_in_log("engine_0.log", "Decode batch") > 0)
    run.kill_engine()
    if num_kills == 2:
        restarted, pause = "engine_0.1.log", "POST /pause_generation"
        # The first pause of the new server precedes its first sync, the second one the weights of step 1.
        run.wait_until("an update of the new server", lambda: run.count_in_log(restarted, pause) > 1)
        run.kill_engine()
    summary = run.finish()
    assert summary["stopped"] == "finished" and summary["train_steps"] == num_steps
    logs = ["engine_0.log", *(f"engine_0.{kill}.log" for kill in range(1, num_kills + 1))]
    assert sorted(path.name for path in run.engines.glob("*.log")) == sorted(logs)
    check_samples(run, num_steps)
    for row in run.rows("metrics.jsonl"):
        assert row["mismatch/abs_logprob_diff_mean"] < 1e-4
    check_nothing_is_left(run)


@pytest.mark.long
def test_a_restarted_engine_in_fp8_gets_quantized_weights(train: Callable[..., Run], tmp_path: Path) -> None:
    """kill -9 in the middle of the first rollout: the next server serves the same quantized weights."""
    model = save_quickstart_model(tmp_path / "model", **CUT_HEADS)
    settings = ("rollout.max_response_tokens=128", "run.total_steps=1", "optimizer.warmup_steps=0")
    run = train(f'model.path="{model}"', *RANDOM_MODEL_SETTINGS, *settings)
    run.wait_until("the first rollout", lambda: run.count_in_log("engine_0.log", "Decode batch") > 0)
    run.kill_engine()
    summary = run.finish()
    assert summary["stopped"] == "finished" and summary["train_steps"] == 1
    assert sorted(path.name for path in run.engines.glob("*.log")) == ["engine_0.1.log", "engine_0.log"]
    check_samples(run, num_steps=1)
    # The killed server before the step and the new one after it agree with the trainer at the same FP8 weights, and
    # differ from the trained weights by the quantization error.
    log = run.log.read_text(errors="replace")
    parity, rounding = PARITY.findall(log), ROUNDING.findall(log)
    assert len(parity) == len(rounding) == 2
    assert all(float(mean) < 1e-4 for mean, _ in parity)
    assert all(1e-3 < float(mean) < 0.2 for mean, _ in rounding)
    [row] = run.rows("metrics.jsonl")
    assert 1e-3 < row["mismatch/abs_logprob_diff_mean"] < 0.2
    check_nothing_is_left(run)


@pytest.mark.long
@pytest.mark.parametrize("update_pause", ["abort", "retract"])
def test_generation_beside_training_stays_within_the_bound(
    train: Callable[..., Run], update_pause: str, labels_tokens: bool
) -> None:
    """Disaggregated servers, synced by point-to-point, generate during training; responses continue across updates."""
    if update_pause != "abort" and not labels_tokens:
        pytest.skip("this SGLang does not label tokens; tests/engine/test_update_pause.py shows that it is refused")
    run = train(
        f'sglang.update_pause="{update_pause}"',
        'sglang.placement="disaggregated"',
        'sglang.weight_sync_transport="p2p"',
        "rollout.partial_rollout=true",
        "rollout.max_staleness=1",
        "sglang.tp_size=2",
    )
    found = watch_sockets(run.process.pid, lambda: run.process.poll() is not None)
    assert run.finish()["train_steps"] == NUM_STEPS
    # torchrun's store, the ranks and their rendezvous with the engines, servers and their schedulers' ranks.
    assert len({each.port for each in found}) >= 8
    assert all(each.is_loopback for each in found), sorted(found)
    check_samples(run)
    rows = run.rows("metrics.jsonl")
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    # The first batch is sampled from the weights that it trains; later ones start one version earlier.
    assert rows[0]["mismatch/abs_logprob_diff_mean"] < 1e-4
    assert rows[1]["rollout/staleness_mean"] > 0


ON_POLICY = ("rollout.oversample=1.0", "rollout.max_staleness=0")
P2P = ('sglang.placement="disaggregated"', 'sglang.weight_sync_transport="p2p"')


@pytest.mark.parametrize(
    ("moment", "settings"),
    [
        ("generate", ()),
        pytest.param("weight_sync", (), marks=pytest.mark.long),
        pytest.param("weight_sync", P2P, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_the_server_outlives_a_killed_trainer_rank_which_is_started_again(
    train: Callable[..., Run], moment: str, settings: tuple[str, ...]
) -> None:
    """kill -9 of rank 1 while the server generates, or waits for that rank's share of the weights."""
    run = train(*ON_POLICY, "checkpoint.interval=1", *settings, restarts=2)
    run.wait_until("the first step", lambda: len(run.rows("metrics.jsonl")) >= 1)
    [server] = run.servers()
    [supervisor] = server.parents()[:1]
    victim, log, pause = run.worker(1), "engine_0.log", "POST /pause_generation"
    if moment == "weight_sync":
        num_pauses = run.count_in_log(log, pause)
        run.wait_until("a weight sync", lambda: run.count_in_log(log, pause) > num_pauses)
        victim.suspend()
        time.sleep(1.0)  # rank 0 and the server come to where they wait for rank 1
    else:
        num_batches = run.count_in_log(log, "Decode batch")
        run.wait_until("the next rollout", lambda: run.count_in_log(log, "Decode batch") > num_batches)
    victim.kill()
    summary = run.finish()
    assert summary["stopped"] == "finished" and summary["train_steps"] == NUM_STEPS
    text = run.log.read_text(errors="replace")
    assert f"first failure: attempt 1, rank 1 ({socket.gethostname()}), phase {moment}: killed by signal 9" in text
    assert len(re.findall(rf"server 0 \(process {server.pid}, http://\S+\) was kept with version \d", text)) == 1, (
        run.tail()
    )
    assert sorted(path.name for path in run.engines.glob("*.log")) == [log], "no other server was started"
    check_samples(run)
    for row in run.rows("metrics.jsonl"):
        assert row["mismatch/abs_logprob_diff_mean"] < 1e-4
    _, left = psutil.wait_procs([server, supervisor], timeout=60.0)
    assert not left
    check_nothing_is_left(run)


@pytest.mark.long  # torchrun's restart above shows that nothing is left
def test_servers_end_when_torchrun_is_killed(train: Callable[..., Run]) -> None:
    run = train(restarts=2)
    run.wait_until("the first rollout", lambda: run.count_in_log("engine_0.log", "Decode batch") > 0)
    [server] = run.servers()
    [supervisor] = server.parents()[:1]
    [agent] = psutil.Process(run.process.pid).children()
    agent.kill()
    _, left = psutil.wait_procs([server, supervisor], timeout=60.0)
    assert not left
    run.process.wait(90.0)
