"""Calls that train, evaluate and generate by a recipe, with the processes and engines of the commands."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.api.recipe import Recipe
from megatron_dapo.config.rules import ConfigError, Violation

if TYPE_CHECKING:
    import numpy as np

    from megatron_dapo.config.schema import Config
    from megatron_dapo.evaluation.protocol import EvaluationResult
    from megatron_dapo.run.plan import Inputs
    from megatron_dapo.telemetry.summary import RunSummary

Turns = Sequence[Mapping[str, str]]  # chat turns: {"role": ..., "content": ...}
_DEFAULT_TOKENS = 256  # response length if neither the call nor a recipe sets one


class TrainingError(RuntimeError):
    """A run that did not finish. The message is the first root cause; failure.json in `output_dir` has the rest."""

    def __init__(self, reason: str, exit_code: int, output_dir: Path) -> None:
        super().__init__(reason)
        self.exit_code = exit_code  # 75: worth starting again
        self.output_dir = output_dir


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    output_dir: Path
    summary: RunSummary

    @property
    def model(self) -> Path | None:
        """The trained model's Hugging Face directory; None if it was not exported."""
        exported = self.summary.directories.get("huggingface")
        return Path(exported) if exported else None

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row a train step: "train_step" and the metrics by name."""
        return _rows(self.output_dir / "metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """One row an evaluation; "train_step" is the number of steps made before it."""
        return _rows(self.output_dir / "evaluations.jsonl")


@dataclass(frozen=True, eq=False)
class Response:
    """A sampled response."""

    prompt: int  # index of its prompt
    text: str  # no special tokens
    token_ids: np.ndarray  # [R] int32, the stop token included
    logprobs: np.ndarray  # [R] float32, at the sampling temperature
    finish_reason: str  # "stop", or "length" for one that was cut off


def train(recipe: Recipe, *, layout: str | None = None, restarts: int = 0, check: bool = True) -> RunResult:
    """Run a recipe on this machine as `megatron-dapo train` does, and wait for its end. Continues an interrupted run.

    Args:
        recipe: what to train.
        layout: parallel layout such as "tp2dp2"; None: the recipe's.
        restarts: times that the processes are started again after a failure.
        check: try the reward, the tokenizer and the engine first, as --dry-run does; takes some seconds.

    Raises ConfigError with everything that is wrong before a process starts, RuntimeError if another run uses the same
    directory, and TrainingError with the first root cause of a run that fails or is stopped.
    """
    from megatron_dapo.run.plan import machines_of, make_plan
    from megatron_dapo.run.start import run_to_end
    from megatron_dapo.telemetry.summary import read_summary
    from megatron_dapo.telemetry.terminal import quiet_libraries

    quiet_libraries()
    inputs: Inputs = "all" if check else "quick"
    try:
        plan = make_plan(recipe.write(), (), layout, None, machines_of(dry_run=False), inputs=inputs)
    except ConfigError as error:
        raise recipe.blamed(error) from None
    directory = plan.loaded.config.run.output_dir
    end = run_to_end(plan, restarts=restarts)
    if end is not None and end.exit_code:
        raise TrainingError(end.reason, end.exit_code, directory)
    return RunResult(directory, read_summary(directory / "summary.json"))


def evaluate(recipe: Recipe, model: str | Path | None = None) -> EvaluationResult:
    """Evaluate a Hugging Face directory (default: the recipe's model) on the recipe's held-out data, as `megatron-dapo eval` does.

    Its `metrics` have avg@k, pass@k and cons@k with their intervals. ConfigError or ValueError for a recipe or data that cannot be
    used, RuntimeError if servers fail.
    """
    from megatron_dapo.run.derive import for_evaluation
    from megatron_dapo.run.evaluate import evaluate_model
    from megatron_dapo.run.plan import ONE_NODE_OF_CPUS, make_plan
    from megatron_dapo.telemetry.terminal import quiet_libraries

    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="evaluation-") as directory:
        file = recipe.write(directory)
        overrides = (f"model.path={model}",) if model else ()
        plan = make_plan(file, overrides, "tp1", None, ONE_NODE_OF_CPUS, for_evaluation, "quick")
        config = plan.loaded.config
        if not config.data.has_held_out:
            problem = Violation("data.eval_paths", "a file of held-out rows", "pass eval_data to Recipe")
            raise ConfigError([problem], str(file))
        return evaluate_model(config)


def generate(
    model: Recipe | str | Path,
    prompts: Sequence[str | Turns],
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_response_tokens: int | None = None,
    seed: int = 0,
) -> list[Response]:
    """Sample responses to prompts by the engine that a run would use, those to the first prompt first.

    Args:
        model: a Hugging Face directory, OWNER/NAME of the Hub, or a recipe, whose model, engine, chat template and system prompt are taken.
        prompts: texts, each the user's turn, or chat turns.
        num_samples: responses to each prompt.
        temperature, top_p, top_k: of sampling; temperature 0 is greedy.
        max_response_tokens: None: rollout.max_response_tokens of a recipe, else 256.
        seed: the same one gives the same responses from the embedded engine.

    ConfigError or ValueError for unusable arguments, RuntimeError if servers fail.
    """
    from megatron_dapo.config.derive import derive
    from megatron_dapo.data.model_inputs import read_model_inputs
    from megatron_dapo.evaluation.runner import evaluation_seed
    from megatron_dapo.evaluation.runner import generate as drive
    from megatron_dapo.run.evaluate import opened_engine
    from megatron_dapo.telemetry.terminal import quiet_libraries
    from megatron_dapo.types import GenerationRequest, SamplingParams

    quiet_libraries()
    if isinstance(prompts, str):
        raise TypeError("prompts is one text; pass a list of prompts")
    config = _generation_config(model, max_response_tokens)
    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    rendered = _rendered(config, inputs, prompts, is_recipe=isinstance(model, Recipe))
    longest = max(map(len, rendered), default=1)
    config = derive(config, {"data": {"max_prompt_tokens": longest}})
    sampling = SamplingParams(
        temperature, top_p, top_k, config.rollout.max_response_tokens, inputs.stop_tokens.token_ids
    )
    requests = {
        f"{number}/{sample}": GenerationRequest(
            f"{number}/{sample}", tokens, sampling, evaluation_seed(seed, str(number), sample)
        )
        for number, tokens in enumerate(rendered)
        for sample in range(num_samples)
    }
    with opened_engine(config, config.model.path) as (engine, max_in_flight, _):
        done = drive(requests, engine, max_in_flight=max_in_flight)
    return [
        Response(
            int(name.partition("/")[0]), inputs.decode(one.token_ids), one.token_ids, one.logprobs, one.finish_reason
        )
        for name, one in ((name, done[name]) for name in requests)
    ]


def _generation_config(model: Recipe | str | Path, max_response_tokens: int | None) -> Config:
    """Return the configuration of a recipe, or the defaults for a model directory, with that length of responses."""
    from megatron_dapo.config.derive import derive
    from megatron_dapo.config.loader import load_config
    from megatron_dapo.doctor.hub_inputs import local_model

    recipe = (
        model if isinstance(model, Recipe) else Recipe(model, "none", rollout={"max_response_tokens": _DEFAULT_TOKENS})
    )
    with tempfile.TemporaryDirectory(prefix="generation-") as directory:
        file = recipe.write(directory)
        copy, absent = local_model(load_config(file))
        if absent:
            raise ConfigError(absent)
        config = load_config(file, copy).config
    length = config.rollout.max_response_tokens if max_response_tokens is None else max_response_tokens
    if not (config.model.path / "config.json").is_file():
        problem = Violation(
            "model.path", "a Hugging Face directory that exists", "name one", {"model.path": str(config.model.path)}
        )
        raise ConfigError([problem])
    # The engine's length is the longest of training and evaluation.
    return derive(config, {name: {"max_response_tokens": length} for name in ("rollout", "evaluation")})


def _rendered(config: Config, inputs: Any, prompts: Sequence[str | Turns], is_recipe: bool) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt, by the recipe's template, otherwise the model's if it has one."""
    from megatron_dapo.data.template import PromptTemplate

    has_template = bool(getattr(inputs.tokenizer, "chat_template", None))
    name = config.data.template if is_recipe or has_template else "plain"
    template = PromptTemplate(inputs.tokenizer, name, vocab_size=inputs.vocab_size)
    system = [{"role": "system", "content": config.data.system_prompt}] if config.data.system_prompt else []
    found = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        if not any(turn.get("role") == "system" for turn in turns):
            turns = system + turns
        found.append(template.render(tuple(turns)))
    return found


def _rows(path: Path) -> list[dict[str, float]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
