from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms import linear_scan
from tests.examples import examples


def scan(inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    def fill(start: int, stop: int, tile_inputs: torch.Tensor, tile_decays: torch.Tensor) -> None:
        tile_inputs.copy_(inputs[start:stop])
        tile_decays.copy_(decays[start:stop])

    return linear_scan.reverse_linear_scan(torch.empty_like(inputs), fill)


def by_loop(inputs: torch.Tensor, decays: torch.Tensor) -> list[float]:
    result, following = [], 0.0
    for x, c in zip(reversed(inputs.tolist()), reversed(decays.tolist()), strict=True):
        following = x + c * following
        result.append(following)
    return result[::-1]


def stream(num_tokens: int, seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    decays = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    chosen = {"random": decays, "ends": decays.round(), "zeros": decays * 0, "ones": decays * 0 + 1}
    return inputs, chosen[kind]


@given(st.integers(0, 400), st.integers(0, 9), st.sampled_from(["random", "ends", "zeros", "ones"]), st.integers(1, 7))
@settings(max_examples=examples(150), deadline=None)
def test_every_length_and_cut_equals_the_loop(num_tokens, seed, kind, lanes):
    inputs, decays = stream(num_tokens, seed, kind)
    given_inputs, given_decays = inputs.clone(), decays.clone()
    before = (linear_scan.LANE_LENGTH, linear_scan.MAX_LANES)
    linear_scan.LANE_LENGTH, linear_scan.MAX_LANES = 9, lanes  # several tiles, lanes that end inside a sequence
    try:
        actual = scan(inputs, decays)
    finally:
        linear_scan.LANE_LENGTH, linear_scan.MAX_LANES = before
    expected = torch.tensor(by_loop(inputs, decays), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scan(inputs, decays), expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(inputs, given_inputs) and torch.equal(decays, given_decays)


def test_a_stream_of_more_than_one_tile():
    num_tokens = linear_scan.LANE_LENGTH * linear_scan.MAX_LANES + 12_345
    inputs, decays = stream(num_tokens, 0, "random")
    decays = 1 - 0.01 * decays
    expected = torch.tensor(by_loop(inputs, decays), dtype=torch.float64)
    torch.testing.assert_close(scan(inputs, decays), expected, rtol=1e-9, atol=1e-9)


def test_one_reward_is_carried_without_rounding():
    inputs = torch.zeros(20_000)
    inputs[-1] = 0.1
    assert scan(inputs, torch.ones(20_000)).unique().tolist() == [inputs[-1].item()]
