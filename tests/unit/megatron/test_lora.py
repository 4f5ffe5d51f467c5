from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from actor_checks import (
    ENTROPY_WEIGHT,
    TEMPERATURE,
    Reference,
    build_actor,
    loss_fn,
    make_micro_batch,
    ragged_batch,
    reference_model,
)
from safetensors.torch import load_file

from megatron_dapo.checkpoints.formats.saved_model import index_file, rank_file
from megatron_dapo.config.model_schema import LoraConfig, OptimizerConfig
from megatron_dapo.files.durable import HERE
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor, PolicyBeforeAdapters
from megatron_dapo.megatron.lora import attach_to_grouped, without_adapters
from megatron_dapo.megatron.model import DeferredOutputLayer, unwrap
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.models.lora import LORA_A, LORA_B, WEIGHT
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.types import MicroBatch

LAYOUT = ParallelLayout(world_size=1)
OPTIMIZER = OptimizerConfig(clip_grad=0.05, weight_decay=0.1)
LORA = LoraConfig(rank=4, alpha=6.0)
LEARNING_RATE = 5e-3
pytestmark = pytest.mark.usefixtures("single_process")


def micro_batches(seed: int) -> list[MicroBatch]:
    return [micro_batch for _, micro_batch in ragged_batch(seed).of_rank(LAYOUT, 0)]


def step(actor: MegatronActor, seed: int) -> float:
    result = actor.train_step(micro_batches(seed), loss_fn, TEMPERATURE, LEARNING_RATE)
    assert result.applied
    return result.metrics["loss"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    reference_model("qwen3").float().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def build(base: Path, lora: LoraConfig = LORA) -> MegatronActor:
    return MegatronActor.build(base, LAYOUT, ActorSettings(optimizer=OPTIMIZER, lora=lora))


class Oracle:
    """AdamW in fp64 over A and B, through transformers with the merged weights."""

    def __init__(self, adapters: dict[str, torch.Tensor]) -> None:
        self.model = reference_model("qwen3")
        self.base = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.adapters = {name: torch.nn.Parameter(each.double()) for name, each in adapters.items()}
        self.adamw = torch.optim.AdamW(self.adapters.values(), lr=LEARNING_RATE, weight_decay=0.1)

    def merged(self) -> dict[str, torch.Tensor]:
        found = {}
        for name in self.adapters:
            if name.endswith(LORA_A):
                matrix = name.removesuffix(LORA_A)
                found[matrix + WEIGHT] = self.base[matrix + WEIGHT] + LORA.scale * self.adapters[matrix + LORA_B] @ self.adapters[name]
        return {**self.base, **found}

    def step(self, seed: int) -> float:
        batch, weights, loss = ragged_batch(seed), self.merged(), torch.zeros((), dtype=torch.float64)
        for index, parts in enumerate(batch.micro_batches):
            packed, rows = make_micro_batch(parts, LAYOUT, batch.num_targets, seed=100 + index), []
            for part in parts:
                logits = torch.func.functional_call(self.model, weights, (part[None],)).logits[0, :-1]
                log_p = (logits / TEMPERATURE).log_softmax(-1)
                rows.append(torch.stack((log_p.gather(1, part[1:, None])[:, 0], -(log_p.exp() * log_p).sum(1)), dim=1))
            values, advantages = torch.cat(rows), packed.advantages[packed.loss_mask.bool()]
            loss = loss - ((advantages * values[:, 0] + ENTROPY_WEIGHT * values[:, 1]) / batch.num_targets).sum()
        self.adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.adapters.values(), OPTIMIZER.clip_grad)
        self.adamw.step()
        return float(loss.detach())


def test_losses_of_several_steps_and_the_exports_are_those_of_an_independent_adamw(base: Path, tmp_path: Path) -> None:
    actor = build(base)
    frozen = {name: parameter.detach().clone() for name, parameter in actor.named_local_parameters().items()}
    actor.export_adapters(tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    oracle = Oracle({name.removeprefix("base_model.model."): tensor for name, tensor in start.items()})
    for seed in range(4):
        assert abs(step(actor, seed) - oracle.step(seed)) < 1e-6
    assert all(torch.equal(parameter, frozen[name]) for name, parameter in actor.named_local_parameters().items())

    actor.export_adapters(tmp_path / "end")
    for name, tensor in load_file(tmp_path / "end" / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor.double(), oracle.adapters[name.removeprefix("base_model.model.")].detach(), rtol=1e-3, atol=1e-4)
    config = json.loads((tmp_path / "end" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6.0, "LORA")
    assert config["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_adapters_gradient(references: str, recompute: str) -> None:
    """Also that of the first layer, whose input needs no gradient."""
    want, settings = Reference.read(references, "qwen3"), ActorSettings(lora=LoraConfig(rank=2, targets=("gate_proj",)))
    modules = {"recompute_modules": ["mlp"]} if recompute == "selective" else {}
    gradients = []
    for model in (ModelSettings(), ModelSettings(recompute=recompute, megatron=modules)):
        actor = build_actor(want, LAYOUT, replace(settings, model=model))
        step(actor, 0)  # B is not zero any more
        actor.accumulate_gradients(micro_batches(1), loss_fn, TEMPERATURE)
        gradients.append({name: each.clone() for name, each in actor.gradients().items()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        # Not the same bits: the gradient of a layer's input is a sum of three, in another order.
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7)


def test_only_adapters_have_gradients_main_params_and_a_saved_state(references: str) -> None:
    settings = ActorSettings(lora=LORA, model=ModelSettings(dtype="bfloat16"))
    actor = build_actor(Reference.read(references, "qwen2"), LAYOUT, settings)
    step(actor, 0)
    numbers = sum(spec.num_elements for spec in actor.adapters.tensors.values())
    buffered = sum(buffer.grad_data.numel() for chunk in actor.chunks for buffer in chunk.buffers)
    assert numbers <= buffered < 1.2 * numbers + 64 * len(actor.adapters.tensors)
    state = actor.saved_state.tensors()
    assert sum(each.numel() for key, each in state.items() if key.startswith("master/")) == numbers
    assert not [key for key in state if key.startswith("parameter/") and ".lora_" not in key]


def test_gradients_of_the_hidden_states_have_the_strides_of_a_matrix() -> None:
    """With others torch.matmul multiplies [tokens, 1, features] by a frozen weight as a batch, with a copy for each token."""
    hidden, strides = torch.randn(5, 1, 8, requires_grad=True), list[tuple[int, ...]]()
    hidden.register_hook(lambda gradient: strides.append(gradient.stride()))
    output, _ = DeferredOutputLayer(None, sequence_parallel=False, group=dist.group.WORLD)(hidden)
    (output.transpose(0, 1).contiguous() * torch.randn(1, 5, 8)).sum().backward()  # GPTModel transposes
    assert strides == [(8, 8, 1)]


def test_adapters_of_grouped_experts_are_those_of_experts_apart_bit_for_bit(references: str) -> None:
    want = Reference.read(references, "qwen3-moe")
    optimizer = OptimizerConfig(clip_grad=1e6)  # the norm is a sum in another order
    single, grouped = (
        build_actor(want, LAYOUT, ActorSettings(optimizer=optimizer, lora=LORA, model=ModelSettings(megatron=options)))
        for options in ({}, {"moe_grouped_gemm": True, "overlap_param_gather": True, "overlap_grad_reduce": True})
    )
    for seed in (0, 1):
        assert step(single, seed) == step(grouped, seed)
    state = grouped.saved_state.tensors()
    assert any(".experts." in key for key in state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in single.saved_state.tensors().items())
    reference = [PolicyBeforeAdapters(actor).forward_logprobs(micro_batches(1), TEMPERATURE)[0].logprobs for actor in (single, grouped)]
    trained = grouped.forward_logprobs(micro_batches(1), TEMPERATURE)[0].logprobs
    assert torch.equal(*reference) and not torch.equal(trained, reference[0])


def test_a_grouped_layer_of_transformer_engine_adds_each_expert_s_adapter_to_its_tokens(references: str) -> None:
    """Its call, made here by a layer of this test: tokens of one expert after another, and their numbers."""

    class GroupedLinear(torch.nn.Module):
        def __init__(self, weights: Sequence[torch.Tensor]) -> None:
            super().__init__()
            for index, weight in enumerate(weights):
                self.register_parameter(f"weight{index}", torch.nn.Parameter(weight, requires_grad=False))

        def forward(self, hidden: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
            parts = hidden.split(counts)
            return torch.cat([part @ getattr(self, f"weight{index}").T for index, part in enumerate(parts)]), None

    actor = build_actor(Reference.read(references, "qwen3-moe"), LAYOUT, ActorSettings(lora=LORA, model=ModelSettings(megatron={"moe_grouped_gemm": True})))
    step(actor, 0)  # B is not zero any more
    ours = unwrap(actor.chunks[0]).decoder.layers[1].mlp.experts.linear_fc1
    layer = GroupedLinear([getattr(ours, f"weight{index}").detach() for index in range(len(ours.layers))])
    attach_to_grouped(layer, ours.adapters)
    counts = [3, 0, 5, *([1] * (len(ours.layers) - 3))]
    hidden = torch.randn(sum(counts), ours.weight0.shape[1], generator=torch.Generator().manual_seed(0))
    apart = [part(tokens)[0] for part, tokens in zip(ours.layers, hidden.split(counts), strict=True)]
    assert torch.equal(layer(hidden, counts)[0], torch.cat(apart))
    names = [name for name, _ in layer.named_parameters()]
    assert names[-2:] == [f"adapter_b{len(counts) - 2}", f"adapter_b{len(counts) - 1}"] and len(names) == 3 * len(counts)
    with without_adapters([layer]):
        plain = layer(hidden, counts)[0]
    assert float((plain - torch.cat(apart).detach()).abs().max()) > 1e-4


def test_a_run_starts_from_exported_adapters_and_a_frozen_copy_has_them_merged(base: Path, tmp_path: Path) -> None:
    trained = build(base)
    for seed in (0, 1):
        step(trained, seed)
    trained.export_adapters(tmp_path / "adapter")
    stored = LORA.model_copy(update={"path": str(tmp_path / "adapter")})
    started, frozen = build(base, stored), MegatronActor.build(base, LAYOUT, ActorSettings(lora=stored, is_frozen=True))
    for name, parameter in started.trained_parameters().items():
        assert torch.equal(parameter, trained.trained_parameters()[name]), name
    served, own = trained.served_parameters(), frozen.served_parameters()
    assert served.keys() == own.keys() and all(torch.equal(own[name], served[name]) for name in served)
    logprobs = [actor.forward_logprobs(micro_batches(1), TEMPERATURE)[0].logprobs for actor in (trained, frozen)]
    torch.testing.assert_close(*logprobs, rtol=1e-5, atol=1e-5)
    assert step(started, 2) != step(build(base), 2)

    other = reference_model("qwen3").float()
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[0, 3] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=f"belong to the weights of {base}, and model.path = {tmp_path / 'other'} has other ones"):
        build(tmp_path / "other", stored)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # gemma3 adds adapters before a norm
def test_the_policy_before_its_adapters_is_the_one_it_started_from_bit_for_bit(references: str, name: str) -> None:
    want = Reference.read(references, name)
    actor, base = build_actor(want, LAYOUT, ActorSettings(lora=LORA)), build_actor(want, LAYOUT, ActorSettings(is_frozen=True))
    before = [outputs.logprobs for outputs in base.forward_logprobs(micro_batches(1), TEMPERATURE)]
    step(actor, 0)
    reference = PolicyBeforeAdapters(actor).forward_logprobs(micro_batches(1), TEMPERATURE)
    assert all(torch.equal(outputs.logprobs, own) for outputs, own in zip(reference, before, strict=True))
    trained = actor.forward_logprobs(micro_batches(1), TEMPERATURE)
    assert max(float((outputs.logprobs - own).abs().max()) for outputs, own in zip(trained, before, strict=True)) > 1e-3


def test_offloading_changes_no_bit_of_the_served_weights(references: str) -> None:
    want, found = Reference.read(references, "qwen3"), []
    for offload, on_host in (("none", False), ("all", False), ("optimizer", True)):
        optimizer = OptimizerConfig(on_host=on_host)
        settings = ActorSettings(lora=LORA, model=ModelSettings(dtype="bfloat16"), offload=offload, optimizer=optimizer)
        actor = build_actor(want, LAYOUT, settings)
        for seed in (0, 1):
            step(actor, seed)
            actor.offload()
        served = actor.served_parameters()
        found.append({name: served[name].clone() for name in served})
    assert all(torch.equal(other[name], each) for other in found[1:] for name, each in found[0].items())


def test_adapters_that_share_a_base_train_as_each_does_alone(base: Path, tmp_path: Path) -> None:
    chosen = (LORA, LoraConfig(rank=2, targets=("q_proj", "up_proj")), LoraConfig(rank=8, alpha=3.0))

    def settings(index: int) -> ActorSettings:
        return ActorSettings(optimizer=OPTIMIZER, lora=chosen[index], seed=index)

    first = MegatronActor.build(base, LAYOUT, settings(0))
    actors = [first, *(MegatronActor.build(base, LAYOUT, settings(index), [first], base=first) for index in (1, 2))]
    for name, parameter in first.named_local_parameters().items():
        assert all(actor.named_local_parameters()[name].data_ptr() == parameter.data_ptr() for actor in actors), name
    for seed in (0, 1):
        for index, actor in enumerate(actors):
            step(actor, 10 * index + seed)
    save(actors[1], tmp_path / "saved")
    actors[1] = MegatronActor.build(base, LAYOUT, settings(1), [first], base=first)
    actors[1].saved_state.load(tmp_path / "saved", "policy")
    losses = [step(actor, 10 * index + 2) for index, actor in enumerate(actors)]
    for index, actor in enumerate(actors):
        apart = MegatronActor.build(base, LAYOUT, settings(index))
        assert [step(apart, 10 * index + seed) for seed in (0, 1, 2)][2] == losses[index]
        wanted = apart.saved_state.tensors()
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in actor.saved_state.tensors().items())
        assert apart.base == actor.base


def save(actor: MegatronActor, directory: Path) -> None:
    directory.mkdir()
    HERE.write_tensors(directory / rank_file("policy", 0), actor.saved_state.tensors())
    HERE.write_json(directory / index_file("policy"), actor.saved_state.index("policy"))


def test_adapters_of_another_base_scale_or_rank_are_refused_in_one_line(base: Path, tmp_path: Path) -> None:
    save(build(base), tmp_path / "saved")
    other = reference_model("qwen3").float()
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[0, 3] += 1
    other.save_pretrained(tmp_path / "other")
    for actor, words in (
        (build(tmp_path / "other"), f"belong to the weights of {base}, and model.path = {tmp_path / 'other'} has other ones"),
        (build(base, LoraConfig(rank=4, alpha=7.0)), "alpha / rank = 6 / 4, not 7 / 4; set model.lora.alpha = 6"),
        (build(base, LoraConfig(rank=3)), "q_proj.lora_A.weight: saved (4, 64) float32, here (3, 64) float32"),
        (build(base, LoraConfig()), "set model.path, model.dtype, model.lora"),
    ):
        with pytest.raises(ValueError) as problem:
            actor.saved_state.load(tmp_path / "saved", "policy")
        assert words in str(problem.value) and "\n" not in str(problem.value), problem.value
    same = build(base)
    same.saved_state.load(tmp_path / "saved", "policy")
