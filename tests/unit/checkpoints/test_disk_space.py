"""Disk of checkpoints before a run: the sum, what is there already, and the refusal with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.checkpoints import disk_space
from megatron_dapo.checkpoints.disk_space import checkpoint_space
from megatron_dapo.config import Config, ConfigError, config_from_dict
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.memory import num_parameters
from tests.unit.config import architectures

QWEN_32B = parse_architecture(architectures.QWEN_32B)


def config(directory: Path, checkpoint: dict[str, object] | None = None, **sections: dict[str, object]) -> Config:
    document = {
        "model": {"path": "model", "dtype": "bfloat16"},
        "data": {"train_paths": ["data.jsonl"]},
        "run": {"output_dir": str(directory), "total_steps": 200},
        "checkpoint": checkpoint or {},
        **sections,
    }
    return config_from_dict(document)


def test_32b_takes_459_gb_a_checkpoint(tmp_path: Path) -> None:
    space = checkpoint_space(config(tmp_path), QWEN_32B, free=10**13)
    assert num_parameters(QWEN_32B) == 32_763_876_352
    assert space.needed == 3 * 14 * 32_763_876_352, "keep = 2 and the one in flight"
    assert "3 checkpoints, one in flight, of 459 GB = (3.276e+10 parameters of the policy) x" in space.formula
    space.require()


def test_the_critic_and_what_is_kept_for_good_come_on_top(tmp_path: Path) -> None:
    one = 14 * num_parameters(QWEN_32B)
    critic = 14 * num_parameters(QWEN_32B, has_value_head=True)
    with_critic = checkpoint_space(config(tmp_path, algorithm={"name": "vapo"}), QWEN_32B, free=0)
    assert with_critic.needed == 3 * (one + critic)
    teachers = {"teachers": [{"name": "start"}, {"name": "snapshot", "refresh_steps": 10}]}
    distilled = checkpoint_space(config(tmp_path, distillation=teachers), QWEN_32B, free=0)
    assert distilled.needed == 3 * (one + 2 * num_parameters(QWEN_32B)) and "1 x 2 weight of teachers" in distilled.formula
    kept = {"keep_every": 40, "keep_best": "eval/avg_at_k"}
    # 200 steps, 20 apart: 160 and 180 are the newest while 200 is written, 40, 80 and 120 stay, and the best one.
    assert checkpoint_space(config(tmp_path, kept), QWEN_32B, free=0).needed == (3 + 3 + 1) * one


def test_a_resumed_run_needs_less(tmp_path: Path) -> None:
    there = tmp_path / "checkpoints" / "step_000020"
    there.mkdir(parents=True)
    (there / "file").write_bytes(bytes(1000))
    (tmp_path / "checkpoints" / "notes").write_bytes(bytes(50))
    space = checkpoint_space(config(tmp_path), QWEN_32B, free=0)
    assert space.needed == 3 * 14 * num_parameters(QWEN_32B) - 1000 and "less 1 kB there" in space.formula


def test_too_little_is_refused_in_one_line_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: 10**12)
    with pytest.raises(ConfigError) as refused:
        checkpoint_space(config(tmp_path), QWEN_32B).require()
    [violation] = refused.value.violations
    assert "\n" not in str(violation) and "lower checkpoint.keep" in violation.suggestion
    assert (violation.values["needed"], violation.values["free"]) == ("1.38 TB", "1 TB")
    checkpoint_space(config(tmp_path), QWEN_32B, free=14 * 10**11).require()


def test_a_directory_that_is_not_there_yet_is_on_the_disk_of_its_parent(tmp_path: Path) -> None:
    deep = tmp_path / "not" / "yet"
    assert disk_space.existing_parent(deep) == tmp_path and disk_space.free_bytes(deep) > 0
    assert not deep.exists()
