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
    hidden = torch.rand(num_rows, 1, 1, width + span) < 0.3
    hidden[..., -1] = False
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    sharing = Sharing.of(prefix_of_row, num_prefixes, "cpu")
    keys, values = (Stored(prefixes[part], responses[part], sharing) for part in range(2))
    output, _ = slot_attention(torch.nn.Module(), query, keys, values, mask, scaling=0.37)
    for row, prefix in enumerate(prefix_of_row):
        joined = torch.cat((prefixes[:, prefix], responses[:, row]), dim=2).repeat_interleave(heads // kv_heads, dim=1)
        weights = torch.softmax(0.37 * query[row] @ joined[0].transpose(-1, -2) + mask[row], dim=-1)
        expected = (weights @ joined[1]).squeeze(1)
        # weights are rounded to fp32 in between
        assert torch.allclose(output[row, 0], expected, atol=1e-6)


def test_a_place_without_a_row_is_never_read_back() -> None:
    sharing = Sharing.of([1, 0, 1, 1], 2, "cpu")
    rows = torch.arange(4.0).view(4, 1, 1, 1)
    (run,) = sharing.runs
    assert run.gather(rows).view(2, 3).tolist() == [[1, 0, 0], [0, 2, 3]]
    of_prefixes = torch.tensor([10.0, 100.0]).view(2, 1, 1, 1)
    assert sharing.product(rows, of_prefixes).flatten().tolist() == [0, 10, 200, 300]


def test_rows_that_share_with_nobody_are_not_padded_to_a_group() -> None:
    """48 responses that go on behind their own tokens, and a fresh group of 16 in the middle of their slots."""
    prefix_of_row = [*range(30), *[30] * 16, *range(31, 49)]
    sharing = Sharing.of(prefix_of_row, 49, "cpu")
    assert [(run.start, run.stop) for run in sharing.runs] == [(0, 30), (30, 33), (33, 49)]
    assert sum(run.members.numel() for run in sharing.runs) == 30 + 3 * 16 + 16 < 49 * 16
    rows = torch.randn(64, 2, 3, 4, dtype=torch.float64)
    of_prefixes = torch.randn(49, 2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(sharing.product(rows, of_prefixes), rows @ of_prefixes[prefix_of_row])


def test_runs_cover_all_slots_with_few_empty_places() -> None:
    assert _runs([4, 4, 4], 6) == [(0, 3, 4)]
    assert _runs([1, 16] * 4, 34) == [(0, 4, 16), (4, 8, 16)]
    assert _runs([0, 2, 0], 0) == [(0, 1, 1), (1, 2, 2), (2, 3, 1)]
    for counts in ([3, 1, 4, 1, 5, 9, 2, 6], [1] * 50 + [8], [8] + [1] * 50):
        runs = _runs(counts, sum(counts) // 2)
        assert [start for start, _, _ in runs] == [0, *(stop for _, stop, _ in runs[:-1])]
        assert runs[-1][1] == len(counts)
        for start, stop, most in runs:
            assert most == max(counts[start:stop])
            assert stop - start == 1 or (stop - start) * most - sum(counts[start:stop]) <= sum(counts) // 2
