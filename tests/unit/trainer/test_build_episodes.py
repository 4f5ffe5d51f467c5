"""The episode engine's settings come from the recipe, and prompts that begin episodes from its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.config.environment_schema import EnvironmentConfig
from megatron_dapo.data.dataset import load_sources
from megatron_dapo.data.files import DAPO_FORMAT
from megatron_dapo.data.model_inputs import ModelInputs
from megatron_dapo.data.sources import Source
from megatron_dapo.data.template import StopTokens
from megatron_dapo.environments.pool import WorkerSettings
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings
from megatron_dapo.rollout.collector import LossLimits
from megatron_dapo.trainer.build_rollout import loss_limits
from megatron_dapo.trainer.build_episodes import check_tool_role, episode_engine, episode_settings, template_proof, worker_settings
from tests.unit.config.small import make
from tests.unit.data.published_templates import turn_template
from tests.unit.environments import user_environments

ON = "environment.path=games.py:Game"


def inputs(name: str, tmp_path) -> ModelInputs:
    turns = turn_template(name)
    return ModelInputs(tmp_path, turns.template.tokenizer, StopTokens(turns.stop_token_ids, {}, True))


def test_a_template_that_rewrites_history_needs_the_user_s_word(tmp_path):
    with pytest.raises(ValueError, match='drops earlier thinking when a user message follows.*set turns.history = "keep"') as error:
        template_proof(make(ON), inputs("qwen3", tmp_path))
    assert "\n" not in str(error.value)
    for history in ("keep", "rewrite"):
        proof = template_proof(make(f"{ON} turns.history={history}"), inputs("qwen3", tmp_path))
        assert proof.turns.history == history and json.dumps(proof.describe())
    assert template_proof(make(ON), inputs("llama3", tmp_path)).turns.history == "refuse"
    assert template_proof(make(), inputs("qwen3", tmp_path)) is None


def test_a_batch_with_more_episodes_than_places_is_warned_of(caplog):
    episode_settings(make(f"{ON} environment.processes=2 environment.episodes_per_process=16"))
    assert not caplog.records
    episode_settings(make(f"{ON} environment.processes=3 environment.episodes_per_process=10"))
    assert "30 of the 32 episodes of a batch play at a time" in caplog.text


def test_results_of_tools_need_a_role_that_the_template_has(tmp_path, caplog):
    """Before anything is sampled, by what the environment's class says of itself."""
    file = Path(user_environments.__file__)

    def opened(kind: str, template: str) -> None:
        config = make(f"{kind} environment.episodes_per_process=32")
        with episode_engine(config, template_proof(config, inputs(template, tmp_path)), object()):
            pass

    refusal = 'template of .*m has no place for messages of the role tool .*Calculator answers.*set result_role = "user" in the class'
    with pytest.raises(ValueError, match=refusal) as error:
        opened(f"environment.path={file}:Calculator model.path=/m", "gemma3")
    assert "\n" not in str(error.value)
    for kind, template in (("path", "llama3"), ("function", "gemma3")):
        opened(f"environment.{kind}={file}:{'Calculator' if kind == 'path' else 'chat_twice'}", template)
    assert not caplog.records
    config = make('environment.agent=["python"]')
    check_tool_role(config, template_proof(config, inputs("gemma3", tmp_path)), {"ready": "python", "tools": []})
    assert "an agent's request with the result of a tool is answered with 400" in caplog.text


def test_every_key_of_the_section_is_used():
    changes = {
        "python": "bin/python", "processes": 3, "episodes_per_process": 5, "max_episodes_per_process": 7, "max_turns": 4,
        "max_turn_tokens": 9, "max_context_tokens": 99, "reset_seconds": 1.5, "step_seconds": 2.5, "episode_seconds": 3.5,
        "on_step_timeout": "lost", "memory_limit_mb": 77, "max_processes": 11, "variables": ["KEY"], "success": 0.25,
        "retries": 6, "resume": "state", "order": "arrival", "max_branches": 13,
    }  # fmt: skip
    overrides = [f"environment.{name}={json.dumps(value)}" for name, value in changes.items()]
    config = make(" ".join([ON, *overrides, "turns.parser=line", "turns.on_cut=observe"]))
    engine, workers = episode_settings(config), worker_settings(config)
    assert engine == EpisodeSettings(99, config.data.max_prompt_tokens, 4, 9, 3.5, 0.25, 15, 6, "state", "arrival", "line", "observe")
    assert workers == WorkerSettings(
        "environment", config.environment.path, python="bin/python", num_processes=3, episodes_per_process=5,
        max_episodes_per_process=7, reset_seconds=1.5, step_seconds=2.5, episode_seconds=3.5, on_step_timeout="lost",
        memory_limit_mb=77, max_processes=11, with_state=True, max_branches=13, variables=("KEY",),
    )  # fmt: skip
    assert set(changes) | {"path", "function", "command", "agent", "other_sampling", "on_lost"} == set(EnvironmentConfig.model_fields)
    assert worker_settings(make("environment.function=games.py:play")).kind == "function"
    assert episode_settings(make(ON)).order == "rounds" and episode_settings(make(f"{ON} rollout.engine=sglang")).order == "arrival"
    assert episode_settings(make(ON)).max_context_tokens == make(ON).longest_trained


@pytest.mark.parametrize(
    ("on_lost", "expected"),
    [("requeue", LossLimits(3, 5, False)), ("shrink", LossLimits(3, 5, True)), ("fail", LossLimits(1, 5, False))],
)
def test_what_becomes_of_groups_with_lost_episodes(on_lost, expected):
    config = make(f"{ON} environment.on_lost={on_lost} environment.retries=5 rollout.prompts_per_step=3 training.mini_batch_prompts=3")
    assert loss_limits(config) == expected


def test_an_agent_s_command_runs_in_a_worker_of_the_trainer_s_interpreter(tmp_path):
    (tmp_path / "agent.py").touch()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[environment]\nagent = ["python", "agent.py", "--level", "2"]\nother_sampling = "ignore"\n')
    config = load_config(recipe, ["model.path=/model", 'data.train_paths=["rows.jsonl"]']).config
    workers = worker_settings(config)
    assert (workers.kind, workers.command[:3]) == ("command", (sys.executable, "-m", "megatron_dapo.engines.endpoint.agents"))
    assert json.loads(workers.command[3]) == {
        "command": [sys.executable, str(tmp_path / "agent.py"), "--level", "2"],
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
        "other_sampling": "ignore",
        "max_branches": 16,
        "roles": ["user", "tool"],
        "template": {"path": "/model", "trust_remote_code": False, "name": "chat", "options": {}, "history": "refuse"},
    }
    assert episode_settings(config).on_cut == "observe"


def test_rows_that_differ_in_any_column_are_different_tasks(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "Play.", "reward_model": {"ground_truth": "7"}, "level": level} for level in (1, 2, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template, sources = turn_template("qwen3").template, [Source((path,), DAPO_FORMAT)]
    tasks = load_sources(sources, template, 100, begin_episodes=True).prompts
    assert [one.task for one in tasks] == [
        {"level": level, "messages": [{"role": "user", "content": "Play."}], "answer": "7"} for level in (1, 2)
    ]
    (plain,) = load_sources(sources, template, 100).prompts
    assert plain.task is None and plain.prompt_id not in {one.prompt_id for one in tasks}
