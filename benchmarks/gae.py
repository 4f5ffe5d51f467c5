"""Advantages of a whole rollout batch: seconds against one pass over the same memory and against loops over tokens.

    python benchmarks/gae.py [--json] [--tiny] [--responses 8192] [--repeats 7]

METHOD. Lengths are log-normal (median 5,000, sigma 0.8), cut at 20,480 tokens (DAPO's hard maximum), as in long
reasoning: few short ones, a heavy tail, 4 % at the limit. Values are random, the reward is on the last token, lambda
is VAPO's for each response's length; float32, one thread. `gae` computes advantages and returns of finished responses,
`egae` of windows of which half are unfinished, `decoupled` advantages with one lambda and returns with another (two
recurrences); `gaps` is `gae` with a tenth of the tokens masked.

The pass reads what they read (values, rewards, mask) and writes what they write (advantages, returns): two plain
torch operations into memory fresh from the system, as in every call; `warm_pass` writes into memory that is already
mapped, and `vs_warm_pass` compares with it. The sides take turns; figures are the least of the repeats, as other
programs on the machine only add to them. `vs_pass` is the larger of gae's and egae's.

`loop` runs over the tokens of each response in Python numbers, on a sample of the responses, and is scaled by tokens;
`column_loop` runs over the columns of the padded batch [responses, 20480], one vector operation per time step, as
trainers on padded batches do: on its last 1,024 columns, and scaled to all. Both are checked to give the advantages of
`gae`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import options
import torch

from megatron_dapo.algorithms.egae import extended_estimates
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from megatron_dapo.algorithms.length_adaptive_lambda import LengthAdaptiveLambda
from megatron_dapo.algorithms.token_rewards import outcome_rewards

MAX_LENGTH = 20480
MEDIAN_LENGTH, SIGMA = 5000.0, 0.8
SAMPLE = 64  # responses in the loop over tokens
SAMPLE_COLUMNS = 1024
GAMMA = 1.0


def draw_lengths(num_responses: int, generator: torch.Generator) -> torch.Tensor:
    """[num_responses] int64, log-normal and cut at MAX_LENGTH."""
    spread = torch.randn(num_responses, generator=generator, dtype=torch.float64) * SIGMA
    return (MEDIAN_LENGTH * spread.exp()).round().long().clamp(1, MAX_LENGTH)


def draw_inputs(num_responses: int) -> ValueInputs:
    generator = torch.Generator().manual_seed(0)
    lengths = draw_lengths(num_responses, generator)
    num_tokens = int(lengths.sum())
    mask = torch.ones(num_tokens)
    outcomes = torch.where(torch.rand(num_responses, generator=generator) < 0.5, 1.0, -1.0)
    values = torch.rand(num_tokens, generator=generator)
    return ValueInputs(values, outcome_rewards(outcomes, mask, lengths), mask, lengths, torch.zeros(num_responses))


def with_gaps(inputs: ValueInputs) -> ValueInputs:
    """Return a mask that leaves out a tenth of the tokens in runs of 50."""
    place = torch.arange(inputs.values.numel(), dtype=torch.int32)
    return replace(inputs, loss_mask=(place.remainder(500) >= 50).float())


def one_pass(inputs: ValueInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Read every input once and write every output once."""
    return inputs.values + inputs.rewards, inputs.loss_mask * 0.5


def loop_over_tokens(
    values: torch.Tensor, rewards: torch.Tensor, lengths: torch.Tensor, lambdas: torch.Tensor
) -> list[float]:
    """Advantages of finished responses, token by token."""
    advantages: list[float] = []
    pairs = zip(values.split(lengths.tolist()), rewards.split(lengths.tolist()), lambdas.tolist(), strict=True)
    for value, reward, decay in pairs:
        following = carried = 0.0
        found = []
        for v, r in zip(reversed(value.tolist()), reversed(reward.tolist()), strict=True):
            carried = r + GAMMA * following - v + GAMMA * decay * carried
            following = v
            found.append(carried)
        advantages += reversed(found)
    return advantages


def loop_over_columns(
    values: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, lambdas: torch.Tensor
) -> torch.Tensor:
    """Return the advantages [responses, columns] of a right-padded batch."""
    advantages = torch.empty_like(values)
    following, carried = torch.zeros_like(lambdas), torch.zeros_like(lambdas)
    for column in range(values.shape[1] - 1, -1, -1):
        here = mask[:, column]
        delta = rewards[:, column] + GAMMA * following - values[:, column]
        carried = here * (delta + GAMMA * lambdas * carried)
        following = torch.where(here > 0, values[:, column], following)
        advantages[:, column] = carried
    return advantages


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_loop(inputs: ValueInputs, lambdas: torch.Tensor) -> dict[str, float]:
    """Seconds of the loop over tokens, for all tokens."""
    lengths = inputs.lengths[:SAMPLE]
    sample = slice(int(lengths.sum()))
    values, rewards = inputs.values[sample], inputs.rewards[sample]
    start = time.perf_counter()
    advantages = loop_over_tokens(values, rewards, lengths, lambdas[:SAMPLE])
    seconds = time.perf_counter() - start
    found = estimate_values(inputs, GAMMA, lambdas).advantages[sample]
    # The loop computes in Python's doubles, the estimator in float32.
    torch.testing.assert_close(found, torch.tensor(advantages), rtol=1e-3, atol=1e-4)
    # Every token costs the loop the same: the sample stands for all.
    return {"seconds": seconds / sample.stop * inputs.values.numel(), "measured_tokens": sample.stop}


def measure_column_loop(inputs: ValueInputs, lambdas: torch.Tensor) -> dict[str, float]:
    """Seconds of the loop over columns, for all columns: the responses end in the measured ones."""
    num_responses = inputs.lengths.numel()
    lengths = inputs.lengths.remainder(SAMPLE_COLUMNS) + 1
    num_tokens = int(lengths.sum())
    mask = (torch.arange(SAMPLE_COLUMNS) < lengths[:, None]).float()
    packed = ValueInputs(
        inputs.values[:num_tokens],
        outcome_rewards(torch.ones(num_responses), torch.ones(num_tokens), lengths),
        torch.ones(num_tokens),
        lengths,
        torch.zeros(num_responses),
    )
    padded = [torch.zeros_like(mask).masked_scatter_(mask > 0, each) for each in (packed.values, packed.rewards)]
    start = time.perf_counter()
    advantages = loop_over_columns(*padded, mask, lambdas.float())
    seconds = time.perf_counter() - start
    found = estimate_values(packed, GAMMA, lambdas).advantages
    torch.testing.assert_close(found, advantages[mask > 0], rtol=1e-3, atol=1e-4)
    return {"seconds": seconds * MAX_LENGTH / SAMPLE_COLUMNS, "measured_columns": SAMPLE_COLUMNS}


def measure(num_responses: int, repeats: int) -> dict[str, Any]:
    inputs = draw_inputs(num_responses)
    is_unfinished = torch.arange(num_responses) % 2 == 0
    lambdas = LengthAdaptiveLambda()(inputs.lengths, ~is_unfinished)
    gaps = with_gaps(inputs)
    buffers = torch.empty_like(inputs.values), torch.empty_like(inputs.values)
    tokens = (inputs.values, inputs.rewards, inputs.loss_mask, inputs.lengths)
    sides: dict[str, Callable[[], Any]] = {
        "pass": lambda: one_pass(inputs),
        # Into memory that exists already, so without the page faults of fresh outputs.
        "warm_pass": lambda: (
            torch.add(inputs.values, inputs.rewards, out=buffers[0]),
            torch.mul(inputs.loss_mask, 0.5, out=buffers[1]),
        ),
        "gae": lambda: estimate_values(inputs, GAMMA, lambdas),
        "egae": lambda: extended_estimates(*tokens, ~is_unfinished, GAMMA, lambdas),
        "decoupled": lambda: (estimate_values(inputs, GAMMA, lambdas), estimate_values(inputs, GAMMA, 1.0)),
        "gaps": lambda: estimate_values(gaps, GAMMA, lambdas),
    }
    # Sides take turns and the least of their rounds counts, as other programs only add to a time.
    rounds = [{name: timed(run) for name, run in sides.items()} for _ in range(repeats)]
    seconds = {name: min(each[name] for each in rounds) for name in sides}
    return summary(
        inputs.lengths, seconds, measure_loop(inputs, lambdas), measure_column_loop(inputs, lambdas), repeats
    )


def summary(
    lengths: torch.Tensor,
    seconds: dict[str, float],
    loop: dict[str, float],
    column_loop: dict[str, float],
    repeats: int,
) -> dict[str, Any]:
    estimators = [name for name in seconds if not name.endswith("pass")]
    vs_pass = {name: seconds[name] / seconds["pass"] for name in estimators}
    slowest = max(seconds["gae"], seconds["egae"])
    return {
        "benchmark": "gae",
        "vs_pass": max(vs_pass["gae"], vs_pass["egae"]),
        "vs_loop": loop["seconds"] / slowest,
        "vs_column_loop": column_loop["seconds"] / slowest,
        "vs_pass_of": vs_pass,
        "vs_warm_pass": slowest / seconds["warm_pass"],
        "seconds": seconds,
        "loop": loop,
        "column_loop": column_loop,
        "num_responses": lengths.numel(),
        "num_tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "share_at_the_limit": float((lengths == MAX_LENGTH).double().mean()),
        "nanoseconds_per_token": {name: seconds[name] / int(lengths.sum()) * 1e9 for name in estimators},
        "repeats": repeats,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
    }


def main() -> None:
    parser = options.parser(__doc__, "64 responses, once")
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.responses, arguments.repeats = 64, 1
    torch.set_num_threads(1)
    result = measure(arguments.responses, arguments.repeats)
    options.show(result, arguments)


if __name__ == "__main__":
    main()
