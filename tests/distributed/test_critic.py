from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import require_parity, run_distributed
from safetensors.torch import load_file

from megatron_dapo.converters.convert import first_difference

MODELS = ("qwen2", "qwen3", "llama3", "qwen3-moe", "gemma3", "qwen2-frozen", "qwen3-moe-frozen", "gemma3-frozen")
# Each path of the code once.
CASES: list[dict[str, Any]] = [
    {"model": "llama3", "layout": {"pipeline": 2, "virtual_pipeline": 2}},
    {"model": "qwen2", "layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, "recompute": "full"},
    {"model": "llama3", "layout": {"tensor": 2, "context": 2, "sequence_parallel": True}, "distributed": False},
    {"model": "qwen3-moe", "layout": {"tensor": 2, "sequence_parallel": True, "expert": 2}},
    {"model": "gemma3", "layout": {"tensor": 2, "pipeline": 2}},
    {"model": "qwen2-frozen", "layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, "recompute": "full"},
]
MORE: list[dict[str, Any]] = [
    {"model": "qwen2", "layout": {"tensor": 2}},
    {"model": "qwen3", "layout": {"tensor": 2, "sequence_parallel": True}},
    {"model": "qwen2", "layout": {"pipeline": 2}},
    {"model": "qwen2", "layout": {"context": 2}},
    {"model": "llama3", "layout": {}},
    {"model": "qwen3", "layout": {}, "distributed": False},
    {"model": "qwen2-frozen", "layout": {"context": 2}, "distributed": False},
    {"model": "qwen3-moe-frozen", "layout": {"tensor": 2, "sequence_parallel": True, "expert": 2}},
    {"model": "gemma3-frozen", "layout": {"tensor": 2}},
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with small critics and their fp64 references, and the policy `policy`."""
    from critic_checks import model_of, write_critic

    directory = tmp_path_factory.mktemp("critic_references")
    for name in MODELS:
        write_critic(directory, name)
    model_of("qwen2-tied", "ForCausalLM").save_pretrained(directory / "policy")
    return str(directory)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["each path", "more"])
def test_every_layout_gives_the_values_gradients_and_steps_of_transformers(
    cases: list[dict[str, Any]], references: str
) -> None:
    """4 ranks, ragged packed batch, fp32 against fp64: values, every local gradient, four AdamW steps that clip."""
    close = ("values", "gradients", "loss", "losses", "norms", "stepped")
    # The head has the same bits on every rank that holds it.
    require_parity("critic_checks:parity", cases, references, close, equal=("drifted", "thawed"))


# A critic on the first two ranks and one on the last two, at the same time.
PAIRS: list[list[dict[str, Any]]] = [
    [
        {"model": "qwen2", "layout": {"tensor": 2}},
        {"model": "llama3", "layout": {"pipeline": 2, "virtual_pipeline": 2}},
    ],
    [{"model": "qwen3", "layout": {}}, {"model": "qwen2", "layout": {"context": 2}}],
    [
        {"model": "qwen3", "layout": {"tensor": 2, "sequence_parallel": True}},
        {"model": "qwen3-moe", "layout": {"expert": 2}},
    ],
]


def test_a_model_on_a_subset_of_ranks_matches_transformers(references: str) -> None:
    arguments = {"references": references, "pairs": PAIRS, "num_last": 2}
    found = run_distributed("critic_checks:parity_of_parts", 4, arguments)
    assert [[one["rank"] for one in ranks] for ranks in found] == [[0, 1, 0, 1]] * len(PAIRS)
    for ranks in found:
        for errors in ranks:
            assert errors["values"] < 1e-5 and errors["gradients"] < 1e-5, errors
            assert max(errors[name] for name in ("loss", "losses", "norms", "stepped")) < 1e-5, errors
            assert errors["drifted"] == 0, errors


@pytest.fixture(scope="module")
def two_ranks(references: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of `critic_checks.two_ranks`, and the directory of its exports."""
    target = tmp_path_factory.mktemp("exports")
    arguments = {
        "references": references,
        "resume": [
            {"model": "qwen2", "layout": {}},
            {"model": "qwen3", "layout": {"tensor": 2, "sequence_parallel": True}, "dtype": "bfloat16"},
            {"model": "llama3", "layout": {"pipeline": 2}, "distributed": False},
        ],
        "beside": {"policy": f"{references}/policy", "actor": {"tensor": 2}, "critic": {"pipeline": 2}},
        "export": {"layout": {"tensor": 2, "sequence_parallel": True}, "target": str(target)},
    }
    return {**run_distributed("critic_checks:two_ranks", 2, arguments), "target": target}


def test_a_resumed_critic_is_the_uninterrupted_one_bit_for_bit(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["resume"] == [{"loaded": 0, "difference": 0, "history": True}] * 3


def test_actor_and_critic_train_in_turn_on_layouts_of_their_own(two_ranks: dict[str, Any]) -> None:
    result = two_ranks["beside"]
    assert result["actor"] == 0 and result["critic"] == 0  # bit for bit as without the other
    assert result["shared"]
    assert "TP1 PP2 CP1 DP1 were destroyed" in result["refused"] and "`running_models`" in result["refused"]


def test_an_exported_critic_equals_its_source_and_loads_in_transformers(
    two_ranks: dict[str, Any], references: str
) -> None:
    import transformers
    from actor_checks import ragged_batch

    target: Path = two_ranks["target"]
    assert first_difference(target / "loaded", Path(references) / "qwen3") is None
    model, found = transformers.AutoModelForTokenClassification.from_pretrained(
        target / "trained", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    model = model.double().eval()
    [parts, *_] = ragged_batch().micro_batches
    with torch.no_grad():
        want = torch.cat([model(part[None]).logits[0, :, 0] for part in parts])
    for rank in range(2):
        values = load_file(target / f"values{rank}.safetensors")["values"][: want.numel()]
        assert (values - want).norm() < 1e-5 * want.norm()
    before = load_file(Path(references) / "qwen3" / "model.safetensors")["score.weight"]
    assert not torch.equal(before, load_file(target / "trained" / "model.safetensors")["score.weight"])
