"""The head with bf16 products on a CPU: as near to fp64 as its rounding allows, alike in every pass, tile and shard."""

from __future__ import annotations

import pytest
import torch
from lm_head_cases import exact, make, relative_norm, run, run_in_shards, upstream_of

from megatron_dapo.ops.lm_head.inputs import Tiles
from megatron_dapo.ops.lm_head.select import HeadSpec, choose
from megatron_dapo.ops.logprob import vocab_parallel_logprobs

NAME = "chunked_bf16"
TILES = {"chunk_tokens": 5, "chunk_columns": 8}


@pytest.mark.parametrize(("vocab_size", "rows"), [(3, 3), (37, 48), (127, 128), (1000, 1024)])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("tiles", [{}, TILES])
def test_bf16_inputs_against_fp64(vocab_size: int, rows: int, temperature: float, tiles: dict[str, int]) -> None:
    inputs = make(24, 64, vocab_size, rows, scale=0.125, dtype=torch.bfloat16)
    found = run(inputs, vocab_size=vocab_size, temperature=temperature, implementation=NAME, **tiles)
    right = exact(inputs, vocab_size=vocab_size, temperature=temperature)
    # A product is rounded to 8 bits, by at most 2^-9 of it; the log-prob has the target's and a mean of all.
    bound = 2 * 2.0**-9 * float((inputs[0].double() @ inputs[1].double().T).abs().max()) / temperature
    assert (found.logprobs.double() - right.logprobs).abs().max() <= bound
    assert relative_norm(found.to_hidden, right.to_hidden) <= 2e-2
    assert relative_norm(found.to_weight, right.to_weight) <= 2e-2
    assert found.logprobs.dtype == torch.float32 and found.to_hidden.dtype == torch.bfloat16
    assert not found.to_weight[vocab_size:].any()


def test_passes_with_gradients_and_without_and_kept_logits_are_the_same_numbers() -> None:
    inputs = make(24, 64, 127, 128, scale=0.125, dtype=torch.bfloat16)
    with torch.no_grad():
        old = vocab_parallel_logprobs(*inputs, vocab_size=127, implementation=NAME, **TILES)
    again, kept = (run(inputs, vocab_size=127, implementation=NAME, keep_bytes=size, **TILES) for size in (0, 1 << 20))
    for found in (again, kept):
        assert torch.equal(found.logprobs, old[0]) and torch.equal(found.entropy, old[1])
    assert torch.equal(again.to_hidden, kept.to_hidden) and torch.equal(again.to_weight, kept.to_weight)


def test_shards_match_one() -> None:
    inputs = make(24, 64, 125, 128, scale=0.125, dtype=torch.bfloat16)
    whole = run(inputs, vocab_size=125, implementation=NAME, temperature=0.8)
    cut = run_in_shards(
        inputs, vocab_size=125, implementation=NAME, num_shards=2, temperature=0.8, tiles=Tiles(tokens=5, columns=8)
    )
    torch.testing.assert_close(cut.logprobs, whole.logprobs, rtol=0, atol=1e-5)
    assert relative_norm(cut.to_hidden, whole.to_hidden) <= 1e-2
    assert relative_norm(cut.to_weight, whole.to_weight) <= 1e-2


def test_the_weights_gradient_is_added_to_its_sum() -> None:
    hidden, weight, targets = make(24, 64, 127, 128, scale=0.125, dtype=torch.bfloat16)
    right = run((hidden, weight, targets), vocab_size=127, implementation=NAME).to_weight
    leaf = weight.clone().requires_grad_()
    leaf.main_grad = torch.ones(leaf.shape)
    outputs = vocab_parallel_logprobs(
        hidden.clone().requires_grad_(), leaf, targets, vocab_size=127, implementation=NAME, adds_to_main_grad=True
    )
    upstream = upstream_of(24, hidden.device)
    (upstream[0] * outputs[0] + upstream[1] * outputs[1]).sum().backward()
    assert relative_norm(leaf.main_grad - 1, right) <= 1e-2


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cuda", torch.bfloat16, "the device is cuda"), ("cpu", torch.float32, "the model is in torch.float32")],
)
def test_it_is_for_a_bf16_model_on_a_cpu(device: str, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ValueError, match=f"chunked_bf16 cannot run here: {reason}"):
        choose(NAME, HeadSpec(torch.device(device), dtype, 64, 64))
    assert choose(NAME, HeadSpec(torch.device("cpu"), torch.bfloat16, 64, 64)).name == NAME
