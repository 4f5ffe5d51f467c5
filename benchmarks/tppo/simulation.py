"""Simulated rollouts of many engines: every response to its end, or a window of each. The assumptions are in the head of
`tppo_efficiency.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from tppo.engines import Curve, Roofline, stored_curves, tick_lengths

MAX_TOKENS = 24576
WINDOW = 8192
NUM_RESPONSES = 512 * 16
WARMUP_STEPS, COUNTED_STEPS = 6, 20
TRAINING_SHARE = 0.25  # share of a full-synchronous step
FORWARD, TRAIN = 1.0, 3.0  # cost of a token in one model
GOAL = 2.5


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
    per_engine: int = 16
    prefill_cost: float = 0.1  # relative to the decoding cost per token of a full engine
    context_cost: float = 0.0  # ticks per token of context that is read; 0: part of the curve
    training_share: float = TRAINING_SHARE

    def __post_init__(self) -> None:
        if self.num_responses % self.per_engine:
            raise ValueError(f"{self.num_responses} responses do not divide over engines of {self.per_engine}")


@dataclass(frozen=True)
class StepCost:
    """One step, in units of tau(1) and of token-forwards."""

    rollout: float
    tokens: int  # generated, and trained by the policy
    work: float  # training work
    idle_share: float
    again: float = 0.0  # prefill of unfinished responses after a weight update during the rollout


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
    """(length, idle share) of a rollout of `new_tokens` [N] after `context` [N], which is prefilled if it is not 0.

    A response of n new tokens after c reads c n + n (n - 1) / 2 tokens of context; reading adds to ticks, so that its
    sum over an engine's responses is all that counts.
    """
    rows = (-1, setting.per_engine)
    seconds, busy = engine_times(new_tokens.view(rows), ticks)
    per_prefilled = setting.prefill_cost * float(ticks[setting.per_engine]) / setting.per_engine
    begun, new = context.view(rows).double(), new_tokens.view(rows).double()
    reading = (begun * new + new * (new - 1) / 2).sum(1) * setting.context_cost
    length = float((seconds + reading + begun.sum(1) * per_prefilled).max())
    # Reading stretches ticks; while contexts are prefilled, nothing is generated.
    occupied = float((busy * (1 + reading / seconds)).sum())
    return length, 1 - occupied / (new_tokens.numel() * length)


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


def window_rollouts(
    setting: Setting, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(whole lengths, context, new tokens), each [N], of the counted steps that give every response at most a window."""
    lengths, context = (torch.zeros(0, dtype=torch.int64) for _ in range(2))
    for step in range(WARMUP_STEPS + COUNTED_STEPS):
        fresh = setting.tail.draw(setting.num_responses - lengths.numel(), generator)
        lengths, context = torch.cat([lengths, fresh]), torch.cat([context, torch.zeros_like(fresh)])
        new_tokens = (lengths - context).clamp(max=setting.window)
        if step >= WARMUP_STEPS:
            # Engines get unfinished and fresh responses in equal parts.
            order = torch.arange(setting.num_responses).view(setting.per_engine, -1).t().reshape(-1)
            yield lengths[order], context[order], new_tokens[order]
        reached = context + new_tokens
        lengths, context = lengths[reached < lengths], reached[reached < lengths]


def window_steps(setting: Setting, generator: torch.Generator) -> list[StepCost]:
    """Steps that give every response at most a window."""
    ticks = tick_lengths(setting.curve, setting.per_engine)
    steps = []
    for lengths, context, new_tokens in window_rollouts(setting, generator):
        seconds, idle = rollout_cost(new_tokens, context, setting, ticks)
        reached = context + new_tokens
        # Policy: log-probs and training of the window with its context; critic: its values, and finished responses.
        work = (FORWARD + TRAIN + FORWARD) * int(reached.sum()) + TRAIN * int(lengths[reached == lengths].sum())
        steps.append(StepCost(seconds, int(new_tokens.sum()), work, idle, _prefill(reached, setting, ticks)))
    return steps


def _prefill(contexts: torch.Tensor, setting: Setting, ticks: torch.Tensor) -> float:
    """Return how long the fullest engine computes `contexts` [N]."""
    tokens = contexts.view(-1, setting.per_engine).sum(1).max()
    return float(tokens) * setting.prefill_cost * float(ticks[setting.per_engine]) / setting.per_engine


def overlapping_step(steps: Sequence[StepCost], per_work: float) -> float:
    """Return the mean length of a step whose windows are generated while the windows before are trained.

    Both begin together, with the weights of the step before. If the windows take longer, the new weights stop them: their
    contexts, as long as at their ends, are computed again.
    """
    lengths = []
    for trained, generated in pairwise(steps):
        training = trained.work * per_work
        lengths.append(training if training >= generated.rollout else generated.rollout + generated.again)
    return sum(lengths) / len(lengths)


def rollouts(setting: Setting, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(new tokens, context), each [N], of rollouts of both modes."""
    whole = setting.tail.draw(setting.num_responses, torch.Generator().manual_seed(seed))
    yield whole, torch.zeros_like(whole)
    for _, context, new_tokens in window_rollouts(setting, torch.Generator().manual_seed(seed)):
        yield new_tokens, context


def simulate(setting: Setting, seed: int = 0) -> dict[str, float]:
    """Both modes on one setting."""
    full = mean_step(synchronous_steps(setting, torch.Generator().manual_seed(seed)))
    steps = window_steps(setting, torch.Generator().manual_seed(seed))
    windows = mean_step(steps)
    per_work = full.rollout * setting.training_share / (1 - setting.training_share) / full.work
    whole = {"full": full.rollout + full.work * per_work, "windows": windows.rollout + windows.work * per_work}
    tokens_ratio, overlapping = windows.tokens / full.tokens, overlapping_step(steps, per_work)
    return {
        "speedup": full.rollout / windows.rollout,
        "speedup_tokens": full.rollout / windows.rollout * tokens_ratio,
        "speedup_step": whole["full"] / whole["windows"],
        "speedup_step_tokens": whole["full"] / whole["windows"] * tokens_ratio,
        "speedup_step_overlapping": whole["full"] / overlapping,
        "speedup_step_tokens_overlapping": whole["full"] / overlapping * tokens_ratio,
        "idle_share_full": full.idle_share,
        "idle_share_windows": windows.idle_share,
        "tokens_a_step_ratio": tokens_ratio,
        "training_work_ratio": windows.work / full.work,
    }


def busy_speedup(setting: Setting, seed: int = 0) -> float:
    """Tokens per second of engines whose slots are never without a response, against full-synchronous steps: what no
    schedule of the same responses over the same engines can exceed, whatever it does with the tail.
    """
    full = mean_step(synchronous_steps(setting, torch.Generator().manual_seed(seed)))
    lengths = setting.tail.draw(200_000, torch.Generator().manual_seed(seed + 1)).double()
    context = float((lengths * (lengths - 1) / 2).sum() / lengths.sum())  # mean context of a token
    tick = (
        float(tick_lengths(setting.curve, setting.per_engine)[-1]) + setting.per_engine * context * setting.context_cost
    )
    engines = setting.num_responses // setting.per_engine
    return engines * setting.per_engine / tick / (full.tokens / full.rollout)


def mean_step(steps: Sequence[StepCost]) -> StepCost:
    count = len(steps)
    return StepCost(
        sum(step.rollout for step in steps) / count,
        sum(step.tokens for step in steps) // count,
        sum(step.work for step in steps) / count,
        sum(step.idle_share for step in steps) / count,
    )


def on_curve(setting: Setting, name: str) -> Setting:
    """`setting` with the engine of that name. ValueError if there is none."""
    curves = stored_curves()
    if name not in curves:
        raise ValueError(f"no engine curve {name!r}; there are {', '.join(curves)}")
    cost = Roofline().context_cost if name == "roofline" else 0.0
    return replace(setting, curve=curves[name], context_cost=cost)


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


def variants(setting: Setting) -> dict[str, dict[str, Setting]]:
    """Return title -> name -> variation of `setting`."""
    roofline = on_curve(setting, "roofline")
    published = on_curve(setting, "published")
    sizes = (8, 16, 32, 64, 128, 256, 512)
    return {
        "engine curve": {name: on_curve(setting, name) for name in stored_curves()},
        "engine curve, 256 responses an engine": {
            name: replace(on_curve(setting, name), per_engine=256) for name in stored_curves()
        },
        "responses an engine": {str(n): replace(setting, per_engine=n) for n in sizes},
        "responses an engine of 8 GPUs, roofline": {str(n): replace(roofline, per_engine=n) for n in sizes},
        "responses an engine of 2 H100, published ticks": {str(n): replace(published, per_engine=n) for n in sizes[:4]},
        "window": {str(n): replace(setting, window=n) for n in (2048, 4096, 8192, 12288, 16384)},
        "tail": {name: replace(setting, tail=tail) for name, tail in TAILS.items()},
        "tail, roofline": {name: replace(roofline, tail=tail) for name, tail in TAILS.items()},
        "prefill cost": {str(cost): replace(setting, prefill_cost=cost) for cost in (0.0, 0.1, 0.3)},
        "training share": {str(share): replace(setting, training_share=share) for share in (0.1, 0.25, 0.5)},
    }


ASSUMPTIONS = {
    "goal": "2.5 in the paper is training time to the same score (60 % less of it, caption of figure 1): seconds a step times "
    "steps. Only seconds a step are simulated; steps_ratio_for_goal is how many times fewer steps would be left to do it",
    "a step": "512 x 16 responses: whole ones full-synchronous, one window of each with windows",
    "slots": "every response has a slot of an engine at once; nothing waits for memory (clusters: is_room_enough)",
    "engines": "not public of the paper, and what decides: windows save the more the fewer responses an engine has. The "
    "headline has 16 an engine, where a tick of the engine measured here is 1.7 times that of one response, as it is with some "
    "32 on two H100: 512 GPUs. `responses an engine` and `clusters` have the others; 256 an engine of 8 are 256 GPUs",
    "lengths": "log-normal cut at 24,576, the same for both modes; the paper's are not public in figures",
    "tick": "depends on the number of responses running; reading contexts is added for the roofline alone",
    "roofline": "32.8B parameters in bf16 on 8 GPUs of 78 % of 3.35 TB/s and 60 % of 989 TFLOP/s, 2.5 ms overhead; "
    "computed. The 78 % make it agree within a seventh with the published ticks of a 32B on two H100",
    "published": "median inter-token latency of Qwen3-32B on two H100 by batch size, by the ML.ENERGY leaderboard: not ours",
    "refill": "slots that become free within a step stay empty until the next one, in both modes",
    "context": "of a continued response is prefilled at a tenth of the decoding cost per token",
    "training": "a quarter of a full-synchronous step; forward 1, forward and backward 3 a token and model; the policy's "
    "window is trained behind its context, the critic on finished responses",
    "overlapping": "rollout.max_staleness = 1, engines and trainer with their own GPUs: while one step's windows are trained, the "
    "next step's are generated. The others take turns on as many GPUs of each kind",
    "left out": "weight synchronization, verification, dynamic sampling, in both modes",
}


def headline(curve_name: str, prefill_cost: float, per_engine: int) -> Setting:
    """The paper's batch, length and window on engines of a named curve. ValueError for what does not divide."""
    return on_curve(Setting(stored_curves()["flat"], prefill_cost=prefill_cost, per_engine=per_engine), curve_name)


def simulation(curve_name: str, prefill_cost: float, per_engine: int) -> dict[str, Any]:
    """The headline, the table around it, and what was assumed."""
    base = headline(curve_name, prefill_cost, per_engine)
    found = simulate(base)
    curves = stored_curves()
    return {
        **found,
        "goal": GOAL,
        "is_goal_reached": found["speedup"] >= GOAL,
        "steps_ratio_for_goal": GOAL / found["speedup_step"],
        "curve": curve_name,
        "responses": base.num_responses,
        "engines": base.num_responses // base.per_engine,
        "responses_an_engine": base.per_engine,
        "window": base.window,
        "longest": MAX_TOKENS,
        "lengths": base.tail.describe(),
        "prefill_cost": prefill_cost,
        "training_share": base.training_share,
        "assumptions": ASSUMPTIONS,
        "tails": {name: tail.describe() for name, tail in TAILS.items()},
        "speedup_tokens_of_slots_never_idle": {name: busy_speedup(on_curve(base, name)) for name in curves},
        "most_responses_an_engine": {
            str(goal): {name: most_responses(on_curve(base, name), goal) for name in curves} for goal in (2.0, GOAL)
        },
        "sensitivity": {
            title: {name: simulate(each) for name, each in cases.items()} for title, cases in variants(base).items()
        },
    }
