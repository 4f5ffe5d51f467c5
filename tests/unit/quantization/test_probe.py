from __future__ import annotations

import math

import pytest
import torch

from megatron_dapo.quantization.formats import Tolerance
from megatron_dapo.quantization.probe import Sample, compare, logprobs_of, sample_responses


def test_log_probs_of_the_response_alone(model, samples) -> None:
    sample = samples[0]
    logits = model(torch.tensor([sample.token_ids])).logits[0].detach().double()
    expected = [
        float(torch.log_softmax(logits[position - 1], -1)[sample.token_ids[position]])
        for position in range(sample.num_prompt_tokens, len(sample.token_ids))
    ]
    assert logprobs_of(model, sample) == pytest.approx(expected, abs=1e-5)


def test_a_prompt_without_response_is_scored_whole(model) -> None:
    assert len(logprobs_of(model, Sample([3, 4, 5, 6], 4))) == 3


def test_responses_follow_their_prompts_end_at_the_end_and_repeat_with_the_seed(model) -> None:
    prompts = [[5, 6, 7], [9, 8], [1, 2, 3, 4, 5]]
    model.generation_config.eos_token_id = list(range(40))  # often drawn
    first, again, other = (sample_responses(model, prompts, 30, seed) for seed in (0, 0, 1))
    assert first == again != other
    for sample, prompt in zip(first, prompts, strict=True):
        response = sample.token_ids[len(prompt) :]
        assert sample.token_ids[: len(prompt)] == prompt and 1 <= len(response) <= 30
        assert all(token >= 40 for token in response[:-1])
        assert response[-1] < 40 or len(response) == 30
    assert any(len(sample.token_ids) - sample.num_prompt_tokens < 30 for sample in first)


def test_batches_of_prompts_do_not_change_what_is_drawn_without_chance(model) -> None:
    """Left padding is masked: greedy continuations are those of the prompt alone."""
    model.generation_config.eos_token_id = None
    prompts = [[5, 6, 7], [9, 8], [1, 2, 3, 4, 5]]
    model.lm_head.weight.data.mul_(1e4)  # sampling becomes greedy
    together = sample_responses(model, prompts, 8, 0)
    alone = [sample_responses(model, [prompt], 8, 0)[0] for prompt in prompts]
    assert together == alone


def test_difference() -> None:
    found = compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]])
    assert (found.num_sequences, found.num_tokens) == (2, 3)
    assert found.mean_abs == pytest.approx(0.5) and found.max_abs == pytest.approx(1.0)
    assert found.perplexity_before == pytest.approx(math.exp(2.0))
    assert found.perplexity_change == pytest.approx(math.exp(5.5 / 3 - 2) - 1)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_nonfinite_values_are_never_within_tolerance(bad: float) -> None:
    found = compare([[-1.0, -2.0]], [[-1.0, bad]])
    assert len(found.violations(Tolerance(1e9, 1e9, 1e9))) == 3


def test_violations_say_both_numbers() -> None:
    found = compare([[-1.0, -2.0]], [[-1.2, -2.0]])
    assert found.violations(Tolerance(0.2, 0.3, 0.2)) == []
    assert found.violations(Tolerance(0.05, 0.3, 0.2)) == ["mean |log-prob difference| 0.1, allowed 0.05"]
    # A model that has become more certain of these tokens is as much another model.
    assert compare([[-2.0]], [[-1.0]]).violations(Tolerance(9, 9, 0.1))[0].startswith("change of perplexity 0.63")


def test_other_tokens_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"\[1\] tokens before and of \[2\] after"):
        compare([[-1.0]], [[-1.0, -2.0]])
    with pytest.raises(ValueError, match="cannot be compared"):
        compare([], [])
