"""Measured memory of ranks against the plan's components, and the check after the first step."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.files.durable import Files
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.measured_memory import RankMemory, exceeded
from megatron_dapo.plan.memory import RunMemory, run_memory
from megatron_dapo.rounding import GIB
from megatron_dapo.trainer.memory_check import MemoryCheck, measure
from tests.unit.config.architectures import QWEN_7B
from tests.unit.plan.models import colocated, run_of


@pytest.fixture(scope="module")
def planned() -> RunMemory:
    parallel = {"tp_size": 4, "sequence_parallel": True}
    config = run_of(model={"offload": "all"}, parallel=parallel, **colocated())
    return run_memory(config, parse_architecture(QWEN_7B), 8, Cluster())


def rank_of(memory: RunMemory, number: int = 0) -> RankMemory:
    """A rank that holds exactly what is planned."""
    parts = {phase.phase: phase.parts for phase in memory.phases}
    train, generate = parts["train"], parts["generate"]
    outside = train["context"] + train["communication"]
    tensors = memory.trainer - outside - train["engine_asleep"]
    servers = sum(generate[name] for name in ("engine_weights", "kv_tokens", "graphs_and_prefill", "engine_context"))
    return RankMemory(number, GIB, 79 * GIB, 5 * GIB, GIB, tensors, outside + GIB, servers)


@pytest.mark.parametrize(
    ("field", "component"),
    [("process", "context and communication"), ("peak_reserved", "tensors and slack"), ("servers", "servers")],
)
def test_what_is_larger_than_planned_is_named_with_its_rank(planned: RunMemory, field: str, component: str) -> None:
    ranks = [rank_of(planned, number) for number in range(4)]
    assert not list(exceeded(planned, ranks))
    ranks[2] = replace(ranks[2], **{field: getattr(ranks[2], field) + GIB})
    [found] = exceeded(planned, ranks)
    assert (found.component, found.rank, found.measured - found.planned) == (component, 2, GIB)
    # What the driver does not tell is no verdict.
    assert not list(exceeded(planned, [RankMemory(0, GIB)]))


def test_the_first_step_is_stored_and_warned_of_once(
    planned: RunMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds: list[Any] = []

    class TwoRanks:
        def gather(self, values: Any) -> list[Any]:
            rounds.append(values)
            full = rank_of(planned, 1)
            return json.loads(json.dumps([values, list(vars(replace(full, servers=70 * GIB)).values())]))

    topology = SimpleNamespace(rank=0, coordination=TwoRanks())
    config = SimpleNamespace(run=SimpleNamespace(output_dir=tmp_path))
    check = MemoryCheck(SimpleNamespace(config=config, topology=topology, files=Files()), planned)
    with caplog.at_level(logging.WARNING):
        check.after_step(5)
        check.after_step(6)
    document = json.loads((tmp_path / "plan_memory.json").read_text())
    assert len(rounds) == 1 and document["train_step"] == 5 and len(document["ranks"]) == 2
    assert document["ranks"][0]["host"] > 0 and document["planned"]["train"]["communication"] > 0
    [line] = [record.message for record in caplog.records if "above the plan" in record.message]
    assert "servers: 70.0 GiB on rank 1" in line and document["exceeded"][0] in line


def test_a_cpu_knows_its_resident_memory() -> None:
    found = measure(3)
    assert found.rank == 3 and found.host > GIB / 50 and found.total is None
