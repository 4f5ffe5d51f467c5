"""Recipes, inheritance, overrides, origins, and errors that name everything at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import (
    ConfigError,
    config_from_dict,
    layout_overrides,
    load_config,
    missing_inputs,
    read_resolved,
    write_resolved,
)
from megatron_dapo.config.loss_schema import FunctionLossConfig
from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import leaf_fields

MINIMAL = '[model]\npath = "model"\n[data]\ntrain_paths = ["train.jsonl"]\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL + "[rollout]\ngroup_size = 4\n")
    return path


def problems(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, str]:
    return {violation.path: str(violation) for violation in error.value.violations}


def test_origin_of_every_value_is_known(recipe: Path) -> None:
    loaded = load_config(recipe, ["rollout.top_k=5"])
    others = {"algorithm.advantage.variant", "algorithm.advantage.weighting", "algorithm.advantage.scale"}
    others |= {"algorithm.advantage.function", "algorithm.advantage.weights"}
    others |= {path for path in leaf_fields() if path.startswith("algorithm.loss.")} - set(loaded.origins)
    assert set(leaf_fields()) - set(loaded.origins) == others  # `others` are members of a union that are not chosen.
    assert loaded.origins["rollout.group_size"] == str(recipe)
    assert loaded.origins["rollout.top_k"] == "--set"
    assert loaded.origins["rollout.top_p"] == "default"
    assert (loaded.config.rollout.group_size, loaded.config.rollout.top_k) == (4, 5)


def test_inputs_are_relative_to_the_file_that_states_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.toml").write_text(MINIMAL)
    child = tmp_path / "deep" / "child.toml"
    child.write_text('base = "../base.toml"\n[data]\neval_paths = ["held.jsonl", "/abs/held.jsonl"]\n')
    monkeypatch.chdir(tmp_path)
    config = load_config(child, ["data.train_paths=['here.jsonl']"]).config
    assert config.model.path == tmp_path / "model"
    assert config.data.eval_paths == (tmp_path / "deep" / "held.jsonl", Path("/abs/held.jsonl"))
    assert config.data.train_paths == (tmp_path / "here.jsonl",)


def test_inputs_and_functions_are_looked_for_next_to_the_recipe_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, here = tmp_path / "recipes", tmp_path / "here"
    for directory, names in ((recipes, ("both.py", "a.jsonl")), (here, ("both.py", "own.py", "a.jsonl", "b.jsonl"))):
        directory.mkdir()
        for name in names:
            (directory / name).touch()
    recipe = recipes / "r.toml"
    recipe.write_text(
        '[model]\npath = "model"\n[data]\ntrain_paths = ["a.jsonl", "b.jsonl", "c.jsonl"]\norder = "own.py:f"\n'
        '[run]\noutput_dir = "out"\ncallbacks = ["both.py:C", "package.module:D"]\n'
        '[reward]\nverifier = "mix"\nmix = [{ verifier = "both.py:f" }, { verifier = "absent.py:f" }, { verifier = "dapo" }]\n'
        '[algorithm]\nloss = "both.py:f"\n'
    )
    monkeypatch.chdir(here)
    config = load_config(recipe, ["rollout.group_filter=both.py:keep"]).config
    assert config.data.train_paths == (recipes / "a.jsonl", here / "b.jsonl", recipes / "c.jsonl")
    assert config.data.order == f"{here}/own.py:f" and config.run.callbacks == (f"{recipes}/both.py:C", "package.module:D")
    assert [one.verifier for one in config.reward.mix] == [f"{recipes}/both.py:f", "absent.py:f", "dapo"]
    assert config.algorithm.loss == FunctionLossConfig(function=f"{recipes}/both.py:f")
    assert config.rollout.group_filter == f"{here}/both.py:keep"  # typed in a shell
    assert config.run.output_dir == Path("out")
    words = f"reward.mix: 'absent.py:f': no file absent.py next to the recipe or in {here}. Fix: put it next"
    assert any(str(one).startswith(words) for one in missing_inputs(config))


def test_a_pattern_names_the_files_that_it_matches(tmp_path: Path, recipe: Path) -> None:
    for number in (2, 1, 10):
        (recipe.parent / f"train-{number:02}.jsonl").touch()
    config = load_config(recipe, [f"data.train_paths=['{recipe.parent}/train-*.jsonl', 'x-*.jsonl']"]).config
    *files, absent = config.data.train_paths
    assert [file.name for file in files] == ["train-01.jsonl", "train-02.jsonl", "train-10.jsonl"]
    assert absent.name == "x-*.jsonl"  # refused as a file that does not exist


def test_a_base_that_is_absent_is_named_as_the_base(tmp_path: Path) -> None:
    (tmp_path / "bsa.toml").write_text('base = "bsae.toml"\n')
    with pytest.raises(ConfigError, match=r"bsa.toml: 1 problem\n  - base: expected a recipe .* Fix: check the path"):
        load_config(tmp_path / "bsa.toml")
    (tmp_path / "base.toml").touch()
    with pytest.raises(ConfigError, match=r"- base: expected a recipe .* did you mean .*/base.toml\?"):
        load_config(tmp_path / "bsa.toml")


def test_base_chain_takes_the_nearest_value_and_says_from_where(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        MINIMAL + "[rollout]\ngroup_size = 2\ntop_k = 1\n[optimizer]\nbetas = [0.9, 0.95]\n"
    )
    (tmp_path / "b.toml").write_text('base = "a.toml"\n[rollout]\ngroup_size = 3\n')
    (tmp_path / "c.toml").write_text('base = "b.toml"\n[rollout]\ntemperature = 0.5\n')
    loaded = load_config(tmp_path / "c.toml")
    rollout = loaded.config.rollout
    assert (rollout.group_size, rollout.top_k, rollout.temperature) == (3, 1, 0.5)
    assert loaded.origins["rollout.group_size"] == str(tmp_path / "b.toml")
    assert loaded.config.optimizer.betas == (0.9, 0.95)


def test_a_loop_of_bases_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(ConfigError, match="a.toml -> .*b.toml -> .*a.toml"):
        load_config(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.groop_size", "rollout.group_size"),
        ("training.learning_rate", "optimizer.learning_rate"),
        ("paralel.tp_size", "parallel.tp_size"),
        ("lr", "optimizer.learning_rate"),
        ("xyzzy", None),
        ("learning_rate", "optimizer.learning_rate"),
        ("algorithm.off_policy.corection", "algorithm.off_policy.correction"),
        ("rolout", "rollout"),
    ],
)
def test_unknown_key_names_the_nearest(recipe: Path, key: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, [f"{key}=1"])
    message = problems(error)[key]
    assert f"did you mean {meant}?" in message if meant else "did you mean" not in message


def test_a_run_directory_of_another_version_is_refused_in_one_line(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    write_resolved(load_config(recipe), file)
    assert read_resolved(file).config == load_config(recipe).config
    document = json.loads(file.read_text())
    document["version"] += 1
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="version = 2; have|version 1.*version = 2") as error:
        read_resolved(file)
    assert len(error.value.violations) == 1


def test_all_unknown_keys_and_wrong_types_are_reported_together(recipe: Path) -> None:
    recipe.write_text("[rollout]\ngroop_size = 4\ngroup_size = '4'\n[run]\nseed = true\n[model]\ndtype = 'bf16'\n")
    with pytest.raises(ConfigError) as error:
        load_config(recipe)
    found = problems(error)
    assert set(found) == {
        "rollout.groop_size",
        "rollout.group_size",
        "run.seed",
        "model.dtype",
        "model.path",  # The validator checks that there is data: files or sources.
    }
    assert "'float32' or 'bfloat16'" in found["model.dtype"] and "(bf16 is bfloat16)" in found["model.dtype"]
    assert str(recipe) in found["run.seed"]


@pytest.mark.parametrize("text", ["true", "1.5", "'3'", "[3]", "2026-01-01", "nan"])
def test_nothing_is_converted_to_a_whole_number(recipe: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, [f"rollout.group_size={text}"])
    assert list(problems(error)) == ["rollout.group_size"]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "'1e-6'", "true"])
def test_nothing_but_a_finite_number_is_a_float(recipe: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(recipe, [f"optimizer.learning_rate={text}"])


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("3", 3.0), ("0.5", 0.5)])
def test_floats(recipe: Path, text: str, value: float) -> None:
    assert load_config(recipe, [f"optimizer.learning_rate={text}"]).config.optimizer.learning_rate == value


@pytest.mark.parametrize("word", ["no", "on", "1e-6", "true", "null", "a=b", '"quoted"', "'quoted'"])
def test_text_stays_text(recipe: Path, word: str) -> None:
    assert load_config(recipe, [f"run.name={word}"]).config.run.name == word.strip("\"'")


@pytest.mark.parametrize("override", ["rollout.group_size", "=3", "nowhere="])
def test_unreadable_override(recipe: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="section.field=value"):
        load_config(recipe, [override])


@pytest.mark.parametrize(
    ("override", "kind", "example"),
    [
        ("rollout.group_size=eight", "a whole number", "--set rollout.group_size=8"),
        ("rollout.top_k=[", "a whole number", "--set rollout.top_k=8"),
        ("rollout.top_k=1\nx=2", "a whole number", "--set rollout.top_k=8"),
        ("rollout.top_k=", "a whole number", "--set rollout.top_k=8"),
        ("rollout.group_size=1.5", "a whole number", "--set rollout.group_size=8"),
        ("optimizer.learning_rate=small", "a number", "--set optimizer.learning_rate=0.5"),
        ("rollout.filter_groups=yes", "true or false", "--set rollout.filter_groups=true"),
        ("rollout.filter_groups=1", "true or false", "--set rollout.filter_groups=true"),
        ("data.train_paths=a.jsonl", "a list of texts", "--set 'data.train_paths=[\"a.jsonl\"]'"),
        ('data.train_paths="a.jsonl"', "a list of texts", "--set 'data.train_paths=[\"a.jsonl\"]'"),
        ("optimizer.betas=[1]", "a list of numbers", "--set 'optimizer.betas=[0.9, 0.95]'"),
        ("algorithm.loss.dual_clip=none", "a number or 'off'", "--set algorithm.loss.dual_clip=off"),
        (
            "algorithm.loss=pgpe",
            "'ppo_clip', 'gspo', 'gspo_token', 'luspo', 'gmpo', 'fipo', 'cispo', 'sapo', 'dis', 'dppo_tv', 'dppo_kl' or 'function'",
            "--set algorithm.loss.name=ppo_clip",
        ),
        ("model.dtype=8", "'float32' or 'bfloat16'", "--set model.dtype=float32"),
    ],
)
def test_an_override_of_a_wrong_type_shows_how_one_is_written(
    recipe: Path, override: str, kind: str, example: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, [override])
    [message] = problems(error).values()
    assert f"expected {kind};" in message and example in message and "line 1" not in message


def test_a_loss_is_a_section_of_its_own_keys(recipe: Path) -> None:
    """GSPO and CISPO get their papers' bounds and aggregation, whatever the recipe says of another loss."""
    recipe.write_text(MINIMAL + "[algorithm.loss]\nclip_ratio_low = 0.1\nclip_ratio_high = 0.3\ndual_clip = 10.0\n")
    assert load_config(recipe).config.algorithm.loss.name == "ppo_clip"
    gspo = load_config(recipe, ["algorithm.loss=gspo"]).config.algorithm.loss
    assert (gspo.clip_ratio_low, gspo.clip_ratio_high, gspo.aggregation) == (3e-4, 4e-4, "sample_mean")
    cispo = load_config(recipe, ["algorithm.loss.name=cispo", "algorithm.loss.clip_ratio_high=3"]).config.algorithm.loss
    assert (cispo.clip_ratio_low, cispo.clip_ratio_high, cispo.aggregation) == (1.0, 3.0, "token_mean")
    child = recipe.with_name("child.toml")
    child.write_text('base = "recipe.toml"\n[algorithm]\nloss = "gspo_token"\n')
    assert load_config(child).config.algorithm.loss.clip_ratio_high == 4e-4
    child.write_text('base = "recipe.toml"\n[algorithm.loss]\nname = "ppo_clip"\nclip_ratio_high = 0.2\n')
    assert load_config(child).config.algorithm.loss.clip_ratio_low == 0.1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.loss=grpo", 'grpo is ppo_clip with algorithm.advantage = "grpo"'),
        ("algorithm.loss=gsop", "did you mean 'gspo'?"),
    ],
)
def test_names_of_other_frameworks_are_known(recipe: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, [override])
    assert words in str(error.value)


def test_a_key_of_another_loss_is_refused_with_the_losses_that_have_it(recipe: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, ["algorithm.loss=gspo", "algorithm.loss.dual_clip=10"])
    message = problems(error)["algorithm.loss.dual_clip"]
    assert "clip_ratio_low, clip_ratio_high" in message and "set algorithm.loss.name to ppo_clip" in message


def test_a_value_where_a_section_stands(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="fields of the section rollout"):
        load_config(recipe, ["rollout=3"])


def test_no_section_or_value_is_coerced_by_yaml_1_1() -> None:
    words = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "~"}
    assert not words & {part for path in leaf_fields() for part in path.split(".")}


def test_missing_recipe_names_a_close_one(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean .*recipe.toml"):
        load_config(recipe.with_name("recpe.toml"))


def test_broken_toml_says_where(recipe: Path) -> None:
    recipe.write_text("[run\n")
    with pytest.raises(ConfigError, match="line 1"):
        load_config(recipe)


def test_resolved_configuration_comes_back_equal(recipe: Path, tmp_path: Path) -> None:
    loaded = load_config(recipe, ["optimizer.learning_rate=1e-7", "optimizer.betas=[0.8, 0.123456789012345678]"])
    target = tmp_path / "run" / "config.json"
    write_resolved(loaded, target)
    assert read_resolved(target) == loaded
    document = json.loads(target.read_text())
    assert document["origins"]["optimizer.learning_rate"] == "--set"
    assert [path.name for path in target.parent.iterdir()] == ["config.json"]


def test_configuration_is_immutable() -> None:
    config = config_from_dict({"model": {"path": "m"}, "data": {"train_paths": ["t"]}})
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.group_size = 3


@pytest.mark.parametrize(
    ("text", "sizes", "processes"),
    [
        ("tp1pp2", {"pp_size": 2}, 2),
        ("TP2 PP2", {"tp_size": 2, "pp_size": 2}, 4),
        ("tp2dp2sp", {"tp_size": 2, "sequence_parallel": True}, 4),
        ("pp2vpp2-cp2", {"pp_size": 2, "vpp_size": 2, "cp_size": 2}, 4),
        ("dp2ep2", {"ep_size": 2}, 2),
        ("tp2ep2etp1sp", {"tp_size": 2, "ep_size": 2, "etp_size": 1, "sequence_parallel": True}, 2),
    ],
)
def test_a_layout_is_the_whole_parallel_section(
    recipe: Path, text: str, sizes: dict[str, Any], processes: int
) -> None:
    recipe.write_text(MINIMAL + "[parallel]\ntp_size = 8\n")
    config = load_config(recipe, layout_overrides(text)).config
    assert config.parallel == ParallelConfig(**sizes, num_processes=processes)


@pytest.mark.parametrize("text", ["", "tp", "2tp", "tp2tp2", "tp2xy3", "sp2", "tp2!"])
def test_invalid_layouts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layout"):
        layout_overrides(text)


def test_missing_inputs_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    tree = {
        "model": {"path": "model"},
        "data": {"train_paths": ["train.jsonl", "trian.jsonl"], "eval_paths": ["held.jsonl"]},
    }
    found = missing_inputs(config_from_dict(tree, directory=tmp_path))
    assert [violation.path for violation in found] == ["model.path", "data.train_paths", "data.eval_paths"]
    assert str(tmp_path / "train.jsonl") in found[1].suggestion


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"agent": ["python", "-u", "agnet.py"]}, "environment.agent: no file agnet.py next to the recipe or in "),
        ({"agent": ["no-such-agent"]}, "environment.agent: no program no-such-agent. Fix: "),
        ({"command": ["./game", "--fast"]}, "environment.command: no program ./game. Fix: "),
        ({"command": ["sh", "game.sh"]}, "environment.command: no file game.sh next to the recipe or in "),
        ({"path": "games.py:Game"}, "environment.path: 'games.py:Game': no file games.py next to the recipe or in "),
        ({"path": "games:Game", "python": "envs/bin/python"}, "environment.python: no program envs/bin/python. Fix: "),
        ({"agent": ["python", "-u", "agent.py", "--task", "made.py"]}, ""),
        ({"agent": ["python", "-m", "my_agent"]}, ""),
    ],
)
def test_a_program_of_episodes_that_is_missing_is_named(tmp_path: Path, environment: dict, message: str) -> None:
    (tmp_path / "agent.py").write_text("")
    tree = {"model": {"path": "model"}, "data": {"train_paths": ["train.jsonl"]}, "environment": environment}
    found = missing_inputs(config_from_dict(tree, directory=tmp_path))
    named = [str(one) for one in found if one.path.startswith("environment.")]
    assert len(named) == bool(message) and all(one.startswith(message) and "\n" not in one for one in named)
