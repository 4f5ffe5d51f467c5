"""An advantage: the share of the group that does worse, less the share that does better. algorithm.advantage = "advantage.py:advantage"."""

import torch

from megatron_dapo import AdvantageInputs


def advantage(inputs: AdvantageInputs) -> torch.Tensor:
    """Return one advantage a response, [S]; groups may have any number of responses."""
    same = inputs.group_index[:, None] == inputs.group_index[None, :]
    better = torch.sign(inputs.rewards[:, None] - inputs.rewards[None, :])
    return (same * better).sum(dim=1) / same.sum(dim=1)
