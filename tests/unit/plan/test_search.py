"""Layouts for 8 to 16,384 GPUs: those that are found pass the validator, and none takes longer than ten seconds."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.config.derive import derive
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.models.stages import layers_of_stages
from megatron_dapo.plan.check import validate_and_check
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.search import MARGIN, Found, candidates, recomputations, search, splits
from megatron_dapo.plan.step import plan_step
from megatron_dapo.rounding import GIB
from tests.unit.plan.models import MODELS, RECIPES

# The fewest GPUs of 80 GB that hold each model with its optimizer: none, for the others there are layouts.
NONE_FITS = {("235B-A22B", 8), ("235B-A22B", 16), ("235B-A22B", 32)}
# One node's engine holds it next to a cache only in FP8, which VAPO's and T-PPO's recipes take with a correction.
NEEDS_FP8_ENGINES = {"235B-A22B"}
SECONDS = 10.0


def config_of(algorithm: str) -> Any:
    return load_config(RECIPES / f"{algorithm}_qwen2.5_32b.toml").config


def found_for(config: Any, model: str, gpus: int, host_gib: float = 2000.0, gpu: str = "H100") -> Found:
    cluster = Cluster(gpus // 8, 8, GPUS[gpu].memory_gib, host_gib)
    return search(config, parse_architecture(MODELS[model]), gpus, GPUS[gpu], cluster)


@cache
def timed(algorithm: str, model: str, gpus: int, host_gib: float = 2000.0, gpu: str = "H100") -> tuple[Found, float]:
    """Return what is found for the shipped recipe, and the CPU seconds of the search: other programs run at the same time."""
    started = time.process_time()
    found = found_for(config_of(algorithm), model, gpus, host_gib, gpu)
    return found, time.process_time() - started


ALL = [
    (algorithm, model, gpus) for algorithm in ("dapo", "vapo", "tppo") for model in MODELS for gpus in (8, 128, 16384)
]
QUICK = [*(("dapo", model, 128) for model in MODELS if model != "235B-A22B"), ("tppo", "7B", 16384), ("vapo", "32B", 8)]


@pytest.mark.parametrize(
    ("algorithm", "model", "gpus"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long) for case in ALL],
)
def test_layouts_are_found_in_time_and_fit(algorithm: str, model: str, gpus: int) -> None:
    config, facts = config_of(algorithm), parse_architecture(MODELS[model])
    found, seconds_searched = timed(algorithm, model, gpus)
    assert seconds_searched < SECONDS
    if (model, gpus) in NONE_FITS:
        assert not found.layouts and found.reasons
        return
    if model in NEEDS_FP8_ENGINES and algorithm != "dapo":
        # Servers in FP8 need a correction. Without one, only servers over several nodes hold the model.
        assert found.layouts and all(one.settings["sglang.nodes_per_server"] > 1 for one in found.layouts)
        config = derive(config, {"algorithm.off_policy.correction": "tis"})
        found = found_for(config, model, gpus)
    assert found.layouts, (found.reasons, found.refused)
    seconds = [one.plan.total for one in found.layouts]
    assert seconds == sorted(seconds) and seconds[0] > 0
    cluster = Cluster(gpus // 8, 8, 79.0, 2000.0)
    for one in found.layouts:
        assert not validate_and_check(derive(config, one.settings), cluster, facts, gpus)
        assert one.plan.peak <= cluster.gpu_bytes - MARGIN and one.binding
        # Context ranks never ran on GPUs: others fit here.
        assert one.settings["parallel.cp_size"] == 1
    assert all(one.flip for one in found.layouts)
    assert (found.over_nodes is not None) == (model in NEEDS_FP8_ENGINES)


def test_more_memory_and_more_gpus_never_slow_a_step() -> None:
    few, many, large = (
        timed("dapo", "32B", gpus, gpu=name)[0].layouts[0].plan.total
        for gpus, name in ((64, "H100"), (256, "H100"), (64, "H200"))
    )
    assert many < few and large < few


def test_mlps_alone_are_recomputed_where_keeping_everything_has_no_room() -> None:
    recipe = RECIPES / "dapo_qwen2.5_32b.toml"
    best = timed("dapo", "32B", 8)[0].layouts[0]
    assert best.settings["model.recompute_granularity"] == "selective"
    assert best.settings["megatron.recompute_modules"] == ["mlp"]
    # The settings that are listed give the configuration that was planned.
    overrides = [f"{path}={json.dumps(value)}" for path, value in best.settings.items()]
    again = load_config(recipe, overrides).config
    facts, cluster = parse_architecture(MODELS["32B"]), Cluster(1, 8, 79.0, 2000.0)
    assert plan_step(again, facts, 8, cluster, GPUS["H100"]).total == best.plan.total


@pytest.mark.parametrize(
    ("model", "changes", "kinds"),
    [
        ("7B", {}, [("none", None), ("selective", ["mlp"]), ("full", None)]),
        ("30B-A3B", {}, [("none", None), ("selective", ["moe"]), ("full", None)]),
        ("30B-A3B", {"rollout.routing_replay": True}, [("none", None), ("full", None)]),
        (
            "7B",
            {"megatron.recompute_modules": ["core_attn"]},
            [("selective", ["core_attn"]), ("selective", ["mlp"])],
        ),
        ("7B", {"megatron.recompute_num_layers": 4}, [("full", None)]),
    ],
)
def test_kinds_of_recomputation_that_are_tried(
    model: str, changes: dict[str, object], kinds: list[tuple[str, object]]
) -> None:
    found = recomputations(derive(config_of("dapo"), changes), parse_architecture(MODELS[model]))
    assert [(one["model.recompute_granularity"], one.get("megatron.recompute_modules")) for one in found] == kinds


def test_a_recipe_with_its_own_modules_is_planned_for_other_gpus() -> None:
    """--set cannot take them away, and validation refuses them with other kinds of recomputation."""
    config = derive(
        config_of("dapo"), {"model.recompute_granularity": "selective", "megatron.recompute_modules": ["mlp"]}
    )
    found = found_for(config, "32B", 16)
    assert found.layouts and not found.refused


@pytest.mark.parametrize(
    ("algorithm", "model", "host_gib", "fits"),
    [
        ("dapo", "32B", 1000.0, False),
        ("dapo", "32B", 2000.0, True),
        ("vapo", "32B", 1000.0, False),
        ("vapo", "32B", 2000.0, True),
        ("tppo", "32B", 2000.0, True),
        ("dapo", "30B-A3B", 1000.0, True),
        ("vapo", "30B-A3B", 1000.0, False),
        ("vapo", "14B", 1000.0, True),
    ],
)
def test_one_node_holds_what_its_host_memory_has_room_for(
    algorithm: str, model: str, host_gib: float, fits: bool
) -> None:
    found, _ = timed(algorithm, model, 8, host_gib)
    assert bool(found.layouts) == fits
    if fits:
        assert all(one.plan.memory.host <= host_gib * GIB for one in found.layouts)
        # The GPUs have no room for main params and moments of larger models.
        assert found.layouts[0].settings["optimizer.on_host"] or model == "14B"
    else:
        assert found.reasons["host memory"] and found.num_fitting == 0


def test_candidates_divide_the_model_and_the_gpus() -> None:
    config, facts = config_of("dapo"), parse_architecture(MODELS["30B-A3B"])
    tried = list(candidates(config, facts, 64, Cluster(8), (1, 2)))
    assert len(tried) == len({tuple(sorted(settings.items())) for settings in tried})
    for settings in tried:
        model = settings["parallel.tp_size"] * settings["parallel.pp_size"] * settings["parallel.cp_size"]
        ends = settings["parallel.first_stage_layers"], settings["parallel.last_stage_layers"]
        stages = layers_of_stages(facts.num_layers, settings["parallel.pp_size"], settings["parallel.vpp_size"], *ends)
        assert 64 % model == 0 and sum(stages) == facts.num_layers and min(stages) >= 1
        assert facts.num_experts % settings["parallel.ep_size"] == 0


@pytest.mark.parametrize("num_layers", [2, 28, 48, 64, 94])
def test_ends_of_a_split_are_no_longer_than_the_stages_between(num_layers: int) -> None:
    assert list(splits(num_layers, 1)) == [(0, 0)]
    for stages in range(2, min(32, num_layers) + 1):
        found = list(splits(num_layers, stages))
        assert ((0, 0) in found) == (num_layers % stages == 0)
        for ends in found:
            sizes = layers_of_stages(num_layers, stages, 1, *ends)
            assert sum(sizes) == num_layers and sizes[-1] <= sizes[0]
            assert stages == 2 or sizes[0] <= sizes[1]


def test_layers_that_no_stages_divide_are_split_with_shorter_ends() -> None:
    """94 layers divide only by 2 and 47; the head's stage has fewer than the others."""
    best = timed("dapo", "235B-A22B", 128)[0].layouts[0]
    assert best.settings["parallel.pp_size"] > 2 and best.settings["parallel.last_stage_layers"] > 0
    even = timed("dapo", "32B", 128)[0].layouts
    last, stages = even[0].settings["parallel.last_stage_layers"], even[0].settings["parallel.pp_size"]
    assert 0 < 64 / stages - last <= 2, "the head is worth about two layers"


def test_servers_in_fp8_are_named_where_those_in_16_bits_have_little_room() -> None:
    """86 GiB: a cache of a few responses next to 16-bit weights. 79 GiB: none."""
    config, facts = config_of("dapo"), parse_architecture(MODELS["235B-A22B"])
    found = search(config, facts, 128, replace(GPUS["H100"], memory_gib=86.0), Cluster(16, 8, 86.0, 2000.0))
    first = found.layouts[0]
    assert first.settings["sglang.max_running_requests"] < 8
    assert not found.needs_fp8 and found.fp8_seconds is not None and found.fp8_seconds < 0.5 * first.plan.total
    only, _ = timed("dapo", "235B-A22B", 128)
    assert only.needs_fp8 and all(one.settings["sglang.quantization"] == "fp8" for one in only.layouts)


def test_servers_are_spread_over_nodes_if_no_one_node_holds_the_model() -> None:
    """Nodes of four GPUs: next to a trainer, their servers hold 235B parameters neither in 16 bits nor in FP8."""
    architecture, gpu = parse_architecture(MODELS["235B-A22B"]), GPUS["H100"]
    cluster = Cluster(16, 4, gpu.memory_gib, 2000.0)
    found = search(config_of("dapo"), architecture, 64, gpu, cluster)
    assert found.layouts and not found.needs_fp8
    for one in found.layouts:
        config, processes = derive(config_of("dapo"), one.settings), one.settings["parallel.num_processes"]
        nodes, here = config.sglang.nodes_per_server, config.sglang.ranks_per_node
        assert nodes > 1 and config.sglang.placement == "disaggregated" and config.sglang.weight_sync_transport == "p2p"
        assert processes == 16 * (4 - here) and cluster.num_engines(config, processes) == 16 // nodes
        assert not validate_and_check(config, cluster, architecture, processes)
