"""The k largest log-probs against a sort of all of them."""

from __future__ import annotations

import pytest
import torch
from lm_head_cases import exact_outputs, make

from megatron_dapo.ops.logprob import vocab_parallel_logprobs
from megatron_dapo.ops.top_logprobs import vocab_parallel_top_logprobs


@pytest.mark.parametrize("k", [1, 5, 37])
@pytest.mark.parametrize("tiles", [(None, None), (6, 3), (20, 36)])
def test_against_a_sort(k, tiles) -> None:
    hidden, weight, targets = make(20, vocab_size=37, rows=48)
    found = vocab_parallel_top_logprobs(
        hidden, weight, targets, k, temperature=0.7, vocab_size=37, chunk_tokens=tiles[0], chunk_columns=tiles[1]
    )
    log_p = torch.log_softmax(hidden.double() @ weight[:37].double().T / 0.7, 1)
    values, words = log_p.sort(dim=1, descending=True)
    assert torch.equal(found.top_words, words[:, :k])
    torch.testing.assert_close(found.top_logprobs.double(), values[:, :k], rtol=2e-5, atol=2e-5)
    assert found.top_logprobs.max() <= 0


def test_the_pass_is_the_same_as_that_of_the_logprobs() -> None:
    inputs = make(20, dtype=torch.bfloat16)
    found = vocab_parallel_top_logprobs(*inputs, 4, vocab_size=37)
    logprobs, entropy = vocab_parallel_logprobs(*inputs, vocab_size=37, implementation="chunked")
    assert torch.equal(found.logprobs, logprobs) and torch.equal(found.entropy, entropy)
    exact, _ = exact_outputs(*inputs, 1.0, 37)
    torch.testing.assert_close(found.logprobs.double(), exact, rtol=1e-4, atol=1e-4)


def test_all_words_have_a_probability_of_one() -> None:
    hidden, weight, targets = make(3)
    found = vocab_parallel_top_logprobs(hidden, weight, targets, 37, vocab_size=37)
    torch.testing.assert_close(found.top_logprobs.exp().sum(1), torch.ones(3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [0, 38])
def test_k_outside_the_vocabulary_is_an_error(k) -> None:
    with pytest.raises(ValueError, match=rf"k {k} is not in \[1, 37\]"):
        vocab_parallel_top_logprobs(*make(3), k, vocab_size=37)
