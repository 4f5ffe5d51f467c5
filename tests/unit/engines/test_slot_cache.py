"""Attention over shared prompts and own responses against a softmax over their concatenation."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.engines.slot_cache import Sharing, Stored, slot_attention


@pytest.mark.parametrize("prefix_of_row", [[0, 0, 0], [2, 0, 1, 0, 2, 2, 2], [0]])
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
    grouped = sharing.gather(rows)
    assert grouped.view(2, 3).tolist() == [[1, 0, 0], [0, 2, 3]]
    assert sharing.scatter(grouped, 1).flatten().tolist() == [0, 1, 2, 3]
