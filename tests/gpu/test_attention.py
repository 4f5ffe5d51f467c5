"""Attention over packed sequences on a device, against every pair of tokens in fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.megatron.attention import PackedAttention, PackedSequences, check_flash_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("real_gpu")]

LENGTHS = (1, 7, 128, 129, 300, 64)
BOUND = 1e-2  # relative to the norm: products of bf16


def exact(query, key, value, window: int | None) -> torch.Tensor:
    outputs, start, repeats = [], 0, query.size(1) // key.size(1)
    for length in LENGTHS:
        q, k, v = (part[start : start + length].transpose(0, 1) for part in (query, key, value))
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(9, 3, 64), (4, 2, 128), (2, 1, 256)])
def test_outputs_and_gradients_are_those_of_all_pairs(device: str, heads, groups, head_dim, window) -> None:
    try:
        check_flash_attention(torch.bfloat16, head_dim, 1)
    except ValueError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(LENGTHS), count, head_dim) for count in (heads, groups, groups, heads)]
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    mine = [part.to(device).requires_grad_() for part in drawn[:3]]
    right = [part.double().requires_grad_() for part in drawn[:3]]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    size = None if window is None else (window - 1, 0)
    config = SimpleNamespace(
        context_parallel_size=1, window_size=size, window_attn_skip_freq=[1], attention_implementation="flash", softmax_type="vanilla"
    )
    outputs = PackedAttention(config, 1)(*mine, packed_seq_params=packed)
    wanted = exact(*right, window)
    outputs.backward(drawn[3].flatten(1).to(device))
    wanted.backward(drawn[3].flatten(1).double())
    pairs = [(outputs, wanted), *((a.grad, b.grad) for a, b in zip(mine, right, strict=True))]
    for found, expected in pairs:
        error = torch.linalg.vector_norm(found.double().cpu() - expected) / torch.linalg.vector_norm(expected)
        assert error < BOUND
