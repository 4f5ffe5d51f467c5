"""Cases of the log-prob head and its oracle in fp64, for every implementation and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.ops.lm_head.inputs import HeadInputs, Tiles, Upstream, VocabShard, combine, rebase
from megatron_dapo.ops.lm_head.select import kernels_of
from megatron_dapo.ops.logprob import vocab_parallel_logprobs


@dataclass(frozen=True)
class Result:
    logprobs: torch.Tensor
    entropy: torch.Tensor
    to_hidden: torch.Tensor
    to_weight: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.logprobs, self.entropy, self.to_hidden, self.to_weight


def make(
    num_tokens: int,
    width: int = 16,
    vocab_size: int = 37,
    rows: int | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden states, weight (`scale` times normal) and targets."""
    generator = torch.Generator().manual_seed(num_tokens + vocab_size)
    hidden = torch.randn(num_tokens, width, generator=generator).to(device, dtype)
    weight = (torch.randn(rows or vocab_size, width, generator=generator) * scale).to(device, dtype)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(device)
    return hidden, weight, targets


def exact_outputs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(hidden.double() @ weight[:vocab_size].double().T / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def upstream_of(num_tokens: int, device: torch.device) -> torch.Tensor:
    """[2, P] gradients of log-prob and entropy."""
    return torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(1)).to(device)


def _differentiate(outputs: tuple[torch.Tensor, torch.Tensor], leaves: tuple[torch.Tensor, torch.Tensor]) -> Result:
    upstream = upstream_of(outputs[0].numel(), outputs[0].device)
    (upstream[0] * outputs[0] + upstream[1] * outputs[1]).sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return Result(outputs[0].detach(), outputs[1].detach(), leaves[0].grad, leaves[1].grad)


def exact(inputs, *, temperature: float = 1.0, vocab_size: int) -> Result:
    """Compute in fp64 from the same (rounded) inputs."""
    leaves = inputs[0].double().requires_grad_(), inputs[1].double().requires_grad_()
    return _differentiate(exact_outputs(*leaves, inputs[2], temperature, vocab_size), leaves)


def run(inputs, *, vocab_size: int, **settings) -> Result:
    """Call `vocab_parallel_logprobs`; settings: those of its keywords that remain."""
    leaves = inputs[0].clone().requires_grad_(), inputs[1].clone().requires_grad_()
    return _differentiate(vocab_parallel_logprobs(*leaves, inputs[2], vocab_size=vocab_size, **settings), leaves)


def run_in_shards(
    inputs, *, vocab_size: int, implementation: str, num_shards: int, temperature: float = 1.0, tiles: Tiles
) -> Result:
    """Compute as `num_shards` ranks do together, in one process: sums over ranks are taken by hand."""
    kernels, (hidden, weight, targets) = kernels_of(implementation), inputs
    rows = weight.size(0) // num_shards
    problems = []
    for rank in range(num_shards):
        columns = min(max(vocab_size - rank * rows, 0), rows)
        shard = VocabShard(rank * rows, columns, vocab_size, temperature, None)
        problems.append(HeadInputs(hidden, weight[rank * rows : (rank + 1) * rows], targets, shard, tiles))
    parts = [kernels.sums(inputs) for inputs in problems]
    maxima = torch.stack([part[0] for part in parts]).amax(dim=0)
    for own, sums in parts:
        rebase(sums, own - maxima)
    totals = torch.stack([part[1] for part in parts]).sum(dim=0)
    logprobs, entropy, *others = combine(maxima, totals, problems[0].shard)
    upstream = upstream_of(targets.numel(), hidden.device).to(maxima.dtype) / temperature
    gradients = [kernels.gradients(p, Upstream(entropy, *others, *upstream, True, True)) for p in problems]
    to_hidden = torch.stack([gradient[0].double() for gradient in gradients]).sum(dim=0)
    return Result(logprobs, entropy, to_hidden, torch.cat([gradient[1] for gradient in gradients]))


def relative_norm(found: torch.Tensor, right: torch.Tensor) -> float:
    norm = float(right.double().norm())
    return float((found.double() - right.double()).norm()) / norm if norm else float(found.double().norm())
