"""Random numbers and token draws against splitmix64 in plain integers and against exact distributions."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.engines.sampling import RowSampling, draw, signed_seed, uniforms

MASK = (1 << 64) - 1


def splitmix_finalizer(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def rows(num_rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> RowSampling:
    return RowSampling.of(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), top_k, dtype=torch.int64),
    )


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63, 2**64 - 1, 2**70 + 5])
def test_uniforms_are_splitmix64_of_seed_and_position(seed: int) -> None:
    positions = [0, 1, 7, 20480]
    expected = [
        (splitmix_finalizer((splitmix_finalizer(seed & MASK) + (p + 1) * 0x9E3779B97F4A7C15) & MASK) >> 40) / 2**24
        for p in positions
    ]
    actual = uniforms(torch.full((4,), signed_seed(seed)), torch.tensor(positions))
    assert actual.tolist() == expected


def test_uniforms_are_flat_and_unrelated_across_neighboring_seeds() -> None:
    numbers = (
        uniforms(torch.arange(2000)[:, None].expand(-1, 50).reshape(-1), torch.arange(50).repeat(2000))
        .double()
        .view(2000, 50)
    )
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
    assert 99 - 5 * 14.1 < chi_squared < 99 + 5 * 14.1
    correlation = torch.corrcoef(torch.stack([numbers[:-1, 1:].flatten(), numbers[1:, :-1].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draw_follows_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, float("-inf"), 1.0])
    num_rows = 40000
    tokens, logprobs, _ = draw(
        logits.expand(num_rows, -1),
        rows(num_rows, temperature),
        uniforms(torch.arange(num_rows), torch.zeros(num_rows).long()),
    )
    exact = (logits.double() / temperature).softmax(-1)
    frequency = torch.bincount(tokens, minlength=5).double() / num_rows
    assert torch.all((frequency - exact).abs() < 5 * (exact * (1 - exact) / num_rows).sqrt() + 1e-12)
    assert torch.allclose(logprobs.double(), exact.log()[tokens], atol=1e-6)


def test_top_k_and_top_p_restrict_but_log_probs_are_of_the_whole_vocabulary() -> None:
    exact = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    logits = exact.log().float()[[4, 0, 2, 1, 3]]  # order in the vocabulary is not the order of probability
    whole = exact[[4, 0, 2, 1, 3]]
    num_rows = 20000
    uniform = uniforms(torch.arange(num_rows), torch.ones(num_rows).long())
    for top_p, top_k, kept in (
        (0.7, 0, {1, 3}),
        (0.71, 0, {1, 3, 2}),
        (1.0, 3, {1, 3, 2}),
        (0.5, 3, {1, 3}),
        (0.01, 0, {1}),
        (0.47, 2, {1}),
    ):
        tokens, logprobs, _ = draw(logits.expand(num_rows, -1), rows(num_rows, 1.0, top_p, top_k), uniform)
        # 0.7 is on the edge of float32: both sets are right there.
        allowed = [kept, kept | {2}] if top_p == 0.7 else [kept]
        assert set(tokens.tolist()) in allowed, (top_p, top_k)
        assert torch.allclose(logprobs.double(), whole.log()[tokens], atol=1e-6)
        restricted = torch.zeros(5, dtype=torch.float64)
        restricted[list(set(tokens.tolist()))] = whole[list(set(tokens.tolist()))]
        restricted /= restricted.sum()
        frequency = torch.bincount(tokens, minlength=5).double() / num_rows
        assert torch.all((frequency - restricted).abs() < 5 * (restricted * (1 - restricted) / num_rows).sqrt() + 1e-12)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 4096), (1.0, 7), (0.6, 5)])
def test_what_is_recorded_is_what_is_drawn_from(top_p: float, top_k: int) -> None:
    """Chi-square of 60,000 tokens against the softmax over the recorded support."""
    num_rows = 60_000
    logits = torch.randn(40, generator=torch.Generator().manual_seed(top_k)) * 1.5
    sampling = RowSampling.of(
        torch.full((num_rows,), 0.8),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), top_k),
        torch.arange(num_rows) > 0,
    )
    uniform = uniforms(torch.arange(num_rows), torch.full((num_rows,), 3))
    tokens, logprobs, support = draw(logits.expand(num_rows, -1), sampling, uniform)
    assert not support[0].any() and (support[1:] == support[1]).all() and 1 < int(support[1].sum()) <= top_k
    exact = (logits.double() / 0.8).masked_fill(~support[1], float("-inf")).log_softmax(-1)
    torch.testing.assert_close(logprobs[1:].double(), exact[tokens[1:]], rtol=0, atol=1e-6)
    assert float(logprobs[0]) == pytest.approx(float((logits.double() / 0.8).log_softmax(-1)[tokens[0]]), abs=1e-6)
    counts = torch.bincount(tokens[1:], minlength=40).double()
    expected = exact.exp() * (num_rows - 1)
    assert counts[~support[1]].sum() == 0
    chi_square = float(((counts - expected).square() / expected)[support[1]].sum())
    freedom = int(support[1].sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    temperature, top_p, top_k = (
        torch.tensor([1.0, 0.0, 0.7, 1.0]),
        torch.tensor([1.0, 1.0, 0.8, 1.0]),
        torch.tensor([0, 0, 0, 5]),
    )
    uniform = torch.rand(4)
    together, together_logprobs, _ = draw(logits, RowSampling.of(temperature, top_p, top_k), uniform)
    for row in range(4):
        alone = RowSampling.of(temperature[row : row + 1], top_p[row : row + 1], top_k[row : row + 1])
        token, logprob, _ = draw(logits[row : row + 1], alone, uniform[row : row + 1])
        assert token.item() == together[row].item()
        assert logprob.item() == pytest.approx(together_logprobs[row].item(), abs=1e-6)
    assert together[1].item() == int(logits[1].argmax())
    assert together_logprobs[1].item() == pytest.approx(float(logits[1].log_softmax(-1).max()), abs=1e-6)


def test_the_largest_uniform_never_leaves_the_support() -> None:
    logits = torch.tensor([[0.0, 1.0, float("-inf"), float("-inf")]]).expand(2, -1)
    tokens, *_ = draw(logits, rows(2), torch.tensor([0.0, 1.0 - 2.0**-24]))
    assert tokens.tolist() == [0, 1]
