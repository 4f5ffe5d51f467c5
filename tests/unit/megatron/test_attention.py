from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_dapo.megatron.attention import (
    PackedAttention,
    PackedSequences,
    _Pad,
    _Rotate,
    _Unpad,
    batch_sequences,
    check_flash_attention,
    plan_attention,
)
from megatron_dapo.megatron.context import context_token_index

HEADS, GROUPS, HEAD_DIM = 4, 2, 8
LENGTHS = [(5, 17, 1, 30), (64,), (8, 8, 8), (200, 3, 190, 4, 70, 70, 1), (1,), (40, 8)]


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def tokens(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, HEADS, HEAD_DIM), (num_tokens, GROUPS, HEAD_DIM), (num_tokens, GROUPS, HEAD_DIM))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], window: int | None = None
) -> torch.Tensor:
    """Softmax attention by the formula, one sequence and one head at a time."""
    rows, start = [], 0
    for length in lengths:
        part, heads = slice(start, start + length), []
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = query[part, head] @ key[part, group].T / HEAD_DIM**0.5
            hidden = torch.ones(length, length).triu(1)
            if window is not None:
                hidden += torch.ones(length, length).tril(-window)
            heads.append(scores.masked_fill(hidden.bool(), float("-inf")).softmax(-1) @ value[part, group])
        rows.append(torch.cat(heads, dim=1))
        start += length
    return torch.cat(rows)


def own_attention(window: int | None = None, implementation: str = "auto") -> PackedAttention:
    size = None if window is None else (window - 1, 0)
    config = SimpleNamespace(
        context_parallel_size=1,
        window_size=size,
        window_attn_skip_freq=[1],
        attention_implementation=implementation,
        softmax_type="vanilla",
    )
    return PackedAttention(config, layer_number=1)


@pytest.mark.parametrize("window", [None, 1, 8, 63])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_attention_is_the_formula_sequence_by_sequence(lengths: tuple[int, ...], window: int | None) -> None:
    query, key, value = tokens(sum(lengths), seed=1)
    want = written_out(query, key, value, lengths, window)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want_gradients = torch.autograd.grad((want * weights).sum(), (query, key, value))
    packed = PackedSequences(cu_seqlens_q=cumulative(lengths))
    got = own_attention(window)(query, key, value, packed_seq_params=packed)
    gradients = torch.autograd.grad((got * weights).sum(), (query, key, value))
    torch.testing.assert_close(got, want)
    for gradient, expected in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("window", [None, 8])
def test_one_call_of_flash_attention_takes_all_sequences(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    varlen, calls, lengths = pytest.importorskip("torch.nn.attention.varlen"), [], (5, 17, 1, 30)

    def attend(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        calls.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, scale))
        before, after = window_size
        assert after == 0, "a token sees none after it"
        out = written_out(query, key, value, lengths, None if before < 0 else before + 1)
        return out.unflatten(1, (HEADS, HEAD_DIM))

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    query, key, value = tokens(sum(lengths), seed=1)
    packed = PackedSequences(cu_seqlens_q=cumulative(lengths), max_seqlen_q=30)
    got = own_attention(window, "flash")(query, key, value, packed_seq_params=packed)
    torch.testing.assert_close(got, written_out(query, key, value, lengths, window))
    bounds = [0, 5, 22, 23, 53]
    assert calls == [(bounds, bounds, 30, 30, None)]


def test_torchs_flash_attention_takes_the_call() -> None:
    """Only shapes: tensors that are on no device."""
    pytest.importorskip("torch.nn.attention.varlen")
    with FakeTensorMode():
        shapes = ((53, HEADS, 64), (53, GROUPS, 64), (53, GROUPS, 64))
        query, key, value = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        bounds = torch.empty(5, device="cuda", dtype=torch.int32)
        packed = PackedSequences(cu_seqlens_q=bounds, max_seqlen_q=30)
        got = own_attention(8, "flash")(query, key, value, packed_seq_params=packed)
    assert got.shape == (53, HEADS * 64) and got.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "context_size", "obstacle"),
    [
        (None, torch.bfloat16, 128, 1, "there is no CUDA device"),
        ((7, 5), torch.bfloat16, 128, 1, "compute capability"),
        ((9, 0), torch.float32, 128, 1, "torch.float32"),
        ((9, 0), torch.bfloat16, 260, 1, "260 dimensions"),
        ((9, 0), torch.bfloat16, 128, 2, "cp_size is 2"),
    ],
)
def test_flash_attention_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability, dtype, head_dim, context_size, obstacle
) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ValueError, match=f'"flash" cannot run: .*{obstacle}'):
        check_flash_attention(dtype, head_dim, context_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_flash_attention(torch.bfloat16, 128, 1)


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("context_size", [2, 4])
@pytest.mark.parametrize("lengths", [(8, 16, 40), (64,), (8, 8, 8, 8), (200, 24, 8)])
def test_context_ranks_together_attend_as_one(lengths: tuple[int, ...], context_size: int, window: int | None) -> None:
    bounds = cumulative(lengths)
    query, key, value = tokens(sum(lengths), seed=3)
    want = written_out(query, key, value, lengths, window)
    indices = [context_token_index(bounds, rank, context_size) for rank in range(context_size)]
    gathered_key, gathered_value = (torch.cat([part[index] for index in indices]) for part in (key, value))
    outputs = []
    for rank, index in enumerate(indices):
        plan = plan_attention(bounds, rank, context_size, window)
        assert plan.batches[0].mask is not None
        pad = [
            part if slots is None else _Pad.apply(part, slots)
            for part, slots in ((query[index], plan.queries), (gathered_key, plan.keys), (gathered_value, plan.keys))
        ]
        out = own_attention()._attend(*pad, plan.batches)
        outputs.append(out if plan.queries is None else _Unpad.apply(out, plan.queries))
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    total = sum((out * weights[index]).sum() for out, index in zip(outputs, indices, strict=True))
    for out, index in zip(outputs, indices, strict=True):
        torch.testing.assert_close(out, want[index])
    expected = torch.autograd.grad((want * weights).sum(), (query, key, value))
    for gradient, wanted in zip(torch.autograd.grad(total, (query, key, value)), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_buckets_hold_every_sequence_once_and_bound_the_padding() -> None:
    lengths = [3, 500, 90, 410, 88, 1, 260, 0, 64]
    batches = batch_sequences(lengths)
    assert sorted(index for batch in batches for index in batch) == [0, 1, 2, 3, 4, 5, 6, 8]
    for batch in batches:
        longest, shortest = lengths[batch[0]], lengths[batch[-1]]
        assert longest - shortest <= max(32, 0.25 * longest)
    assert len(batches) < 6


def test_rotation_is_the_complex_product_and_its_gradient_the_inverse() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 2, HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = torch.rand(6, 1, HEAD_DIM // 2, generator=generator, dtype=torch.float64)
    cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
    as_complex = torch.complex(x.detach()[..., : HEAD_DIM // 2], x.detach()[..., HEAD_DIM // 2 :]) * torch.exp(
        1j * angles
    )
    torch.testing.assert_close(_Rotate.apply(x, cos, sin), torch.cat((as_complex.real, as_complex.imag), dim=-1))
    assert torch.autograd.gradcheck(lambda x: _Rotate.apply(x, cos, sin), (x,))
