"""`megatron-dapo quantize` from end to end on a model small enough for a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.main import get_command

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.cli.main import app
from megatron_dapo.cli.options import REFUSED
from megatron_dapo.cli.quantize import OUT_OF_TOLERANCE
from tests.examples import first

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="nvidia-modelopt is not installed: make .venv-modelopt, then PYTHONPATH=.venv-modelopt",
)
FEW = ["--num-calibration", "6", "--num-check", "4", "--response-tokens", "16"]
# The first three have each format and both models.
QUANTIZED = [
    ("source", "fp8"),
    ("expert_source", "int4_awq"),
    ("expert_source", "fp8_blockwise"),
    ("expert_source", "fp8"),
    ("source", "int4_awq"),
    ("source", "fp8_blockwise"),
]


SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
EXPERTS = {
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


def save_model(directory: Path, repository: Path, config_class: Any, model_class: Any, **fields: Any) -> Path:
    """Random weights with the quickstart's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(repository / "examples/quickstart/base_model")
    config = config_class(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SHAPE, **fields)
    torch.manual_seed(0)
    model_class(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory, repository: Path) -> Path:
    """A source model in the shape of Qwen2.5."""
    return save_model(tmp_path_factory.mktemp("model") / "trained", repository, Qwen2Config, Qwen2ForCausalLM)


@pytest.fixture(scope="module")
def expert_source(tmp_path_factory, repository: Path) -> Path:
    """A source model in the shape of Qwen3-MoE."""
    directory = tmp_path_factory.mktemp("experts") / "trained"
    return save_model(directory, repository, Qwen3MoeConfig, Qwen3MoeForCausalLM, **EXPERTS)


@pytest.fixture
def prompts(repository: Path) -> str:
    return str(repository / "examples/quickstart/heldout.jsonl")


def run_tool(source: Path, target: Path, name: str, prompts: str, *more: str) -> int:
    arguments = [str(source), str(target), "--format", name, "--prompts", prompts, "--device", "cpu", *more]
    return get_command(app).main(["quantize", *arguments], standalone_mode=False) or 0


@needs_modelopt
@pytest.mark.parametrize(("model", "name"), first(3, QUANTIZED))
def test_a_model_is_quantized_and_accepted(request, model, tmp_path, prompts, name, capsys) -> None:
    source = request.getfixturevalue(model)
    assert run_tool(source, tmp_path / name, name, prompts, *FEW, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / name / "quantization.json").read_text())
    assert stored == report and report["scored_by"] == "transformers"
    assert 0 < report["difference"]["mean_abs"] <= report["tolerance"]["mean_abs"]
    assert report["difference"]["num_sequences"] == 4
    assert report["bytes_after"] < 0.7 * report["bytes_before"]
    # Everything but the weights is the source's.
    config = json.loads((tmp_path / name / "config.json").read_text())
    assert config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name / file).read_bytes() == (source / file).read_bytes()
    with HFCheckpoint(source) as before, HFCheckpoint(tmp_path / name) as after:
        embedding = "model.embed_tokens.weight"
        assert torch.equal(before.read_tensor(embedding), after.read_tensor(embedding))


@needs_modelopt
def test_one_out_of_tolerance_leaves_nothing_and_says_both_numbers(source, tmp_path, prompts, capsys) -> None:
    code = run_tool(source, tmp_path / "fp8", "fp8", prompts, *FEW, "--max-mean", "1e-6")
    message = capsys.readouterr().err
    assert code == OUT_OF_TOLERANCE and "mean |log-prob difference|" in message and "allowed 1e-06" in message
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_exists_is_not_touched(source, tmp_path, prompts, capsys) -> None:
    (tmp_path / "out").mkdir()
    assert run_tool(source, tmp_path / "out", "fp8", prompts, *FEW) == REFUSED
    assert "exists already" in capsys.readouterr().err and list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        ("fp7", FEW, "unknown format 'fp7', choose one of fp8"),
        ("nvfp4", FEW, "kernels for cuda, and the device is cpu"),
        ("int4_awq", [*FEW, "--engine-python", "python"], "SGLang cannot read it"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(
    source, tmp_path, prompts, capsys, name, more, what
) -> None:
    assert run_tool(source, tmp_path / "out", name, prompts, *more) == REFUSED
    assert what in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_named(tmp_path, prompts, capsys) -> None:
    assert run_tool(tmp_path / "nothing", tmp_path / "out", "fp8", prompts) == REFUSED
    assert "nothing is not a directory" in capsys.readouterr().err


def test_a_shape_that_does_not_fit(repository, tmp_path, prompts, capsys) -> None:
    base = repository / "examples/quickstart/base_model"
    assert run_tool(base, tmp_path / "out", "fp8_blockwise", prompts) == REFUSED
    assert "q_proj.weight has 96 rows, which is no multiple of 128" in capsys.readouterr().err


@needs_modelopt
@pytest.mark.parametrize(
    ("text", "more", "what"),
    [
        ("", FEW, "has no rows"),
        (None, ["--num-calibration", "0"], "each at least 1"),
        (None, ["--num-calibration", "120", "--num-check", "9"], "120 prompts to calibrate with and 9 others"),
    ],
)
def test_too_few_prompts(source, tmp_path, prompts, capsys, text, more, what) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(Path(prompts).read_text() if text is None else text)
    assert run_tool(source, tmp_path / "out", "fp8", str(path), *more) == REFUSED
    assert what in capsys.readouterr().err and not (tmp_path / "out").exists()
