"""Padding of packed micro-batches for FP8: every rank's own tokens are aligned, and no real token notices."""

from __future__ import annotations

import pytest
import torch
from actor_checks import TEMPERATURE, build_actor, loss_fn
from fp8_checks import BLOCKWISE, FAMILIES, settings_of, wide_model
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.megatron.context import slice_for_context
from megatron_dapo.megatron.precision import is_fp8
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import PADDING_ID, MicroBatchLimits, pack, plan_micro_batches, unpack_responses
from megatron_dapo.precision import RECIPES
from megatron_dapo.types import MicroBatch, TrainSample
from tests.examples import examples


def make_sample(length: int, seed: int) -> TrainSample:
    generator = torch.Generator().manual_seed(seed)
    prompt = 1 + seed % max(1, length - 1)
    num_response = length - prompt
    return TrainSample(
        sample_id=f"g/{seed}",
        group_index=0,
        tokens=torch.randint(1, 300, (length,), generator=generator),
        prompt_length=prompt,
        loss_mask=torch.ones(num_response),
        advantages=torch.randn(num_response, generator=generator),
        rollout_logprobs=-torch.rand(num_response, generator=generator),
    )


def packed(lengths: list[int], layout: ParallelLayout) -> MicroBatch:
    samples = [make_sample(length, seed) for seed, length in enumerate(lengths)]
    return pack(samples, [1.0 / max(1, sum(lengths))] * len(samples), layout)


@settings(max_examples=examples(150), deadline=None)
@given(
    lengths=st.lists(st.integers(2, 300), min_size=0, max_size=12),
    tensor=st.integers(1, 4),
    context=st.integers(1, 4),
    sequence=st.booleans(),
    recipe=st.sampled_from(sorted(RECIPES)),
)
def test_every_rank_s_share_of_any_micro_batch_is_aligned(
    lengths: list[int], tensor: int, context: int, sequence: bool, recipe: str
) -> None:
    multiple = RECIPES[recipe].token_multiple
    layout = ParallelLayout(
        tensor * context,
        tensor=tensor,
        context=context,
        sequence_parallel=sequence and tensor > 1,
        token_multiple=multiple,
    )
    batch = packed(lengths, layout)
    plain = packed(lengths, ParallelLayout(context, context=context))
    for rank in range(context):
        local = slice_for_context(batch, rank, context).token_ids.numel()
        own, rest = divmod(local, tensor if layout.sequence_parallel else 1)
        assert rest == 0 and own % multiple == 0
    # The sequences are where they are without FP8; what was added is one sequence after them, which no sum sees.
    count = len(lengths)
    assert torch.equal(batch.cu_seqlens[: count + 1], plain.cu_seqlens[: count + 1])
    assert int(batch.cu_seqlens[-1]) == batch.num_tokens and len(batch.sample_ids) <= count + 1
    assert (batch.cu_seqlens[1:] > batch.cu_seqlens[:-1]).all()
    end = int(batch.cu_seqlens[count])
    assert batch.sample_ids[count:] in ((), (PADDING_ID,))
    for field in ("loss_mask", "loss_weights", "advantages", "rollout_logprobs", "targets", "token_ids"):
        assert not getattr(batch, field)[end:].any(), field
    assert torch.equal(batch.loss_weights[batch.loss_weights > 0], plain.loss_weights[plain.loss_weights > 0])


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(2, 300), min_size=2, max_size=20), recipe=st.sampled_from(sorted(RECIPES)))
def test_plans_keep_the_limit_with_the_padding(lengths: list[int], recipe: str) -> None:
    layout = ParallelLayout(4, tensor=2, sequence_parallel=True, token_multiple=RECIPES[recipe].token_multiple)
    limits = MicroBatchLimits(max_tokens=1024)
    for rank in plan_micro_batches(lengths, layout, limits):
        for part in rank:
            assert packed([lengths[index] for index in part], layout).num_tokens <= limits.max_tokens


LENGTHS = [5, 17, 2, 70, 40, 8, 8]


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    ("precision", "family", "multiples"),
    [
        (PrecisionConfig(), "dense", (1, 16, 384)),
        (BLOCKWISE, "dense", (128, 512)),
        (BLOCKWISE, "experts", (128, 512)),
    ],
    ids=["fp32", "fp8", "experts in fp8"],
)
def test_real_tokens_do_not_notice_padding(precision: PrecisionConfig, family: str, multiples: tuple[int, ...]) -> None:
    results = []
    for multiple in multiples:
        layout = ParallelLayout(1, token_multiple=multiple)
        actor = build_actor(wide_model(**FAMILIES[family]), layout, settings_of(precision))
        batch = packed(LENGTHS, layout)
        [outputs] = actor.forward_logprobs([batch], TEMPERATURE)
        actor.accumulate_gradients([batch], loss_fn, TEMPERATURE)
        gradients = torch.cat([gradient.flatten() for gradient in actor.gradients().values()]).clone()
        prompts = [make_sample(length, seed).prompt_length for seed, length in enumerate(LENGTHS)]
        kept = [unpack_responses(getattr(outputs, name), batch, prompts) for name in ("logprobs", "entropy")]
        results.append((batch.num_tokens, kept, gradients))
    assert [size for size, _, _ in results] == [-(-sum(LENGTHS) // multiple) * multiple for multiple in multiples]
    # In FP8 padding shares blocks of tokens with real ones, so that their activations may be rounded one step coarser in
    # gradients of weights.
    allowed = 1e-5 if not is_fp8(precision) else 2e-2
    for _, kept, gradients in results[1:]:
        for one, other in zip(results[0][1], kept, strict=True):
            assert all((one[name] - other[name]).abs().max() < 1e-5 for name in one if one[name].numel())
        assert (gradients - results[0][2]).norm() / results[0][2].norm() < allowed
