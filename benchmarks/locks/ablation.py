"""3. PPO with every part of VAPO, and with one part removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from locks import language
from locks.language import Locks, Responses
from locks.networks import PolicyNetwork, ValueNetwork, update_critic
from locks.values import value_errors

from megatron_dapo.algorithms.aggregation import global_denominators, sample_token_weights
from megatron_dapo.algorithms.gae import estimate_values
from megatron_dapo.algorithms.length_adaptive_lambda import FixedLambda, LambdaRule, LengthAdaptiveLambda
from megatron_dapo.algorithms.policy_loss import ppo_clip
from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs
from megatron_dapo.algorithms.vapo import positive_example_loss, positive_token_weights, positive_tokens
from megatron_dapo.algorithms.whitening import moments, whiten
from megatron_dapo.config.loss_schema import PpoClipLossConfig

MONTE_CARLO, FIXED, BY_LENGTH = FixedLambda(1.0), FixedLambda(0.95), LengthAdaptiveLambda(0.5)


@dataclass(frozen=True)
class Recipe:
    """VAPO with its parts as switches."""

    reward_model_steps: int = 60  # The critic starts from this reward model.
    pretraining_steps: int = 100
    critic_lambda: LambdaRule = MONTE_CARLO
    policy_lambda: LambdaRule = BY_LENGTH
    policy_loss: PpoClipLossConfig = PpoClipLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28)
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
    "without clip-higher": (replace(FULL, policy_loss=PpoClipLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.2)), 46),
    "without token-level loss": (replace(FULL, aggregation="sample_mean"), 53),
    "without positive-example loss": (replace(FULL, positive_coefficient=0.0), 54),
    "without group sampling": (replace(FULL, group_size=1), 55),
}

# What makes a run of any recipe short.
TINY_RECIPE = {"reward_model_steps": 1, "pretraining_steps": 1, "num_responses": 32, "num_mini_batches": 2}


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
        order = torch.randperm(language.NUM_PROMPTS, generator=self.generator).repeat(
            -(-num_prompts // language.NUM_PROMPTS)
        )
        prompts = order[:num_prompts].repeat_interleave(recipe.group_size)
        return self.locks.sample(self.policy.table(), prompts, self.generator)

    def start_as_reward_model(self) -> None:
        """Return a critic that has learned the outcome at the last token of responses, and nothing before it."""
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
            self._train_critic(responses, estimate_values(responses.inputs(values), 1.0, 1.0).returns, values)

    def step(self) -> None:
        """One rollout and its optimizer steps."""
        recipe, responses = self.recipe, self.rollout()
        with torch.no_grad():
            values = self.critic.of(responses)
            old_logprobs = self._logprobs(responses)
        finished = torch.ones_like(responses.lengths, dtype=torch.bool)
        # Decoupled GAE: the policy and the critic each have their own lambda.
        policy, critic = (
            estimate_values(responses.inputs(values), 1.0, rule(responses.lengths, finished))
            for rule in (recipe.policy_lambda, recipe.critic_lambda)
        )
        spread = moments(policy.advantages, torch.ones_like(values))
        advantages = whiten(policy.advantages, torch.ones_like(values), spread.mean(), spread.variance())
        for part, inside in self._mini_batches(responses):
            self._update_policy(part, old_logprobs[inside], advantages[inside])
        self._train_critic(responses, critic.returns, values)

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
        inputs = PolicyLossInputs(logprobs, old_logprobs, advantages, mask, sequence_ids, len(part.lengths))
        token_loss, _ = ppo_clip(inputs, recipe.policy_loss)
        denominators = global_denominators(part.lengths, part.prompts)
        weights = sample_token_weights(
            recipe.aggregation, part.lengths, part.prompts, denominators, language.MAX_TOKENS
        )
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
    """Return the exact accuracy before every step and after the last one."""
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


def check_parts(seeds: Sequence[int], num_steps: int, changes: Mapping[str, int]) -> dict[str, Any]:
    """Train every ablation with every seed; `changes` are made to all recipes."""
    runs = {
        name: [learn_policy(replace(recipe, **changes), seed, num_steps) for seed in seeds]
        for name, (recipe, _) in ABLATIONS.items()
    }
    return {name: ablation_row(runs[name], runs["VAPO"], ABLATIONS[name][1]) for name in runs}


def ablation_row(runs: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]], paper: int) -> dict[str, Any]:
    """Return means over seeds, and how removing each part changed them, seed by seed."""
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
