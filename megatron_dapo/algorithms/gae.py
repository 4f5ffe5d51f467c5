"""Generalized advantage estimation over packed responses, finished or cut (arXiv 1506.02438, Eq 16).

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = sum_{k >= t} (gamma lambda)^{k-t} delta_k

V after the last token is the response's bootstrap value (0 if the response is finished). The advantages are computed
through the lambda-return, whose recurrence avoids differences of large numbers:

    G_t = r_t + gamma (1 - lambda) V_{t+1} + gamma lambda G_{t+1}          A_t = G_t - V_t

With lambda = 1 the returns are exactly the Monte-Carlo returns, because every V has the factor 0.

Tokens with mask 0 (from tools or an environment) are not steps: the token before such a gap takes its next value and
next advantage from the token after the gap. Masked tokens get advantage and return 0, and rewards on them are ignored.
To use a padded [S, R] batch, flatten it: it is a packed batch of S sequences of length R.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.linear_scan import reverse_linear_scan


@dataclass(frozen=True)
class ValueInputs:
    """Response tokens of S sequences, one after the other; sequence i has lengths[i] of the P tokens."""

    values: torch.Tensor  # [P] floating, V of the state in which each token was drawn
    rewards: torch.Tensor  # [P] floating, see token_rewards
    loss_mask: torch.Tensor  # [P] 0 or 1
    lengths: torch.Tensor  # [S] int64, masked tokens included
    bootstrap: torch.Tensor  # [S] value after the last trained token: 0 if the response is finished


@dataclass(frozen=True)
class ValueEstimates:
    """Advantages and returns, [P] each, 0 where masked, in the dtype of the values (at least float32)."""

    advantages: torch.Tensor
    returns: torch.Tensor


@dataclass(frozen=True)
class TrainedTokens:
    """Indexes the M trained tokens of a packed batch, sequence by sequence."""

    mask: torch.Tensor | None  # [P] bool; None if every token is trained
    lengths: torch.Tensor  # [S] int64, trained tokens
    last: torch.Tensor  # [S] int64, index in [M] of the last one; meaningless if the length is 0

    @property
    def present(self) -> torch.Tensor:
        """[S] bool: sequences with a trained token."""
        return self.lengths > 0

    def take(self, per_token: torch.Tensor) -> torch.Tensor:
        """[P] -> [M]."""
        return per_token if self.mask is None else per_token.masked_select(self.mask)

    def put(self, trained: torch.Tensor) -> torch.Tensor:
        """[M] -> [P], 0 where masked."""
        if self.mask is None:
            return trained
        return torch.zeros_like(self.mask, dtype=trained.dtype).masked_scatter_(self.mask, trained)


def trained_tokens(loss_mask: torch.Tensor, lengths: torch.Tensor) -> TrainedTokens:
    """Return the positions of the trained tokens of `loss_mask` [P], for sequences of `lengths` [S]."""
    total = int(lengths.sum())
    assert loss_mask.shape == (total,), f"mask of shape {tuple(loss_mask.shape)}, the lengths add up to {total}"
    ends = lengths.cumsum(0)
    if not total or bool(loss_mask.min() > 0):
        return TrainedTokens(None, lengths, ends - 1)
    mask = loss_mask > 0
    counted = mask.cumsum(0)[(ends - 1).clamp(min=0)].masked_fill(ends == 0, 0)
    return TrainedTokens(mask, counted.diff(prepend=counted.new_zeros(1)), counted - 1)


def estimate_values(inputs: ValueInputs, gamma: float, lambdas: float | torch.Tensor) -> ValueEstimates:
    """Return advantages and lambda-returns; `lambdas` is one number or one per sequence [S].

    Raise ValueError if gamma or a lambda lies outside [0, 1], or if an input of a trained token is not finite.
    """
    _check_range("gamma", gamma)
    _check_range("lambda", lambdas)
    tokens = trained_tokens(inputs.loss_mask, inputs.lengths)
    dtype = torch.promote_types(inputs.values.dtype, torch.float32)
    values = tokens.take(inputs.values.detach()).to(dtype)
    rewards = tokens.take(inputs.rewards.detach()).to(dtype)
    bootstrap = inputs.bootstrap.detach().to(dtype)[tokens.present]
    _check_finite({"value": values, "reward": rewards, "bootstrap value": bootstrap})
    stream = _Stream(values, rewards, bootstrap, tokens.last[tokens.present], gamma)
    returns = stream.lambda_returns(_of_present(lambdas, tokens, values))
    return ValueEstimates(tokens.put(returns - stream.values), tokens.put(returns))


def _of_present(lambdas: float | torch.Tensor, tokens: TrainedTokens, like: torch.Tensor) -> torch.Tensor:
    """Return [N], one lambda for each sequence with a trained token."""
    per_sequence = torch.as_tensor(lambdas, dtype=like.dtype, device=like.device)
    num_sequences = tokens.lengths.numel()
    assert per_sequence.shape in ((), (num_sequences,)), f"{tuple(per_sequence.shape)} lambdas, {num_sequences} lengths"
    return per_sequence.expand(num_sequences)[tokens.present]


@dataclass(frozen=True)
class _Stream:
    """M trained tokens of N non-empty sequences."""

    values: torch.Tensor  # [M]
    rewards: torch.Tensor  # [M]
    bootstrap: torch.Tensor  # [N]
    last: torch.Tensor  # [N] int64, the index of each sequence's last token, ascending
    gamma: float

    def lambda_returns(self, lambdas: torch.Tensor) -> torch.Tensor:
        """Return [M], G_t = r_t + (gamma - c_t) V_{t+1} + c_t G_{t+1}.

        c_t is gamma lambda, or 0 at a sequence's last token. At lambda = 1,
        gamma - gamma lambda is exactly 0; at the last token, gamma - 0 is the factor of the bootstrap.
        """
        decays = self.gamma * lambdas

        def fill(start: int, stop: int, inputs: torch.Tensor, decay: torch.Tensor) -> None:
            first, behind = torch.searchsorted(self.last, torch.tensor([start, stop], device=self.last.device)).tolist()
            ends = self.last[first:behind] - start
            # A sequence that continues past the tile's end counts too, up to that end.
            num_open = int(behind < self.last.numel())
            counts = torch.cat([ends + 1, ends.new_full((num_open,), stop - start)]).diff(prepend=ends.new_zeros(1))
            # One view per sequence: one index per token would be the largest tensor in memory.
            of_sequences = decays[first : first + counts.numel()].tolist()
            for tokens, number in zip(decay.split(counts.tolist()), of_sequences, strict=True):
                tokens.fill_(number)
            decay[ends] = 0.0
            following = self.values[start + 1 : stop + 1]
            inputs[: following.numel()] = following
            inputs[ends] = self.bootstrap[first:behind]
            torch.addcmul(self.rewards[start:stop], self.gamma - decay, inputs, out=inputs)

        return reverse_linear_scan(torch.empty_like(self.values), fill)


def _check_range(name: str, number: float | torch.Tensor) -> None:
    numbers = torch.as_tensor(number)
    wrong = ~((numbers >= 0) & (numbers <= 1))
    if bool(wrong.any()):
        raise ValueError(f"{name} is {float(numbers[wrong].flatten()[0])}: it must lie in [0, 1], e.g. 1.0 or 0.95")


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        # The sum is finite if all entries are (barring overflow), and costs one read and no memory.
        if not bool(torch.isfinite(tensor.sum())):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise ValueError(f"{bad} of {tensor.numel()} entries of {name} are not finite: skip this critic's step")
