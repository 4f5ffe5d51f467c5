"""Recipes as objects: what is written is what the command reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest

import megatron_dapo
from megatron_dapo import ConfigError, Recipe, generate, train
from megatron_dapo.config import load_config
from megatron_dapo.config.algorithm_schema import FunctionAdvantageConfig
from megatron_dapo.config.loss_schema import FunctionLossConfig
from megatron_dapo.config.rules import UnusableInput
from megatron_dapo.data.hub import HubError, HubReference, hub_reference, input_directory

ROWS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "ü", "answer": 3}]


def own_reward(sample: object) -> float:
    return 1.0


def own_loss(inputs: object) -> object:
    return inputs


class OwnCallback(megatron_dapo.Callback):
    pass


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, megatron_dapo; megatron_dapo.Recipe; "
        "print([name for name in ('torch', 'numpy', 'transformers', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    for name in megatron_dapo.__all__:
        assert getattr(megatron_dapo, name) is not None
    assert set(megatron_dapo.__all__) == {"__version__", *megatron_dapo._PUBLIC} <= set(dir(megatron_dapo))
    with pytest.raises(AttributeError, match="has no attribute 'trainn'"):
        megatron_dapo.trainn  # noqa: B018


def test_rows_and_functions_are_written_beside_the_recipe(tmp_path: Path) -> None:
    recipe = Recipe(
        "model",
        ROWS,
        own_reward,
        eval_data=(row for row in ROWS[:1]),
        output_dir=tmp_path / "run",
        run={"total_steps": 7, "callbacks": [OwnCallback, "a.b:C"]},
        algorithm={"loss": own_loss, "advantage": {"name": own_loss}, "off_policy": {"correction": "tis"}},
        settings={"data.max_prompt_tokens": 64, "optimizer.learning_rate": 1e-6},
    )
    assert not list(tmp_path.iterdir())
    file = recipe.write()
    assert file == tmp_path / "run" / "inputs" / "recipe.toml"
    config = load_config(file).config
    [train], [held_out] = config.data.train_paths, config.data.eval_paths
    assert [json.loads(line) for line in train.read_text().splitlines()] == ROWS
    assert len(held_out.read_text().splitlines()) == 1
    assert config.model.path == Path.cwd() / "model"
    assert (config.data.columns.prompt, config.data.columns.answer) == ("prompt", "answer")
    assert config.reward.verifier == f"{__name__}:own_reward"
    assert isinstance(config.algorithm.loss, FunctionLossConfig)
    assert config.algorithm.loss.function == f"{__name__}:own_loss"
    assert isinstance(config.algorithm.advantage, FunctionAdvantageConfig)
    assert config.run.callbacks == (f"{__name__}:OwnCallback", "a.b:C")
    assert config.run.total_steps == 7 and config.optimizer.learning_rate == 1e-6
    assert config.algorithm.off_policy.correction == "tis"
    written = file.stat().st_mtime_ns, train.stat().st_mtime_ns
    assert recipe.write() == file and (file.stat().st_mtime_ns, train.stat().st_mtime_ns) == written


def test_a_model_of_the_hub_is_the_same_in_the_written_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe is written into the run's directory, from which a bare "OWNER/NAME" would be a path."""
    monkeypatch.chdir(tmp_path)
    for name in ("own/tiny", "hf://own/tiny"):
        loaded = load_config(Recipe(name, ROWS, own_reward, output_dir="run").write())
        directory = input_directory(loaded.origins["model.path"])
        assert hub_reference(loaded.config.model.path, directory, is_model=True) == HubReference("own/tiny")


def test_sampling_from_a_model_of_the_hub_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(reference: HubReference) -> Path:
        raise HubError(f"asked for {reference}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_dapo.doctor.hub_inputs.download_model", refuse)
    with pytest.raises(ConfigError, match="model.path: asked for own/tiny"):
        generate("own/tiny", ["1 + 1 ="])


class Rows:
    """Iterates mappings as a `datasets.Dataset` does, and is no list."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield {"question": "1 + 1 =", "level": "easy"}


def test_a_data_set_without_answers(tmp_path: Path) -> None:
    config = load_config(Recipe("m", Rows(), own_reward, prompt_column="question").write(tmp_path)).config
    assert (config.data.columns.prompt, config.data.columns.answer) == ("question", "")


def test_a_recipe_on_top_of_a_file(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(
        '[run]\noutput_dir = "runs/base"\ntotal_steps = 9\n[model]\npath = "m"\n[data]\ntrain_paths = ["x.jsonl"]\n'
    )
    child = tmp_path / "child.toml"
    child.write_text('base = "base.toml"\n[rollout]\ngroup_size = 4\n')
    config = load_config(
        Recipe.from_toml(child, reward=own_reward, run={"total_steps": 3}).write(tmp_path / "out")
    ).config
    assert config.run.total_steps == 3 and config.rollout.group_size == 4
    assert config.data.train_paths == (tmp_path / "x.jsonl",) and config.model.path == tmp_path / "m"
    assert config.reward.verifier.endswith(":own_reward")


def test_a_recipe_on_top_of_a_file_writes_where_that_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text('[run]\noutput_dir = "there"\n')
    (tmp_path / "child.toml").write_text('base = "base.toml"\n')
    file = Recipe.from_toml("child.toml", model="m", data=ROWS, reward="dapo").write()
    assert file == tmp_path / "there" / "inputs" / "recipe.toml"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"data": []}, ValueError, "data has no rows"),
        ({"data": {"prompt": "x"}}, TypeError, "data is a mapping, which is one row"),
        ({"data": [1]}, TypeError, r"data\[0\] is of type int"),
        ({"data": ROWS, "run": {"name": object()}}, TypeError, "run.name is of type object"),
    ],
)
def test_what_is_no_recipe(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Recipe("m", reward=own_reward, **arguments)


class Frame:
    """A table as pandas has it."""

    columns = ("prompt", "answer")

    def to_dict(self, orient: str) -> list[dict]:
        assert orient == "records"
        return [{"prompt": "1 + 1 =", "answer": np.int64(2)}, {"prompt": "ü", "answer": np.float32(3.0)}]


@pytest.mark.parametrize("table", [Frame(), pyarrow.table({"prompt": ["1 + 1 =", "ü"], "answer": [2, 3]})])
def test_a_table_is_its_rows(table: object, tmp_path: Path) -> None:
    config = load_config(Recipe("m", table, own_reward).write(tmp_path)).config  # type: ignore[arg-type]
    rows = [json.loads(line) for line in config.data.train_paths[0].read_text().splitlines()]
    assert rows == [{"prompt": "1 + 1 =", "answer": 2}, {"prompt": "ü", "answer": 3}]


def short(sample: object) -> float:
    return 0.5


def test_a_list_of_rewards_is_their_sum(tmp_path: Path) -> None:
    """As reward_funcs of TRL: each has its part under its own name."""
    reward = load_config(Recipe("m", ROWS, [own_reward, short, "lenient", short]).write(tmp_path)).config.reward
    assert reward.verifier == "mix"
    assert [(one.name, one.verifier, one.weight) for one in reward.mix] == [
        ("own_reward", f"{__name__}:own_reward", 1.0),
        ("short", f"{__name__}:short", 1.0),
        ("lenient", "lenient", 1.0),
        ("short_3", f"{__name__}:short", 1.0),
    ]


def test_what_cannot_be_written_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\[1\]: column '[a-z]+' is no JSON"):
        Recipe("m", [{"prompt": "a"}, {"prompt": object()}], own_reward).write(tmp_path)


class Model:
    """A loaded model, as transformers has it."""


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": Model()}, TypeError, "model is of type Model.*save_pretrained"),
        ({"reward": lambda sample: 1.0}, ValueError, "reward: a lambda has no name"),
        ({"reward": [own_reward, lambda sample: 1.0]}, ValueError, "reward: a lambda has no name"),
        ({"reward": 3}, ConfigError, "Recipe: 1 problem.*- reward: "),
        ({"rollout": {"group_filter": lambda group: True}}, ValueError, "rollout.group_filter: a lambda has no name"),
        ({"rollout": {"group_siz": 3}}, ConfigError, "Recipe: 1 problem.*did you mean rollout.group_size"),
        ({"run": {"total_steps": "many"}}, ConfigError, "Recipe: 1 problem.*run.total_steps"),
    ],
)
def test_a_wrong_argument_is_named_where_it_is_given(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        Recipe(**{"model": "m", "data": ROWS, "reward": own_reward, **arguments})


def test_an_error_of_a_run_names_arguments_and_rows_and_no_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "base_model")
    rows = [*ROWS, {"prompt": "x"}]
    settings = {"data.max_prompt_tokens": 64, "rollout.top_k": 1}
    recipe = Recipe("model", rows, own_reward, output_dir="run", settings=settings)
    with pytest.raises(ConfigError) as caught:
        train(recipe, check=False)
    assert "recipe.toml" not in str(caught.value) and str(caught.value).startswith("Recipe: ")
    error = ConfigError([UnusableInput("data.train_paths", f"{tmp_path}/run/inputs/train.jsonl, line 3 has no field answer")])
    assert str(recipe.blamed(error)).splitlines()[1] == "  - data: data[2] has no field answer"
