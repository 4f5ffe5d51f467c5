"""What every family passes, with one tiny model each: the table of docs/new_family.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import SglangLayout, sglang_layout
from megatron_dapo.config import config_from_dict
from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.engines.embedded_model import empty_model, weights_by_name
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan.memory import rank_parameters, stage_memory
from megatron_dapo.plan.memory.engine import engine_weight_bytes
from megatron_dapo.reshard.layout import Layout, SingleHolderLayout
from megatron_dapo.reshard.planner import plan
from tests.examples import examples
from tests.reshard_oracles import execute_in_memory


class Row(NamedTuple):
    """A family: the name of its tiny model in `actor_checks.MODELS`, whether its layers may have experts, and whether these have
    biases, which are not cut over tensor ranks."""

    model: str
    experts: bool = False
    biases: bool = False


FAMILIES = {
    "llama": Row("llama3"),
    "qwen2": Row("qwen2"),
    "qwen3": Row("qwen3"),
    "qwen3_moe": Row("qwen3-moe", experts=True),
    "gemma3_text": Row("gemma3"),
    "qwen3_5_text": Row("qwen3.5"),
    "qwen3_next": Row("qwen3-next", experts=True),
    "qwen3_5_moe_text": Row("qwen3.5-moe", experts=True),
    "deepseek_v3": Row("deepseek", experts=True),
    "kimi_k2": Row("kimi-k2", experts=True),
    "glm4_moe": Row("glm4-moe", experts=True),
    "glm4_moe_lite": Row("glm4-moe-lite", experts=True),
    "gpt_oss": Row("gpt-oss", experts=True, biases=True),
}
TENSOR_PIPELINE = {"tensor": 2, "pipeline": 2}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
EXPERT = {"expert": 2, "tensor": 2, "sequence_parallel": True}
every_family = pytest.mark.parametrize("family", FAMILIES)


def layouts(row: Row) -> list[dict[str, Any]]:
    """Layouts of four ranks that together have every axis."""
    virtual, context = {"pipeline": 2, "virtual_pipeline": 2}, {"context": 2, **SEQUENCE}
    if row.experts:
        # Experts under tensor parallelism need sequence parallelism.
        sizes = ({**TENSOR_PIPELINE, "sequence_parallel": True}, virtual, context, EXPERT, {"expert": 4})
        return [fitting(row, layout) for layout in sizes]
    return [TENSOR_PIPELINE, virtual, context, {"tensor": 4}, {"context": 4}]


def fitting(row: Row, layout: dict[str, Any]) -> dict[str, Any]:
    """Give tensor ranks different experts if they cannot share one."""
    return {**layout, "expert": 2, "expert_tensor": 1} if row.biases and "tensor" in layout else layout


@pytest.fixture(scope="session")
def architecture_of() -> Callable[[str], ModelArchitecture]:
    from actor_checks import reference_model

    @cache
    def read(family: str) -> ModelArchitecture:
        config = reference_model(FAMILIES[family].model).config
        return parse_architecture(json.loads(config.to_json_string(use_diff=False)))

    return read


def megatron_layouts(architecture: ModelArchitecture) -> Iterator[MegatronLayout]:
    """Every layout of up to eight ranks that fits the model, without replicas."""
    for tensor in (1, 2, 4, 8):
        for pipeline, virtual in ((1, 1), (2, 1), (2, 2), (4, 1)):
            for expert, expert_tensor in ((1, None), (2, None), (2, 1), (4, 1)):
                world = max(tensor, expert * (expert_tensor or tensor)) * pipeline
                if world > 8:
                    continue
                sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual, "expert": expert}
                try:
                    parallel = ParallelLayout(world, expert_tensor=expert_tensor, sequence_parallel=tensor > 1, **sizes)
                    yield megatron_layout(architecture, parallel, torch.float32)
                except ValueError:  # sizes that do not divide the model's
                    continue


def engine_layouts(architecture: ModelArchitecture) -> Iterator[SglangLayout]:
    for tensor, expert in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2)):
        for device in ("cuda", "cpu"):
            try:
                yield sglang_layout(architecture, tensor, torch.float32, expert_parallel=expert, device=device)
            except ValueError:
                continue


def numbered(architecture: ModelArchitecture) -> dict[str, torch.Tensor]:
    """Weights in which each element is its number in the whole model, counted from 1; 0 means padding."""
    weights, start = {}, 1
    for name, shape in architecture.shapes().items():
        size = torch.Size(shape).numel()
        weights[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    assert start < 2**24, "fp32 holds every integer up to there"
    return weights


def moved(source: Layout, held: list[dict[str, torch.Tensor]], target: Any) -> list[dict[str, torch.Tensor]]:
    there = [{n: torch.zeros(s) for n, s in target.local_shapes(rank).items()} for rank in range(target.num_ranks)]
    execute_in_memory(plan(source, target), held, there)
    return there


@every_family
def test_bytes_are_the_same_on_all_three_sides(family: str, architecture_of: Any) -> None:
    """Hugging Face -> Megatron -> SGLang equals Hugging Face -> SGLang, and Megatron -> Hugging Face is the identity: ten layouts
    of trainers, in `make test-all` every one, each with two of engines."""
    architecture = architecture_of(family)
    weights, engines = numbered(architecture), list(engine_layouts(architecture))
    served = [moved(SingleHolderLayout(engine.tensors), [weights], engine) for engine in engines]
    trainers = list(megatron_layouts(architecture))
    assert len(trainers) >= 8 and len(engines) >= 4, (len(trainers), len(engines))
    for number, trainer in enumerate(trainers[:: -(-len(trainers) // examples(50))]):
        held = moved(SingleHolderLayout(trainer.tensors), [weights], trainer)
        back = {name: torch.zeros(shape) for name, shape in architecture.shapes().items()}
        execute_in_memory(plan(trainer, SingleHolderLayout(trainer.tensors)), held, [back])
        assert all(torch.equal(back[name], weight) for name, weight in weights.items()), trainer.parallel.describe()
        for place in (number % len(engines), (3 * number + 1) % len(engines)):
            for here, there in zip(moved(trainer, held, engines[place]), served[place], strict=True):
                assert all(torch.equal(here[name], there[name]) for name in there), trainer.parallel.describe()


@every_family
def test_planned_parameters_are_those_of_the_layouts(family: str, architecture_of: Any) -> None:
    architecture = architecture_of(family)
    for layout in megatron_layouts(architecture):
        p = layout.parallel
        sizes = {"tp_size": p.tensor, "pp_size": p.pipeline, "vpp_size": p.virtual_pipeline, "ep_size": p.expert}
        parallel = ParallelConfig(**sizes, etp_size=p.expert_tensor_size if p.expert > 1 else 0)
        for rank in range(layout.num_ranks):
            held = sum(spec.num_elements for spec in layout.local_specs(rank).values())
            assert rank_parameters(architecture, parallel, p.coordinates(rank).pipeline).total == held, p.describe()
    for engine in engine_layouts(architecture):
        if not engine.cut.pads:
            held = 4 * sum(spec.num_elements for spec in engine.local_specs(0).values())
            sizes = engine.tensor_parallel, engine.expert_parallel, "float32", False
            assert engine_weight_bytes(architecture, *sizes) == held, sizes


@every_family
def test_a_weight_sync_in_bf16_brings_every_bit(family: str, architecture_of: Any, tmp_path: Path) -> None:
    """From four ranks into an engine of two, fp32 tensors next to bf16 ones; checksums of both sides agree."""
    from sync_simulation import PATIENT, SimulatedEngine, World, run_ranks

    layout, narrow = ParallelLayout(4, **layouts(FAMILIES[family])[0]), torch.bfloat16
    sizes = {"tensor_parallel": 2, "bucket_bytes": 1 << 20}
    world = World(architecture_of(family), layout, dtype=narrow, source_dtype=narrow, **sizes)
    engine, weights = SimulatedEngine(world.layout), world.weights(1)
    updates = world.updates([engine], tmp_path, PATIENT)
    for outcome in run_ranks(4, lambda rank: updates[rank].update(1, weights[rank])):
        assert outcome.is_complete, outcome
    assert world.holds(engine, 0, world.expected(weights))
    assert all(world.source.tensors[name] == spec for name, spec in world.layout.tensors.items())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text", "qwen3_moe"])
def test_tensors_of_the_embedded_engine_have_the_trainers_types(family: str, architecture_of: Any) -> None:
    from actor_checks import reference_model

    engine = empty_model(reference_model(FAMILIES[family].model).config, torch.bfloat16, "cpu")
    types = {name: tensor.dtype for name, tensor in weights_by_name(engine).items()}
    trainer = megatron_layout(architecture_of(family), ParallelLayout(1), torch.bfloat16)
    assert types == {name: spec.dtype for name, spec in trainer.tensors.items()}
    assert (torch.float32 in types.values()) == (family != "qwen3_moe")


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_bf16_logprobs_are_as_close_to_fp64_as_those_of_transformers(family: str, references_of: Any) -> None:
    """Median distance from fp64, of a bf16 model with its fp32 tensors; then a step is made. Rounding sends few tokens to other
    experts, whose distances are much larger, in both."""
    from actor_checks import Reference, median_error_in_bf16
    from launcher import run_distributed

    row = FAMILIES[family]
    theirs = median_error_in_bf16(row.model, Reference.read(references_of(row.model), row.model))
    layouts_of_two = (SEQUENCE, {"pipeline": 2}, {**EXPERT, "expert_tensor": 1})
    cases = [{"model": row.model, "layout": layout, "dtype": "bfloat16"} for layout in layouts_of_two]
    arguments = {"cases": cases, "references": references_of(row.model)}
    for case, found in zip(cases, run_distributed("actor_checks:parity_of_layouts", 2, arguments), strict=True):
        assert found["logprob_median"] < 1.5 * theirs and not found["not_applied"], (case, found, theirs)


@every_family
def test_what_a_step_keeps_is_planned(family: str, architecture_of: Any) -> None:
    """`benchmarks/plan_memory.py` compares the bytes with real steps."""
    config = config_from_dict({"model": {"path": "/m"}, "data": {"train_paths": ["/t"]}})
    torchs, fused = (
        stage_memory(config, architecture_of(family), 1, 0, kernels=kernels).activations
        for kernels in ("torch", "transformer_engine")
    )
    assert torchs > fused > 0


@pytest.mark.long
@every_family
def test_logprobs_and_gradients_are_those_of_transformers(family: str, references_of: Any) -> None:
    """4 ranks, ragged packed batch, fp32 against fp64 within 1e-5: log-probs, loss, every local gradient, gradient norm."""
    from launcher import require_parity

    row = FAMILIES[family]
    cases = [{"model": row.model, "layout": layout} for layout in layouts(row)]
    close, equal = ("logprob", "gradient", "loss", "norm"), ("targets", "not_applied")
    require_parity("actor_checks:parity_of_layouts", cases, references_of(row.model), close, equal)


@pytest.mark.long
@every_family
def test_a_sample_is_computed_apart_from_those_it_is_packed_with(family: str, references_of: Any) -> None:
    """Other tokens in one sample change no bit of another's log-probs. With experts they change the size of an expert's
    product, and so its rounding."""
    from launcher import run_distributed

    row = FAMILIES[family]
    cases = [{"model": row.model, "layout": layout} for layout in ({}, fitting(row, SEQUENCE), {"context": 2})]
    arguments = {"cases": cases, "references": references_of(row.model)}
    for case, found in zip(cases, run_distributed("actor_checks:isolation", 2, arguments), strict=True):
        assert found["others"] <= (2e-6 if row.experts else 0.0) and found["moved"] > 1e-3, (case, found)


@pytest.mark.long
@every_family
def test_values_and_steps_of_a_critic_are_those_of_transformers(family: str, references_of: Any) -> None:
    from launcher import require_parity

    row = FAMILIES[family]
    cases = [{"model": row.model, "layout": layout} for layout in layouts(row)[:3]]
    close = ("values", "gradients", "loss", "losses", "norms", "stepped")
    directory = str(Path(references_of(row.model)) / "critics")
    require_parity("critic_checks:parity", cases, directory, close, equal=("drifted", "thawed"))


@pytest.mark.long
@every_family
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(family: str, references_of: Any) -> None:
    from launcher import run_distributed

    row = FAMILIES[family]
    cases = [
        {"model": row.model, "layout": fitting(row, SEQUENCE), "distributed": True, "dtype": "bfloat16"},
        {"model": row.model, "layout": {"pipeline": 2}, "distributed": False},
    ]
    arguments = {"references": references_of(row.model), "cases": cases}
    for case, result in zip(cases, run_distributed("actor_checks:resume", 2, arguments), strict=True):
        assert result["continued"] == result["history"], case
        assert all(rank["loaded"] == rank["difference"] == [] for rank in result["ranks"]), case


@pytest.mark.long
@pytest.mark.timeout(450)
@every_family
def test_a_checkpoint_is_the_same_bits_in_another_layout(family: str, references_of: Any, tmp_path: Path) -> None:
    from launcher import run_distributed

    row = FAMILIES[family]
    there, back = layouts(row)[0], layouts(row)[2]
    case = {"model": row.model, "source": {"layout": there}, "target": {"layout": back}, "dtype": "bfloat16"}
    directory = references_of(row.model)
    arguments = {
        "references": directory,
        "critics": f"{directory}/critics",
        "cases": [case],
        "directory": str(tmp_path),
    }
    [found] = run_distributed("state_checks:there_and_back", 4, arguments, timeout_s=400)
    assert found["difference"] == [] and found["back"] == [], found


@pytest.mark.long
@every_family
def test_planned_bytes_are_those_of_every_rank(family: str, references_of: Any, architecture_of: Any) -> None:
    from launcher import run_distributed

    row, architecture = FAMILIES[family], architecture_of(family)
    names = {"tensor": "tp_size", "pipeline": "pp_size", "context": "cp_size", "expert": "ep_size"}
    names |= {"virtual_pipeline": "vpp_size", "expert_tensor": "etp_size"}
    cases = [{"model": row.model, "layout": layout, "dtype": "bfloat16"} for layout in layouts(row)[:3]]
    cases.append({**cases[0], "lora": 3})
    arguments = {"cases": cases, "references": references_of(row.model), "configs": ""}
    for case, ranks in zip(cases, run_distributed("memory_checks:bytes_of_ranks", 4, arguments), strict=True):
        parallel = {names.get(name, name): size for name, size in case["layout"].items()}
        config = config_from_dict(
            {
                "model": {"path": "/m", "dtype": "bfloat16", "lora": {"rank": case.get("lora", 0)}},
                "data": {"train_paths": ["/t"]},
                "parallel": parallel,
            }
        )
        planned = [stage_memory(config, architecture, 4, rank["stage"]) for rank in ranks]
        assert [rank["weights"] for rank in ranks] == [memory.weights for memory in planned], case
        assert [rank["gradients"] for rank in ranks] == [memory.gradients for memory in planned], case
