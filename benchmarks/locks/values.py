"""1. Values and advantages that a network learns, compared with the dynamic programme's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from locks import language
from locks.language import Locks, Responses
from locks.networks import ValueNetwork, update_critic
from torch import nn

from megatron_dapo.algorithms.explained_variance import explained_variance, explained_variance_sums
from megatron_dapo.algorithms.gae import estimate_values
from megatron_dapo.algorithms.length_adaptive_lambda import FixedLambda, LambdaRule, LengthAdaptiveLambda


def value_errors(values: torch.Tensor, locks: Locks, policy: torch.Tensor) -> dict[str, float]:
    """Compare `values` [prompts, stages + 1, tokens] with the dynamic programme's."""
    exact, _ = locks.solve(policy)
    visits = locks.visits(policy)
    error = (values.double() - exact).abs()
    often = visits * language.NUM_PROMPTS >= 1e-2
    return {
        "mean_error": float((error * visits).sum() / visits.sum()),
        "largest_error": float(error[often].max()),
        "states": int(often.sum()),
    }


def of_values(responses: Responses, values: torch.Tensor) -> dict[str, float]:
    """Return the explained variance of `values` [M] for each part of the response."""
    returns = estimate_values(responses.inputs(values), 1.0, 1.0).returns
    mask = torch.ones_like(values)
    return explained_variance(explained_variance_sums(values, returns, mask, responses.lengths))


NUM_BLOCKS = 40
BATCH, HELD_OUT = 2048, 60_000  # responses per step of the critic, and per comparison of advantages
LAMBDAS: dict[str, LambdaRule] = {
    "0.5": FixedLambda(0.5),
    "0.95": FixedLambda(0.95),
    "1.0": FixedLambda(1.0),
    "length_adaptive": LengthAdaptiveLambda(0.5),
}


def advantage_errors(
    locks: Locks, policy: torch.Tensor, values: torch.Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """Advantages from `values` (a table) against Q - V of the dynamic programme."""
    exact, action_values = locks.solve(policy)
    responses = sample_many(locks, policy, HELD_OUT, generator)
    true = (action_values - exact[..., None])[
        responses.state_prompt, responses.state_stage, responses.state_time, responses.tokens
    ]
    at_zero = estimate_values(responses.inputs(responses.of(values).double()), 1.0, 0.0).advantages
    error = (at_zero - true).abs()
    report: dict[str, Any] = {"lambda_0": {"mean_error": float(error.mean()), "spread": float(true.std())}}
    for name, rule in LAMBDAS.items():
        report[f"lambda_{name}"] = {
            "from_learned_values": deviation(locks, responses, values.double(), true, rule),
            "from_exact_values": deviation(locks, responses, exact, true, rule),
        }
    return report


def deviation(
    locks: Locks, responses: Responses, values: torch.Tensor, true: torch.Tensor, rule: LambdaRule
) -> dict[str, float]:
    """Compare mean advantages with the true ones for each kind of (state, token), see `kinds`.

    The standard error is from the means of NUM_BLOCKS blocks of responses: tokens of one response share its outcome.
    """
    lambdas = rule(responses.lengths, torch.ones_like(responses.lengths, dtype=torch.bool))
    found = estimate_values(responses.inputs(responses.of(values)), 1.0, lambdas).advantages
    kind = kinds(locks, responses)
    block = (torch.arange(len(responses.lengths)) % NUM_BLOCKS).repeat_interleave(responses.lengths)
    shape = (int(kind.max()) + 1, NUM_BLOCKS)
    cell = kind * NUM_BLOCKS + block
    count, sums = (
        torch.zeros(shape, dtype=torch.float64).view(-1).index_add_(0, cell, each).view(shape)
        for each in (torch.ones_like(found), found - true)
    )
    enough = count.min(1).values >= 10  # too few in a block give no standard error
    count, sums = count[enough], sums[enough]
    mean = sums.sum(1) / count.sum(1)
    standard_error = (sums / count).std(1) / NUM_BLOCKS**0.5
    chance = standard_error > 1e-9  # no chance is left once the outcome is certain
    weight = count.sum(1) / count.sum()
    return {
        "bias": float((mean.abs() * weight).sum()),
        "in_standard_errors": float((mean[chance] / standard_error[chance]).square().mean().sqrt()),
        "kinds": len(mean),
    }


def kinds(locks: Locks, responses: Responses) -> torch.Tensor:
    """[M] which tokens are alike: the stage; the letter that opens it, another one, or the end; the time's eighth."""
    opens = responses.tokens == locks.keys[responses.state_prompt, responses.state_stage]
    token = torch.where(responses.tokens == language.END, 2, opens.long())
    return (responses.state_stage * 3 + token) * 8 + responses.state_time * 8 // language.MAX_TOKENS


def sample_many(locks: Locks, policy: torch.Tensor, count: int, generator: torch.Generator) -> Responses:
    return locks.sample(policy, torch.randint(language.NUM_PROMPTS, (count,), generator=generator), generator)


def fixed_policy(locks: Locks) -> torch.Tensor:
    """A half-trained policy, unlike on every prompt: it often ends early, and is right nearly half the time."""
    generator = torch.Generator().manual_seed(5)
    logits = (
        torch.randn(language.NUM_PROMPTS, language.NUM_STAGES + 1, language.NUM_LETTERS + 1, generator=generator) * 0.5
    )
    opens = nn.functional.one_hot(locks.keys[:, : language.NUM_STAGES], language.NUM_LETTERS + 1).bool()
    logits[:, : language.NUM_STAGES][opens] += 1.0
    logits[:, : language.NUM_STAGES, language.END] -= 1.0
    return logits.softmax(-1)


def learn_values(locks: Locks, policy: torch.Tensor, loss_name: str, seed: int, num_steps: int) -> dict[str, Any]:
    """The value network trained on Monte-Carlo returns of the fixed policy."""
    generator = torch.Generator().manual_seed(seed)
    critic = ValueNetwork(seed)
    optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    errors = {0: value_errors(critic.table(), locks, policy)}
    for step in range(1, num_steps + 1):
        responses = sample_many(locks, policy, BATCH, generator)
        with torch.no_grad():
            values = critic.of(responses)
        returns = estimate_values(responses.inputs(values), 1.0, 1.0).returns
        update_critic(critic, optimizer, responses, returns, values, loss_name)
        schedule.step()
        if step in (num_steps // 5, num_steps):
            errors[step] = value_errors(critic.table(), locks, policy)
    held_out = sample_many(locks, policy, HELD_OUT // 3, generator)
    table = critic.table()
    return {
        "errors_by_step": {str(step): error for step, error in errors.items()},
        "explained_variance": of_values(held_out, held_out.of(table)),
        "explained_variance_of_exact_values": of_values(held_out, held_out.of(locks.solve(policy)[0])),
        "advantages": advantage_errors(locks, policy, table, generator),
    }


def check_values(seeds: Sequence[int], num_steps: int = 500) -> dict[str, Any]:
    locks = Locks(0)
    policy = fixed_policy(locks)
    values, _ = locks.solve(policy)
    return {
        "accuracy_of_the_policy": locks.accuracy(policy),
        "spread_of_the_values": float(values[:, :, 0].std()),
        "squared": {str(seed): learn_values(locks, policy, "squared", seed, num_steps) for seed in seeds},
        "clipped": {str(seeds[0]): learn_values(locks, policy, "clipped", seeds[0], num_steps)},
    }
