"""Random pairs of trainer and engine layouts on tensors filled with their own index.

The oracle cuts whole Hugging Face tensors with torch.chunk, cat and pad, as the engine's own loader does, and knows
nothing of pieces.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from megatron_dapo.bridge import sync_plan
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.models.architecture import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    ModelArchitecture,
)
from megatron_dapo.models.blocks import MixtureOfExperts
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import ShiftedLayout, check_layout, shard_view
from megatron_dapo.reshard.planner import plan
from tests.examples import examples
from tests.reshard_oracles import execute_in_memory, sent_bound

DTYPE = torch.float32  # holds every index below 2 ** 24


def _architecture(family: str, *, tied: bool, heads: int, kv_heads: int, vocab_size: int, layers: int = 2, size=16):
    experts = MixtureOfExperts(4, 2, 8, True, frozenset(range(layers))) if family == "qwen3_moe" else None
    return ModelArchitecture(
        model_type=family,
        num_layers=layers,
        hidden_size=8,
        intermediate_size=size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=2,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith(("qwen3", "gemma3")),
        dtype=DTYPE,
        experts=experts,
        sandwich_norms=family.startswith("gemma3"),
    )


def _weights(architecture: ModelArchitecture) -> dict[str, torch.Tensor]:
    """Weights in which each element is its number in the whole model, counted from 1; 0 means padding."""
    weights, start = {}, 1
    for name, shape in architecture.shapes().items():
        size = torch.Size(shape).numel()
        weights[name] = torch.arange(start, start + size, dtype=DTYPE).view(shape)
        start += size
    assert start < 2**24
    return weights


def _padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    pad = [0, 0] * (tensor.dim() - 1 - dim) + [0, size - tensor.shape[dim]]
    return F.pad(tensor, pad)


def _chunk(tensor: torch.Tensor, dim: int, size: int, index: int, count: int) -> torch.Tensor:
    return _padded(tensor, dim, size).chunk(count, dim)[index]


def _round_up(size: int, multiple: int) -> int:
    while size % multiple:
        size += 1
    return size


def engine_shard(architecture, weights, rank: int, tp: int, ep: int, device: str) -> dict[str, torch.Tensor]:
    """Return the parameters of rank `rank` of an engine, from whole tensors."""
    heads, kv, head = architecture.num_attention_heads, architecture.num_key_value_heads, architecture.head_dim
    vocabulary, multiple = _round_up(architecture.vocab_size, 64), 1
    if device == "cpu":
        if heads % tp or kv % tp:
            kv = _round_up(kv, tp)
            heads = kv * (architecture.num_attention_heads // architecture.num_key_value_heads)
        vocabulary = vocabulary if vocabulary % tp == 0 else _round_up(vocabulary, 64 * tp)
        multiple = 32 * tp
    kv_chunks, kv_index = (tp, rank) if kv >= tp else (kv, rank // (tp // kv))
    shard = {EMBEDDING: _chunk(weights[EMBEDDING], 0, vocabulary, rank, tp), FINAL_NORM: weights[FINAL_NORM]}
    if LM_HEAD in weights or architecture.experts:
        shard[LM_HEAD] = _chunk(weights.get(LM_HEAD, weights[EMBEDDING]), 0, vocabulary, rank, tp)
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}."
        w = {name[len(prefix) :]: t for name, t in weights.items() if name.startswith(prefix)}
        local = {n: t for n, t in w.items() if "norm" in n or n == "mlp.gate.weight"}
        for kind in [n.rsplit(".", 1)[1] for n in w if n.startswith("self_attn.q_proj")]:
            rows = [_chunk(w[f"self_attn.q_proj.{kind}"], 0, heads * head, rank, tp)]
            rows += [_chunk(w[f"self_attn.{n}_proj.{kind}"], 0, kv * head, kv_index, kv_chunks) for n in "kv"]
            local[f"self_attn.qkv_proj.{kind}"] = torch.cat(rows)
        local["self_attn.o_proj.weight"] = _chunk(w["self_attn.o_proj.weight"], 1, heads * head, rank, tp)
        if "mlp.gate_proj.weight" in w:
            size = _round_up(architecture.intermediate_size, multiple)
            gate_up = [_chunk(w[f"mlp.{n}_proj.weight"], 0, size, rank, tp) for n in ("gate", "up")]
            local["mlp.gate_up_proj.weight"] = torch.cat(gate_up)
            local["mlp.down_proj.weight"] = _chunk(w["mlp.down_proj.weight"], 1, size, rank, tp)
        else:
            size, cut = _round_up(architecture.experts.intermediate_size, multiple), tp // ep
            mine = torch.arange(architecture.experts.num_experts).chunk(ep)[rank // cut].tolist()
            into = [[w[f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up")] for e in mine]
            local["mlp.experts.w13_weight"] = torch.stack(
                [torch.cat([_chunk(half, 0, size, rank % cut, cut) for half in halves]) for halves in into]
            )
            down = [_chunk(w[f"mlp.experts.{e}.down_proj.weight"], 1, size, rank % cut, cut) for e in mine]
            local["mlp.experts.w2_weight"] = torch.stack(down)
        shard.update({f"model.layers.{layer}.{n}": t for n, t in local.items()})
    if architecture.sandwich_norms:
        shard[EMBEDDING] = weights[EMBEDDING]
    prefix = "language_model." if architecture.model_type == "gemma3" else ""
    return {prefix + name: tensor for name, tensor in shard.items()}


def _trainer_buffers(source, weights) -> list[dict[str, torch.Tensor]]:
    """Return the buffers of each trainer rank; padding is noise that must not reach an engine."""
    held = []
    for rank in range(source.num_ranks):
        buffers = {name: torch.full(shape, -7.0) for name, shape in source.local_shapes(rank).items()}
        for shard in source.shards(rank):
            bounds = tuple(slice(o, o + n) for o, n in zip(shard.global_offset, shard.shape))
            shard_view(buffers[shard.local], shard).copy_(weights[shard.tensor][bounds])
        held.append(buffers)
    return held


def _check_pair(architecture, parallel: ParallelLayout, tp: int, ep: int, engines: int, device: str, offset: int):
    source = megatron_layout(architecture, parallel, DTYPE)
    engine = sglang_layout(architecture, tp, DTYPE, engines, expert_parallel=ep, device=device)
    check_layout(engine)
    reshard = plan(source, ShiftedLayout(engine, offset), ranks_per_node=4)
    weights = _weights(architecture)
    filled = [{n: torch.zeros(s) for n, s in engine.local_shapes(r).items()} for r in range(engine.num_ranks)]
    execute_in_memory(reshard, _trainer_buffers(source, weights), [{}] * offset + filled)
    for rank, buffers in enumerate(filled):
        expected = engine_shard(architecture, weights, rank % tp, tp, ep, device)
        assert buffers.keys() == expected.keys() == engine.buffer_names(rank)
        for name, tensor in expected.items():
            assert torch.equal(buffers[name], tensor), (rank, name)
        for name, slices in engine.padding(rank).items():
            assert sum(bounds.volume for bounds in slices) == int((expected[name] == 0).sum())
    _check_traffic(reshard, engine, offset)


def _check_traffic(reshard, engine, offset: int) -> None:
    """Check that each byte comes once, from one sender; no rank sends above the bound or receives more than its shard."""
    assert all(engine.shards(r) is engine.shards(r % engine.tensor_parallel) for r in range(engine.num_ranks))
    sent = [0] * reshard.num_ranks
    for rank in range(engine.num_ranks):
        transfers = reshard.receives(rank + offset)
        for shard in engine.shards(rank):
            counts = torch.zeros(shard.shape, dtype=torch.int64)
            for t in (t for t in transfers if t.destination_shard == shard):
                start = [o - base for o, base in zip(t.bounds.offset, shard.global_offset)]
                counts[tuple(slice(o, o + n) for o, n in zip(start, t.bounds.shape))] += 1
            assert bool((counts == 1).all())
        for t in transfers:
            sent[t.source] += (t.source != t.destination) * reshard.num_bytes(t)
        shard_bytes = sum(spec.num_bytes for spec in engine.local_specs(rank).values())
        assert reshard.traffic(rank + offset).received <= shard_bytes
    for rank in range(reshard.source.num_ranks):
        assert sum(reshard.num_bytes(t) for t in reshard.sends(rank) if t.destination != rank) == sent[rank]
        assert sent[rank] <= sent_bound(reshard, rank)


def _random_pair(choose) -> tuple:
    """`choose(name, options)` -> one of them. Sizes that do not go together raise ValueError in the layouts."""
    family = choose("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gemma3"])
    heads = choose("heads", [4, 8])
    architecture = _architecture(
        family,
        tied=choose("tied", [False, True]),
        heads=heads,
        kv_heads=choose("kv_heads", [n for n in (1, 2, 4, 8) if heads % n == 0]),
        vocab_size=choose("vocab_size", [64, 67, 130, 301]),
        layers=choose("layers", [2, 4]),
        size=choose("size", [16, 24, 64]),
    )
    tensor, pipeline, context = choose("tensor", [1, 2, 4]), choose("pipeline", [1, 2]), choose("context", [1, 2])
    data = choose("data", [1, 2, 3])
    world = tensor * pipeline * context * data
    expert = choose("expert", [1, 2]) if family == "qwen3_moe" else 1
    virtual = choose("virtual", [1, 2]) if pipeline > 1 else 1
    parallel = ParallelLayout(world, tensor, pipeline, virtual, context, expert)
    tp = choose("tp", [1, 2, 3, 4, 8])
    ep = choose("ep", [1, 2]) if family == "qwen3_moe" else 1
    return architecture, parallel, tp, ep, choose("engines", [1, 2, 3]), choose("device", ["cuda", "cpu"]), world


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(st.data())
def test_every_engine_byte_is_right_and_traffic_is_bounded(data):
    def choose(name, options):
        return data.draw(st.sampled_from(options), label=name)

    try:
        architecture, parallel, tp, ep, engines, device, world = _random_pair(choose)
        megatron_layout(architecture, parallel, DTYPE)
        sglang_layout(architecture, tp, DTYPE, engines, expert_parallel=ep, device=device)
    except ValueError:  # sizes that do not go together
        reject()
    _check_pair(architecture, parallel, tp, ep, engines, device, choose("offset", [0, world]))


@pytest.mark.parametrize("tp, kv_heads, held", [(8, 2, [0, 0, 0, 0, 1, 1, 1, 1]), (4, 8, [0, 2, 4, 6]), (2, 1, [0, 0])])
def test_key_value_heads_are_replicated(tp, kv_heads, held):
    engine = sglang_layout(
        _architecture("llama", tied=True, heads=8, kv_heads=kv_heads, vocab_size=64), tp, torch.bfloat16
    )
    name = "model.layers.1.self_attn.k_proj.weight"
    firsts = [next(p for p in engine.shards(r) if p.tensor == name).global_offset[0] // 2 for r in range(tp)]
    assert firsts == held


def test_a_dense_layer_among_experts_is_refused():
    experts = MixtureOfExperts(4, 2, 8, True, frozenset({0}))
    architecture = _architecture("qwen3_moe", tied=False, heads=8, kv_heads=4, vocab_size=67)
    with pytest.raises(ValueError, match="1 of 2 layers have no experts"):
        sglang_layout(replace(architecture, experts=experts), 2, DTYPE)


def test_engines_are_replicas_beside_the_trainer():
    engine = sglang_layout(_architecture("qwen3", tied=False, heads=8, kv_heads=4, vocab_size=67), 2, DTYPE, 3)
    shifted = ShiftedLayout(engine, 4)
    assert (engine.num_ranks, shifted.num_ranks) == (6, 10)
    assert shifted.shards(3) == () and shifted.buffer_names(3) == frozenset()
    assert shifted.shards(9) is engine.shards(5) is engine.shards(1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tensor_parallel": 3}, "tensor parallel size 3 is neither a multiple nor a divisor of num_key_value_heads 4"),
        ({"tensor_parallel": 16}, "tensor parallel size 16 does not divide num_attention_heads 8"),
        ({"expert_parallel": 2}, "expert parallel size 2 needs a mixture-of-experts model"),
        ({"tensor_parallel": 4, "expert_parallel": 3}, "expert parallel size 3 does not divide"),
        ({"device": "tpu"}, "engine device 'tpu': choose one of cuda, cpu"),
        ({"num_engines": 0}, "0 of 2 ranks"),
    ],
)
def test_sizes_the_engine_refuses(changes, message):
    architecture = _architecture("llama", tied=False, heads=8, kv_heads=4, vocab_size=67)
    with pytest.raises(ValueError, match=message):
        sglang_layout(architecture, **{"tensor_parallel": 2, "dtype": DTYPE, **changes})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_expert_can_be_synced(device):
    """The slices that a weight sync writes, in the engine's three-dimensional parameters, hold what the oracle holds there."""
    architecture = _architecture("qwen3_moe", tied=False, heads=8, kv_heads=4, vocab_size=67)
    source = megatron_layout(architecture, ParallelLayout(4, tensor=2, expert=2, expert_tensor=1), DTYPE)
    engine = sglang_layout(architecture, 4, DTYPE, expert_parallel=2, device=device)
    reshard, weights = plan(source, engine, ranks_per_node=2), _weights(architecture)
    for rank in range(4):
        expected = engine_shard(architecture, weights, rank, 4, 2, device)
        for t in reshard.receives(rank):
            shape = engine.local_shapes(rank)[t.destination_shard.local]
            position = sync_plan.local_slice(t.destination_shard, t.bounds, shape)
            values = weights[t.tensor][tuple(slice(o, o + n) for o, n in zip(t.bounds.offset, t.bounds.shape))]
            bounds = tuple(slice(o, o + n) for o, n in zip(position.offset, position.shape))
            part = expected[t.destination_shard.local][bounds]
            assert torch.equal(part.reshape(values.shape), values)
