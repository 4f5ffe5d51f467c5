"""The gated delta rule and its convolution against the paper's recurrence in fp64, transformers, and their own pieces."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from megatron_dapo.ops.gated_delta import (
    causal_convolution,
    gated_delta_rule,
    gated_delta_step,
    plan_chunks,
    plan_convolution,
)
from tests.examples import examples

GROUPS, HEADS, K, V = 2, 4, 5, 3


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(
    num_tokens: int, num_sequences: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[torch.Tensor]:
    """Query, key, value, log decay, beta and first states; decays from almost 1 to almost 0."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, GROUPS, K), (num_tokens, GROUPS, K), (num_tokens, HEADS, V)]
    parts = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    decay = -(torch.randn(num_tokens, HEADS, generator=draw, dtype=torch.float64) * 3).exp()
    beta = torch.rand(num_tokens, HEADS, generator=draw, dtype=torch.float64)
    state = torch.randn(num_sequences, HEADS, K, V, generator=draw, dtype=torch.float64)
    return [part.to(dtype) for part in (*parts, decay, beta, state)]


def recurrence(query, key, value, log_decay, beta, state, lengths):
    """The paper's equation 10 token by token and head by head, with S [V, K] as it is printed there."""
    outputs, states, start = [], [], 0
    for index, length in enumerate(lengths):
        s = [state[index, head].T for head in range(HEADS)]
        for t in range(start, start + length):
            row = []
            for head in range(HEADS):
                q, k = (part[t, head // (HEADS // GROUPS)] for part in (query, key))
                q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
                a, b = log_decay[t, head].exp(), beta[t, head]
                eye = torch.eye(K, dtype=s[head].dtype)
                s[head] = s[head] @ (a * (eye - b * torch.outer(k, k))) + b * torch.outer(value[t, head], k)
                row.append(s[head] @ q / K**0.5)
            outputs.append(torch.stack(row))
        states.append(torch.stack([each.T for each in s]))
        start += length
    return torch.stack(outputs), torch.stack(states)


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    chunk=st.sampled_from([1, 2, 4, 8, 64]),
    seed=st.integers(0, 99),
)
def test_outputs_states_and_gradients_against_the_recurrence_in_fp64(lengths, chunk, seed) -> None:
    leaves = [part.requires_grad_() for part in inputs(sum(lengths), len(lengths), seed=seed)]
    others = [part.detach().clone().requires_grad_() for part in leaves]
    draw = torch.Generator().manual_seed(seed + 1)
    results = gated_delta_rule(*leaves[:5], plan_chunks(bounds(lengths), chunk), leaves[5])
    expected = recurrence(*others, lengths)
    weights = [torch.randn(part.shape, generator=draw, dtype=torch.float64) for part in expected]
    for outputs in (results, expected):
        sum((part * weight).sum() for part, weight in zip(outputs, weights, strict=True)).backward()
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(leaves, others, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-9)


def test_fp32_inputs_against_fp64() -> None:
    lengths = [200, 1, 64, 65, 130]
    wide = inputs(sum(lengths), len(lengths))
    expected = gated_delta_rule(*wide[:5], plan_chunks(bounds(lengths)), wide[5])
    narrow = [part.float() for part in wide]
    for ours, right in zip(
        gated_delta_rule(*narrow[:5], plan_chunks(bounds(lengths)), narrow[5]), expected, strict=True
    ):
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=5e-6)


def test_sums_of_bf16_inputs_are_in_fp32() -> None:
    narrow = [part.bfloat16() for part in inputs(300, 2)]
    wide = [part.double() for part in narrow]
    out, state = gated_delta_rule(*narrow[:5], plan_chunks(bounds([140, 160])), narrow[5])
    right, right_state = gated_delta_rule(*wide[:5], plan_chunks(bounds([140, 160])), wide[5])
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(state.double(), right_state, rtol=0, atol=5e-6)
    torch.testing.assert_close(out.double(), right, rtol=2**-8, atol=5e-6)


def test_each_sequence_against_transformers() -> None:
    lengths = [70, 3, 128]
    query, key, value, decay, beta, state = inputs(sum(lengths), len(lengths), torch.float32)
    decay = decay.clamp(min=-1)  # transformers subtracts sums in fp32
    out, final = gated_delta_rule(query, key, value, decay, beta, plan_chunks(bounds(lengths)), state)
    query, key = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (query, key))
    parts = zip(*(part.split(lengths) for part in (query, key, value, decay, beta)), strict=True)
    for index, (part, ours) in enumerate(zip(parts, out.split(lengths), strict=True)):
        q, k, v, g, b = (each[None] for each in part)
        theirs, last = torch_chunk_gated_delta_rule(
            q, k, v, g, b, initial_state=state[index, None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(ours, theirs[0], rtol=0, atol=5e-6)
        torch.testing.assert_close(final[index], last[0], rtol=0, atol=5e-6)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 150])
def test_a_state_continues_its_sequence(cut: int) -> None:
    query, key, value, decay, beta, state = inputs(151, 1)
    whole, last = gated_delta_rule(query, key, value, decay, beta, plan_chunks(bounds([151])), state)
    pieces = []
    for part in (slice(0, cut), slice(cut, 151)):
        piece = [each[part] for each in (query, key, value, decay, beta)]
        out, state = gated_delta_rule(*piece, plan_chunks(bounds([len(piece[0])])), state)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_steps_against_the_rule() -> None:
    *parts, state = inputs(30, 3)
    out, last = gated_delta_rule(*parts, plan_chunks(bounds([10, 10, 10])), state)
    for token in range(10):
        step, state = gated_delta_step(*(part[token::10] for part in parts), state)
        torch.testing.assert_close(step, out[token::10], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_decays_of_any_size_stay_finite() -> None:
    *parts, state = inputs(130, 1, torch.float32)
    parts[3] = torch.tensor([0.0, -1e4]).repeat(65)[:, None].repeat(1, HEADS)
    leaves = [part.requires_grad_() for part in (*parts, state)]
    out, last = gated_delta_rule(*leaves[:5], plan_chunks(bounds([130])), leaves[5])
    (out.sum() + last.sum()).backward()
    assert all(part.isfinite().all() for part in (out, last, *(leaf.grad for leaf in leaves)))


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_sample_changes_no_bit_of_another(changed: int) -> None:
    lengths = [65, 40, 130]

    def run(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [part.clone().requires_grad_() for part in parts]
        mixed = torch.cat((leaves[0].flatten(1), leaves[1].flatten(1), leaves[2].flatten(1)), dim=1)
        mixed, _ = causal_convolution(mixed, weight, plan_convolution(bounds(lengths), 4))
        q, k, v = mixed.split((GROUPS * K, GROUPS * K, HEADS * V), dim=1)
        q, k, v = q.unflatten(1, (GROUPS, K)), k.unflatten(1, (GROUPS, K)), v.unflatten(1, (HEADS, V))
        out, state = gated_delta_rule(q, k, v, *leaves[3:5], plan_chunks(bounds(lengths)), leaves[5])
        (out.square().sum() + state.square().sum()).backward()
        tokens = [part.split(lengths) for part in (out.detach(), *(leaf.grad for leaf in leaves[:5]))]
        return [torch.cat([part[index].flatten() for part in tokens]) for index in range(3)]

    weight = torch.randn(2 * GROUPS * K + HEADS * V, 4, generator=torch.Generator().manual_seed(5))
    parts = inputs(sum(lengths), 3, torch.float32)
    before = run(parts)
    rows = slice(sum(lengths[:changed]), sum(lengths[: changed + 1]))
    for part in parts[:5]:
        part[rows] *= 0.9
    parts[5][changed] += 1
    after = run(parts)
    for index in range(3):
        assert torch.equal(before[index], after[index]) == (index != changed)


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any), kernel=st.integers(1, 5))
def test_convolution_against_a_loop_in_fp64(lengths, kernel) -> None:
    draw, channels = torch.Generator().manual_seed(sum(lengths)), 3
    shapes = (sum(lengths), channels), (channels, kernel), (len(lengths), kernel - 1, channels)
    leaves = [torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    others = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out, last = causal_convolution(leaves[0], leaves[1], plan_convolution(bounds(lengths), kernel), leaves[2])
    rows, lasts, packed, weight = [], [], others[0].split(lengths), others[1]
    for index, length in enumerate(lengths):
        tokens = torch.cat((others[2][index], packed[index]))
        for t in range(length):
            total = sum(tokens[t + shift] * weight[:, shift] for shift in range(kernel))
            rows.append(total * total.sigmoid())
        lasts.append(tokens[length:])
    expected, expected_last = torch.stack(rows), torch.stack(lasts)
    torch.testing.assert_close(out, expected)
    assert torch.equal(last, expected_last)
    upstream = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    ((out * upstream).sum() + last.sum()).backward()
    ((expected * upstream).sum() + expected_last.sum()).backward()
    for ours, right in zip(leaves, others, strict=True):
        torch.testing.assert_close(ours.grad, right.grad)


def test_convolution_against_torch_per_sequence() -> None:
    lengths, channels, draw = [9, 1, 30], 6, torch.Generator().manual_seed(1)
    packed, weight = torch.randn(40, channels, generator=draw), torch.randn(channels, 4, generator=draw)
    out, _ = causal_convolution(packed, weight, plan_convolution(bounds(lengths), 4))
    for ours, part in zip(out.split(lengths), packed.split(lengths), strict=True):
        right = torch.nn.functional.conv1d(part.T[None], weight[:, None], padding=3, groups=channels)
        torch.testing.assert_close(ours, torch.nn.functional.silu(right[0, :, : len(part)].T), rtol=0, atol=1e-6)
