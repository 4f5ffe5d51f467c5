"""`megatron-dapo recipes`: names, what is copied with a recipe, and files that are not replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_dapo.ablation.grid import read_grid
from megatron_dapo.cli.main import app
from megatron_dapo.cli.recipes import (
    DIRECTIVE,
    SCHEMA,
    find_shipped,
    schema_text,
    shipped_directory,
    shipped_files,
    shipped_recipe,
)
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.loader import read_toml

runner = CliRunner()
SHIPPED = shipped_directory()


def copy(name: str, directory: Path, *more: str) -> str:
    result = runner.invoke(app, ["recipes", "copy", name, str(directory), *more])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_recipe_has_a_first_line() -> None:
    result = runner.invoke(app, ["recipes"])
    assert result.exit_code == 0, result.output
    for name, path in shipped_files().items():
        if path.suffix in (".toml", ".sh"):
            (line,) = (line for line in result.output.splitlines() if line.split()[:1] == [name])
            assert len(line.split()) > 4, f"{name} begins with no comment that says what it is"


@pytest.mark.parametrize("name", [name for name, path in shipped_files().items() if path.suffix == ".toml"])
def test_a_copy_loads_as_the_original_does(name: str, tmp_path: Path) -> None:
    path = shipped_files()[name]
    copy(name, tmp_path)
    copied = tmp_path / "examples" / path.relative_to(shipped_directory())
    tree = read_toml(copied)
    if "recipe" in tree:  # a grid
        if any("program" in variant for variant in tree["variants"]):
            with pytest.raises(ConfigError, match="benchmarks/trl_recipe.py"):  # it compares with TRL, in a checkout
                read_grid(copied)
        else:
            assert read_grid(copied).variants
        return
    original, found = (load_config(one).config.model_dump(mode="json") for one in (path, copied))
    for section, key in (
        ("model", "path"),
        ("data", "train_paths"),
        ("data", "eval_paths"),
        ("telemetry", "references"),
    ):
        pairs = zip(*(np.atleast_1d(one[section][key]).tolist() for one in (original, found)), strict=True)
        assert all(
            Path(there).exists() for here, there in pairs if SHIPPED in Path(here).parents and Path(here).exists()
        )
    assert found["optimizer"] == original["optimizer"] and found["rollout"] == original["rollout"]


@pytest.mark.parametrize("name", ["smollm2", "examples/smollm2/smollm2.toml", "quickstart/quickstart_ppo", "nothing.toml", "short"])
def test_a_recipe_is_found_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an installation the path that documents print does not exist; a grid is no recipe, and a file comes first."""
    monkeypatch.chdir(tmp_path)
    found = shipped_recipe(Path(name))
    assert (found is None) == (name in ("nothing.toml", "short"))
    if found is None:
        return
    command = ["plan", name, "--set", f"model.path={SHIPPED / 'quickstart/base_model'}", "--json"]
    assert runner.invoke(app, command).exit_code in (0, 1)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("[nonsense]\nkey = 1\n")
    result = runner.invoke(app, command)
    assert result.exit_code == 2 and "nonsense" in result.output


def test_the_shipped_schema_is_that_of_the_configuration() -> None:
    assert (SHIPPED / SCHEMA).read_text(encoding="utf-8") == schema_text(), (
        f"megatron-dapo recipes schema > examples/{SCHEMA} writes it anew"
    )


def test_every_recipe_names_the_schema_in_its_first_line() -> None:
    recipes = [path for path in shipped_files().values() if path.suffix == ".toml" and "variants" not in read_toml(path)]
    assert len(recipes) > 20
    for path in recipes:
        directive, file = path.read_text(encoding="utf-8").splitlines()[0].split()
        assert directive == DIRECTIVE and (path.parent / file).resolve() == SHIPPED / SCHEMA, path


@pytest.mark.parametrize("name", ["layouts/colocated_1node", "quickstart"])
def test_a_copy_has_the_schema(name: str, tmp_path: Path) -> None:
    copy(name, tmp_path)
    assert (tmp_path / "examples" / SCHEMA).is_file()


def test_a_name_that_is_not_there_and_one_of_two(tmp_path: Path) -> None:
    result = runner.invoke(app, ["recipes", "copy", "nothing", str(tmp_path)])
    assert result.exit_code == 2 and "no recipe 'nothing' comes with the package" in result.output
    result = runner.invoke(app, ["recipes", "copy", "dapo_qwen2.5_32b", str(tmp_path)])
    assert result.exit_code == 2 and "recipes/dapo_qwen2.5_32b.toml" in result.output
    assert not (tmp_path / "examples").exists()


def test_changed_files_are_replaced_only_on_request(tmp_path: Path) -> None:
    copy("short", tmp_path)
    copied = tmp_path / "examples/quickstart/quickstart.toml"
    copied.write_text("# mine\n")
    result = runner.invoke(app, ["recipes", "copy", "short", str(tmp_path)])
    assert result.exit_code == 2 and str(copied) in result.output and copied.read_text() == "# mine\n"
    copy("short", tmp_path, "--force")
    assert "[run]" in copied.read_text()


def test_all_is_everything() -> None:
    assert set(shipped_files().values()) <= set(find_shipped("all"))
