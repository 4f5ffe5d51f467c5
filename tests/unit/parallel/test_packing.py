"""Plans keep their promises for any ragged lengths; packed fields stand where the token is predicted."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import (
    PADDING_ID,
    MicroBatchLimits,
    pack,
    pad_to_longest,
    plan_micro_batches,
    unpack_responses,
)
from megatron_dapo.rounding import round_up
from megatron_dapo.types import TrainSample

LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(4),
    ParallelLayout(4, tensor=2, sequence_parallel=True),
    ParallelLayout(8, context=2),
    ParallelLayout(4, pipeline=2, virtual_pipeline=2),
    ParallelLayout(12, tensor=3, pipeline=2, sequence_parallel=True),
]
layouts = st.sampled_from(LAYOUTS)
ragged = st.lists(st.integers(2, 120), min_size=1, max_size=80)


def make_sample(length: int, prompt_length: int, seed: int = 0, name: str = "g/0") -> TrainSample:
    generator = torch.Generator().manual_seed(seed)
    num_response = length - prompt_length
    return TrainSample(
        sample_id=name,
        group_index=0,
        tokens=torch.randint(1, 1000, (length,), generator=generator),
        prompt_length=prompt_length,
        loss_mask=(torch.rand(num_response, generator=generator) > 0.3).float(),
        advantages=torch.randn(num_response, generator=generator),
        rollout_logprobs=-torch.rand(num_response, generator=generator),
        staleness=torch.randint(0, 3, (num_response,), generator=generator).float(),
    )


def check_plan(plan, lengths, layout, limits) -> None:
    assert len(plan) == layout.data
    assert len({len(rank) for rank in plan}) == 1, "ranks disagree on the number of micro-batches"
    if layout.virtual_pipeline > 1:
        assert len(plan[0]) % layout.pipeline == 0
    assert sorted(index for rank in plan for part in rank for index in part) == list(range(len(lengths)))
    for rank in plan:
        assert any(rank) or len(lengths) < layout.data, "a rank without a sequence"
        for part in rank:
            padded = round_up(
                sum(round_up(lengths[index], layout.sequence_alignment) for index in part),
                layout.micro_batch_alignment,
            )
            assert not limits.max_tokens or padded <= limits.max_tokens
            assert not limits.max_sequences or len(part) <= limits.max_sequences


@given(ragged, layouts, st.integers(128, 600), st.sampled_from([0, 50, 1000]))
def test_plan_by_tokens(lengths, layout, budget, parity) -> None:
    limits = MicroBatchLimits(max_tokens=budget, attention_parity=parity)
    plan = plan_micro_batches(lengths, layout, limits)
    check_plan(plan, lengths, layout, limits)
    num_empty = sum(not part for rank in plan for part in rank)
    if num_empty:
        assert sum(len(rank) for rank in plan) > len(lengths), (
            "an empty micro-batch though there were sequences for all"
        )


@given(ragged, layouts, st.integers(1, 8))
def test_plan_by_sequences(lengths, layout, size) -> None:
    limits = MicroBatchLimits(max_sequences=size)
    plan = plan_micro_batches(lengths, layout, limits)
    check_plan(plan, lengths, layout, limits)


@given(ragged, layouts)
def test_plan_with_both_limits(lengths, layout) -> None:
    limits = MicroBatchLimits(max_tokens=256, max_sequences=3)
    check_plan(plan_micro_batches(lengths, layout, limits), lengths, layout, limits)


def test_plan_is_as_short_as_the_limits_allow_and_balanced() -> None:
    lengths = [
        torch.randint(20, 200, (1,), generator=torch.Generator().manual_seed(seed)).item() for seed in range(512)
    ]
    plan = plan_micro_batches(lengths, ParallelLayout(8), MicroBatchLimits(max_tokens=2048))
    assert len(plan[0]) <= -(-sum(lengths) // (8 * 2048)) + 1
    tokens = [sum(lengths[index] for part in rank for index in part) for rank in plan]
    assert max(tokens) <= 1.01 * sum(tokens) / 8


def test_ranks_get_equal_work_where_attention_counts() -> None:
    """Ranks of equal tokens are not equally busy: the work of long sequences grows with the square of their length."""
    layout, parity, slowest = ParallelLayout(16, pipeline=2), 97_611, {}  # parity of Qwen2.5-32B
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        lengths = [min(20_000, 200 + int(x)) for x in torch.exp(torch.randn(512, generator=generator) * 0.9 + 8)]
        for attention_parity in (0, parity):
            limits = MicroBatchLimits(max_tokens=22_528, attention_parity=attention_parity)
            plan = plan_micro_batches(lengths, layout, limits)
            check_plan(plan, lengths, layout, limits)
            work = [sum(lengths[i] * (parity + lengths[i]) for part in rank for i in part) for rank in plan]
            slowest.setdefault(attention_parity, []).append(max(work) / (sum(work) / 8))
    assert sum(slowest[parity]) / 5 < 1.006 < 1.01 < sum(slowest[0]) / 5, slowest


def test_tight_budget_that_balancing_alone_would_break() -> None:
    # Largest first would put 6 + 6 apart and end with 3 x 4 = 12 on one part; only 6+6 and 4+4+4 fit.
    plan = plan_micro_batches([6, 6, 4, 4, 4], ParallelLayout(1), MicroBatchLimits(max_tokens=12))
    assert sorted(map(sorted, plan[0])) == [[0, 1], [2, 3, 4]]


def test_masked_micro_batch_only_where_counts_leave_no_other_way() -> None:
    plan = plan_micro_batches([10] * 5, ParallelLayout(2), MicroBatchLimits(max_tokens=10))
    assert [len(rank) for rank in plan] == [3, 3] and sum(not part for rank in plan for part in rank) == 1
    plan = plan_micro_batches(
        [10] * 3, ParallelLayout(2, pipeline=2, virtual_pipeline=2), MicroBatchLimits(max_tokens=20)
    )
    assert [len(part) for part in plan[0]] == [2, 1]


def test_sequence_above_the_limit_is_an_error_with_both_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"sequence 1 has 301 tokens, 304 with padding.*at most 256; raise.*at least 304"
    ):
        plan_micro_batches([5, 301, 7], ParallelLayout(2, context=2), MicroBatchLimits(max_tokens=256))


def test_budget_between_multiples_of_the_alignment_holds_no_more_than_it_says() -> None:
    layout = ParallelLayout(4, tensor=4, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"sequence 0 has 9 tokens, 12 with padding.*at most 11"):
        plan_micro_batches([9], layout, MicroBatchLimits(max_tokens=11))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_ranks_without_a_sequence_have_masked_micro_batches(num_micro_batches: int) -> None:
    """The last windows of a run, or what a filter left: fewer sequences than ranks."""
    layout = ParallelLayout(4 * num_micro_batches, pipeline=num_micro_batches, virtual_pipeline=num_micro_batches)
    plan = plan_micro_batches([5, 6, 7], layout, MicroBatchLimits(max_tokens=100))
    assert sorted(map(sum, ([len(part) for part in rank] for rank in plan))) == [0, 1, 1, 1]
    assert {len(rank) for rank in plan} == {num_micro_batches}


@pytest.mark.parametrize("limits", [{}, {"max_tokens": -1, "max_sequences": 2}])
def test_limits_without_a_limit_are_an_error(limits) -> None:
    with pytest.raises(ValueError, match="at least one positive limit"):
        MicroBatchLimits(**limits)


def test_pack_by_hand() -> None:
    sample = TrainSample(
        sample_id="7/0",
        group_index=7,
        tokens=torch.tensor([11, 12, 13, 14, 15]),
        prompt_length=2,
        loss_mask=torch.tensor([1.0, 0.0, 1.0]),
        advantages=torch.tensor([0.5, 0.6, 0.7]),
        rollout_logprobs=torch.tensor([-1.0, -2.0, -3.0]),
    )
    layout = ParallelLayout(4, tensor=2, context=2, sequence_parallel=True)
    batch = pack([sample, sample], [0.25, 0.125], layout)
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15, 0, 0, 0] * 2
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] * 2
    assert batch.targets.tolist() == [0, 13, 14, 15, 0, 0, 0, 0] * 2
    assert batch.loss_mask.tolist() == [0, 1, 0, 1, 0, 0, 0, 0] * 2
    assert batch.loss_weights.tolist() == [0, 0.25, 0, 0.25, 0, 0, 0, 0, 0, 0.125, 0, 0.125, 0, 0, 0, 0]
    torch.testing.assert_close(batch.advantages, torch.tensor([0, 0.5, 0.6, 0.7, 0, 0, 0, 0] * 2))
    assert batch.rollout_logprobs.tolist() == [0, -1, -2, -3, 0, 0, 0, 0] * 2
    assert batch.cu_seqlens.tolist() == [0, 8, 16] and batch.cu_seqlens.dtype == torch.int32
    assert batch.sequence_lengths == (5, 5) and batch.sample_ids == ("7/0", "7/0")


def test_tail_padding_is_a_masked_sequence_of_its_own() -> None:
    layout = ParallelLayout(4, tensor=4, sequence_parallel=True)
    batch = pack([make_sample(5, 2), make_sample(4, 1)], [1.0, 1.0], layout)
    assert batch.num_tokens == 12 and batch.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert batch.sequence_lengths == (5, 4, 0) and batch.sample_ids[-1] == PADDING_ID
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 4 + [2] * 3
    assert batch.position_ids[9:].tolist() == [0, 1, 2] and not batch.loss_mask[9:].any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
def test_masked_micro_batch_has_tokens_but_no_weight(layout) -> None:
    batch = pack([], [], layout)
    assert batch.num_tokens == layout.micro_batch_alignment and batch.sequence_lengths == (0,)
    assert not batch.loss_mask.any() and not batch.loss_weights.any()


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=12), layouts)
def test_pack_holds_every_field_of_every_sample_once(shapes, layout) -> None:
    samples = [make_sample(p + r, p, seed, f"g/{seed}") for seed, (p, r) in enumerate(shapes)]
    weights = [1.0 / (1 + index) for index in range(len(samples))]
    for batch in (pack(samples, weights, layout), pad_to_longest(samples, weights, layout)):
        assert batch.num_tokens % layout.micro_batch_alignment == 0
        starts = batch.cu_seqlens.tolist()
        assert all(
            (end - start) % layout.sequence_alignment == 0 for start, end in zip(starts, starts[1:], strict=False)
        )
        for index, sample in enumerate(samples):
            assert torch.equal(batch.token_ids[starts[index] :][: sample.num_tokens], sample.tokens)
            assert set(batch.sequence_ids[starts[index] : starts[index + 1]].tolist()) == {index}
        prompts = [sample.prompt_length for sample in samples]
        for field in ("loss_mask", "advantages", "rollout_logprobs", "staleness"):
            unpacked = unpack_responses(getattr(batch, field), batch, prompts)
            assert all(torch.equal(unpacked[sample.sample_id], getattr(sample, field)) for sample in samples)
        targets = unpack_responses(batch.targets, batch, prompts)
        assert all(torch.equal(targets[sample.sample_id], sample.tokens[sample.prompt_length :]) for sample in samples)
        assert batch.loss_mask.sum() == sum(sample.loss_mask.sum() for sample in samples)
        exact = sum(weight * float(sample.loss_mask.sum()) for weight, sample in zip(weights, samples, strict=True))
        assert abs(float(batch.loss_weights.double().sum()) - exact) <= 1e-6 * max(exact, 1.0)


def test_padded_variant_pads_to_the_longest() -> None:
    batch = pad_to_longest([make_sample(9, 2), make_sample(4, 1)], [1.0, 1.0], ParallelLayout(2, context=2))
    assert batch.cu_seqlens.tolist() == [0, 12, 24] and batch.sequence_lengths == (9, 4)


def test_samples_whose_fields_do_not_fit_are_errors() -> None:
    sample = make_sample(6, 2)
    short = TrainSample(**{**vars(sample), "rollout_logprobs": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"sample 'g/0': rollout_logprobs has shape \(3,\), its response has 4 tokens"):
        pack([short], [1.0], ParallelLayout(1))
    with pytest.raises(ValueError, match="prompt length 0 of 6"):
        pack([TrainSample(**{**vars(sample), "prompt_length": 0})], [1.0], ParallelLayout(1))
    with pytest.raises(ValueError, match="1 samples but 2 loss weights"):
        pack([sample], [1.0, 1.0], ParallelLayout(1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_routing_stands_at_the_token_that_was_routed(dtype: torch.dtype) -> None:
    samples = [make_sample(6, 2, 1, "a"), make_sample(5, 3, 2, "b"), make_sample(4, 1, 3, "c")]
    routed = [
        sample
        if sample.sample_id == "b"
        else replace(sample, routing=torch.randint(0, 200, (sample.num_tokens - 1, 3, 2)).to(dtype))
        for sample in samples
    ]
    layout = ParallelLayout(4, tensor=2, context=2, sequence_parallel=True)
    batch = pack(routed, [1.0] * 3, layout)
    assert batch.routing.dtype == dtype and batch.routing.shape == (batch.num_tokens, 3, 2)
    known = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for start, sample in zip(batch.cu_seqlens.tolist(), routed, strict=False):
        if sample.routing is not None:  # the engine did not read the last token
            assert torch.equal(batch.routing[start : start + sample.num_tokens - 1], sample.routing)
            known[start : start + sample.num_tokens - 1] = True
    assert torch.equal(batch.is_routed, known)
    assert pack(samples, [1.0] * 3, layout).routing is None and pack(samples, [1.0] * 3, layout).is_routed is None
    short = replace(samples[0], routing=torch.zeros(4, 3, 2, dtype=dtype))
    with pytest.raises(ValueError, match="sample 'a': the experts of 4 tokens, the engine read 5"):
        pack([short], [1.0], layout)


def test_a_support_stands_at_the_position_that_predicts_its_token() -> None:
    plain, drawn = make_sample(6, 2, 1, "a"), make_sample(5, 2, 2, "b")
    tokens = drawn.tokens[2:].tolist()
    flat = torch.tensor([tokens[0], ~70_000, ~tokens[1], 5, tokens[2], ~6], dtype=torch.int32)
    drawn = replace(drawn, support=flat)
    batch = pack([plain, drawn], [1.0] * 2, ParallelLayout(1))
    expected = torch.full((11, 3), -1)
    expected[7, :2] = torch.tensor([tokens[0], 70_000])
    expected[8, 0], expected[9] = tokens[1], torch.tensor([5, tokens[2], 6])
    assert torch.equal(batch.support, expected.int()) and pack([plain], [1.0], ParallelLayout(1)).support is None
    with pytest.raises(ValueError, match="sample 'b': the supports of 2 tokens, its response has 3"):
        pack([replace(drawn, support=flat[:3])], [1.0], ParallelLayout(1))
    with pytest.raises(ValueError, match="sample 'b': response token 1 is not in the support it was drawn from"):
        pack([replace(drawn, support=torch.where(flat == ~tokens[1], ~(tokens[1] + 1), flat))], [1.0], ParallelLayout(1))


def test_values_are_aligned_with_the_log_probs_of_their_tokens() -> None:
    plain, judged = make_sample(6, 3), make_sample(5, 2)
    values, returns = torch.tensor([0.5, 0.25, -1.0]), torch.tensor([1.0, 2.0, 3.0])
    judged = dataclasses.replace(judged, values=values, returns=returns, positive_weight=0.125)

    micro_batch = pack([plain, judged], [0.1, 0.1], ParallelLayout(1))

    assert micro_batch.values.tolist() == [0.0] * 7 + [0.5, 0.25, -1.0, 0.0]
    assert micro_batch.returns.tolist() == [0.0] * 7 + [1.0, 2.0, 3.0, 0.0]
    assert torch.equal(micro_batch.positive_weights[7:10], 0.125 * judged.loss_mask)
    assert pack([plain], [0.1], ParallelLayout(1)).values.tolist() == [0.0] * 6
