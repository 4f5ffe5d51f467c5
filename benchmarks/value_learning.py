"""Does the value path learn what it should? A language whose values, advantages and optimum are known exactly.

    python benchmarks/value_learning.py [--json] [--part values|megatron|ablation] [--seeds 3] [--steps 40]

THE LANGUAGE. A prompt is a lock with a secret key of 6 letters out of 6. A response is letters and an end token, 64
tokens at most. The next letter of the key opens one stage, another letter does nothing, the end token ends. It is
correct (+1) if all stages are open at its end, else wrong (-1), also if it is cut. The best policy is always right.
The state behind a prefix is (prompt, stages open, tokens), so under any policy the values V, the action values Q and
the probability of a correct response come out of dynamic programming, without sampling.

1. VALUES. A fixed policy; a small network learns from sampled Monte-Carlo returns with the project's value loss.
   Against V of the dynamic programme: the mean error over visits, and the largest one over the states that at least
   one response in a hundred to their prompt visits. Advantages by the project's estimators from the learned values
   against Q - V: at lambda 0 token by token, where no chance is left in them; at others their mean over tokens that
   are alike, in units of its standard error (1: only chance is left), from the learned and from the exact values.
2. MEGATRON. The same values from `MegatronCritic`, two layers that read the tokens themselves (TP1, fp32).
3. ABLATION. PPO with every part of VAPO, and with one part removed, from the same start; accuracy is exact, not
   sampled. `learning` is its mean over all steps, `final` that of the last fifth. A part counts as shown where
   without it learning is lower with every seed. All losses, weights and estimators are the project's own functions.

Where the small task differs from the paper (arXiv 2504.05118): responses have 8 to 36 tokens and not thousands, so
alpha of the length-adaptive lambda is 0.5 and not 0.05 (at 40 tokens it gives the 0.95 that the paper's gives at
400), and everything that long responses do to PPO is weak here. Without pretraining, the critic starts where a reward
model does that has learned the ends of responses alone.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_dapo.algorithms.aggregation import global_denominators, sample_token_weights
from megatron_dapo.algorithms.explained_variance import explained_variance, explained_variance_sums
from megatron_dapo.algorithms.gae import ValueInputs, decoupled_estimates, estimate_values, monte_carlo_returns
from megatron_dapo.algorithms.length_adaptive_lambda import FixedLambda, LambdaRule, LengthAdaptiveLambda
from megatron_dapo.algorithms.policy_loss import PolicyLossInputs, build_policy_loss
from megatron_dapo.algorithms.token_rewards import outcome_rewards
from megatron_dapo.algorithms.value_loss import ValueLossInputs, build_value_loss
from megatron_dapo.algorithms.vapo import positive_example_loss, positive_token_weights, positive_tokens
from megatron_dapo.algorithms.whitening import moments, whiten
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import pack
from megatron_dapo.types import MicroBatch, TrainSample

NUM_LETTERS, NUM_STAGES, MAX_TOKENS, NUM_PROMPTS = 6, 6, 64, 64
END = NUM_LETTERS
CORRECT, WRONG = 1.0, -1.0


# ---- the language


@dataclass(frozen=True)
class Responses:
    """N sampled responses, their M tokens packed; `state_` is the state that a token was drawn in."""

    prompts: torch.Tensor  # [N]
    lengths: torch.Tensor  # [N]
    outcomes: torch.Tensor  # [N] +1 or -1
    tokens: torch.Tensor  # [M]
    state_prompt: torch.Tensor  # [M]
    state_stage: torch.Tensor  # [M]
    state_time: torch.Tensor  # [M]

    def inputs(self, values: torch.Tensor) -> ValueInputs:
        """What the estimators take, with `values` [M]."""
        mask = torch.ones_like(values)
        rewards = outcome_rewards(self.outcomes.to(values.dtype), mask, self.lengths)
        return ValueInputs(values, rewards, mask, self.lengths, torch.zeros(len(self.lengths), dtype=values.dtype))

    def of(self, table: torch.Tensor) -> torch.Tensor:
        """[M] entries of `table` [prompts, stages + 1, tokens] at the states."""
        return table[self.state_prompt, self.state_stage, self.state_time]

    def part(self, chosen: torch.Tensor) -> tuple[Responses, torch.Tensor]:
        """The responses at indices `chosen`, and [M] bool: which tokens those are."""
        inside = torch.zeros(len(self.lengths), dtype=torch.bool)
        inside[chosen] = True
        tokens = inside.repeat_interleave(self.lengths)
        of_tokens = (self.tokens, self.state_prompt, self.state_stage, self.state_time)
        kept = [each[inside] for each in (self.prompts, self.lengths, self.outcomes)]
        return Responses(*kept, *(each[tokens] for each in of_tokens)), tokens


class Locks:
    """The language. Policies are tables of probabilities [prompts, stages + 1, letters + 1]."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.keys = torch.randint(NUM_LETTERS, (NUM_PROMPTS, NUM_STAGES), generator=generator)
        # Behind the last stage no letter opens anything.
        self.keys = torch.cat([self.keys, torch.full((NUM_PROMPTS, 1), -1)], 1)

    def next_stages(self) -> torch.Tensor:
        """[prompts, stages + 1, letters] the stage behind each letter."""
        opens = self.keys[:, :, None] == torch.arange(NUM_LETTERS)
        return torch.arange(NUM_STAGES + 1)[:, None] + opens.long()

    def sample(self, policy: torch.Tensor, prompts: torch.Tensor, generator: torch.Generator) -> Responses:
        """One response to each of `prompts` [N]."""
        stage = torch.zeros_like(prompts)
        running = torch.ones_like(prompts, dtype=torch.bool)
        outcomes = torch.full(prompts.shape, WRONG)
        columns: list[tuple[torch.Tensor, ...]] = []
        for _ in range(MAX_TOKENS):
            token = torch.multinomial(policy[prompts, stage], 1, generator=generator)[:, 0]
            columns.append((token, stage, running))
            outcomes = torch.where(running & (token == END) & (stage == NUM_STAGES), CORRECT, outcomes)
            running = running & (token != END)
            stage = stage + (token == self.keys[prompts, stage]).long()
            if not bool(running.any()):
                break
        tokens, stages, inside = (torch.stack(each, 1) for each in zip(*columns, strict=True))
        times = torch.arange(len(columns)).expand_as(tokens)
        of_prompt = prompts[:, None].expand_as(tokens)
        packed = (each[inside] for each in (tokens, of_prompt, stages, times))
        return Responses(prompts, inside.sum(1), outcomes, *packed)

    def solve(self, policy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(V [prompts, stages + 1, tokens], Q [..., letters + 1]) of `policy`, exactly, in float64."""
        policy = policy.double()
        behind = torch.full((NUM_PROMPTS, NUM_STAGES + 1), WRONG, dtype=torch.float64)
        ended = torch.full((NUM_PROMPTS, NUM_STAGES + 1, 1), WRONG, dtype=torch.float64)
        ended[:, NUM_STAGES] = CORRECT
        following = self.next_stages()
        values, action_values = [], []
        for _ in range(MAX_TOKENS):
            letters = behind.gather(1, following.flatten(1)).view(following.shape)
            action_values.append(torch.cat([letters, ended], 2))
            behind = (policy * action_values[-1]).sum(2)
            values.append(behind)
        return torch.stack(values[::-1], 2), torch.stack(action_values[::-1], 2)

    def visits(self, policy: torch.Tensor) -> torch.Tensor:
        """[prompts, stages + 1, tokens] probability that a response reaches each state, over uniform prompts."""
        here = torch.zeros(NUM_PROMPTS, NUM_STAGES + 1, dtype=torch.float64)
        here[:, 0] = 1 / NUM_PROMPTS
        following = self.next_stages()
        found = []
        for _ in range(MAX_TOKENS):
            found.append(here)
            moved = here[:, :, None] * policy.double()[:, :, :NUM_LETTERS]
            here = torch.zeros_like(here).scatter_add_(1, following.flatten(1), moved.flatten(1))
        return torch.stack(found, 2)

    def accuracy(self, policy: torch.Tensor) -> float:
        """Probability of a correct response, over uniform prompts."""
        return float((self.solve(policy)[0][:, 0, 0].mean() - WRONG) / (CORRECT - WRONG))


# ---- the networks


def one_hot(index: torch.Tensor, size: int) -> torch.Tensor:
    return nn.functional.one_hot(index, size).float()


class PolicyNetwork(nn.Module):
    """Logits of the next token from the prompt and the stages open."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(NUM_PROMPTS + NUM_STAGES + 1, 64), nn.Tanh(), nn.Linear(64, NUM_LETTERS + 1)
        )

    def forward(self, prompt: torch.Tensor, stage: torch.Tensor) -> torch.Tensor:
        features = torch.cat([one_hot(prompt, NUM_PROMPTS), one_hot(stage, NUM_STAGES + 1)], -1)
        return self.layers(features).log_softmax(-1)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        prompts = torch.arange(NUM_PROMPTS)[:, None].expand(-1, NUM_STAGES + 1)
        return self(prompts, torch.arange(NUM_STAGES + 1).expand(NUM_PROMPTS, -1)).exp()


class ValueNetwork(nn.Module):
    """The value of (prompt, stages open, tokens)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.places = nn.Embedding(NUM_PROMPTS * (NUM_STAGES + 1), 64)
        self.time = nn.Linear(2, 64)
        self.layers = nn.Sequential(nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, prompt: torch.Tensor, stage: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        left = 1 - step.float() / MAX_TOKENS
        # The values fall steeply where few tokens are left.
        time = torch.stack([left, (-10 * left).exp()], -1)
        return self.layers(self.places(prompt * (NUM_STAGES + 1) + stage) + self.time(time))[..., 0]

    def of(self, responses: Responses) -> torch.Tensor:
        return self(responses.state_prompt, responses.state_stage, responses.state_time)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        shape = (NUM_PROMPTS, NUM_STAGES + 1, MAX_TOKENS)
        return self(*torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij"))


def update_critic(
    critic: ValueNetwork,
    optimizer: torch.optim.Optimizer,
    responses: Responses,
    returns: torch.Tensor,
    old_values: torch.Tensor,
    loss_name: str,
    mask: torch.Tensor | None = None,
) -> None:
    """One step of the critic on `responses`, token-level, by the project's value loss."""
    mask = torch.ones_like(returns) if mask is None else mask
    token_loss, _ = build_value_loss(loss_name)(ValueLossInputs(critic.of(responses), old_values, returns, mask))
    optimizer.zero_grad()
    (token_loss.sum() / mask.sum()).backward()
    optimizer.step()


# ---- 1. values


def value_errors(values: torch.Tensor, locks: Locks, policy: torch.Tensor) -> dict[str, float]:
    """Of `values` [prompts, stages + 1, tokens] against the dynamic programme."""
    exact, _ = locks.solve(policy)
    visits = locks.visits(policy)
    error = (values.double() - exact).abs()
    often = visits * NUM_PROMPTS >= 1e-2
    return {
        "mean_error": float((error * visits).sum() / visits.sum()),
        "largest_error": float(error[often].max()),
        "states": int(often.sum()),
    }


def of_values(responses: Responses, values: torch.Tensor) -> dict[str, float]:
    """Explained variance of `values` [M], by part of the response."""
    returns = monte_carlo_returns(responses.inputs(values), 1.0)
    mask = torch.ones_like(values)
    return explained_variance(explained_variance_sums(values, returns, mask, responses.lengths))


NUM_BLOCKS = 40
BATCH, HELD_OUT = 2048, 60_000  # responses of a step of the critic, and of a judgement of advantages
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
    """How far mean advantages are from the true ones, by kind of (state, token): see `kinds`.

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
    enough = count.min(1).values >= 10
    count, sums = count[enough], sums[enough]
    mean = sums.sum(1) / count.sum(1)
    standard_error = (sums / count).std(1) / NUM_BLOCKS**0.5
    chance = standard_error > 1e-9
    weight = count.sum(1) / count.sum()
    return {
        "bias": float((mean.abs() * weight).sum()),
        "in_standard_errors": float((mean[chance] / standard_error[chance]).square().mean().sqrt()),
        "kinds": len(mean),
    }


def kinds(locks: Locks, responses: Responses) -> torch.Tensor:
    """[M] which tokens are alike: the stage; the letter that opens it, another one, or the end; the time's eighth."""
    opens = responses.tokens == locks.keys[responses.state_prompt, responses.state_stage]
    token = torch.where(responses.tokens == END, 2, opens.long())
    return (responses.state_stage * 3 + token) * 8 + responses.state_time * 8 // MAX_TOKENS


def sample_many(locks: Locks, policy: torch.Tensor, count: int, generator: torch.Generator) -> Responses:
    return locks.sample(policy, torch.randint(NUM_PROMPTS, (count,), generator=generator), generator)


def fixed_policy(locks: Locks) -> torch.Tensor:
    """A half-trained policy, unlike on every prompt: it often ends early, and is right nearly half the time."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(NUM_PROMPTS, NUM_STAGES + 1, NUM_LETTERS + 1, generator=generator) * 0.5
    opens = nn.functional.one_hot(locks.keys[:, :NUM_STAGES], NUM_LETTERS + 1).bool()
    logits[:, :NUM_STAGES][opens] += 1.0
    logits[:, :NUM_STAGES, END] -= 1.0
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
        returns = monte_carlo_returns(responses.inputs(values), 1.0)
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


# ---- 2. Megatron

FIRST_PROMPT_TOKEN = NUM_LETTERS + 1
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "vocab_size": FIRST_PROMPT_TOKEN + NUM_PROMPTS,
}


def train_samples(responses: Responses) -> list[TrainSample]:
    """A prompt is one token. Returns are Monte-Carlo."""
    returns = monte_carlo_returns(responses.inputs(torch.zeros(len(responses.tokens))), 1.0)
    lengths = responses.lengths.tolist()
    parts = zip(responses.prompts, responses.tokens.split(lengths), returns.split(lengths), strict=True)
    return [
        TrainSample(
            sample_id=str(index),
            group_index=index,
            tokens=torch.cat([prompt[None] + FIRST_PROMPT_TOKEN, tokens]),
            prompt_length=1,
            loss_mask=torch.ones(len(tokens)),
            advantages=torch.zeros(len(tokens)),
            rollout_logprobs=torch.zeros(len(tokens)),
            values=torch.zeros(len(tokens)),
            returns=target,
        )
        for index, (prompt, tokens, target) in enumerate(parts)
    ]


def learn_values_with_megatron(num_steps: int, num_prompts: int = 4) -> dict[str, Any]:
    """`MegatronCritic` on the responses of the fixed policy to the first prompts."""
    from megatron_dapo.megatron.critic import CriticSettings, MegatronCritic
    from megatron_dapo.megatron.optimizer import OptimizerSettings

    locks, layout = Locks(0), ParallelLayout(world_size=1)
    policy, generator = fixed_policy(locks), torch.Generator().manual_seed(0)
    exact, _ = locks.solve(policy)
    value_loss = build_value_loss("squared")

    def draw(count: int) -> Responses:
        return locks.sample(policy, torch.randint(num_prompts, (count,), generator=generator), generator)

    def packed(responses: Responses) -> MicroBatch:
        count = len(responses.lengths)
        return pack(train_samples(responses), [1 / len(responses.tokens)] * count, layout)

    def loss_fn(
        micro_batch: MicroBatch, values: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = ValueLossInputs(values, micro_batch.values, micro_batch.returns, micro_batch.loss_mask)
        token_loss, metrics = value_loss(inputs)
        return (token_loss * micro_batch.loss_weights).sum(), metrics

    def judge(critic: MegatronCritic) -> dict[str, float]:
        responses = draw(2000)
        micro_batch = packed(responses)
        [found] = critic.forward_values([micro_batch])
        values, true = found[micro_batch.loss_mask > 0], responses.of(exact)
        report = {
            "mean_error": float((values - true).abs().mean()),
            "largest_error": float((values - true).abs().max()),
        }
        report["explained_variance"] = of_values(responses, values)["all"]
        return {**report, "explained_variance_of_exact_values": of_values(responses, true.float())["all"]}

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
            settings = CriticSettings(optimizer=OptimizerSettings(weight_decay=0.0))
            critic = MegatronCritic.build_random(folder, layout, settings, seed=0)
        before = judge(critic)
        for step in range(num_steps):
            rate = 3e-3 * min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / num_steps)) / 2
            critic.train_step([packed(draw(256))], loss_fn, rate)
        return {"steps": num_steps, "prompts": num_prompts, "before": before, "after": judge(critic)}
    finally:
        dist.destroy_process_group()


# ---- 3. ablation


MONTE_CARLO, FIXED, BY_LENGTH = FixedLambda(1.0), FixedLambda(0.95), LengthAdaptiveLambda(0.5)


@dataclass(frozen=True)
class Recipe:
    """VAPO with its parts as switches."""

    reward_model_steps: int = 60  # that the critic starts from
    pretraining_steps: int = 100
    critic_lambda: LambdaRule = MONTE_CARLO
    policy_lambda: LambdaRule = BY_LENGTH
    policy_loss: tuple[str, Mapping[str, float]] = ("clip_higher", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28})
    aggregation: str = "token_mean"
    positive_coefficient: float = 0.1
    group_size: int = 16
    num_responses: int = 256
    num_mini_batches: int = 16
    policy_rate: float = 3e-3
    critic_rate: float = 3e-4


FULL = Recipe()
# What the paper's table removes, and its accuracy on AIME 2024 (60 with all parts).
ABLATIONS: dict[str, tuple[Recipe, int]] = {
    "VAPO": (FULL, 60),
    "without value pretraining": (replace(FULL, pretraining_steps=0), 11),
    "without decoupled GAE": (replace(FULL, critic_lambda=FIXED, policy_lambda=FIXED), 33),
    "without length-adaptive lambda": (replace(FULL, policy_lambda=FIXED), 45),
    "without clip-higher": (replace(FULL, policy_loss=("ppo_clip", {"clip_ratio": 0.2})), 46),
    "without token-level loss": (replace(FULL, aggregation="sample_mean"), 53),
    "without positive-example loss": (replace(FULL, positive_coefficient=0.0), 54),
    "without group sampling": (replace(FULL, group_size=1), 55),
}


class Learner:
    """One run of a recipe."""

    def __init__(self, recipe: Recipe, locks: Locks, seed: int) -> None:
        self.recipe, self.locks = recipe, locks
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.policy, self.critic = PolicyNetwork(seed), ValueNetwork(100 + seed)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=recipe.policy_rate)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=recipe.critic_rate)

    def rollout(self) -> Responses:
        """Groups of responses to prompts drawn without replacement, as far as there are prompts."""
        recipe = self.recipe
        num_prompts = recipe.num_responses // recipe.group_size
        order = torch.randperm(NUM_PROMPTS, generator=self.generator).repeat(-(-num_prompts // NUM_PROMPTS))
        prompts = order[:num_prompts].repeat_interleave(recipe.group_size)
        return self.locks.sample(self.policy.table(), prompts, self.generator)

    def start_as_reward_model(self) -> None:
        """The critic that has learned the outcome at the last token of responses, and nothing before it."""
        for _ in range(self.recipe.reward_model_steps):
            responses = self.rollout()
            returns = responses.outcomes.repeat_interleave(responses.lengths)
            ends = torch.zeros_like(returns)
            ends[responses.lengths.cumsum(0) - 1] = 1.0
            update_critic(self.critic, self.critic_optimizer, responses, returns, returns, "squared", ends)

    def pretrain_value(self) -> None:
        """Monte-Carlo returns of the fixed policy (VC-PPO)."""
        for _ in range(self.recipe.pretraining_steps):
            responses = self.rollout()
            with torch.no_grad():
                values = self.critic.of(responses)
            self._train_critic(responses, monte_carlo_returns(responses.inputs(values), 1.0), values)

    def step(self) -> None:
        """One rollout and its optimizer steps."""
        recipe, responses = self.recipe, self.rollout()
        with torch.no_grad():
            values = self.critic.of(responses)
            old_logprobs = self._logprobs(responses)
        finished = torch.ones_like(responses.lengths, dtype=torch.bool)
        lambdas = [rule(responses.lengths, finished) for rule in (recipe.policy_lambda, recipe.critic_lambda)]
        estimates = decoupled_estimates(responses.inputs(values), 1.0, *lambdas)
        spread = moments(estimates.advantages, torch.ones_like(values))
        advantages = whiten(estimates.advantages, torch.ones_like(values), spread.mean(), spread.variance())
        for part, inside in self._mini_batches(responses):
            self._update_policy(part, old_logprobs[inside], advantages[inside])
        self._train_critic(responses, estimates.returns, values)

    def _mini_batches(self, responses: Responses) -> list[tuple[Responses, torch.Tensor]]:
        order = torch.randperm(len(responses.lengths), generator=self.generator)
        return [responses.part(chosen) for chosen in order.chunk(self.recipe.num_mini_batches)]

    def _train_critic(self, responses: Responses, returns: torch.Tensor, values: torch.Tensor) -> None:
        for part, inside in self._mini_batches(responses):
            update_critic(self.critic, self.critic_optimizer, part, returns[inside], values[inside], "squared")

    def _logprobs(self, responses: Responses) -> torch.Tensor:
        logprobs = self.policy(responses.state_prompt, responses.state_stage)
        return logprobs.gather(1, responses.tokens[:, None])[:, 0]

    def _update_policy(self, part: Responses, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> None:
        recipe = self.recipe
        logprobs, mask = self._logprobs(part), torch.ones_like(advantages)
        sequence_ids = torch.arange(len(part.lengths)).repeat_interleave(part.lengths)
        name, settings = recipe.policy_loss
        inputs = PolicyLossInputs(logprobs, old_logprobs, advantages, mask, sequence_ids, len(part.lengths))
        token_loss, _ = build_policy_loss(name, settings)(inputs)
        denominators = global_denominators(part.lengths, part.prompts)
        weights = sample_token_weights(recipe.aggregation, part.lengths, part.prompts, denominators, MAX_TOKENS)
        loss = (token_loss * weights[sequence_ids]).sum()
        correct = part.outcomes > 0
        num_positive = int(positive_tokens(part.lengths, correct).sum())
        positive = positive_token_weights(part.lengths, correct, num_positive, recipe.positive_coefficient)
        nll, _ = positive_example_loss(logprobs, mask, correct[sequence_ids])
        loss = loss + (nll * positive[sequence_ids]).sum()
        self.policy_optimizer.zero_grad()
        loss.backward()
        self.policy_optimizer.step()


def learn_policy(recipe: Recipe, seed: int, num_steps: int) -> dict[str, Any]:
    """Exact accuracy before every step and behind the last one."""
    locks = Locks(seed)
    learner = Learner(recipe, locks, seed)
    learner.start_as_reward_model()
    started = value_errors(learner.critic.table(), locks, learner.policy.table())["mean_error"]
    learner.pretrain_value()
    pretrained = value_errors(learner.critic.table(), locks, learner.policy.table())["mean_error"]
    accuracies = [locks.accuracy(learner.policy.table())]
    for _ in range(num_steps):
        learner.step()
        accuracies.append(locks.accuracy(learner.policy.table()))
    last = accuracies[-max(1, num_steps // 5) :]
    return {
        "learning": sum(accuracies) / len(accuracies),
        "final": sum(last) / len(last),
        "value_error_of_the_reward_model": started,
        "value_error_at_the_start": pretrained,
        "value_error_at_the_end": value_errors(learner.critic.table(), locks, learner.policy.table())["mean_error"],
        "accuracies": [round(accuracy, 4) for accuracy in accuracies],
    }


def check_parts(seeds: Sequence[int], num_steps: int) -> dict[str, Any]:
    runs = {name: [learn_policy(recipe, seed, num_steps) for seed in seeds] for name, (recipe, _) in ABLATIONS.items()}
    return {name: ablation_row(runs[name], runs["VAPO"], ABLATIONS[name][1]) for name in runs}


def ablation_row(runs: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]], paper: int) -> dict[str, Any]:
    """Means over seeds, and what leaving the part out changed, seed by seed."""
    changes = [run["learning"] - full["learning"] for run, full in zip(runs, whole, strict=True)]
    return {
        "learning": sum(run["learning"] for run in runs) / len(runs),
        "final": sum(run["final"] for run in runs) / len(runs),
        "changes": changes,
        "shown": all(change < 0 for change in changes),
        "paper": paper,
        "value_error_at_the_start": sum(run["value_error_at_the_start"] for run in runs) / len(runs),
        "accuracies": [run["accuracies"] for run in runs],
    }


# ---- the command line


def measure(parts: Sequence[str], num_seeds: int, num_steps: int) -> dict[str, Any]:
    seeds = range(num_seeds)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "values": lambda: check_values(seeds),
        "megatron": lambda: learn_values_with_megatron(500),
        "ablation": lambda: check_parts(seeds, num_steps),
    }
    start = time.process_time()
    result: dict[str, Any] = {"benchmark": "value_learning", "seeds": num_seeds}
    for name in parts:
        result[name] = checks[name]()
    if "values" in result:
        learned = [run["errors_by_step"].values() for run in result["values"]["squared"].values()]
        result["value_error"] = max(list(errors)[-1]["mean_error"] for errors in learned)
    if "ablation" in result:
        result["parts_shown"] = [name for name, row in result["ablation"].items() if row["shown"]]
    return {**result, "cpu_seconds": time.process_time() - start, "torch": torch.__version__}


def tables(result: Mapping[str, Any]) -> str:
    """Markdown."""
    sections = {"values": value_tables, "megatron": megatron_table, "ablation": ablation_table}
    return "\n\n".join(write(result[name]) for name, write in sections.items() if name in result)


def value_tables(values: Mapping[str, Any]) -> str:
    runs = {f"{loss}, seed {seed}": run for loss in ("squared", "clipped") for seed, run in values[loss].items()}
    lines = ["| values | mean error, by step | largest | EV | EV of the exact values | advantage error, lambda 0 |"]
    lines.append("|---|---|---|---|---|---|")
    for name, run in runs.items():
        errors = run["errors_by_step"]
        by_step = ", ".join(f"{step}: {error['mean_error']:.3f}" for step, error in errors.items())
        largest = list(errors.values())[-1]["largest_error"]
        explained, exact = run["explained_variance"]["all"], run["explained_variance_of_exact_values"]["all"]
        at_zero = run["advantages"]["lambda_0"]
        lines.append(
            f"| {name} | {by_step} | {largest:.2f} | {explained:.3f} | {exact:.3f} | "
            f"{at_zero['mean_error']:.4f} of {at_zero['spread']:.3f} |"
        )
    lines += [
        "",
        "| lambda (squared, seed 0) | bias, learned values | bias, exact values | in standard errors, exact |",
    ]
    lines.append("|---|---|---|---|")
    for name in LAMBDAS:
        learned, exact = values["squared"]["0"]["advantages"][f"lambda_{name}"].values()
        lines.append(f"| {name} | {learned['bias']:.4f} | {exact['bias']:.4f} | {exact['in_standard_errors']:.1f} |")
    return "\n".join(lines)


def megatron_table(megatron: Mapping[str, Any]) -> str:
    lines = ["| MegatronCritic | mean error | largest error | EV | EV of the exact values |", "|---|---|---|---|---|"]
    for name in ("before", "after"):
        figures = (
            f"{megatron[name][key]:.3f}"
            for key in ("mean_error", "largest_error", "explained_variance", "explained_variance_of_exact_values")
        )
        lines.append(f"| {name} {megatron['steps']} steps | {' | '.join(figures)} |")
    return "\n".join(lines)


def ablation_table(ablation: Mapping[str, Any]) -> str:
    lines = ["| parts | learning | final | change of learning, by seed | value error at the start | paper | shown |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in ablation.items():
        changes = ", ".join(f"{change:+.3f}" for change in row["changes"]) if name != "VAPO" else ""
        shown = "" if name == "VAPO" else "yes" if row["shown"] else "no"
        lines.append(
            f"| {name} | {row['learning']:.3f} | {row['final']:.3f} | {changes} | "
            f"{row['value_error_at_the_start']:.3f} | {row['paper']} | {shown} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=["values", "megatron", "ablation"], action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="rollouts of a run of the ablation")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = arguments.part or ["values", "megatron", "ablation"]
    result = measure(parts, arguments.seeds, arguments.steps)
    print(json.dumps(result, indent=1) if arguments.json else tables(result))


if __name__ == "__main__":
    main()
