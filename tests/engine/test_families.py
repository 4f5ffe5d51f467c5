"""Every family on a stock SGLang server: weights of four trainer ranks arrive, and its log-probs are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_world import add_rope_theta
from sync_simulation import PATIENT, SimulatedEngine, World, run_ranks
from synced_server import SyncedServer

from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.families import FAMILIES as BUILT_IN
from megatron_dapo.parallel.layout import ParallelLayout
from tests.families.test_table import FAMILIES, fitting

pytestmark = pytest.mark.long  # test_sglang_layout.py loads every layout without a server


def save_model(directory: Path, family: str) -> Path:
    """The family's model of `actor_checks` with random weights far from uniform, and heads of a size that SGLang's CPU
    kernels take."""
    import transformers
    from actor_checks import MODELS, SIZES

    name, fields = MODELS[FAMILIES[family].model]
    model_class = getattr(transformers, f"{name}ForCausalLM")
    sizes = {**SIZES, **fields, "vocab_size": 300, "hidden_size": 64}
    if fields.get("head_dim"):
        sizes["head_dim"] = 16
    sizes.pop("model_type", None)  # transformers, which computes the references, has no class of that type
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, dtype="float32", architectures=[model_class.__name__]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    if family == "qwen3_next":
        add_rope_theta(directory)
    return directory


SERVED = [family for family in FAMILIES if BUILT_IN[family].serving.on_cpu]


@pytest.mark.parametrize("family", SERVED)
def test_logprobs_after_a_weight_sync_are_those_of_transformers(
    server_factory: Callable[..., SglangServer], tmp_path: Path, family: str
) -> None:
    directory = save_model(tmp_path / "model", family)
    server = server_factory(directory, tensor_parallel=1, random_weights=True, max_total_tokens=4096)
    sizes: dict[str, Any] = {"expert": 2, "pipeline": 2} if FAMILIES[family].experts else {"tensor": 2, "pipeline": 2}
    world = World(read_architecture(directory), ParallelLayout(4, **sizes), tensor_parallel=1, bucket_bytes=64 << 10)
    synced = SyncedServer(server, directory, world)
    syncs = synced.syncs()
    for version, scale in enumerate((1.0, 1.1), start=1):
        assert synced.run(syncs, version, scale).is_complete
        assert synced.gap(scale) < 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(SERVED)))
def test_weights_arrive_if_no_server_runs_on_a_cpu(tmp_path: Path, family: str) -> None:
    """By the weight loader of servers, on modules with the parameters of SGLang's, whose layout test_sglang_layout.py compares."""
    architecture = read_architecture(save_model(tmp_path / "model", family))
    parallel = ParallelLayout(4, **fitting(FAMILIES[family], {"tensor": 2, "pipeline": 2, "sequence_parallel": True}))
    world = World(architecture, parallel, tensor_parallel=2, bucket_bytes=64 << 10, device="cuda")
    engine = SimulatedEngine(world.layout)
    syncs = world.updates([engine], tmp_path, PATIENT)
    for version in (1, 2):
        weights = world.weights(version)
        reports = run_ranks(world.size, lambda rank: syncs[rank].update(version, weights[rank]))  # noqa: B023
        assert all(report.is_complete for report in reports), reports
        assert world.holds(engine, 0, world.expected(weights))
