"""The memory module's bytes against those of models that four ranks really build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher import run_distributed

from megatron_dapo.config import config_from_dict
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.plan.memory import optimizer_ranks, stage_memory

NUM_RANKS = 4
CASES: list[dict[str, Any]] = [
    {"model": "qwen2-tied", "dtype": "bfloat16", "layout": {"pipeline": 2}},
    {"model": "qwen3", "dtype": "bfloat16", "layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}},
    {"model": "llama3", "dtype": "bfloat16", "layout": {"context": 2}},
    {"model": "qwen3", "dtype": "float32", "layout": {"tensor": 2}},
    {"model": "qwen2", "dtype": "bfloat16", "layout": {"tensor": 2}, "distributed": False},
    {"model": "qwen3-moe", "dtype": "bfloat16", "layout": {"tensor": 2, "expert": 2, "sequence_parallel": True}},
    {"model": "qwen2", "dtype": "bfloat16", "layout": {"tensor": 2}, "freeze": ["attention"]},
    {"model": "qwen3", "dtype": "float32", "layout": {"pipeline": 2}, "freeze": ["attention"]},
]
FIELDS = {"tensor": "tp_size", "pipeline": "pp_size", "context": "cp_size", "expert": "ep_size"}


def test_bytes_of_every_rank_are_the_computed_ones(actor_references: str, tmp_path: Path) -> None:
    for name in {case["model"] for case in CASES}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((Path(actor_references) / f"{name}.json").read_text())
    arguments = {"cases": CASES, "references": actor_references, "configs": str(tmp_path)}
    found = run_distributed("memory_checks:bytes_of_ranks", NUM_RANKS, arguments, timeout_s=220)
    for case, ranks in zip(CASES, found, strict=True):
        directory = tmp_path / case["model"]
        parallel = {FIELDS.get(name, name): size for name, size in case["layout"].items()}
        config = config_from_dict(
            {
                "model": {"path": str(directory), "dtype": case["dtype"]},
                "data": {"train_paths": ["/t"]},
                "critic": {"freeze": case.get("freeze", [])},
                "parallel": {**parallel, "use_distributed_optimizer": case.get("distributed", True)},
            }
        )
        architecture, is_critic = read_architecture(directory), "freeze" in case
        computed = [stage_memory(config, architecture, NUM_RANKS, rank["stage"], is_critic) for rank in ranks]
        assert [rank["weights"] for rank in ranks] == [memory.weights for memory in computed], case
        assert [rank["gradients"] for rank in ranks] == [memory.gradients for memory in computed], case
        # Replicas cut one padded buffer: their shares differ by its padding, and add up to the whole.
        replicas, _ = optimizer_ranks(config.parallel, NUM_RANKS)
        total, expected = sum(rank["optimizer"] for rank in ranks), sum(memory.optimizer for memory in computed)
        assert abs(total - expected) <= 12 * NUM_RANKS * replicas, case
        assert max(rank["optimizer"] for rank in ranks) <= 1.25 * max(memory.optimizer for memory in computed), case
