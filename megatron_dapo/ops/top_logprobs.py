"""The largest log-probs of each token and their words, in the same pass as log-prob and entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.inputs import HeadInputs, choose_tiles, combine
from megatron_dapo.ops.logprob import shard_of


@dataclass(frozen=True)
class TopLogprobs:
    """`logprobs` and `entropy` [P] as `vocab_parallel_logprobs`; `top_logprobs` [P, k], largest first, and `top_words`
    [P, k] int64. What is missing to a probability of 1 is the tail's."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top_logprobs: torch.Tensor
    top_words: torch.Tensor


@torch.no_grad()
def vocab_parallel_top_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    chunk_columns: int | None = None,
) -> TopLogprobs:
    """Arguments as `vocab_parallel_logprobs`, by the chunked implementation, without gradients. Beside its two
    all-reduces, one all-gather of each rank's k best. ValueError for a k outside [1, vocab_size]."""
    if not 1 <= k <= vocab_size:
        raise ValueError(f"top log-probs: k {k} is not in [1, {vocab_size}], the vocabulary")
    shard = shard_of(hidden, weight, targets, temperature, vocab_size, group)
    tiles = choose_tiles(hidden.size(0), shard.num_columns, hidden.device, chunk_tokens, chunk_columns)
    inputs = HeadInputs(hidden, weight, targets, shard, tiles)
    source = _WithTop(inputs, k)
    maxima, totals = chunked.sums(inputs, lambda inputs: source)
    logprobs, entropy, maxima, log_totals = combine(maxima, totals, shard)
    logits, words = _over_ranks(source.logits_found / shard.temperature, source.words + shard.first_column, k, group)
    return TopLogprobs(logprobs, entropy, (logits - maxima[:, None]).sub_(log_totals[:, None]).clamp_(max=0.0), words)


class _WithTop(chunked.WideLogits):
    """Keeps the k largest products of each token as tiles go by; -inf, word 0, where there were fewer."""

    def __init__(self, inputs: HeadInputs, k: int) -> None:
        super().__init__(inputs)
        num_tokens = inputs.hidden.size(0)
        dtype = torch.promote_types(self._dtype, torch.float32)
        self.logits_found = inputs.hidden.new_full((num_tokens, k), float("-inf"), dtype=dtype)
        self.words = torch.zeros((num_tokens, k), dtype=torch.int64, device=inputs.hidden.device)
        self._first = 0

    def enter(self, columns: slice) -> None:
        super().enter(columns)
        self._first = columns.start

    def logits(self, tokens: slice) -> torch.Tensor:
        logits, k = super().logits(tokens), self.words.size(1)
        best = logits.topk(min(k, logits.size(1)), dim=1)
        both = torch.cat([self.logits_found[tokens], best.values], dim=1)
        words = torch.cat([self.words[tokens], best.indices + self._first], dim=1)
        self.logits_found[tokens], self.words[tokens] = _best(both, words, k)
        return logits


def _best(logits: torch.Tensor, words: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = logits.topk(k, dim=1)
    return best.values, words.gather(1, best.indices)


def _over_ranks(
    logits: torch.Tensor, words: torch.Tensor, k: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if group is None:
        return logits, words
    # One message: fp64 holds every fp32 logit and every word exactly.
    own = torch.stack([logits.double(), words.double()])
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, own, group=group)
    together = torch.cat(all_ranks, dim=2)
    best, chosen = _best(together[0], together[1], k)
    return best.to(logits.dtype), chosen.long()
