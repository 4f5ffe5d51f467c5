"""Precision: a recipe's choice of implementation, and the guarantees of emulated FP8."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from actor_checks import TEMPERATURE, build_actor, loss_fn, ragged_batch
from fp8_checks import BLOCKWISE, EXPERTS, FAMILIES, TOKENS, WIDE, measured, settings_of, wide_model
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.bridge.fp8_weights import Fp8Weights
from megatron_dapo.checkpoints.layouts.fp8 import Fp8EngineLayout, Fp8SourceLayout, expected_parameters
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.megatron import precision as module
from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.megatron.implementations import implementations
from megatron_dapo.megatron.layers import (
    Fp8ExpertColumnParallelLinear,
    Fp8ExpertRowParallelLinear,
    Fp8NormColumnParallelLinear,
    Fp8RowParallelLinear,
)
from megatron_dapo.megatron.model_config import ModelSettings, transformer_config
from megatron_dapo.megatron.precision import has_fp8, linear_backend, precision_fields
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.ops.fp8 import BLOCK, quantize_hidden, quantize_weight
from megatron_dapo.parallel.layout import ParallelLayout

LAYOUT = ParallelLayout(1, token_multiple=TOKENS)
KINDS = (
    Fp8NormColumnParallelLinear,
    Fp8RowParallelLinear,
    Fp8ExpertColumnParallelLinear,
    Fp8ExpertRowParallelLinear,
)
MATRICES = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


# ---- megatron-core's fields


@pytest.mark.parametrize(
    ("precision", "fields"),
    [
        (PrecisionConfig(), {}),
        (PrecisionConfig(recipe="bf16"), {}),
        (PrecisionConfig(recipe="fp8_blockwise"), {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
        (PrecisionConfig(recipe="fp8_current"), {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        (
            PrecisionConfig(recipe="fp8_delayed"),
            {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
        ),
        (
            PrecisionConfig(
                recipe="fp8_blockwise", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2, fp8_param=True
            ),
            {
                "fp8": "e4m3",
                "fp8_recipe": "blockwise",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 1,
                "num_layers_at_end_in_bf16": 2,
                "fp8_param": True,
            },
        ),
    ],
)
def test_fields_are_those_that_megatron_takes(precision: PrecisionConfig, fields: dict[str, Any]) -> None:
    assert precision_fields(precision) == fields
    config = TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=2, **fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_layers_in_bf16_are_those_that_megatron_keeps() -> None:
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    precision = PrecisionConfig(recipe="fp8_blockwise", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    config = TransformerConfig(num_layers=6, hidden_size=128, num_attention_heads=2, **precision_fields(precision))
    for layer in range(6):
        assert has_fp8(precision, layer, 6) == (not is_first_last_bf16_layer(config, layer))


def test_the_model_s_type_is_not_contradicted() -> None:
    with pytest.raises(ValueError, match="recipe bf16 is of a model in bfloat16, but the model is in float32"):
        linear_backend(PrecisionConfig(recipe="bf16"), "float32")


# ---- what can run here


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (PrecisionConfig(recipe="fp8_current"), "only fp8_blockwise is emulated"),
        (PrecisionConfig(recipe="fp8_delayed"), "only fp8_blockwise is emulated"),
        (PrecisionConfig(recipe="fp8_blockwise", fp8_param=True), "are not emulated"),
    ],
)
def test_settings_that_are_not_emulated_are_refused(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionConfig, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"{precision.recipe} cannot run here: there is no CUDA device, and .*{words}"):
        linear_backend(precision, "bfloat16")


def engine(answer: Any = (True, ""), power_2: bool = True, override: str | None = None) -> dict[str, Any]:
    rule = SimpleNamespace(power_2_scale=power_2)

    def ask(return_reason: bool) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    recipe = SimpleNamespace(
        fp8_quant_fwd_inp=rule, fp8_quant_fwd_weight=rule, fp8_quant_bwd_grad=rule, backward_override=override
    )
    return {
        "transformer_engine.pytorch": SimpleNamespace(is_fp8_block_scaling_available=ask, is_fp8_available=ask),
        "transformer_engine.common.recipe": SimpleNamespace(Float8BlockScaling=lambda: recipe),
    }


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (None, "Transformer Engine is not installed"),
        (engine((False, "Device compute capability 9.0 or higher required")), "says: Device compute capability 9.0"),
        (engine(OSError("libcudart.so.13: cannot open")), "does not work: OSError: libcudart.so.13"),
        ({**engine(), "transformer_engine.common.recipe": SimpleNamespace()}, "does not work: AttributeError"),
        (engine(power_2=False), "NVTE_FP8_BLOCK_SCALING_FP32_SCALES is set.*unset it"),
        (engine(override="high_precision"), "NVTE_BACKWARD_OVERRIDE is set"),
    ],
)
def test_on_a_device_transformer_engine_s_word_counts(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any] | None, words: str
) -> None:
    monkeypatch.setattr(module, "_has_cuda", lambda: True)
    monkeypatch.setattr(module, "_has_transformer_engine", lambda: modules is not None)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: (modules or {})[name])
    with pytest.raises(ValueError, match=f"fp8_blockwise cannot run here: .*{words}"):
        linear_backend(BLOCKWISE, "bfloat16")


def test_on_a_device_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = engine()
    monkeypatch.setattr(module, "_has_cuda", lambda: True)
    monkeypatch.setattr(module, "_has_transformer_engine", lambda: True)
    monkeypatch.setattr(module.importlib, "import_module", modules.__getitem__)
    for recipe in ("fp8_blockwise", "fp8_current", "fp8_delayed"):
        assert linear_backend(PrecisionConfig(recipe=recipe), "bfloat16").name == "Transformer Engine"


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"hidden_size": 192}, LAYOUT, "hidden_size = 192 is no multiple of 128"),
        ({"intermediate_size": 200}, LAYOUT, "intermediate_size = 200 is no multiple of 128"),
        ({}, ParallelLayout(4, tensor=4, token_multiple=TOKENS), "/ parallel.tp_size .4. = 64 is no multiple of 128"),
        (
            {**EXPERTS, "moe_intermediate_size": 200, "intermediate_size": 200},
            LAYOUT,
            "cannot compute: moe_intermediate_size = 200 is no multiple of 128$",
        ),
        (
            {**EXPERTS, "moe_intermediate_size": 384, "hidden_size": 256},
            ParallelLayout(2, tensor=2, sequence_parallel=True, token_multiple=TOKENS),
            "moe_intermediate_size / parallel.etp_size .2. = 192 is no multiple of 128",
        ),
        ({}, ParallelLayout(1), "pads them to a multiple of 1; set token_multiple = 128"),
    ],
)
def test_shapes_that_fp8_cannot_multiply_are_named(changes: dict[str, Any], layout: ParallelLayout, words: str) -> None:
    architecture = parse_architecture({**WIDE, **changes})
    with pytest.raises(ValueError, match=words):
        transformer_config(architecture, layout, ModelSettings(precision=BLOCKWISE))


def test_the_table_names_recipe_products_and_the_layers_kept_out() -> None:
    precision = PrecisionConfig(recipe="fp8_blockwise", num_layers_at_start_in_bf16=1)
    config = transformer_config(parse_architecture(WIDE), LAYOUT, ModelSettings(precision=precision))
    rows = {row.op: row for row in implementations(config)}
    assert rows["precision"].name == "fp8_blockwise" and "no CUDA device" in rows["precision"].reason
    assert rows["linear products"].name == "emulation in fp32"
    assert "1 of 4 layers in float32" in rows["linear products"].reason
    assert rows["fp8 weights"].name == "float32, quantized for each product"
    plain = {
        row.op: row
        for row in implementations(
            transformer_config(parse_architecture(WIDE), ParallelLayout(1), ModelSettings())
        )
    }
    assert plain["precision"].name == "fp32" and "fp8 weights" not in plain


# ---- the emulated model

pytestmark = pytest.mark.usefixtures("single_process")


def test_only_the_requested_layers_compute_in_fp8() -> None:
    precision = PrecisionConfig(recipe="fp8_blockwise", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    actor = build_actor(wide_model(), LAYOUT, settings_of(precision))
    names = [name for name, part in actor.chunks[0].named_modules() if isinstance(part, KINDS)]
    assert len(names) == 8 and {name.split("layers.")[1][0] for name in names} == {"1", "2"}


@pytest.mark.parametrize(("family", "num_layers"), [("dense", 8), ("experts", 4 + 4 * 4)])
def test_a_layer_multiplies_what_a_server_holds(family: str, num_layers: int) -> None:
    """Each layer computes with quantize(main param), and the bridge sends the same bits to an engine."""
    want = wide_model(**FAMILIES[family])
    actor = build_actor(want, LAYOUT, settings_of())
    parameters = {name: p.detach() for name, p in actor.named_local_parameters().items()}
    shards = actor.state_shards()
    seen = {}

    def watch(part: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, None]) -> None:
        hidden = inputs[0].flatten(0, -2)
        weight, num_tokens = part.weight.detach(), len(hidden)
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, -num_tokens % BLOCK))
        product = quantize_hidden(hidden).widened() @ quantize_weight(weight).widened().t()
        same = torch.equal(product[:num_tokens], outputs[0].flatten(0, -2))
        seen[id(part)] = seen.get(id(part), True) and same

    for part in actor.chunks[0].modules():
        if isinstance(part, (Fp8RowParallelLinear, Fp8ExpertRowParallelLinear)):
            part.register_forward_hook(watch)
    micro_batches = [micro for _, micro in ragged_batch().of_rank(LAYOUT, 0)]
    actor.forward_logprobs(micro_batches, TEMPERATURE)
    assert len(seen) == num_layers and all(seen.values())

    plain = sglang_layout(want.architecture, 1, torch.bfloat16)
    source = Fp8SourceLayout(actor.tensors, Fp8EngineLayout(plain, expected_parameters(plain)))
    quantized = {name: quantize_weight(p).widened() for name, p in parameters.items() if name.endswith(MATRICES)}
    before = {name: p.clone() for name, p in parameters.items()}
    with Fp8Weights(source, 0, parameters).in_place():
        for name, parameter in parameters.items():
            assert torch.equal(parameter, quantized.get(name, before[name])), name
    assert len(quantized) == 2 * num_layers
    assert not any(key.startswith("master/") for key in shards), "an fp32 parameter is its own main param"


def test_served_logprobs_are_the_trainer_s_at_the_served_values() -> None:
    """A model in fp32 at the quantized weights differs from FP8 only by the rounding of activations."""
    want = wide_model()
    micro_batches = [micro for _, micro in ragged_batch().of_rank(LAYOUT, 0)]
    actor = build_actor(want, LAYOUT, settings_of())
    in_fp8 = actor.forward_logprobs(micro_batches, TEMPERATURE)
    with torch.no_grad():
        for name, parameter in actor.named_local_parameters().items():
            if name.endswith(MATRICES):
                parameter.copy_(quantize_weight(parameter).widened())
    again = actor.forward_logprobs(micro_batches, TEMPERATURE)
    for one, other in zip(in_fp8, again, strict=True):
        assert torch.equal(one.logprobs, other.logprobs), "rounding what is rounded changes nothing"


def test_main_params_are_the_checkpoint_s_values() -> None:
    want = wide_model()
    wide = build_actor(want, ParallelLayout(1), settings_of(PrecisionConfig())).named_local_parameters()
    actor = build_actor(want, LAYOUT, settings_of(dtype="bfloat16"))
    shards = actor.state_shards()
    for name, parameter in actor.named_local_parameters().items():
        assert torch.equal(shards[f"master/{name}"].flatten(), wide[name].flatten()), name
        assert torch.isfinite(parameter).all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_training_sees_the_logprobs_of_the_forward_pass_and_that_pass_changes_nothing(family: str) -> None:
    actor = build_actor(wide_model(**FAMILIES[family]), LAYOUT, settings_of(dtype="bfloat16"))
    micro_batches = [micro for _, micro in ragged_batch().of_rank(LAYOUT, 0)]
    before = {name: value.clone() for name, value in _everything(actor).items()}
    old = actor.forward_logprobs(micro_batches, TEMPERATURE)
    after = _everything(actor)
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    seen = {}

    def watch(micro_batch: Any, outputs: Any, index: int) -> Any:
        seen[index] = outputs.logprobs.detach().clone()
        return loss_fn(micro_batch, outputs, index)

    actor.train_step(micro_batches, watch, TEMPERATURE, 1e-3)
    assert all(torch.equal(outputs.logprobs, seen[index]) for index, outputs in enumerate(old))


def test_transformer_engine_requantizes_the_weights_in_every_pass() -> None:
    """Transformer Engine keeps quantized weights across micro-batches; after a step they would be stale."""
    actor = build_actor(wide_model(), LAYOUT, settings_of(PrecisionConfig()))
    actor.config.fp8 = "e4m3"  # read by megatron-core
    part = actor.chunks[0].module.decoder.layers[0].mlp.linear_fc2
    part.is_first_microbatch = True
    seen = []

    def as_transformer_engine(module: Any, inputs: Any) -> None:
        seen.append(module.is_first_microbatch)
        module.is_first_microbatch = False

    part.register_forward_pre_hook(as_transformer_engine)
    micro_batches = [micro for _, micro in ragged_batch().of_rank(LAYOUT, 0)]
    for _ in range(2):
        actor.forward_logprobs(micro_batches, TEMPERATURE)
        actor.train_step(micro_batches, loss_fn, TEMPERATURE, 1e-3)
    assert seen == 4 * [True, *(False for _ in micro_batches[1:])]


def _everything(actor: Any) -> dict[str, torch.Tensor]:
    """Parameters, main params, moments and every buffer of every module."""
    tensors = actor.state_shards()
    buffers = {f"buffer/{name}": b for chunk in actor.chunks for name, b in chunk.named_buffers() if b is not None}
    return {**tensors, **buffers}


# Relative rms error of rounding to 3 bits after the leading one, of numbers evenly spread in logarithm: the step is
# 1/8, its variance 1/8^2 / 12, and the mean of 1/x^2 over [1, 2) is 3 / (8 ln 2). A product has two rounded operands.
ROUNDING = math.sqrt((1 / 8) ** 2 / 12 * 3 / (8 * math.log(2)))
PRODUCT = math.sqrt(2) * ROUNDING


@pytest.mark.parametrize("changes", [{}, {**EXPERTS, "num_experts_per_tok": 4}], ids=["dense", "experts"])
def test_fp8_differs_from_fp32_by_what_its_rounding_costs(changes: dict[str, Any]) -> None:
    """A gradient comes through 4 products a layer forward and back, and one of its own; errors of either sign add up as
    the root of their number. Twice that is allowed, half of it is there. All experts are chosen: another choice would be
    another function."""
    want = wide_model(**changes)
    micro_batches = [micro for _, micro in ragged_batch().of_rank(LAYOUT, 0)]
    gradients, logprobs = [], []
    for precision in (PrecisionConfig(), BLOCKWISE):
        actor = build_actor(want, LAYOUT, settings_of(precision))
        outputs = actor.forward_logprobs(micro_batches, TEMPERATURE)
        logprobs.append(
            torch.cat([out.logprobs[m.loss_mask.bool()] for out, m in zip(outputs, micro_batches, strict=True)])
        )
        actor.accumulate_gradients(micro_batches, loss_fn, TEMPERATURE)
        gradients.append(torch.cat([gradient.flatten() for gradient in actor.gradients().values()]).clone())
    products = 4 * WIDE["num_hidden_layers"]
    of_gradients = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    expected = PRODUCT * math.sqrt(2 * products + 1)
    assert 0.5 * expected < of_gradients < 2 * expected, (of_gradients, expected)
    # Only forward, as a share of how much log-probs of different tokens differ.
    of_logprobs = float((logprobs[1] - logprobs[0]).square().mean().sqrt() / logprobs[0].std())
    expected = PRODUCT * math.sqrt(products)
    assert 0.5 * expected < of_logprobs < 2 * expected, (of_logprobs, expected)


def test_bf16_layers_bring_it_closer() -> None:
    want = wide_model()
    exact, _ = measured(build_actor(want, LAYOUT, settings_of(PrecisionConfig())))
    kept = PrecisionConfig(recipe="fp8_blockwise", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1)
    errors = [measured(build_actor(want, LAYOUT, settings_of(p)), exact)[1]["logprob"] for p in (BLOCKWISE, kept)]
    assert errors[1] < errors[0]


def test_the_log_names_recipe_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        build_actor(wide_model(), LAYOUT, settings_of())
    words = "fp8_blockwise, 4 of 4 layers, linear products by emulation in fp32 (requested; there is no CUDA device)"
    assert f"precision: {words}" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_changes_no_bit(family: str) -> None:
    micro_batches = [micro for _, micro in ragged_batch().of_rank(LAYOUT, 0)][:2]
    found = []
    for name in ("none", "selective", "full"):
        actor = build_actor(
            wide_model(**FAMILIES[family]),
            LAYOUT,
            ActorSettings(model=ModelSettings(recompute=name, precision=BLOCKWISE)),
        )
        actor.accumulate_gradients(micro_batches, loss_fn, TEMPERATURE)
        found.append(torch.cat([gradient.flatten() for gradient in actor.gradients().values()]).clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
