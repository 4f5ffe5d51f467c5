"""Attention over shared prompts and own responses against a softmax over their concatenation."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.engines.slot_cache import Sharing, Stored, _runs, slot_attention


@pytest.mark.parametrize("prefix_of_row", [[0, 0, 0], [2, 0, 1, 0, 2, 2, 2], [0], [0, 1, 4, 2, 4, 3, 4, 4, 5]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_attention_over_repeated_prompts(prefix_of_row: list[int], kv_heads: int) -> None:
    torch.manual_seed(0)
    num_rows, num_prefixes, heads, dim, width, span = len(prefix_of_row), max(prefix_of_row) + 1, 4, 6, 5, 7
    query = torch.randn(num_rows, heads, 1, dim, dtype=torch.float64)
    prefixes = torch.randn(2, num_prefixes, kv_heads, width, dim, dtype=torch.float64)
    responses = torch.randn(2, num_rows, kv_heads, span, dim, dtype=torch.float64)
    lengths = [5, 2, 4, 0, 5, 1][:num_prefixes]
    hidden = torch.rand(num_rows, 1, 1, width + span) < 0.3
    hidden[..., -1] = False
    hidden[..., :width] |= (
        torch.arange(width) >= torch.tensor([[[lengths[prefix]]] for prefix in prefix_of_row])[:, None]
    )
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    sharing = Sharing.of(prefix_of_row, lengths, "cpu")
    keys, values = (Stored(prefixes[part], responses[part], sharing) for part in range(2))
    output, _ = slot_attention(torch.nn.Module(), query, keys, values, mask, scaling=0.37)
    for row, prefix in enumerate(prefix_of_row):
        joined = torch.cat((prefixes[:, prefix], responses[:, row]), dim=2).repeat_interleave(heads // kv_heads, dim=1)
        weights = torch.softmax(0.37 * query[row] @ joined[0].transpose(-1, -2) + mask[row], dim=-1)
        expected = (weights @ joined[1]).squeeze(1)
        # weights are rounded to fp32 in between
        assert torch.allclose(output[row, 0], expected, atol=1e-6)


def test_an_empty_slot_is_never_read() -> None:
    sharing = Sharing.of([1, 0, 1, 1], [1, 1], "cpu")
    rows = torch.arange(4.0).view(4, 1, 1, 1)
    (run,) = sharing.runs
    assert run.gather(rows).view(2, 3).tolist() == [[1, 0, 0], [0, 2, 3]]
    of_prefixes = torch.tensor([10.0, 100.0]).view(2, 1, 1, 1)
    for product in (sharing.scores, sharing.sums):
        assert product(rows, of_prefixes).flatten().tolist() == [0, 10, 200, 300]


def test_rows_that_share_no_prefix_are_not_padded_to_a_group() -> None:
    """48 responses that continue after their own tokens, and a fresh group of 16 in the middle of their slots."""
    prefix_of_row = [*range(30), *[30] * 16, *range(31, 49)]
    sharing = Sharing.of(prefix_of_row, [4] * 49, "cpu")
    assert [(run.start, run.stop) for run in sharing.runs] == [(0, 30), (30, 33), (33, 49)]
    assert sum(run.members.numel() for run in sharing.runs) == 30 + 3 * 16 + 16 < 49 * 16
    check_products(sharing, prefix_of_row, [4] * 49)


def test_short_prefixes_are_not_read_as_far_as_long_ones() -> None:
    """8 responses that continue after 400 to 800 tokens, and 32 fresh ones of 4 prompts."""
    lengths = [800, 780, 760, 700, 500, 450, 420, 400, 9, 8, 7, 3]
    prefix_of_row = [*range(8), *(slot for slot in range(8, 12) for _ in range(8))]
    sharing = Sharing.of(prefix_of_row, lengths, "cpu")
    assert [(run.start, run.stop, run.width) for run in sharing.runs] == [(0, 6, 800), (6, 9, 420), (9, 12, 8)]
    assert sum((run.stop - run.start) * run.width for run in sharing.runs) < 1.3 * sum(lengths) < 12 * 800
    check_products(sharing, prefix_of_row, lengths)


def check_products(sharing: Sharing, prefix_of_row: list[int], lengths: list[int]) -> None:
    """Against products with each row's own prefix, whose columns after its length count for nothing."""
    torch.manual_seed(0)
    used = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, :, None]
    keys, values = torch.randn(2, len(lengths), 2, max(lengths), 4, dtype=torch.float64) * used
    queries = torch.randn(len(prefix_of_row), 2, 3, 4, dtype=torch.float64)
    expected = queries @ keys[prefix_of_row].transpose(-1, -2)
    torch.testing.assert_close(sharing.scores(queries, keys), expected)
    weights = torch.randn(len(prefix_of_row), 2, 3, max(lengths), dtype=torch.float64)
    weights = weights * used[prefix_of_row].transpose(-1, -2)
    torch.testing.assert_close(sharing.sums(weights, values), weights @ values[prefix_of_row])


def test_runs_cover_all_slots_with_few_empty_places() -> None:
    assert _runs([4, 4, 4], [7, 5, 6]) == [(0, 3, 4, 7)]
    assert _runs([1, 16] * 4, [5] * 8) == [(0, 4, 16, 5), (4, 8, 16, 5)]
    assert _runs([0, 2, 0], [0, 1, 2]) == [(0, 1, 1, 0), (1, 2, 2, 1), (2, 3, 1, 2)]
    assert _runs([1], [0]) == [(0, 1, 1, 0)]
    many = [3, 1, 4, 1, 5, 9, 2, 6], [1] * 50 + [8], [8] + [1] * 50, [300, 900, 20, 10, 4000, 1, 1, 1]
    for counts in many:
        for lengths in (many[many.index(counts)], [2000] + [5] * (len(counts) - 1)):
            runs = _runs(counts, lengths)
            assert [start for start, *_ in runs] == [0, *(stop for _, stop, *_ in runs[:-1])]
            assert runs[-1][1] == len(counts)
            for start, stop, most, width in runs:
                assert most == max(counts[start:stop]) and width == max(lengths[start:stop])
                size = stop - start
                assert size == 1 or size * most - sum(counts[start:stop]) <= sum(counts) // 2
                assert size == 1 or size * width - sum(lengths[start:stop]) <= max(
                    sum(lengths[start : stop - 1]) // 4, 512
                )
