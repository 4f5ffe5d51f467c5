"""Overlap of generation and training, with a trainer on one core and an SGLang server on another.

    python benchmarks/overlap.py [--json] [--tiny] [--modes alternating streamed_1 ...] [--steps 8] [--engine-python PATH]

Each mode is a run of `megatron-dapo train` with a disaggregated server and a random model whose responses end by chance: their
lengths are geometric, so the longest of a batch is several times the mean. The server's processes have one core, those of the
trainer (its rank, the verifier) another.

`alternating` generates a batch and then trains it. Its seconds of both are those of `max(generate, train)`, to which every mode's
step is compared: `vs_max`. The others overlap: `whole_1` by whole batches with max_staleness 1, `streamed_S` by mini-batches with
max_staleness S, `guarded_S` the same with rollout.order = "guarded". `wait` are the seconds in which the trainer waits for
responses, `sync` those of the weight update, in which both sides stand still. `trainer_cpu` and `engine_cpu` are the shares of
their cores that the processes used, next to the shares that the run's metrics report as not idle.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import options
import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
REWARD = """import zlib

def reward(sample):
    return zlib.crc32(sample.response.encode()) % 2 == 0
"""
RUN_S = 1800.0
POLL_S = 0.05


@dataclass(frozen=True)
class Size:
    """A run's model, batch and steps."""

    hidden: int
    layers: int
    prompts: int
    group_size: int
    mini_batch: int  # prompts
    tokens: int  # the most of a response
    num_stops: int  # token ids that end a response
    slots: int  # responses that the server works on at a time
    steps: int
    warm: int  # first steps that are not counted


FULL = Size(256, 8, 8, 8, 2, 384, 5, 64, 7, 2)
TINY = Size(64, 2, 4, 2, 2, 48, 9, 8, 3, 1)

OVERLAP = ("rollout.partial_rollout=true", 'algorithm.off_policy.correction="tis"')
STREAM = ('training.stream="mini_batches"',)
GUARDED = ('rollout.order="guarded"',)


def ahead(staleness: int) -> tuple[str, ...]:
    """Return the settings of a run that generates up to `staleness` batches ahead."""
    return (*OVERLAP, f"rollout.max_staleness={staleness}", f"rollout.oversample={staleness + 1}.0")


# Mode -> its settings, in addition to those of `alternating`.
MODES: dict[str, tuple[str, ...]] = {
    "alternating": (),
    "streamed_0": STREAM,
    "whole_1": ahead(1),
    "streamed_1": (*ahead(1), *STREAM),
    "guarded_1": (*ahead(1), *STREAM, *GUARDED),
    "streamed_2": (*ahead(2), *STREAM),
}
REFERENCE = "alternating"


def save_model(directory: Path, size: Size) -> Path:
    """Write a random Qwen2 with the quickstart's tokenizer; `num_stops` of its tokens end a response."""
    vocab_size = json.loads((QUICKSTART / "base_model" / "config.json").read_text())["vocab_size"]
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    for name in TOKENIZER:
        shutil.copy(QUICKSTART / "base_model" / name, directory / name)
    stops = [2, *range(vocab_size - size.num_stops + 1, vocab_size)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops, "pad_token_id": 0}))
    return directory


def interpreter_on(core: int, python: Path, directory: Path) -> Path:
    """Write a program that runs `python` on one core, as the interpreter of the servers."""
    path = directory / "engine_python"
    path.write_text(f'#!/bin/sh\nexec taskset -c {core} {python.absolute()} "$@"\n')
    path.chmod(0o755)
    return path


@dataclass
class CpuSeconds:
    """CPU seconds of a run's processes by side, summed up over the processes that were seen."""

    root: psutil.Process
    engine_core: int
    _by_process: dict[tuple[bool, int], float] = field(default_factory=dict)

    def read(self) -> tuple[float, float]:
        """Return the seconds of the trainer's and of the engine's processes so far."""
        for process in (self.root, *self.root.children(recursive=True)):
            try:
                is_engine = process.cpu_affinity() == [self.engine_core]
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._by_process[is_engine, process.pid] = times.user + times.system
        sides = {side: sum(s for (one, _), s in self._by_process.items() if one is side) for side in (False, True)}
        return sides[False], sides[True]


@contextmanager
def running(command: Sequence[str], core: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on one core; end it with the context."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60.0)


def settings_of(size: Size, model: Path, reward: Path, python: Path, mode: str) -> list[str]:
    """Return the settings of a run, as arguments of --set."""
    return [
        f'model.path="{model}"',
        f'reward.verifier="{reward}:reward"',
        "reward.overlong_punishment.enabled=false",
        *options.NO_EVALUATION,
        "checkpoint.interval=0",
        f"run.total_steps={size.steps}",
        "parallel.tp_size=1",
        'rollout.engine="sglang"',
        'sglang.placement="disaggregated"',
        'sglang.weight_sync_transport="p2p"',
        f'sglang.python="{python}"',
        f"sglang.max_running_requests={size.slots}",
        "sglang.weight_sync_bucket_mb=8",
        f"rollout.prompts_per_step={size.prompts}",
        f"rollout.group_size={size.group_size}",
        f"rollout.max_response_tokens={size.tokens}",
        "rollout.filter_groups=false",
        f"training.mini_batch_prompts={size.mini_batch}",
        "training.micro_batch_tokens=2048",
        "training.shuffle=false",
        "optimizer.learning_rate=1e-7",
        "telemetry.progress=false",
        "mismatch.step0_max_mean_abs=1e-3",
        *MODES[mode],
    ]


def measure(size: Size, mode: str, cores: tuple[int, int], python: Path, directory: Path) -> dict[str, float]:
    """Train a run of this mode and return the means of its counted steps."""
    model = save_model(directory / "model", size)
    reward = directory / "reward.py"
    reward.write_text(REWARD)
    settings = settings_of(size, model, reward, interpreter_on(cores[1], python, directory), mode)
    run = directory / "run"
    command = [
        *(sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(QUICKSTART / "quickstart.toml")),
        *("--output-dir", str(run), *(part for one in settings for part in ("--set", one))),
    ]
    log = directory / "log"
    marks: list[tuple[float, float, float]] = []  # (time, CPU of both sides): first counted step's begin, then each end
    with running(command, cores[0], log) as process:
        cpu, deadline = CpuSeconds(psutil.Process(process.pid), cores[1]), time.monotonic() + RUN_S
        while len(marks) < size.steps - size.warm + 1:
            if len(rows_of(run)) >= size.warm + len(marks):
                marks.append((time.monotonic(), *cpu.read()))
            if process.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        process.wait(RUN_S)
    rows = rows_of(run)
    if process.returncode or len(rows) < size.steps:
        raise RuntimeError(f"{mode}: the run ended with code {process.returncode}: {log.read_text()[-3000:]}")
    return summary(rows[size.warm :], marks)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics that a run has written."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def summary(rows: Sequence[Mapping[str, float]], marks: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Return means over `rows`; `marks` are times and CPU seconds around them."""
    mean = lambda name: fmean(row[name] for row in rows)  # noqa: E731
    step, wait, sync = mean("time/step"), mean("time/generate"), mean("time/weight_sync")
    (start, *before), (end, *after) = marks[0], marks[-1]
    trainer, engine = ((late - early) / (end - start) for early, late in zip(before, after, strict=True))
    return {
        "step": step,
        "wait": wait,
        "sync": sync,
        "train": step - wait - sync,
        "generated_tokens": mean("throughput/generated_tokens"),
        "staleness": mean("rollout/staleness_mean"),
        "trainer_cpu": trainer,
        "trainer_busy": 1 - mean("async/trainer_idle"),
        "engine_cpu": engine,
        "engine_busy": 1 - mean("async/engine_idle"),
    }


def main() -> None:
    parser = options.parser(__doc__.splitlines()[0], "a small model and few steps")
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES), help="modes to compare with the alternating one")
    parser.add_argument("--steps", type=int, help="train steps of each run")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".venv-sglang/bin/python", help="interpreter with SGLang")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else FULL
    if arguments.steps:
        size = Size(**{**vars(size), "steps": arguments.steps})
    available = sorted(os.sched_getaffinity(0))
    cores = available[0], available[-1]
    modes = [REFERENCE, *(mode for mode in arguments.modes if mode != REFERENCE)]
    if arguments.tiny:
        modes = [REFERENCE, "streamed_1"]
    rows: dict[str, dict[str, float]] = {}
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="overlap-") as directory:
            rows[mode] = measure(size, mode, cores, arguments.engine_python, Path(directory))
        slower = max(rows[REFERENCE]["wait"], rows[REFERENCE]["train"])
        rows[mode]["vs_max"] = rows[mode]["step"] / slower
        rows[mode]["vs_max_and_sync"] = rows[mode]["step"] / (slower + rows[REFERENCE]["sync"])
        print(mode, json.dumps(rows[mode]), file=sys.stderr, flush=True)
    overlapping = [mode for mode in modes if mode != REFERENCE]
    result = {
        "overlap_vs_max": min(rows[mode]["vs_max"] for mode in overlapping) if overlapping else None,
        "load_average": os.getloadavg()[1],
        "cores": len(available),
        "rows": rows,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
