"""Weight syncs in FP8 between random pairs of layouts: every byte against quantizing whole tensors.

The oracle quantizes each Hugging Face tensor as a whole, by a formula of its own, and cuts it as the engine's loader
would; it knows nothing of shards, ranks or blocks that are cut.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from megatron_dapo.bridge.fp8_weights import Fp8Weights
from megatron_dapo.bridge.protocol.receiver import Receiver
from megatron_dapo.bridge.sync_plan import SyncPlan, write_chunks
from megatron_dapo.checkpoints.layouts.fp8 import (
    SCALES,
    Fp8EngineLayout,
    Fp8Parameters,
    Fp8SourceLayout,
    expected_parameters,
    read_parameters,
)
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.engines.sglang.cpu_fp8 import widened
from megatron_dapo.models.architecture import LM_HEAD, ModelArchitecture
from megatron_dapo.models.blocks import MixtureOfExperts
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.ops.fp8 import quantize_weight
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import SingleHolderLayout, TensorSpec, check_layout, shard_view
from megatron_dapo.reshard.planner import plan
from tests.reshard_oracles import execute_in_memory
from tests.unit.models.test_deepseek import PUBLISHED as DEEPSEEK
from tests.unit.models.test_qwen3_next import QWEN3_NEXT, TEXT

E4M3 = torch.float8_e4m3fn


def architecture(family: str = "qwen3", *, heads: int = 4, kv_heads: int = 4, head_dim: int = 64, **changes):
    experts = MixtureOfExperts(4, 2, 256, True, frozenset(range(2))) if family == "qwen3_moe" else None
    fields = {
        "model_type": family,
        "num_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 301,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "qkv_bias": family == "qwen2",
        "qk_norm": family.startswith("qwen3"),
        "dtype": torch.float32,
        "experts": experts,
    }
    return ModelArchitecture(**{**fields, **changes})


def weights_of(model: ModelArchitecture, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows and columns of very different magnitude, so that blocks differ; one block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in model.shapes().items():
        tensor = torch.randn(shape, generator=generator)
        for dim, size in enumerate(shape):
            factors = torch.exp2(torch.randint(-12, 6, (size,), generator=generator).float())
            tensor *= factors.view([-1 if other == dim else 1 for other in range(len(shape))])
        weights[name] = tensor
    weights["model.layers.1.self_attn.o_proj.weight"][:128, :128] = 0
    return weights


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and scales of a whole matrix, block after block, exponent by exponent."""
    rows, columns = weight.shape
    values, scales = torch.empty(weight.shape, dtype=E4M3), torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            bounds = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            largest = float(weight[bounds].abs().max())
            exponent = math.floor(math.log2(448 / largest)) if largest else 0
            assert not largest or largest * 2.0**exponent <= 448 < largest * 2.0 ** (exponent + 1)
            values[bounds] = (weight[bounds].double() * 2.0**exponent).to(E4M3)
            scales[i, j] = 2.0**-exponent
    return values, scales


def chunk(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    return tensor.chunk(count, dim)[index]


def engine_shard(model: ModelArchitecture, weights, rank: int, tp: int) -> dict[str, torch.Tensor]:
    """The FP8 parameters of rank `rank`, from whole tensors."""
    kv_chunks, kv_index = (tp, rank) if model.num_key_value_heads >= tp else (
        model.num_key_value_heads, rank // (tp // model.num_key_value_heads)
    )  # fmt: skip
    shard = {}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        for kind in (0, 1):
            suffix = ("", SCALES)[kind]
            whole = {
                n.removeprefix(prefix): quantized(w)[kind]
                for n, w in weights.items()
                if n.startswith(prefix) and w.dim() == 2 and not n.endswith("mlp.gate.weight")
            }
            chunks = [chunk(whole["self_attn.q_proj.weight"], 0, rank, tp)]
            chunks += [chunk(whole[f"self_attn.{n}_proj.weight"], 0, kv_index, kv_chunks) for n in "kv"]
            local = {"self_attn.qkv_proj.weight": torch.cat(chunks)}
            local["self_attn.o_proj.weight"] = chunk(whole["self_attn.o_proj.weight"], 1, rank, tp)
            if model.experts is None:
                chunks = [chunk(whole[f"mlp.{n}_proj.weight"], 0, rank, tp) for n in ("gate", "up")]
                local["mlp.gate_up_proj.weight"] = torch.cat(chunks)
                local["mlp.down_proj.weight"] = chunk(whole["mlp.down_proj.weight"], 1, rank, tp)
            else:
                into = [
                    torch.cat([chunk(whole[f"mlp.experts.{e}.{n}_proj.weight"], 0, rank, tp) for n in ("gate", "up")])
                    for e in range(model.experts.num_experts)
                ]
                down = [
                    chunk(whole[f"mlp.experts.{e}.down_proj.weight"], 1, rank, tp)
                    for e in range(model.experts.num_experts)
                ]
                local["mlp.experts.w13_weight"], local["mlp.experts.w2_weight"] = torch.stack(into), torch.stack(down)
            shard.update({prefix + n + suffix: tensor for n, tensor in local.items()})
    return shard


def trainer_buffers(source, weights, rank: int) -> dict[str, torch.Tensor]:
    """Buffers of a trainer rank; padding is noise that must reach neither an engine nor a scale."""
    buffers = {name: torch.full(shape, -1e6) for name, shape in source.local_shapes(rank).items()}
    for shard in source.shards(rank):
        bounds = tuple(slice(o, o + n) for o, n in zip(shard.global_offset, shard.shape))
        shard_view(buffers[shard.local], shard).copy_(weights[shard.tensor][bounds])
    return buffers


class Exchange:
    """Maximum over ranks that are built one after the other: a first round collects, a second one answers."""

    def __init__(self) -> None:
        self.largest: torch.Tensor | None = None

    def __call__(self, vector: torch.Tensor) -> None:
        self.largest = vector.clone() if self.largest is None else torch.maximum(self.largest, vector)
        vector.copy_(self.largest)


def sources_of(layout: Fp8SourceLayout, buffers) -> list[Fp8Weights]:
    exchange = Exchange()
    for _ in range(2):
        made = [Fp8Weights(layout, rank, own, exchange) for rank, own in enumerate(buffers)]
    return made


def sync(model, parallel: ParallelLayout, tp: int, engines: int = 1, bucket_bytes: int = 40_000):
    """(engine layout, source layout, one Receiver an engine rank) after a whole sync of `weights_of(model)`."""
    trainer_layout = megatron_layout(model, parallel, torch.float32)
    plain = sglang_layout(model, tp, torch.bfloat16, engines)
    engine = Fp8EngineLayout(plain, with_kv_scales(expected_parameters(plain)))
    layout = Fp8SourceLayout(trainer_layout, engine)
    check_layout(layout)
    check_layout(engine)
    weights = weights_of(model)
    sources = sources_of(
        layout, [trainer_buffers(trainer_layout, weights, rank) for rank in range(trainer_layout.num_ranks)]
    )
    sync_plan = SyncPlan(plan(layout, engine), engine, bucket_bytes)
    receivers = []
    for rank in range(engine.num_ranks):
        specs = engine.local_specs(rank)
        receiver = Receiver({name: torch.ones(spec.shape).to(spec.dtype) for name, spec in specs.items()})
        receiver.begin(sync_plan.manifest(rank, "d", "s", 1))
        for bucket in sync_plan.buckets(rank):
            data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for source in range(trainer_layout.num_ranks):
                write_chunks(sync_plan, bucket, source, sources[source], data)
            receiver.accept("d", bucket, data)
        receiver.finish("d")
        receivers.append(receiver)
    return weights, engine, layout, receivers, sync_plan


def with_kv_scales(parameters: Fp8Parameters) -> Fp8Parameters:
    return replace(parameters, constants=frozenset(f"model.layers.0.self_attn.attn.{kind}_scale" for kind in "kv"))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_pair(model, parallel: ParallelLayout, tp: int, engines: int = 1) -> None:
    weights, engine, _, receivers, _ = sync(model, parallel, tp, engines)
    for rank, receiver in enumerate(receivers):
        expected = engine_shard(model, weights, rank % tp, tp)
        assert expected.keys() == {
            n for n in receiver.parameters if n in expected or receiver.parameters[n].dtype == E4M3
        }
        for name, tensor in expected.items():
            assert same_bytes(receiver.parameters[name], tensor), (rank, name)
        assert [float(receiver.parameters[name]) for name in engine.parameters.constants] == [1.0, 1.0]
        norm = "model.layers.1.input_layernorm.weight"
        assert torch.equal(receiver.parameters[norm], weights[norm].to(torch.bfloat16))


# trainer (tensor, pipeline, virtual), engine TP. The trainer's TP 4 cuts every block of a projection.
@pytest.mark.parametrize("trainer", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 2, 1), (4, 2, 1)])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_byte_is_that_of_the_whole_tensor(trainer, tp):
    tensor, pipeline, virtual = trainer
    check_pair(architecture(), ParallelLayout(tensor * pipeline, tensor, pipeline, virtual), tp)


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 301,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
DELTA = {
    **SIZES,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
LATENT = {"q_lora_rank": 256, "kv_lora_rank": 128, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# With projections whose rows on a rank are apart in the tensor, or end inside a block, next to matrices that stay as they are.
PUBLISHED = {
    "qwen3_5": {**TEXT, **DELTA},
    "qwen3_next": {**QWEN3_NEXT, **DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 256},
    "deepseek_v3": {**DEEPSEEK, **SIZES, **EXPERTS, **LATENT},
}
UNCHANGED = {
    "qwen3_5": {"conv1d", "in_proj_a", "in_proj_b"},
    "qwen3_next": {"conv1d", "in_proj_ba", "gate", "shared_expert_gate"},
    "deepseek_v3": {"gate"},
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("family", PUBLISHED)
def test_delta_nets_and_latent_attention_serve_the_values_of_whole_tensors(family, tensor, tp):
    """Parameters times scales are those that a sync without FP8 brings of tensors that were quantized whole."""
    model = parse_architecture(PUBLISHED[family])
    weights, engine, layout, receivers, _ = sync(model, ParallelLayout(tensor, tensor), tp)
    assert bool(layout.shared) == (tensor == 4 or (family, tensor) == ("qwen3_5", 2))
    matrices = {name for name, one in weights.items() if one.dim() > 1 and "layers." in name}
    assert {name.split(".")[-2] for name in matrices - layout.quantized} == UNCHANGED[family]
    values = {name: in_blocks(one) if name in layout.quantized else one for name, one in weights.items()}
    plain = sglang_layout(model, tp, torch.float32)
    expected = [{name: torch.zeros(spec.shape) for name, spec in plain.local_specs(rank).items()} for rank in range(tp)]
    execute_in_memory(plan(SingleHolderLayout(plain.tensors, 1), plain), [values], expected)
    for rank, receiver in enumerate(receivers):
        for name, own in receiver.parameters.items():
            if name in engine.parameters.quantized:
                scales = receiver.parameters[name + SCALES]
                assert torch.equal(widened(own, [128, 128], scales), expected[rank][name]), name
            elif name in expected[rank]:
                assert torch.equal(own, expected[rank][name].to(own.dtype)), name


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    values, scales = quantized(weight)
    return widened(values, [128, 128], scales)


def test_random_pairs():
    choose = random.Random(1).choice
    done = 0
    while done < 12:
        family = choose(["llama", "qwen2", "qwen3", "qwen3_moe"])
        heads, kv_heads, head_dim = choose([(4, 4, 64), (4, 2, 128), (8, 2, 128), (2, 2, 128), (4, 1, 128), (4, 2, 64)])
        model = architecture(
            family, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            hidden_size=choose([128, 256, 384]), tie_word_embeddings=choose([True, False]),
        )  # fmt: skip
        tensor, pipeline, data, tp = choose([1, 2, 4]), choose([1, 2]), choose([1, 2]), choose([1, 2, 4])
        expert = choose([1, 2]) if family == "qwen3_moe" else 1
        try:
            parallel = ParallelLayout(tensor * pipeline * data, tensor, pipeline, expert=expert)
            megatron_layout(model, parallel, torch.float32)
            plain = sglang_layout(model, tp, torch.bfloat16)
            Fp8EngineLayout(plain, expected_parameters(plain)).shards(0)
        except ValueError:
            continue
        check_pair(model, parallel, tp, choose([1, 2]))
        done += 1


def test_the_trainer_quantizes_like_the_oracle():
    weight = weights_of(architecture())["model.layers.0.mlp.gate_proj.weight"]
    values, scales = quantized(weight)
    own = quantize_weight(weight)
    assert same_bytes(own.values, values) and torch.equal(own.scales, scales)


def test_only_blocks_that_ranks_share_are_exchanged():
    model = architecture()
    plain = sglang_layout(model, 1, torch.bfloat16)
    engine = Fp8EngineLayout(plain, expected_parameters(plain))
    for tensor, expected in ((1, 0), (2, 0), (4, 8)):  # TP 4: 64 rows or columns of the projections; the MLP has 128
        layout = Fp8SourceLayout(megatron_layout(model, ParallelLayout(tensor, tensor), torch.float32), engine)
        assert len(layout.shared) == expected, layout.shared


def test_a_cut_block_without_the_exchange_would_be_wrong():
    """Check the test: a rank that sees only its shard's magnitudes computes other scales."""
    model = architecture()
    trainer_layout = megatron_layout(model, ParallelLayout(4, 4), torch.float32)
    plain = sglang_layout(model, 1, torch.bfloat16)
    layout = Fp8SourceLayout(trainer_layout, Fp8EngineLayout(plain, expected_parameters(plain)))
    weights = weights_of(model)
    buffers = [trainer_buffers(trainer_layout, weights, rank) for rank in range(4)]
    alone, together = Fp8Weights(layout, 0, buffers[0]), sources_of(layout, buffers)[0]
    names = [name + SCALES for name in layout.shared]
    assert names and not all(torch.equal(alone[name], together[name]) for name in names)


def test_half_the_bytes_with_every_write_counted():
    _, engine, _, receivers, _ = sync(architecture(), ParallelLayout(2, 2), 2)
    plain = sum(spec.num_bytes for spec in engine.engines.local_specs(0).values())
    quantized_bytes = sum(spec.num_bytes for n, spec in engine.local_specs(0).items() if spec.dtype == E4M3)
    fp8 = sum(spec.num_bytes for spec in engine.local_specs(0).values())
    assert 0 < fp8 - (plain - quantized_bytes) < quantized_bytes / 1000  # the scales
    assert receivers[0].version == 1


def test_the_trainer_can_compute_with_the_engines_values():
    """`in_place` puts values times scales into the parameters and restores their bits, also after an error."""
    model = architecture()
    trainer_layout = megatron_layout(model, ParallelLayout(2, 2), torch.float32)
    plain = sglang_layout(model, 1, torch.bfloat16)
    layout = Fp8SourceLayout(trainer_layout, Fp8EngineLayout(plain, expected_parameters(plain)))
    weights = weights_of(model)
    quantized_weights = {
        name: quantize_weight(tensor).widened() if name in layout.quantized else tensor
        for name, tensor in weights.items()
    }
    own = trainer_buffers(trainer_layout, weights, 1)
    before = {name: tensor.clone() for name, tensor in own.items()}
    expected = trainer_buffers(trainer_layout, quantized_weights, 1)
    fp8 = Fp8Weights(layout, 1, own)
    with pytest.raises(KeyboardInterrupt), fp8.in_place():
        assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
        again = Fp8Weights(layout, 1, own)
        shard = next(p for p in layout.shards(1) if p.tensor in layout.quantized)
        # Quantizing quantized weights changes no value.
        assert torch.equal(again.widened_chunk(shard, shard.bounds), shard_view(expected[shard.local], shard))
        raise KeyboardInterrupt
    assert all(torch.equal(own[name], tensor) for name, tensor in before.items())


def test_a_chunk_may_be_cut_from_the_middle_of_blocks():
    model = architecture()
    trainer_layout = megatron_layout(model, ParallelLayout(1), torch.float32)
    plain = sglang_layout(model, 1, torch.bfloat16)
    layout = Fp8SourceLayout(trainer_layout, Fp8EngineLayout(plain, expected_parameters(plain)))
    weights = weights_of(model)
    source = Fp8Weights(layout, 0, trainer_buffers(trainer_layout, weights, 0))
    name = "model.layers.0.mlp.down_proj.weight"
    (shard,) = [p for p in layout.shards(0) if p.tensor == name]
    values, _ = quantized(weights[name])
    bounds = type(shard.bounds)((37, 100), (150, 301))
    assert same_bytes(source.chunk(shard, bounds), values[37:187, 100:401])


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"kv_heads": 2}, 2, "rows [0, 64) of model.layers.0.self_attn.v_proj.weight (128, 256) from row 192"),
        ({"intermediate_size": 640}, 2, "gate_up_proj"),
        ({"head_dim": 32, "kv_heads": 2}, 1, "v_proj.weight"),
    ],
)
def test_an_engine_that_cuts_a_block_is_refused(changes, tp, words):
    plain = sglang_layout(architecture(**changes), tp, torch.bfloat16)
    with pytest.raises(ValueError, match="blocks of 128.* must begin at a multiple of 128") as error:
        engine = Fp8EngineLayout(plain, expected_parameters(plain))
        for rank in range(tp):
            engine.shards(rank)
    assert words in str(error.value)


def described(plain, **changes) -> list[dict[str, TensorSpec]]:
    engine = Fp8EngineLayout(plain, with_kv_scales(expected_parameters(plain)))
    return [{**engine.local_specs(rank), **changes} for rank in range(plain.tensor_parallel)]


def test_quantized_parameters_are_read_from_the_engine():
    plain = sglang_layout(architecture(), 2, torch.bfloat16)
    assert read_parameters(plain, described(plain)) == with_kv_scales(expected_parameters(plain))
    # A server whose checkpoint leaves the last layer unquantized and has no KV cache scales.
    some = [
        {
            name: TensorSpec(spec.shape, torch.bfloat16) if "layers.1." in name and spec.dtype == E4M3 else spec
            for name, spec in specs.items()
            if not ("layers.1." in name and name.endswith(SCALES)) and not name.endswith("_scale")
        }
        for specs in described(plain)
    ]
    found = read_parameters(plain, some)
    assert found.quantized == {n for n in expected_parameters(plain).quantized if "layers.0." in n}
    assert not found.constants
    tensors = Fp8EngineLayout(plain, found).tensors
    assert "model.layers.0.self_attn.k_proj.weight_scale_inv" in tensors and LM_HEAD + SCALES not in tensors
    assert "model.layers.1.self_attn.k_proj.weight_scale_inv" not in tensors


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("model.layers.0.mlp.down_proj.weight_scale_inv", TensorSpec((256, 1), torch.int32), "repacks"),
        ("model.layers.0.mlp.down_proj.weight", TensorSpec((16, 1024), torch.int32), "repacks"),
        ("model.layers.0.mlp.down_proj.input_scale", TensorSpec((1,), torch.float32), "input_scale"),
    ],
)
def test_parameters_in_other_formats_are_refused_by_name(name, spec, words):
    plain = sglang_layout(architecture(), 1, torch.bfloat16)
    with pytest.raises(ValueError, match=words):
        read_parameters(plain, described(plain, **{name: spec}))


def test_a_server_without_fp8_is_refused():
    plain = sglang_layout(architecture(), 1, torch.bfloat16)
    with pytest.raises(ValueError, match="no parameter in FP8"):
        read_parameters(plain, [dict(plain.local_specs(0))])
