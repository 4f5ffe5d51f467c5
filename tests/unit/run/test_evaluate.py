"""The embedded engine filled from a directory against transformers' own greedy decoding, and a whole evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.run.evaluate import loaded_engine
from megatron_dapo.types import GenerationRequest, SamplingParams

WORDS = ["<eos>", "<unk>", "Answer", ":", *"0123456789+=?"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        root / "model"
    )
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=len(WORDS), max_position_embeddings=128, eos_token_id=0, tie_word_embeddings=True, **sizes
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(root / "model")
    row = {"data_source": "unit", "ability": "MATH", "extra_info": {"index": "0"}}
    rows = [
        {
            **row,
            "prompt": [{"role": "user", "content": f"{a} + {b} = ?"}],
            "reward_model": {"ground_truth": str(a + b), "style": "rule"},
        }
        for a in range(3)
        for b in range(3)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    (root / "recipe.toml").write_text(
        '[model]\npath = "model"\n[data]\ntrain_paths = ["data.jsonl"]\neval_paths = ["data.jsonl"]\n'
        'template = "plain"\nmax_prompt_tokens = 16\n'
        "[rollout]\nmax_response_tokens = 12\nslots_per_rank = 8\n[evaluation]\nnum_samples = 3\n"
    )
    return root


def test_the_engine_has_the_weights_of_the_directory(directory: Path) -> None:
    engine = loaded_engine(load_config(directory / "recipe.toml").config, directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    prompt = (4, 14, 5, 15, 16)
    engine.submit(
        [
            GenerationRequest(
                "r", prompt, SamplingParams(temperature=0.0, max_new_tokens=10, stop_token_ids=(0,)), seed=0
            )
        ]
    )
    completions = []
    while engine.num_unfinished:
        completions += engine.poll()
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10, pad_token_id=0)[
        0, len(prompt) :
    ]
    assert list(completions[0].token_ids) == expected.tolist()


def test_eval_command(directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "result.json"
    result = CliRunner().invoke(app, ["eval", str(directory / "recipe.toml"), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "avg@3:" in result.output and "pass@3:" in result.output
    document = json.loads(output.read_text())
    protocol = document["protocol"]
    assert (protocol["num_samples"], protocol["num_problems"], protocol["top_p"], protocol["stop_token_ids"]) == (
        3,
        9,
        0.7,
        [0],
    )
    assert protocol["verifier"] == "dapo" and protocol["engine"] == "embedded" and len(protocol["dataset_sha256"]) == 64
    repeated = CliRunner().invoke(app, ["eval", str(directory / "recipe.toml"), "--model", str(directory / "model")])
    assert repeated.output.splitlines()[-1] == result.output.splitlines()[-1]


def test_two_models_are_compared_by_problem_and_by_file(directory: Path, tmp_path: Path) -> None:
    lines = (directory / "data.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("low", lines[:4]), ("high", lines[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    command = ["eval", str(directory / "recipe.toml"), "--set", "data.eval_paths=['LOW', 'HIGH']"]
    command[3] = command[3].replace("LOW", str(tmp_path / "low.jsonl")).replace("HIGH", str(tmp_path / "high.jsonl"))
    result = tmp_path / "result.json"
    first = CliRunner().invoke(app, [*command, "--output", str(result)])
    assert first.exit_code == 0, first.output
    assert "low, 4 problems:" in first.output and "high, 5 problems:" in first.output
    # With itself, by its directory and by its result.
    for other in (directory / "model", result):
        compared = CliRunner().invoke(app, [*command, "--against", str(other)])
        assert compared.exit_code == 0, compared.output
        shown = compared.output.partition("paired over 9 problems")[2].splitlines()
        assert [line for line in shown if "avg@3" in line] == ["  avg@3: +0.0000  [+0.0000, +0.0000]"] * 3
    by_files = CliRunner().invoke(app, ["compare", str(result), str(result)])
    assert by_files.exit_code == 0 and "  avg@3: +0.0000  [+0.0000, +0.0000]" in by_files.output
    absent = CliRunner().invoke(app, [*command, "--against", str(tmp_path / "no")])
    assert absent.exit_code == 2 and "neither a Hugging Face directory nor a result" in absent.output
    no_checkpoint = CliRunner().invoke(app, [*command, "--checkpoint", str(tmp_path / "step_000003")])
    assert no_checkpoint.exit_code == 2 and "step_000003" in no_checkpoint.output
