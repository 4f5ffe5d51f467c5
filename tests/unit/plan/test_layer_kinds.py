"""Plans of models whose layers differ: gated delta nets, latent attention, shared experts."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.memory import chunks_in_flight, layer_bytes, model_memory, stage_memory, trainer_cut
from megatron_dapo.plan.memory.activations import Recompute, chunks_of_stage, kept_bytes
from tests.unit.plan.models import DEEPSEEK_V3, QWEN3_NEXT_80B, run_of

DEEPSEEK, QWEN3_NEXT = parse_architecture(DEEPSEEK_V3), parse_architecture(QWEN3_NEXT_80B)
TP8 = {"tp_size": 8, "sequence_parallel": True, "ep_size": 8, "etp_size": 1}


def test_latent_attention_keeps_the_tensors_of_megatron_cores_layer() -> None:
    """megatron-core 0.19.2's MLASelfAttention between Transformer Engine's layers, bf16, TP8 with sequence parallelism."""
    cut = trainer_cut(ParallelConfig(**TP8), 2, "transformer_engine")
    layer, local = layer_bytes(DEEPSEEK.parts(0), 7168, cut), 1 / 8
    heads = 128 // 8
    norm = local * (2 * 2 * 7168 + 4)
    latents = local * (2 * (1536 + 512 + 64) + 2 * 4)  # the rotary part is in the tensor of the keys' and values'
    expanded = local * 2 * (1536 + 512) + 2 * heads * 2 * 192  # their norms; queries and keys
    attended = 2 * heads * 192 + 4 * heads + 2 * heads * 192 + 2 * heads * 128  # padded values, sums, output, its copy
    assert layer.mixer == norm + latents + expanded + attended
    assert layer.mlp == norm + 3 * 2 * 18432 / 8
    plain, again = (kept_bytes([layer], Recompute(frozenset(one)))[0] for one in ((), ("mla_up_proj",)))
    assert plain - again == expanded
    held = kept_bytes([layer], Recompute(frozenset({"core_attn"})))[0]
    assert plain - held == 4 * heads + 2 * heads * 192 + 2 * heads * 64  # the values' padding is computed again


def test_a_delta_net_keeps_most_inside_its_rule() -> None:
    run = {"data": {"max_prompt_tokens": 1}, "rollout": {"max_response_tokens": 4095}, "training": {"micro_batch_tokens": 4096}}
    kinds = {
        name: stage_memory(run_of(model={"recompute_granularity": name}, **run), QWEN3_NEXT, 1, 0).activations
        for name in ("none", "selective", "full")
    }
    assert kinds["none"] > 2 * kinds["selective"] > 4 * kinds["full"]
    cut = trainer_cut(ParallelConfig(), 2, "transformer_engine", sequence_tokens=4096)
    delta, attention = (layer_bytes(QWEN3_NEXT.parts(layer), 2048, cut) for layer in (0, 3))
    whole, residual = delta.whole, 2 * 2048
    assert delta.mixer > 5 * attention.mixer and delta.mlp == attention.mlp
    # The last layer attends: the third one, with a delta net, holds more, although the last one's input is freed by then.
    assert kinds["full"] == int(4096 * (47 * residual + whole - residual))


def test_a_chunk_that_is_shorter_than_one_of_the_rule_counts_as_one() -> None:
    def core(tokens: int) -> float:
        cut = trainer_cut(ParallelConfig(), 4, "torch", sequence_tokens=tokens)
        return tokens * layer_bytes(QWEN3_NEXT.parts(0), 2048, cut).core

    assert core(65) > 1.5 * core(64) and core(128) < 1.3 * core(65)


@pytest.mark.parametrize("stage", range(4))
def test_the_peak_of_chunks_that_differ_is_that_of_the_schedule(stage: int) -> None:
    """Interleaved 1F1B: counted micro-batch by micro-batch, in the order of megatron-core's schedule table."""
    sizes: dict[str, Any] = {"pp_size": 4, "vpp_size": 2}
    config, facts = run_of(parallel=sizes, training={"micro_batch_tokens": 1024}), QWEN3_NEXT
    cut = trainer_cut(config.parallel, 2, "transformer_engine", sequence_tokens=1024)
    chunks = chunks_of_stage(facts, config.parallel, stage)
    assert [len(chunk) for chunk in chunks] == [6, 6]
    held = [kept_bytes([layer_bytes(facts.parts(layer), 2048, cut) for layer in chunk], Recompute())[0] for chunk in chunks]
    table = [chunk for _ in range(3) for chunk in (0, 1) for _ in range(4)]  # virtual micro-batches of twelve
    alive, peak = [0, 0], 0.0
    warmup = chunks_in_flight(config.parallel, stage) - 1
    for index in range(warmup, len(table)):
        if index == warmup:
            alive = [table[:warmup].count(0), table[:warmup].count(1)]
        alive[table[index]] += 1
        peak = max(peak, sum(count * size for count, size in zip(alive, held)))
        alive[1 - table[index - warmup]] -= 1
    assert stage_memory(config, facts, 4, stage).activations == int(1024 * peak)


def test_the_fullest_stage_may_be_between_the_ends() -> None:
    """The first six of twelve layers are dense, so that the third stage is the first with experts."""
    document = {**DEEPSEEK_V3, "num_hidden_layers": 12, "first_k_dense_replace": 6}
    config = run_of(parallel={"pp_size": 4, "ep_size": 2}, training={"micro_batch_tokens": 512})
    facts = parse_architecture(document)
    stages = [stage_memory(config, facts, 8, stage).training for stage in range(4)]
    assert model_memory(config, facts, 8).training == max(stages)
