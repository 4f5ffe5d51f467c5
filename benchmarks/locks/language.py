"""The language of locks and its dynamic programme; see `value_learning.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.gae import ValueInputs
from megatron_dapo.algorithms.token_rewards import outcome_rewards

NUM_LETTERS, NUM_STAGES, MAX_TOKENS, NUM_PROMPTS = 6, 6, 64, 64
END = NUM_LETTERS
CORRECT, WRONG = 1.0, -1.0


@dataclass(frozen=True)
class Responses:
    """N sampled responses, their M tokens packed; `state_*` is the state in which a token was drawn."""

    prompts: torch.Tensor  # [N]
    lengths: torch.Tensor  # [N]
    outcomes: torch.Tensor  # [N] +1 or -1
    tokens: torch.Tensor  # [M]
    state_prompt: torch.Tensor  # [M]
    state_stage: torch.Tensor  # [M]
    state_time: torch.Tensor  # [M]

    def inputs(self, values: torch.Tensor) -> ValueInputs:
        """Return the estimators' inputs with `values` [M]."""
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
        # After the last stage no letter opens anything.
        self.keys = torch.cat([self.keys, torch.full((NUM_PROMPTS, 1), -1)], 1)

    def next_stages(self) -> torch.Tensor:
        """[prompts, stages + 1, letters] the stage after each letter."""
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
