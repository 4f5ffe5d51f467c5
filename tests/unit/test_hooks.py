"""Hooks: what is imported, how a wrong one is refused, and that an error in one names it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_dapo.algorithms.dynamic_sampling import FunctionFilter
from megatron_dapo.algorithms.policy_loss import policy_loss, ppo_clip
from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs
from megatron_dapo.config import Config, config_from_dict, load_config
from megatron_dapo.config.algorithm_schema import FunctionAdvantageConfig
from megatron_dapo.config.inputs import hook_problems
from megatron_dapo.config.loss_schema import FunctionLossConfig, PpoClipLossConfig
from megatron_dapo.data.prompt_stream import FunctionOrder, PromptStream
from megatron_dapo.hooks import Callbacks, HookError, load_hook
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.families import FAMILIES
from megatron_dapo.plan.check import unshared_hooks
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.rewards.result import RewardSample
from megatron_dapo.rewards.verifiers.verifier import load_verifier
from megatron_dapo.types import Prompt
from megatron_dapo.watch.failure import failure_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "hooks"

OWN = """
import torch
from megatron_dapo import Callback

def loss(inputs):
    ratio = inputs.log_ratio().exp()
    advantages = inputs.trained_advantages()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))

def without_gradient(inputs):
    return inputs.advantages

def mean(inputs):
    return inputs.logprobs.mean()

def raises(*arguments):
    return 1 / 0

def infinite(inputs):
    return inputs.rewards / 0

def two(one, two):
    return one

def first_left_out(prompts, epoch):
    return range(1, len(prompts))

def reversed_order(prompts, epoch):
    return reversed(range(len(prompts)))

class Log(Callback):
    seen = []
    def on_step_end(self, step, metrics):
        self.seen.append((step, dict(metrics)))

class Raises:
    def on_checkpoint(self, step, directory):
        raise OSError("the tracker is down")

class Misspelled(Callback):
    def on_step(self, step):
        pass

class TooMany(Callback):
    def on_step_end(self, step, metrics, more):
        pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def configuration(tmp_path: Path, tree: dict[str, Any]) -> Config:
    base = {"model": {"path": str(tmp_path)}, "data": {"train_paths": ["x.jsonl"]}}
    return config_from_dict({**base, **{name: {**base.get(name, {}), **section} for name, section in tree.items()}})


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("absent.py:f", "data.order", "cannot import .*FileNotFoundError"),
        ("no_such_package.module:f", "data.order", "cannot import 'no_such_package.module' .*ModuleNotFoundError"),
        ("own.py:absent", "data.order", "has no 'absent'; it has .*first_left_out"),
        ("own.py:loss", "data.order", r"it takes \(inputs\); write it as \(prompts, epoch\)"),
        ("own.py:two", "algorithm.loss.function", r"it takes \(one, two\); write it as \(inputs\)"),
        ("own.py:OWN", "rollout.group_filter", "has no 'OWN'"),
        ("own.py:loss", "run.callbacks", "no class with one of the methods on_run_start, on_step_end"),
        ("own.py:Misspelled", "run.callbacks", "on_step is never called"),
        ("own.py:TooMany", "run.callbacks", r"method on_step_end: it takes .*; write it as \(self, step, metrics\)"),
        ("broken.py:f", "data.order", "cannot import .*SyntaxError"),
    ],
)
def test_a_wrong_hook_is_refused_in_one_line(tmp_path: Path, own: str, name: str, field: str, words: str) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    path = name if name.startswith("no_such") else str(tmp_path / name)
    with pytest.raises(ValueError, match=words) as error:
        load_hook(path, field)
    assert "\n" not in str(error.value) and field in str(error.value)


def test_the_plan_lists_every_wrong_hook(tmp_path: Path, own: str) -> None:
    config = configuration(
        tmp_path,
        {
            "algorithm": {"loss": f"{own}:two", "advantage": {"name": f"{own}:absent"}},
            "rollout": {"group_filter": "spelled/wrong"},
            "data": {"order": f"{own}:loss"},
            "run": {"callbacks": [f"{own}:Log", f"{own}:Misspelled"]},
        },
    )
    problems = [str(problem) for problem in hook_problems(config)]
    fields = [problem.partition(":")[0] for problem in problems]
    assert fields == [
        "algorithm.loss.function",
        "algorithm.advantage.function",
        "rollout.group_filter",
        "data.order",
        "run.callbacks",
    ]
    assert all("\n" not in problem for problem in problems)


def test_the_shipped_examples_are_hooks(tmp_path: Path) -> None:
    config = configuration(
        tmp_path,
        {
            "algorithm": {"loss": f"{EXAMPLES}/policy_loss.py:loss", "advantage": f"{EXAMPLES}/advantage.py:advantage"},
            "rollout": {"group_filter": f"{EXAMPLES}/group_filter.py:keep"},
            "data": {"order": f"{EXAMPLES}/prompt_order.py:easy_first"},
            "run": {"callbacks": [f"{EXAMPLES}/callbacks.py:EventLog"]},
        },
    )
    assert hook_problems(config) == []
    several = [str(problem) for problem in unshared_hooks(config, Cluster(2, gpus_per_node=8))]
    assert len(several) == 5 and all("a module that every node can import" in line for line in several)
    assert not list(unshared_hooks(config, Cluster(1, gpus_per_node=8)))


def test_a_colon_in_a_name_makes_it_a_function(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[data]\ntrain_paths = ["x"]\n[algorithm]\nadvantage = "a.b:c"\n'
        '[algorithm.loss]\nname = "a.py:f"\naggregation = "sample_mean"\n'
    )
    algorithm = load_config(recipe).config.algorithm
    assert algorithm.loss == FunctionLossConfig(function="a.py:f", aggregation="sample_mean")
    assert algorithm.advantage == FunctionAdvantageConfig(function="a.b:c")
    # Another name loses the keys of the function, and the other way round.
    changed = load_config(recipe, ["algorithm.loss=cispo", "algorithm.advantage.name=x.y:z"]).config.algorithm
    assert changed.loss.name == "cispo" and changed.advantage == FunctionAdvantageConfig(function="x.y:z")


def inputs_of_loss(requires_grad: bool = True) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(12, generator=generator)
    return PolicyLossInputs(
        logprobs=logprobs.requires_grad_(requires_grad),
        old_logprobs=logprobs.detach() + 0.5 * torch.randn(12, generator=generator),
        advantages=torch.randn(12, generator=generator),
        loss_mask=torch.tensor([1.0] * 9 + [0.0] * 3),
        sequence_ids=torch.zeros(12, dtype=torch.int64),
        num_sequences=1,
    )


def test_a_loss_of_the_users_own_equals_the_built_in_one(own: str) -> None:
    inputs = inputs_of_loss()
    ours, metrics = policy_loss(FunctionLossConfig(function=f"{own}:loss"), inputs)
    theirs, wanted = ppo_clip(inputs, PpoClipLossConfig())
    [gradient] = torch.autograd.grad(ours.sum(), inputs.logprobs, retain_graph=True)
    [expected] = torch.autograd.grad(theirs.sum(), inputs.logprobs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, expected)
    assert metrics.keys() == wanted.keys() and metrics["num_tokens"] == 9
    assert metrics["policy_loss_sum"] == pytest.approx(float(wanted["policy_loss_sum"]))


def test_the_example_of_a_loss_counts_clipped_tokens() -> None:
    _, metrics = policy_loss(FunctionLossConfig(function=f"{EXAMPLES}/policy_loss.py:loss"), inputs_of_loss())
    _, wanted = ppo_clip(inputs_of_loss(), PpoClipLossConfig())
    assert metrics["clip_low_sum"] == wanted["clip_low_sum"] and metrics["clip_high_sum"] == wanted["clip_high_sum"]
    assert metrics["clip_low_sum"] + metrics["clip_high_sum"] > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mean", r"returned the shapes \[\(\), \(12,\), \(12,\)\], not \(12,\)"),
        ("without_gradient", "without a gradient"),
        ("raises", r"raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_loss_names_itself(own: str, name: str, words: str) -> None:
    with pytest.raises(HookError, match=words) as error:
        policy_loss(FunctionLossConfig(function=f"{own}:{name}"), inputs_of_loss())
    assert f"hook '{own}:{name}' (algorithm.loss)" in str(error.value)
    failure = failure_of(0, error.value)
    assert failure.exit_code == 1 and f"{own}:{name}" in failure.message


def inputs_of_advantage() -> AdvantageInputs:
    rewards = torch.tensor([1.0, 0.0, 0.5, 3.0, 3.0], dtype=torch.float64)
    return AdvantageInputs(rewards, torch.tensor([7, 7, 7, 2, 2]), torch.tensor([3, 1, 4, 1, 5]))


def test_an_advantage_of_the_users_own() -> None:
    found = compute_advantages(
        FunctionAdvantageConfig(function=f"{EXAMPLES}/advantage.py:advantage"), inputs_of_advantage()
    )
    torch.testing.assert_close(found.values, torch.tensor([2 / 3, -2 / 3, 0, 0, 0]))
    assert found.metrics["num_groups"] == 2


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "raised ZeroDivisionError"), ("infinite", "5 of 5 advantages are not finite")]
)
def test_a_wrong_advantage_names_itself(own: str, name: str, words: str) -> None:
    with pytest.raises(HookError, match=words):
        compute_advantages(FunctionAdvantageConfig(function=f"{own}:{name}"), inputs_of_advantage())


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{number}", (), tuple(range(10 - number)), "") for number in range(count)]


def test_an_order_of_the_users_own_and_its_resume(own: str) -> None:
    order = FunctionOrder(f"{EXAMPLES}/prompt_order.py:easy_first", prompts(4))
    names = [f"p{number}" for number in range(4)]
    stream = PromptStream(names, 0, order=order)
    drawn = [stream.next() for _ in range(10)]
    assert drawn[:4] == ["p3", "p2", "p1", "p0"] and sorted(drawn[4:8]) == names
    resumed = PromptStream(names, 0, order=order)
    resumed.load_state_dict(stream.state_dict())
    assert [resumed.next() for _ in range(9)] == [stream.next() for _ in range(9)]
    for other in (
        PromptStream(names, 0),
        PromptStream(names, 0, order=FunctionOrder(f"{own}:reversed_order", prompts(4))),
    ):
        with pytest.raises(ValueError, match="another order of epoch"):
            other.load_state_dict(stream.state_dict())


def test_an_order_that_leaves_out_a_prompt(own: str) -> None:
    with pytest.raises(HookError, match="returned 3 indices for epoch 0 that leave out 1 of 4 prompts"):
        PromptStream(["a", "b", "c", "d"], 0, order=FunctionOrder(f"{own}:first_left_out", prompts(4)))


def test_callbacks_are_called_and_named(own: str, tmp_path: Path) -> None:
    callbacks = Callbacks([f"{own}:Log", f"{own}:Raises"])
    callbacks.call("on_step_end", 3, {"a": 1.0})
    assert load_hook(f"{own}:Log", "run.callbacks").seen == [(3, {"a": 1.0})]
    words = re.escape(f"hook '{own}:Raises' (run.callbacks, on_checkpoint) raised OSError: the tracker is down")
    with pytest.raises(HookError, match=words):
        callbacks.call("on_checkpoint", 3, tmp_path)


def test_a_filter_that_raises_names_itself(own: str) -> None:
    with pytest.raises(HookError, match=r"raises' \(rollout.group_filter\) raised ZeroDivisionError"):
        FunctionFilter(f"{own}:raises").decide(None)  # type: ignore[arg-type]


MISTRAL = json.dumps(
    {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "vocab_size": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
)


def test_a_model_family_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "mistral", None)  # taken out after the test
    (tmp_path / "config.json").write_text(MISTRAL)
    family = f"{EXAMPLES}/model_family.py:MISTRAL"
    configuration(tmp_path, {"model": {"family": family}})
    assert read_architecture(tmp_path).num_layers == 2
    with pytest.raises(ValueError, match="it is a type, not a megatron_dapo.Family"):
        configuration(tmp_path, {"model": {"family": f"{EXAMPLES}/callbacks.py:EventLog"}})
    (tmp_path / "config.json").write_text(MISTRAL.replace("mistral", "llama"))
    with pytest.raises(ValueError, match="model.family: .*'llama' is supported without it"):
        configuration(tmp_path, {"model": {"family": family}})


# ---- reward


@pytest.mark.parametrize(
    ("response", "parts", "is_right"),
    [
        ("It is 4", {"right": 1.0, "short": 0.1}, True),
        ("5" + " of many words" * 9, {"right": 0.0, "short": 0.0}, False),
    ],
)
def test_the_example_reward_has_parts(response: str, parts: dict[str, float], is_right: bool) -> None:
    verifier = load_verifier(f"{EXAMPLES}/reward.py:reward")
    assert verifier.takes_sample and not verifier.is_batched
    result = verifier.score(RewardSample((), response, "4", "", {}, "stop", 0))
    assert result.detail["parts"] == parts and result.reward == sum(parts.values())
    assert result.outcome == ("correct" if is_right else "wrong")


def test_a_reward_and_a_hook_of_one_file_share_its_module(own: str) -> None:
    """Its top level runs once in a process, and no file hides a package of its name."""
    before = set(sys.modules)
    load_hook(f"{own}:loss", "algorithm.loss.function")
    load_verifier(f"{own}:two")
    assert len({name for name in set(sys.modules) - before if name.startswith("own")}) == 1
    assert "own" not in sys.modules
