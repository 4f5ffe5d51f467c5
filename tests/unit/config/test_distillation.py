"""What is wrong with teachers: one line each, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config.inputs import unfit_teachers
from megatron_dapo.config.loader import config_from_dict
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import validate

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def make(*teachers: dict[str, Any], directory: Path = Path(), **sections: Any) -> Config:
    tree = {
        "model": {"path": "policy"},
        "data": {"train_paths": ["rows.jsonl"]},
        "rollout": {"max_num_gen_batches": 10},
        **sections,
        "distillation": {"teachers": [dict(one) for one in teachers], **sections.get("distillation", {})},
    }
    return config_from_dict(tree, directory)


def problems(config: Config) -> list[str]:
    return [str(one) for one in validate(config)]


def test_a_teacher_needs_no_key() -> None:
    config = make({})
    assert not problems(config)
    assert config.distillation.models[0].path == "" and not config.distillation.servers


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (make({"name": "a"}, {"name": "a"}), "another name"),
        (make({"name": "a/b"}), "another name"),
        (make({"weight": 0.0}), "a weight above 0"),
        (make({"prompt": "A solution: {solution}"}), "write {prompt} in the prompt"),
        (make({"prompt": "{prompt} {answer}"}, environment={"path": "games.py:Game"}), "leave prompt out of distillation.teachers"),
        (make({"refresh_steps": -1}), "a refresh_steps of 0 or more"),
        (make({"refresh_steps": 2, "path": "teacher"}), "leave path and url out"),
        (make({"refresh_steps": 2, "url": "http://host:3000"}), "leave path and url out"),
        (make({"url": "host:3000"}), "http://host:port"),
        (make({"url": "http://host:3000"}, rollout={"temperature": 0.8, "max_num_gen_batches": 10}), "rollout.temperature = 1.0"),
        (make({}, algorithm={"name": "vapo"}), 'algorithm.name = "dapo"'),
        (make({}, megatron={"tp_comm_overlap": True}), "one shape for all models of a process"),
        (make({}, distillation={"beta": 1.0}), "distillation.beta"),
        (make({}, rollout={"top_k": 50}), "distillation.teachers"),
        (make({}, distillation={"coefficient": 0.0}), "distillation.coefficient"),
    ],
)
def test_violations_name_the_fix(config: Config, words: str) -> None:
    found = [line for line in problems(config) if words in line]
    assert len(found) == 1, problems(config)


def write_model(directory: Path, words: dict[str, int], **changes: Any) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))


def unfit(tmp_path: Path, **sections: Any) -> list[str]:
    config = make({"name": "big", "path": "teacher"}, directory=tmp_path, **sections)
    policy = {"model": {"path": str(tmp_path / "policy")}}
    return [str(one) for one in unfit_teachers(make(config.distillation.teachers[0].model_dump(), **policy, **sections))]


def test_a_teacher_of_another_size_and_padding_fits(tmp_path: Path) -> None:
    words = {"a": 0, "b": 1}
    write_model(tmp_path / "policy", words)
    write_model(tmp_path / "teacher", words, hidden_size=64, num_hidden_layers=6, vocab_size=128)
    assert unfit(tmp_path, parallel={"tp_size": 2, "pp_size": 2}) == []


def test_an_absent_teacher_another_tokenizer_and_a_layout_that_does_not_divide_it(tmp_path: Path) -> None:
    write_model(tmp_path / "policy", {"a": 0, "b": 1, "c": 2})
    [absent] = unfit(tmp_path)
    assert "teacher big" in absent and str(tmp_path / "teacher") in absent
    write_model(tmp_path / "teacher", {"a": 0, "b": 2, "c": 1}, num_hidden_layers=3)
    [other] = unfit(tmp_path)
    assert "teacher big" in other and "another tokenizer than the policy" in other and "2 of them not the same" in other
    assert "\n" not in other
    (tmp_path / "teacher" / "tokenizer.json").unlink()
    [undivided] = unfit(tmp_path, parallel={"pp_size": 2})
    assert "teacher big has the policy's layout" in undivided and "num_layers = 3" in undivided
