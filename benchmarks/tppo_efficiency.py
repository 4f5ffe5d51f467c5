"""What windows save (T-PPO, arXiv 2506.15050): rollouts that wait for their longest response against windows of it.

    python benchmarks/tppo_efficiency.py [--json]                                 the simulation (b)
    python benchmarks/tppo_efficiency.py --measure-curve embedded|sglang          engine curve, to be stored
    python benchmarks/tppo_efficiency.py --measure-rollout embedded|sglang        rollouts alone on an engine (a)
    python benchmarks/tppo_efficiency.py --train [--output FOLDER] [--json]       both recipes trained here (a)
    python benchmarks/tppo_efficiency.py --runs FULL WINDOWS [--target 0.7]       the same from folders that are there

(b) METHOD. A step generates 512 x 16 responses of up to 24,576 tokens, spread evenly over engines. A decode tick
gives every running response of an engine a token and lasts tau(number running), the engine curve; an engine's step
lasts until its last response is done, the step as long as its slowest engine. Full-synchronous: every response to its
end. Windows: 8,192 responses of which each gets at most 8,192 new tokens, unfinished ones first, fresh ones for those
that ended; the figures are of the steady state (6 steps to get there, 20 counted).

ASSUMPTIONS. (1) Every response has a slot at once. (2) A tick's length depends on the number running, not on their
lengths; reading keys and values of long contexts costs both sides the same for each token and brings the ratio closer
to 1. (3) tau is the measured curve of `results/tppo_engine_curve.json` in units of tau(1), linear between its points
and beyond them. `roofline` is computed, not measured: a 32B model in bf16 on 8 GPUs of 3.35 TB/s, 5 ms a tick for
weights, all-reduces and launches, 0.06 ms more a response for its 6K tokens of keys and values; `flat` is the limit
of engines that a response more costs nothing. (4) Where a response goes on, its context is prefilled again at a tenth
of the decoding cost per token of a full engine (`--prefill-cost`; 0: its keys and values are still there). (5) The
length of a response does not depend on the mode: log-normal, cut at the maximum. DAPO's lengths are of this kind: a
mean of some thousands, a long tail, some percent cut. (6) Training takes a quarter of a full-synchronous step and its
cost is that of the tokens that go through the models: forward 1, forward and backward 3, for policy and critic. With
windows the context of a window goes through policy and critic again; the critic trains on finished responses, all
their tokens. (7) Weight synchronisation, verification and dynamic sampling are left out of both.

KEYS. `speedup` compares seconds a step: full-synchronous / windows, both of 8,192 responses. A window step has fewer tokens, so `speedup_tokens` compares tokens generated
(trained on) per second: the one for equal work. `idle_share`: of all slots over the rollout's time, those without a
response.
`most_responses_an_engine`: how many responses an engine may have at most for `speedup` to reach 2.0 and 2.5.

(a) METHOD, rollouts. One engine generates the simulation's lengths divided by 32, `--most-running` responses
of which every one has a slot: whole, and in windows, each in turn; contexts of windows are prefilled again by the engine. The embedded
engine is timed in CPU seconds, which other programs on the machine do not lengthen.

(a) METHOD, training. The two recipes train one after the other from one pretrained critic: the same model, task and
number of responses a step, the embedded engine, VAPO on whole responses and T-PPO on windows. The clock is that of
training, without pretraining, evaluation and checkpoints; the first step, which warms up, is left out of speeds.
`idle_share` is 1 - new tokens / (responses x the longest one's new tokens), as every response has a slot.
`time_to_accuracy_ratio` is seconds to the target, whole responses / windows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.types import Completion, GenerationRequest, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
CURVES = ROOT / "benchmarks" / "results" / "tppo_engine_curve.json"
QUICKSTART = ROOT / "examples" / "quickstart"
MAX_TOKENS = 24576
WINDOW = 8192
NUM_RESPONSES = 512 * 16
WARMUP_STEPS, COUNTED_STEPS = 6, 20
TRAINING_SHARE = 0.25  # of a full-synchronous step
FORWARD, TRAIN = 1.0, 3.0  # cost of a token in one model

Curve = Sequence[tuple[float, float]]  # (responses running, seconds or relative length of a tick), ascending


# ---- the simulation


@dataclass(frozen=True)
class Tail:
    """Log-normal lengths cut at `longest`; sigma of the logarithm."""

    median: float = 4000.0
    sigma: float = 1.0
    longest: int = MAX_TOKENS

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """[count] int64."""
        spread = torch.randn(count, generator=generator, dtype=torch.float64) * self.sigma
        return (self.median * spread.exp()).round().long().clamp(1, self.longest)

    def describe(self) -> dict[str, float]:
        """Figures of a large sample."""
        lengths = self.draw(200_000, torch.Generator().manual_seed(1)).double()
        return {
            "median": self.median,
            "sigma": self.sigma,
            "mean": float(lengths.mean()),
            "share_over_8192": float((lengths > 8192).double().mean()),
            "share_cut": float((lengths >= self.longest).double().mean()),
        }


@dataclass(frozen=True)
class Setting:
    """One simulated cluster and task."""

    curve: Curve
    tail: Tail = field(default_factory=Tail)
    window: int = WINDOW
    num_responses: int = NUM_RESPONSES
    per_engine: int = 256
    prefill_cost: float = 0.1  # of the decoding cost per token of a full engine
    training_share: float = TRAINING_SHARE

    def __post_init__(self) -> None:
        if self.num_responses % self.per_engine:
            raise ValueError(f"{self.num_responses} responses do not divide over engines of {self.per_engine}")


@dataclass(frozen=True)
class StepCost:
    """One step, in units of tau(1) and of token-forwards."""

    rollout: float
    tokens: int  # generated, and trained by the policy
    work: float  # of training
    idle_share: float


def tick_lengths(curve: Curve, most: int) -> torch.Tensor:
    """[most + 1] tau(0..most), linear between the points of `curve` and beyond the last two; tau(0) = 0."""
    sizes, seconds = (torch.tensor(column, dtype=torch.float64) for column in zip(*curve, strict=True))
    running = torch.arange(1, most + 1, dtype=torch.float64)
    left = (torch.searchsorted(sizes, running, right=True) - 1).clamp(0, len(curve) - 2)
    slope = (seconds[left + 1] - seconds[left]) / (sizes[left + 1] - sizes[left])
    found = seconds[left] + slope * (running - sizes[left])
    return torch.cat([torch.zeros(1, dtype=torch.float64), found])


def engine_times(new_tokens: torch.Tensor, ticks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[engines] how long each runs for responses of `new_tokens` [engines, responses] all begun at once, and the sum
    over its responses of how long each of them ran.
    """
    ordered = new_tokens.sort(dim=1).values.double()
    running = torch.arange(ordered.shape[1], 0, -1)
    seconds = ordered.diff(dim=1, prepend=torch.zeros_like(ordered[:, :1])) * ticks[running]
    return seconds.sum(1), (seconds * running).sum(1)


def rollout_cost(
    new_tokens: torch.Tensor, context: torch.Tensor, setting: Setting, ticks: torch.Tensor
) -> tuple[float, float]:
    """(length, idle share) of a rollout of `new_tokens` [N] behind `context` [N], prefilled where it is not 0."""
    rows = (-1, setting.per_engine)
    seconds, busy = engine_times(new_tokens.view(rows), ticks)
    per_prefilled = setting.prefill_cost * float(ticks[setting.per_engine]) / setting.per_engine
    length = float((seconds + context.view(rows).sum(1) * per_prefilled).max())
    return length, 1 - float(busy.sum()) / (new_tokens.numel() * length)


def synchronous_steps(setting: Setting, generator: torch.Generator) -> list[StepCost]:
    """Steps that generate every response to its end."""
    ticks = tick_lengths(setting.curve, setting.per_engine)
    steps = []
    for _ in range(COUNTED_STEPS):
        lengths = setting.tail.draw(setting.num_responses, generator)
        seconds, idle = rollout_cost(lengths, torch.zeros_like(lengths), setting, ticks)
        tokens = int(lengths.sum())
        steps.append(StepCost(seconds, tokens, 2 * (FORWARD + TRAIN) * tokens, idle))
    return steps


def window_steps(setting: Setting, generator: torch.Generator) -> list[StepCost]:
    """Steps that give every response at most a window."""
    ticks = tick_lengths(setting.curve, setting.per_engine)
    lengths, context = (torch.zeros(0, dtype=torch.int64) for _ in range(2))
    steps = []
    for _ in range(WARMUP_STEPS + COUNTED_STEPS):
        fresh = setting.tail.draw(setting.num_responses - lengths.numel(), generator)
        lengths, context = torch.cat([lengths, fresh]), torch.cat([context, torch.zeros_like(fresh)])
        new_tokens = (lengths - context).clamp(max=setting.window)
        # Engines get unfinished and fresh responses in equal parts.
        order = torch.arange(setting.num_responses).view(setting.per_engine, -1).t().reshape(-1)
        seconds, idle = rollout_cost(new_tokens[order], context[order], setting, ticks)
        reached = context + new_tokens
        finished = reached == lengths
        # Policy: log-probs and training of the window with its context; critic: its values, and finished responses.
        work = (FORWARD + TRAIN + FORWARD) * int(reached.sum()) + TRAIN * int(lengths[finished].sum())
        steps.append(StepCost(seconds, int(new_tokens.sum()), work, idle))
        lengths, context = lengths[~finished], reached[~finished]
    return steps[WARMUP_STEPS:]


def simulate(setting: Setting, seed: int = 0) -> dict[str, float]:
    """Both modes on one setting."""
    full = mean_step(synchronous_steps(setting, torch.Generator().manual_seed(seed)))
    windows = mean_step(window_steps(setting, torch.Generator().manual_seed(seed)))
    per_work = full.rollout * setting.training_share / (1 - setting.training_share) / full.work
    whole = {"full": full.rollout + full.work * per_work, "windows": windows.rollout + windows.work * per_work}
    tokens_ratio = windows.tokens / full.tokens
    return {
        "speedup": full.rollout / windows.rollout,
        "speedup_tokens": full.rollout / windows.rollout * tokens_ratio,
        "speedup_step": whole["full"] / whole["windows"],
        "speedup_step_tokens": whole["full"] / whole["windows"] * tokens_ratio,
        "idle_share_full": full.idle_share,
        "idle_share_windows": windows.idle_share,
        "tokens_a_step_ratio": tokens_ratio,
        "training_work_ratio": windows.work / full.work,
    }


def mean_step(steps: Sequence[StepCost]) -> StepCost:
    count = len(steps)
    return StepCost(
        sum(step.rollout for step in steps) / count,
        sum(step.tokens for step in steps) // count,
        sum(step.work for step in steps) / count,
        sum(step.idle_share for step in steps) / count,
    )


def stored_curves() -> dict[str, Curve]:
    """By name: the measured ones, relative to their first point, and the two that are computed."""
    found: dict[str, Curve] = {}
    if CURVES.is_file():
        for name, entry in json.loads(CURVES.read_text(encoding="utf-8")).items():
            one = entry["points"][0]["seconds_a_tick"]
            found[name] = [(point["running"], point["seconds_a_tick"] / one) for point in entry["points"]]
    found["roofline"] = [(1, 1.0), (512, (5.0 + 0.06 * 512) / 5.06)]
    found["flat"] = [(1, 1.0), (512, 1.0)]
    return found


def most_responses(setting: Setting, goal: float) -> int | None:
    """The largest power of two of responses an engine at which `speedup` reaches `goal`; None: not even at 1."""
    for power in range(9, -1, -1):
        if simulate(replace(setting, per_engine=2**power))["speedup"] >= goal:
            return 2**power
    return None


TAILS = {
    "early in training: median 1,500, sigma 0.9": Tail(1500.0, 0.9),
    "median 4,000, sigma 0.6": Tail(4000.0, 0.6),
    "median 4,000, sigma 1.0": Tail(4000.0, 1.0),
    "late in training: median 8,000, sigma 0.8": Tail(8000.0, 0.8),
}


def simulation(curve_name: str, prefill_cost: float) -> dict[str, Any]:
    """The headline and the table around it."""
    curves = stored_curves()
    if curve_name not in curves:
        raise ValueError(f"no engine curve {curve_name!r}; there are {', '.join(curves)}")
    setting = Setting(curves[curve_name], prefill_cost=prefill_cost)
    variants = {
        "engine curve": {name: replace(setting, curve=curve) for name, curve in curves.items()},
        "responses an engine": {str(n): replace(setting, per_engine=n) for n in (8, 16, 32, 64, 128, 256, 512)},
        "responses an engine, roofline": {
            str(n): replace(setting, curve=curves["roofline"], per_engine=n) for n in (8, 16, 32, 64, 128, 256, 512)
        },
        "window": {str(n): replace(setting, window=n) for n in (2048, 4096, 8192, 12288, 16384)},
        "tail": {name: replace(setting, tail=tail) for name, tail in TAILS.items()},
        "tail, 32 an engine, roofline": {
            name: replace(setting, tail=tail, per_engine=32, curve=curves["roofline"]) for name, tail in TAILS.items()
        },
        "prefill cost": {str(cost): replace(setting, prefill_cost=cost) for cost in (0.0, 0.1, 0.3)},
        "training share": {str(share): replace(setting, training_share=share) for share in (0.1, 0.25, 0.5)},
    }
    return {
        **simulate(setting),
        "curve": curve_name,
        "responses": setting.num_responses,
        "engines": setting.num_responses // setting.per_engine,
        "responses_an_engine": setting.per_engine,
        "window": setting.window,
        "longest": MAX_TOKENS,
        "lengths": setting.tail.describe(),
        "prefill_cost": prefill_cost,
        "training_share": setting.training_share,
        "tails": {name: tail.describe() for name, tail in TAILS.items()},
        "most_responses_an_engine": {
            str(goal): {name: most_responses(replace(setting, curve=curve), goal) for name, curve in curves.items()}
            for goal in (2.0, 2.5)
        },
        "sensitivity": {
            title: {name: simulate(each) for name, each in cases.items()} for title, cases in variants.items()
        },
    }


# ---- the engine curve


def measure_curve(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a tick at 1, 2, 4, ... responses that all run together, the least of the repeats."""
    with ExitStack() as stack:
        measured = ENGINES[kind](arguments, arguments.ticks + 16, stack)
        measured.seconds(_equal_requests(4, 16))
        points = []
        for power in range(int(math.log2(arguments.most_running)) + 1):
            requests = _equal_requests(2**power, arguments.ticks)
            tick = min(measured.seconds(requests)[0] for _ in range(arguments.repeats)) / arguments.ticks
            points.append({"running": 2**power, "seconds_a_tick": tick, "tokens_per_second": 2**power / tick})
    return {"origin": measured.origin, "machine": _machine(), "ticks": arguments.ticks, "points": points}


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine, the clock it is timed by, and what it is."""

    engine: Any
    clock: Callable[[], float]
    origin: str

    def seconds(self, requests: Sequence[GenerationRequest]) -> tuple[float, list[Completion]]:
        """Generate everything."""
        start = self.clock()
        self.engine.submit(requests)
        completions: list[Completion] = []
        while self.engine.num_unfinished:
            completions += self.engine.poll()
        seconds = self.clock() - start
        limits = {request.request_id: request.sampling.max_new_tokens for request in requests}
        assert all(len(done.token_ids) == limits[done.request_id] for done in completions), "a response ended early"
        return seconds, completions


def request_of(name: str, num_tokens: int, prefix: Completion | None = None) -> GenerationRequest:
    """A response of exactly `num_tokens`: there is no stop token."""
    seed = int(name)
    return GenerationRequest(name, (5, 6, 7, 8 + seed % 256), SamplingParams(max_new_tokens=num_tokens), seed, prefix)


def _equal_requests(running: int, ticks: int) -> list[GenerationRequest]:
    return [request_of(str(index), ticks) for index in range(running)]


def _embedded(arguments: argparse.Namespace, max_length: int, stack: ExitStack) -> MeasuredEngine:
    from transformers import AutoModelForCausalLM

    from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings

    torch.set_num_threads(1)
    settings = EmbeddedEngineSettings(max_slots=arguments.most_running, max_length=max_length)
    engine = EmbeddedEngine.from_folder(arguments.model, settings)
    source = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).state_dict()
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(source[name])
    engine.set_policy_version(0)
    origin = (
        f"embedded engine, {arguments.model.name} of {arguments.model.parent.name}, fp32, one CPU thread, CPU seconds"
    )
    return MeasuredEngine(engine, time.process_time, origin)


def _sglang(arguments: argparse.Namespace, max_length: int, stack: ExitStack) -> MeasuredEngine:
    from rollout_throughput import Traffic, start_servers

    vocab_size = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    most = arguments.most_running
    traffic = Traffic(arguments.model, vocab_size, max_length, most, most, ())
    engine = start_servers(traffic, arguments.engine_python, 1, stack)
    origin = f"one SGLang server, {arguments.model.name} of {arguments.model.parent.name}, wall seconds"
    return MeasuredEngine(engine, time.perf_counter, origin)


ENGINES = {"embedded": _embedded, "sglang": _sglang}


# ---- the rollout alone, on an engine

SCALE = 32  # lengths are those of the simulation divided by this
ROLLOUT_BATCHES, ROLLOUT_WARMUP, ROLLOUT_STEPS = 2, 2, 4


def measure_rollout(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Whole responses and windows of one engine's lengths, in turns, and what the simulation says of them."""
    tail, window, count = Tail(4000.0 / SCALE, 1.0, MAX_TOKENS // SCALE), WINDOW // SCALE, arguments.most_running
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        measured = ENGINES[kind](arguments, tail.longest + 16, stack)
        measured.seconds(_equal_requests(4, 16))
        pool = EnginePool(measured, tail, window, count, generator)
        for _ in range(ROLLOUT_WARMUP):
            pool.step()
        whole, windows = [], []
        for number in range(ROLLOUT_STEPS):
            windows.append(pool.step())
            if number < ROLLOUT_BATCHES:
                lengths = tail.draw(count, generator)
                seconds, _ = measured.seconds([request_of(str(i), int(n)) for i, n in enumerate(lengths)])
                whole.append((seconds, int(lengths.sum()), int(lengths.max())))
    return {
        "engine": measured.origin,
        "machine": _machine(),
        "responses": count,
        "window": window,
        "longest": tail.longest,
        "lengths": f"those of the simulation / {SCALE}",
        **compare_rollouts(whole, windows, count),
        "simulated": _predicted(kind, tail, window, count),
    }


class EnginePool:
    """Unfinished responses of an engine that gets a window of each at a step."""

    def __init__(
        self, measured: MeasuredEngine, tail: Tail, window: int, count: int, generator: torch.Generator
    ) -> None:
        self._measured, self._tail, self._window, self._count = measured, tail, window, count
        self._generator = generator
        self._waiting: list[tuple[str, int, Completion | None]] = []  # name, length, what there is of it
        self._num_drawn = 0

    def step(self) -> tuple[float, int, int]:
        """(seconds, new tokens, the longest one's) of one step."""
        fresh = self._tail.draw(self._count - len(self._waiting), self._generator).tolist()
        names = range(self._num_drawn, self._num_drawn + len(fresh))
        self._num_drawn += len(fresh)
        items = [*self._waiting, *((str(name), length, None) for name, length in zip(names, fresh, strict=True))]
        requests, new_tokens = [], []
        for name, length, held in items:
            start = len(held.token_ids) if held else 0
            new_tokens.append(min(length - start, self._window))
            requests.append(request_of(name, start + new_tokens[-1], held))
        seconds, completions = self._measured.seconds(requests)
        lengths = {name: length for name, length, _ in items}
        partial = [done for done in completions if len(done.token_ids) < lengths[done.request_id]]
        self._waiting = [
            (done.request_id, lengths[done.request_id], replace(done, finish_reason="abort")) for done in partial
        ]
        return seconds, sum(new_tokens), max(new_tokens)


def compare_rollouts(
    whole: Sequence[tuple[float, int, int]], windows: Sequence[tuple[float, int, int]], count: int
) -> dict[str, Any]:
    """From (seconds, tokens, longest) of every batch of either mode."""
    per_step, speed, idle = {}, {}, {}
    for name, batches in (("full", whole), ("windows", windows)):
        seconds, tokens, ticks = (sum(column) for column in zip(*batches, strict=True))
        per_step[name], speed[name] = seconds / len(batches), tokens / seconds
        idle[name] = 1 - tokens / (count * ticks)
    return {
        "measured_speedup": per_step["full"] / per_step["windows"],
        "measured_speedup_tokens": speed["windows"] / speed["full"],
        "seconds_a_step": per_step,
        "tokens_per_second": speed,
        "idle_share_of_ticks": idle,
    }


def _predicted(kind: str, tail: Tail, window: int, count: int) -> dict[str, float]:
    curves = stored_curves()
    if kind not in curves:
        return {}
    setting = Setting(curves[kind], tail=tail, window=window, num_responses=count, per_engine=count)
    return {name: figure for name, figure in simulate(setting).items() if name in ("speedup", "speedup_tokens")}


# ---- trained here


def run_command(command: str, recipe: Path, run_folder: Path, overrides: Sequence[str]) -> Path:
    """`megatron-dapo COMMAND` of a recipe; the run folder. RuntimeError with the end of its output where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run_folder.parent.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", command, str(recipe)]
    arguments += ["--run-folder", str(run_folder), *(part for each in overrides for part in ("--set", each))]
    log = run_folder.with_suffix(".log")
    with open(log, "w", encoding="utf-8") as stream:
        code = subprocess.run(
            arguments, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise RuntimeError(
            f"{command} {recipe.name} ended with code {code}; {log} ends:\n{log.read_text('utf-8')[-1500:]}"
        )
    return run_folder


def train(recipes: Sequence[Path], folder: Path, overrides: Sequence[str]) -> list[Path]:
    """Run folders of the recipes, trained one after the other from one pretrained critic."""
    pretrained = run_command("pretrain-value", recipes[0], folder / "value_pretraining", overrides)
    start = [*overrides, f"critic.path={pretrained / 'critic'}"]
    return [run_command("train", recipe, folder / recipe.stem, start) for recipe in recipes]


def run_report(folder: Path, responses_a_step: int, window: int | None) -> dict[str, Any]:
    """A run's speeds and curve of accuracy from its metrics; `window` is None where responses come whole."""
    steps, evaluations = (_read_lines(folder / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    if len(steps) < 2:
        raise ValueError(f"{folder}: metrics.jsonl has {len(steps)} steps, two are needed: is it the folder of a run?")
    ends, generating, training, tokens, trained, idle = [0.0], 0.0, 0.0, 0.0, 0.0, []
    for step in steps:
        ends.append(ends[-1] + step["time/step"] - step["time/evaluate"] - step["time/checkpoint"])
    for step in steps[1:]:
        generating += step["time/generate"]
        training += step["time/train"]
        tokens += step["throughput/generated_tokens"]
        trained += step["actor/trained_tokens"]
        longest = step["rollout/response_tokens_max"]
        longest = longest if window is None else min(longest, window)
        idle.append(1 - step["throughput/generated_tokens"] / (responses_a_step * longest))
    seconds = ends[-1] - ends[1]
    return {
        "train_steps": len(steps),
        "seconds": ends[-1],
        "generated_tokens_per_s": tokens / generating,
        "trained_tokens_per_s": trained / seconds,
        "seconds_a_step": seconds / (len(steps) - 1),
        "seconds_a_rollout": generating / (len(steps) - 1),
        "training_share": training / seconds,
        "idle_share": sum(idle) / len(idle),
        "evaluations": [
            {"train_seconds": ends[min(int(one["train_step"]), len(steps))], "accuracy": one["eval/avg_at_k"]}
            for one in evaluations
        ],
    }


def compare(full: Mapping[str, Any], windows: Mapping[str, Any], target: float) -> dict[str, Any]:
    """The ratios, above 1 where windows are faster."""
    to_target = {name: seconds_to(target, side["evaluations"]) for name, side in (("full", full), ("windows", windows))}
    reached = all(seconds is not None for seconds in to_target.values())
    return {
        "measured_speedup": full["seconds_a_rollout"] / windows["seconds_a_rollout"],
        "measured_speedup_tokens": windows["generated_tokens_per_s"] / full["generated_tokens_per_s"],
        "measured_speedup_step": full["seconds_a_step"] / windows["seconds_a_step"],
        "measured_speedup_step_tokens": windows["trained_tokens_per_s"] / full["trained_tokens_per_s"],
        "idle_share": {"full": full["idle_share"], "windows": windows["idle_share"]},
        "target_accuracy": target,
        "seconds_to_target": to_target,
        "time_to_accuracy_ratio": to_target["full"] / to_target["windows"] if reached else None,
        "full": full,
        "windows": windows,
    }


def seconds_to(target: float, evaluations: Sequence[Mapping[str, float]]) -> float | None:
    """Training seconds at which the accuracy first reaches `target`, on the straight lines between evaluations."""
    for before, after in itertools.pairwise(evaluations):
        if before["accuracy"] < target <= after["accuracy"]:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before["train_seconds"] + share * (after["train_seconds"] - before["train_seconds"])
    return None


def compare_runs(full: Path, windows: Path, target: float) -> dict[str, Any]:
    """Of two run folders, each with the configuration it ran under."""
    configs = [json.loads((folder / "config.json").read_text("utf-8"))["config"] for folder in (full, windows)]
    sizes = [config["rollout"]["prompts_per_step"] * config["rollout"]["group_size"] for config in configs]
    window = configs[1]["window"]["tokens"]
    return compare(run_report(full, sizes[0], None), run_report(windows, sizes[1], window), target)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--curve", default="embedded", help="engine curve of the headline")
    parser.add_argument("--prefill-cost", type=float, default=0.1)
    parser.add_argument("--measure-curve", choices=list(ENGINES))
    parser.add_argument("--measure-rollout", choices=list(ENGINES))
    parser.add_argument("--model", type=Path, default=QUICKSTART / "base_model", help="of the curve")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".venv-sglang/bin/python")
    parser.add_argument("--most-running", type=int, default=256)
    parser.add_argument("--ticks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="train both recipes here and compare")
    parser.add_argument("--runs", type=Path, nargs=2, metavar=("FULL", "WINDOWS"), help="run folders to compare")
    parser.add_argument("--full-recipe", type=Path, default=QUICKSTART / "quickstart_vapo.toml")
    parser.add_argument("--windows-recipe", type=Path, default=QUICKSTART / "quickstart_tppo.toml")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="a.b=value", help="both recipes"
    )
    parser.add_argument("--target", type=float, default=0.7, help="held-out avg@k to reach")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: a temporary one")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure_curve:
        curve = measure_curve(arguments.measure_curve, arguments)
        print(json.dumps({arguments.measure_curve: curve}, indent=2))
        return
    if arguments.measure_rollout:
        rollout = measure_rollout(arguments.measure_rollout, arguments)
        print(json.dumps({"benchmark": "tppo_efficiency", **rollout}, indent=2))
        return
    if arguments.runs or arguments.train:
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.output or Path(temporary)
            recipes = (arguments.full_recipe, arguments.windows_recipe)
            folders = arguments.runs or train(recipes, folder, arguments.overrides)
            result = compare_runs(*folders, arguments.target)
        print(json.dumps({"benchmark": "tppo_efficiency", **result}, indent=2))
        return
    result = {"benchmark": "tppo_efficiency", **simulation(arguments.curve, arguments.prefill_cost)}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print_tables(result)


def print_tables(result: Mapping[str, Any]) -> None:
    """Markdown."""
    columns = ("speedup", "speedup_tokens", "speedup_step", "speedup_step_tokens")
    print(
        f"curve {result['curve']}, {result['engines']} engines of {result['responses_an_engine']} responses: ", end=""
    )
    print(", ".join(f"{name} {result[name]:.2f}" for name in columns))
    for title, cases in result["sensitivity"].items():
        print(f"\n| {title} | rollout, a step | rollout, a token | step | step, a token | idle, full | idle, windows |")
        print("|---|---|---|---|---|---|---|")
        for name, row in cases.items():
            figures = [f"{row[column]:.2f}" for column in columns]
            idle = [f"{row[f'idle_share_{mode}']:.0%}" for mode in ("full", "windows")]
            print(f"| {name} | {' | '.join(figures + idle)} |")


if __name__ == "__main__":
    main()
