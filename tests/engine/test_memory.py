"""The KV cache that the memory module computes, against SGLang's own sizing code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.config import config_from_dict
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.memory import engine_memory, free_at_start

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # else a test of this file alone does not find the configurations below

from tests.unit.config.architectures import DENSE, EXPERTS, QWEN_7B, QWEN_14B, QWEN_32B, write_model  # noqa: E402

MODELS = {"7B": QWEN_7B, "14B": QWEN_14B, "32B": QWEN_32B, "tiny": DENSE, "experts": EXPERTS}
# model, ranks of a server, mem_fraction_static, colocated
CASES = [
    ("7B", 1, 0.78, True),
    ("14B", 2, 0.78, True),
    ("32B", 4, 0.78, True),
    ("32B", 8, 0.78, True),
    ("32B", 4, 0.85, False),
    ("32B", 2, 0.6, True),
    ("7B", 8, 0.5, False),  # more ranks than key-value heads
    ("tiny", 1, 0.1, False),
    ("experts", 2, 0.1, False),
]


def test_tokens_are_those_that_sglang_computes(tmp_path: Path, engine_python: Path, repository: Path) -> None:
    cluster, expected, request = Cluster(), [], []
    for name, tensor, fraction, is_colocated in CASES:
        directory = write_model(tmp_path / name, MODELS[name])
        config = config_from_dict(
            {
                "model": {"path": str(directory), "dtype": "bfloat16"},
                "data": {"train_paths": ["/t"]},
                "rollout": {"engine": "sglang"},
                "sglang": {
                    "tp_size": tensor,
                    "mem_fraction_static": fraction,
                    "placement": "colocated" if is_colocated else "disaggregated",
                },
            }
        )
        memory = engine_memory(config, read_architecture(directory), cluster)
        expected.append((memory.bytes_per_token, memory.kv_tokens))
        free = free_at_start(config, cluster)
        request.append(
            {
                "directory": str(directory),
                "tensor_parallel": tensor,
                "fraction": fraction,
                "free_before": free,
                "free_after": free - memory.weights,
            }
        )
    (tmp_path / "cases.json").write_text(json.dumps(request))
    result = subprocess.run(
        [str(engine_python), str(Path(__file__).with_name("sglang_cache_probe.py")), str(tmp_path / "cases.json")],
        env={
            "PYTHONPATH": str(repository),
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    [line] = [line for line in result.stdout.splitlines() if line.startswith("SIZED ")]
    for case, mine, theirs in zip(CASES, expected, json.loads(line.removeprefix("SIZED ")), strict=True):
        assert mine[0] == theirs[0], case
        assert mine[1] == pytest.approx(theirs[1], abs=1), case  # SGLang computes in GiB
