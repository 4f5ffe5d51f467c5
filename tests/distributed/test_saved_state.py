"""State of real models, trained, saved under one layout and loaded under another by ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launcher import run_distributed

GROUPED = {"moe_grouped_gemm": True}
CASES: list[dict[str, Any]] = [
    {  # ZeRO ranges of many small buckets
        "model": "qwen2",
        "source": {"layout": {"tensor": 2}},
        "target": {"layout": {}, "megatron": {"overlap_grad_reduce": True, "bucket_size": 4096}},
    },
    {
        "model": "llama3",  # tied
        "source": {"layout": {"pipeline": 2, "virtual_pipeline": 2}},
        "target": {"layout": {"tensor": 2, "pipeline": 2}, "on_host": True},
        "dtype": "bfloat16",
    },
    {
        "model": "qwen3-moe-mixed",
        "source": {
            "layout": {"expert": 2, "tensor": 2, "sequence_parallel": True},
            "megatron": GROUPED,
            "on_host": True,
        },
        "target": {"layout": {"pipeline": 2, "expert": 2, "first_stage_layers": 3}},
        "dtype": "bfloat16",
    },
    {
        "long": True,
        "model": "qwen3",
        "source": {"layout": {"context": 2}, "distributed": False},
        "target": {"layout": {"tensor": 4, "sequence_parallel": True}},
        "dtype": "bfloat16",
    },
    {
        "long": True,
        "model": "qwen3-moe",
        "source": {"layout": {"pipeline": 2}},
        "target": {
            "layout": {"tensor": 2, "expert": 4, "expert_tensor": 1, "sequence_parallel": True},
            "distributed": False,
            "megatron": GROUPED,
        },
    },
    {
        "long": True,
        "model": "qwen2",
        "source": {"layout": {"tensor": 2}, "on_host": True},
        "target": {"layout": {}, "on_host": True},
        "dtype": "bfloat16",
        "steps": 0,
    },
    {"long": True, "model": "llama3", "critic": True, "source": {"layout": {"pipeline": 2}}, "target": {"layout": {"tensor": 2}}},
    {"model": "qwen3-moe", "critic": True, "source": {"layout": {"expert": 2}}, "target": {"layout": {"pipeline": 2}}},
    {
        "model": "qwen2-frozen",
        "critic": True,
        "source": {"layout": {"tensor": 2}},
        "target": {"layout": {"pipeline": 2}},
        "dtype": "bfloat16",
    },
    {  # weights of a teacher that is a snapshot of the policy
        "model": "llama3",
        "untrained": True,
        "source": {"layout": {"tensor": 2}},
        "target": {"layout": {"pipeline": 2}},
        "dtype": "bfloat16",
    },
    {
        "model": "qwen3-moe-mixed",
        "lora": {"rank": 3, "targets": ("q_proj", "v_proj", "up_proj", "down_proj")},
        "source": {"layout": {"expert": 2, "tensor": 2, "sequence_parallel": True}, "megatron": GROUPED},
        "target": {"layout": {"pipeline": 2, "expert": 2}, "on_host": True},
        "dtype": "bfloat16",
    },
    {
        "long": True,
        "model": "qwen3",
        "lora": {"rank": 8},
        "source": {"layout": {"tensor": 4}},
        "target": {"layout": {"context": 2, "pipeline": 2}, "distributed": False},
    },
    {
        "long": True,
        "model": "deepseek",
        "lora": {"rank": 3},
        "source": {"layout": {"expert": 2, "tensor": 2, "sequence_parallel": True}},
        "target": {"layout": {"pipeline": 2, "expert": 2}},
        "dtype": "bfloat16",
    },
    {
        "long": True,
        "model": "qwen3-next",
        "lora": {"rank": 3},
        "source": {"layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}},
        "target": {"layout": {"context": 2, "expert": 2}, "distributed": False},
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def critic_references(tmp_path_factory: pytest.TempPathFactory) -> str:
    from critic_checks import write_critic

    directory = tmp_path_factory.mktemp("critic_references")
    for name in sorted({case["model"] for case in CASES if "critic" in case}):
        write_critic(directory, name)
    return str(directory)


def named(case: dict[str, Any]) -> str:
    return "-".join([case["model"], *(kind for kind in ("lora", "critic", "untrained") if kind in case), f"{case.get('steps', 2)} steps"])


@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=named(case), marks=[pytest.mark.long] * case.get("long", False)) for case in CASES]
)
def test_a_state_is_the_same_bits_in_every_layout_and_read_once(
    case: dict[str, Any], actor_references: str, critic_references: str, tmp_path: Path
) -> None:
    arguments = {
        "references": actor_references,
        "critics": critic_references,
        "cases": [case],
        "directory": str(tmp_path),
    }
    [found] = run_distributed("state_checks:there_and_back", 4, arguments, timeout_s=400)
    assert found["difference"] == [] and found["back"] == [], found
    is_frozen = case["model"].endswith("-frozen")
    steps = [] if "untrained" in case else [*[0.0] * is_frozen, float(case.get("steps", 2))]
    assert found["steps"] == steps and 0 < found["norm"] < 1e3, found
    # The optimizer state of frozen parameters is 0, and is not read.
    assert 0.5 < found["read"] < 1.0 if is_frozen else found["read"] == 1.0, found
    # The order of grouped experts is computed from sizes, as that of others; ranks do not tell each other their ranges.
    assert all(found["computed"]) or case["model"] not in ("qwen3-moe-mixed", "qwen2-frozen"), found


@pytest.mark.timeout(450)
# In its own layout a rank reads straight into its parameters: what a damaged file left there is loaded over.
@pytest.mark.parametrize("loaded", [{"pipeline": 2}, {"tensor": 2}], ids=["another layout", "its own"])
def test_all_ranks_load_the_checkpoint_before_where_one_reads_wrong_bytes(
    actor_references: str, tmp_path: Path, loaded: dict[str, int]
) -> None:
    arguments = {"references": actor_references, "directory": str(tmp_path), "loaded": loaded}
    found = run_distributed("state_checks:damaged", 4, arguments, timeout_s=400)
    assert found["steps"] == [1] * 4 and found["difference"] == [], found
    [told] = {problem for [problem] in found["problems"] if "another rank" not in problem}
    assert told.endswith("step_000002: contents of policy_00003.safetensors changed since they were written")
