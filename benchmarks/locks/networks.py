"""Small networks over the states of the language, and the critic's step by the project's value loss."""

from __future__ import annotations

import torch
from locks import language
from locks.language import Responses
from torch import nn

from megatron_dapo.algorithms.value_loss import ValueLossInputs, value_loss
from megatron_dapo.config.algorithm_schema import CriticConfig


def one_hot(index: torch.Tensor, size: int) -> torch.Tensor:
    return nn.functional.one_hot(index, size).float()


class PolicyNetwork(nn.Module):
    """Logits of the next token from the prompt and the stages open."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(language.NUM_PROMPTS + language.NUM_STAGES + 1, 64),
            nn.Tanh(),
            nn.Linear(64, language.NUM_LETTERS + 1),
        )

    def forward(self, prompt: torch.Tensor, stage: torch.Tensor) -> torch.Tensor:
        features = torch.cat([one_hot(prompt, language.NUM_PROMPTS), one_hot(stage, language.NUM_STAGES + 1)], -1)
        return self.layers(features).log_softmax(-1)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        prompts = torch.arange(language.NUM_PROMPTS)[:, None].expand(-1, language.NUM_STAGES + 1)
        return self(prompts, torch.arange(language.NUM_STAGES + 1).expand(language.NUM_PROMPTS, -1)).exp()


class ValueNetwork(nn.Module):
    """The value of (prompt, stages open, tokens)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.places = nn.Embedding(language.NUM_PROMPTS * (language.NUM_STAGES + 1), 64)
        self.time = nn.Linear(2, 64)
        self.layers = nn.Sequential(nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, prompt: torch.Tensor, stage: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        left = 1 - step.float() / language.MAX_TOKENS
        # The values fall steeply when few tokens are left.
        time = torch.stack([left, (-10 * left).exp()], -1)
        return self.layers(self.places(prompt * (language.NUM_STAGES + 1) + stage) + self.time(time))[..., 0]

    def of(self, responses: Responses) -> torch.Tensor:
        return self(responses.state_prompt, responses.state_stage, responses.state_time)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        shape = (language.NUM_PROMPTS, language.NUM_STAGES + 1, language.MAX_TOKENS)
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
    inputs = ValueLossInputs(critic.of(responses), old_values, returns, mask)
    token_loss, _ = value_loss(CriticConfig(loss=loss_name), inputs)
    optimizer.zero_grad()
    (token_loss.sum() / mask.sum()).backward()
    optimizer.step()
