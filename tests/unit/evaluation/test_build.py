"""The record of an evaluation's rules from a configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.data.template import StopTokens
from megatron_dapo.evaluation.build import evaluation_protocol
from megatron_dapo.evaluation.protocol import EvaluationProtocol, differing_fields
from megatron_dapo.hooks import source_file


def protocol(directory: Path, *overrides: str, code: str = "class Game: ...") -> EvaluationProtocol:
    directory.mkdir(exist_ok=True)
    (directory / "games.py").write_text(code)
    recipe = directory / "recipe.toml"
    recipe.write_text('[environment]\npath = "games.py:Game"\n')
    config = load_config(recipe, ["model.path=/model", 'data.train_paths=["rows.jsonl"]', *overrides]).config
    report = SimpleNamespace(files=(("held.jsonl", "0"),), num_rows=2, num_prompts=2, template_hash="t")
    return evaluation_protocol(config, "m", SimpleNamespace(report=report), StopTokens((2,), {}, True), "1")


def test_results_of_another_environment_are_unlike(tmp_path):
    """Its code, its limits and how turns are joined count; where its file is does not."""
    one = protocol(tmp_path / "a")
    assert one.environment == "games.py:Game" and "max_turns = 8" in one.environment_limits
    assert differing_fields(one, protocol(tmp_path / "b")) == {}
    changed = {
        "environment": protocol(tmp_path / "c", f"environment.path={tmp_path / 'a' / 'games.py'}:Other"),
        "environment_sha256": protocol(tmp_path / "d", code="class Game: pass"),
        "environment_limits": protocol(tmp_path / "e", "environment.max_turns=9"),
        "turns": protocol(tmp_path / "f", "turns.history=keep"),
    }
    for field, other in changed.items():
        assert list(differing_fields(one, other)) == [field]
    none = protocol(tmp_path / "g", 'environment.path=""')
    assert set(differing_fields(one, none)) == set(changed) and none.environment == none.environment_sha256 == ""


def test_an_agent_s_files_are_hashed(tmp_path):
    def of(name: str, code: str) -> EvaluationProtocol:
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent.py").write_text(code)
        agent = f'environment.agent=["python", "{tmp_path / name / "agent.py"}", "--level", "2"]'
        return protocol(tmp_path / name, 'environment.path=""', agent)

    one = of("a", "1")
    assert one.environment == "python agent.py --level 2"
    assert differing_fields(one, of("b", "1")) == {} and list(differing_fields(one, of("c", "2"))) == ["environment_sha256"]


def test_a_module_s_file_is_found_without_running_it(tmp_path, monkeypatch):
    package = tmp_path / "pack" / "inner"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "games.py"):
        file.write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_file("pack.inner.games") == package / "games.py" and "pack" not in sys.modules
    assert source_file("pack.other.games") is None and source_file("pack.games") is None
    assert source_file("games.py") == Path("games.py")


@pytest.mark.parametrize("place", ["", "nowhere"])
def test_no_module_no_file(place):
    assert source_file(place) is None
