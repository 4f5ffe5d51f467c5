"""The head as the formulas are written: all logits at once, in fp32 (fp64 from fp64), differentiated by autograd.

The oracle of the other implementations, with nothing in common with them. It holds several tensors of
[tokens, whole vocabulary].
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_dapo.ops.lm_head.inputs import HeadInputs, accumulation_dtype


def logprobs_and_entropy(inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both, [P] and differentiable; the gradient of hidden is this rank's partial sum."""
    shard = inputs.shard
    dtype = accumulation_dtype(torch.promote_types(inputs.hidden.dtype, inputs.weight.dtype))
    own = inputs.hidden.to(dtype) @ inputs.weight.to(dtype).t() / shard.temperature
    # Other ranks' logits are constants here: the derivative with respect to the own ones is partial.
    logits = own if shard.group is None else torch.cat(_all_shards(own, shard.group), dim=1)
    log_p = torch.log_softmax(logits[:, : shard.vocab_size], dim=1)
    logprobs = log_p.gather(1, inputs.targets.clamp(0, shard.vocab_size - 1)[:, None])[:, 0]
    return logprobs, -(log_p.exp() * log_p).sum(dim=1)


def _all_shards(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, own.detach().contiguous(), group=group)
    shards[dist.get_rank(group)] = own
    return shards
