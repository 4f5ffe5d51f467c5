"""Plans of models whose layers differ: gated delta nets, latent attention, shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS, SHARES
from megatron_dapo.plan.memory import (
    EngineMemory,
    chunks_in_flight,
    engine_memory,
    layer_bytes,
    model_memory,
    run_memory,
    stage_memory,
    trainer_cut,
)
from megatron_dapo.plan.memory.activations import Recompute, chunks_of_stage, kept_bytes
from megatron_dapo.plan.rollout import active_parameters, engine_rates
from megatron_dapo.plan.step import plan_step
from megatron_dapo.plan.training import LOG_PROBS, Batch, Model, pass_seconds
from tests.unit.config.architectures import GEMMA3_1B
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


# ---- servers


def server(facts: ModelArchitecture, **fields: Any) -> EngineMemory:
    config = run_of(rollout={"engine": "sglang"}, sglang={"placement": "disaggregated", "mem_fraction_static": 0.85, **fields})
    return engine_memory(config, facts, Cluster())


def test_states_of_gated_delta_nets_limit_the_responses_at_a_time() -> None:
    """36 layers of 32 heads of [128, 128] in fp32, and three rows of the convolution's 8,192 channels in bf16, over four ranks."""
    found = server(QWEN3_NEXT, tp_size=4)
    assert found.bytes_per_state == 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192) // 4
    assert found.bytes_per_token == 12 * 2 * 256 * 2, "twelve layers attend; two ranks hold one key-value head"
    assert found.static <= found.budget < found.static + found.bytes_per_token + found.bytes_per_state
    assert found.states == pytest.approx(0.9 / 1.9 * (found.budget - found.weights), rel=0.01)
    assert found.held_by_states is not None and found.holds(100) == found.held_by_states < found.kv_tokens // 100
    assert found.holds(100_000) == found.kv_tokens // 100_000
    # Without overlapped scheduling a response needs three states in place of five.
    assert server(QWEN3_NEXT, tp_size=4, update_pause="in_place").held_by_states == found.num_states // 3
    assert server(DEEPSEEK, tp_size=8).held_by_states is None


def test_an_embedded_engine_has_a_state_in_each_slot() -> None:
    config = run_of(rollout={"slots_per_rank": 6})
    found = engine_memory(config, QWEN3_NEXT, Cluster())
    assert found.held_by_states == 6 and found.states == 6 * found.bytes_per_state


def test_decoding_reads_states_and_multiplies_latent_vectors() -> None:
    memory, gpu = server(QWEN3_NEXT, tp_size=4), GPUS["H100"]
    config = run_of(rollout={"engine": "sglang"}, sglang={"tp_size": 4})
    rates = engine_rates(config, QWEN3_NEXT, memory, gpu)
    short, long = (rates.tick(16, 16 * tokens)[0] for tokens in (1000, 2000))
    per_token = memory.bytes_per_token / SHARES.decode_memory / gpu.memory_bytes_s
    assert long - short == pytest.approx(16 * 1000 * per_token)
    states = 16 * 2 * memory.bytes_per_state / SHARES.decode_memory / gpu.memory_bytes_s
    assert short == pytest.approx(replace(rates, bytes_per_state=0).tick(16, 16 * 1000)[0] + states)
    # 128 heads multiply 576 elements for a score and 512 for an output, in 61 layers.
    latent = engine_rates(run_of(rollout={"engine": "sglang"}, sglang={"tp_size": 8}), DEEPSEEK, server(DEEPSEEK, tp_size=8), gpu)
    less, more = (latent.tick(1, context)[1] for context in (0, 1000))
    flops = 2 * 1000 * 61 * 128 * (576 + 512)
    assert more - less == pytest.approx(flops / (8 * gpu.flops * SHARES.decode_flops))
    # DeepSeek's report: 671 billion parameters, 37 of them for a token (arXiv:2412.19437).
    assert active_parameters(DEEPSEEK) / 1e9 == pytest.approx(37, rel=0.02)


def test_local_layers_are_read_as_far_as_their_window() -> None:
    facts = parse_architecture(GEMMA3_1B)
    memory = server(facts)
    rates = engine_rates(run_of(rollout={"engine": "sglang"}), facts, memory, GPUS["H100"])
    below, within, beyond = (rates.tick(4, 4 * tokens)[0] for tokens in (256, 512, 1024))
    # Four of 26 layers see more than 512 tokens.
    assert beyond - within == pytest.approx(2 * (within - below) * 4 / 26)


@pytest.mark.parametrize("facts", [QWEN3_NEXT, DEEPSEEK, parse_architecture(GEMMA3_1B)], ids=["delta", "latent", "local"])
def test_only_layers_that_see_all_tokens_take_quadratic_time(facts: ModelArchitecture) -> None:
    config = run_of(training={"micro_batch_tokens": 1 << 20})
    model = Model(config, facts, 1, GPUS["H100"], 8)

    def seconds(length: int) -> float:
        """Seconds a token of sequences of this length."""
        batch = Batch(64, 64.0 * length, 64.0 * length**2, length)
        return pass_seconds(model, batch, LOG_PROBS)["products"] / (64 * length)

    quadratic = sum(  # elements of queries in layers that see all
        facts.parts(layer)[0].attention_width
        for layer in range(facts.num_layers)
        if facts.local is None or layer not in facts.local.layers
    )
    flops = 2.0 * (1 << 14) * quadratic  # twice the tokens: half of them more to see, two products
    # Windows of 512 tokens are full at both lengths.
    added = seconds(1 << 15) - seconds(1 << 14)
    assert added == pytest.approx(flops / (GPUS["H100"].flops * SHARES.training * SHARES.packing), rel=1e-6)


def test_a_plan_of_a_model_with_shared_experts_and_delta_nets() -> None:
    config = run_of(
        rollout={"engine": "sglang", "max_response_tokens": 8192},
        sglang={"tp_size": 4, "servers_per_node": 2, "placement": "disaggregated"},
        parallel={"tp_size": 8, "sequence_parallel": True, "ep_size": 8, "etp_size": 1},
    )
    found = plan_step(config, QWEN3_NEXT, 16, Cluster(4), GPUS["H100"])
    phases = {phase.phase: phase for phase in found.memory.phases}
    assert found.memory.engine_memory is not None
    assert phases["generate"].parts["states"] == found.memory.engine_memory.states > 0
    assert found.queue is not None and found.queue.running <= (found.memory.engine_memory.held_by_states or 0)


# ---- teachers


def test_a_teacher_that_reads_more_takes_longer_and_its_prompts_are_kept() -> None:
    def planned(prompt: str) -> tuple[float, int]:
        config = run_of(
            data={"max_prompt_tokens": 8192},
            rollout={"max_response_tokens": 1024, "prompts_per_step": 8, "group_size": 4},
            distillation={"teachers": [{"prompt": prompt}]},
        )
        seconds = plan_step(config, parse_architecture(QWEN3_NEXT_80B), 8, Cluster(), GPUS["H100"]).seconds
        return sum(seconds["log_probs"].values()), run_memory(config, QWEN3_NEXT, 8, Cluster()).host

    (plain, host), (more, host_of_more) = planned(""), planned("{prompt} {solution}")
    # 1,024 tokens of prompts and 256 of responses against 4,096 and 256.
    assert 2 < more / plain < 4
    assert host_of_more - host == 4 * 8192 * (32 + 8 * 4), "all on rank 0, and a replica's four on each of eight ranks"
