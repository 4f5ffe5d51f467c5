"""Checks that read the disk: the model's config.json, the files and the user's functions that a configuration names."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_dapo.config.data_schema import TASK_PREFIX
from megatron_dapo.config.layout_rules import architecture_facts, architecture_rules, layout_facts
from megatron_dapo.config.rules import UnusableInput, Violation, broken, value_of
from megatron_dapo.config.schema import Config
from megatron_dapo.config.section import is_function_path
from megatron_dapo.files.safetensors import read_header
from megatron_dapo.hooks import CALLBACKS, FUNCTIONS, load_hook
from megatron_dapo.models.architecture import HEADS, ModelArchitecture
from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.models.peft import TENSORS_FILE, adapter_name, read_adapter_config, require_adapters
from megatron_dapo.models.tokens import check_same_tokens

ADAPTERS = "model.lora.path"
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl", ".jar")  # files that are the argument of an interpreter


def check_inputs(config: Config, are_here: bool = True) -> tuple[ModelArchitecture | None, list[Violation]]:
    """Return the policy's architecture, None if it cannot be read, and what is wrong with the files that are named.

    are_here: data and weights have to exist; otherwise a published model needs no file at all (`planned_directory`).
    """
    problems = [*(missing_inputs(config) if are_here else ()), *hook_problems(config)]
    if any(problem.path == "model.path" for problem in problems):
        return None, problems
    try:
        policy = read_architecture(config.model.path if are_here else planned_directory(config.model.path))
    except ValueError as error:
        return None, [*problems, UnusableInput("model.path", str(error))]
    others = (*critics_of_other_models(config, policy), *unfit_teachers(config, are_here), *unfit_adapters(config, policy))
    return policy, [*problems, *others]


def missing_inputs(config: Config) -> list[Violation]:
    """Return a violation for each model directory, data file or reference that does not exist."""
    problems, critic = [], Path(config.critic.path)
    if not config.model.path.is_dir():
        problems.append(_absent("model.path", config.model.path, "a Hugging Face directory that exists"))
    if config.has_critic and config.critic.path and not (critic / "config.json").is_file():
        words = "a Hugging Face directory that exists (`megatron-dapo pretrain-value` writes one)"
        problems.append(_absent("critic.path", critic, words))
    if config.model.lora.path and not Path(config.model.lora.path).is_dir():
        problems.append(_absent(ADAPTERS, Path(config.model.lora.path), "a directory that PEFT's save_pretrained wrote"))
    files = {"data.train_paths": config.data.train_paths, "data.eval_paths": config.data.eval_paths}
    if config.has_critic:
        files["value_pretraining.train_paths"] = config.value_pretraining.train_paths
    own = (Path(source.path) for source in config.data.sources if not source.path.startswith(TASK_PREFIX))
    files["data.sources"] = tuple(own)
    absent = ((path, file) for path, paths in files.items() for file in paths if not file.exists())
    problems += [_absent(path, file, "a file that exists") for path, file in absent]
    problems += [*_missing_functions(config), *missing_programs(config)]
    references = (path for path in config.telemetry.references if not path.exists())
    return [*problems, *(_absent("telemetry.references", path, "a file or a run's directory") for path in references)]


def _missing_functions(config: Config) -> Iterator[Violation]:
    """Yield a violation for each file of a user's function that is neither next to the recipe nor in the current directory."""
    reward = config.reward
    verifiers = [("reward.verifier", reward.verifier), ("reward.shadow_verifier", reward.shadow_verifier)]
    verifiers += [("reward.mix", one.verifier) for one in reward.mix]
    environments = [(f"environment.{name}", getattr(config.environment, name)) for name in ("path", "function")]
    for field, name in [*verifiers, *environments, *hook_paths(config)]:
        file = Path(name.rpartition(":")[0])
        if is_function_path(name) and file.suffix == ".py" and not file.is_file():
            words = f"{name!r}: no file {file} next to the recipe or in {Path.cwd()}"
            yield UnusableInput(field, words, "put it next to the recipe, or name its whole path")


def missing_programs(config: Config) -> Iterator[Violation]:
    """Yield a violation for each program of [environment], and each script that one is given, that does not exist."""
    environment = config.environment
    commands = {"command": environment.command, "agent": environment.agent, "python": (environment.python,)}
    for name, (first, *rest) in {name: words for name, words in commands.items() if any(words)}.items():
        # "python" of an agent is environment.python or this interpreter.
        is_there = shutil.which(first) is not None or (name == "agent" and first == "python")
        script = next((word for word in rest if Path(word).suffix in _SCRIPTS and not word.startswith("-")), "")
        if not is_there:
            yield UnusableInput(f"environment.{name}", f"no program {first}", "name one that is executable")
        elif script and not Path(script).is_file():
            words = f"no file {script} next to the recipe or in {Path.cwd()}"
            yield UnusableInput(f"environment.{name}", words, "put it next to the recipe, or name its whole path")


# Fields in which a critic may differ from its policy.
_OF_A_ROLE = ("max_position_embeddings", "tie_word_embeddings", "head", "dtype", "vision_parameters")


def critics_of_other_models(config: Config, policy: ModelArchitecture) -> list[Violation]:
    """Yield a violation if critic.path exists and its shape differs from the policy's. Weights and tokenizers are
    compared when the critic is built."""
    directory = Path(config.critic.path)
    if not (config.has_critic and config.critic.path and (directory / "config.json").is_file()):
        return []
    try:
        critic = read_architecture(directory, heads=HEADS)
    except ValueError as error:
        return [UnusableInput("critic.path", str(error))]
    # A critic may have been trained at another length, and its head differs.
    values: dict[str, Any] = {
        f"{field.name} of critic and policy": (of_critic, of_policy)
        for field in fields(policy)
        if field.name not in _OF_A_ROLE
        and (of_critic := getattr(critic, field.name)) != (of_policy := getattr(policy, field.name))
    }
    if not values:
        return []
    fix = "set critic.path to a critic of this model, or leave it out to start from the policy"
    values = {"critic.path": config.critic.path, **values}
    return [Violation("critic.path", "a critic of the policy's architecture", fix, values)]


def unfit_teachers(config: Config, are_here: bool = True) -> Iterator[Violation]:
    """Yield a violation for each teacher whose directory is absent (if it has to be here), has another tokenizer, or does not
    divide into the policy's layout. Reads config.json and tokenizer.json."""
    for teacher in config.distillation.teachers:
        directory, label = Path(teacher.path), f"teacher {teacher.name}"
        if not teacher.path:
            continue
        if are_here and not directory.is_dir():
            yield _absent("distillation.teachers", directory, f"{label}: a Hugging Face directory that exists")
            continue
        directory = directory if are_here else planned_directory(directory)
        try:
            check_same_tokens(label, directory, config.model.path)
            if not teacher.url:
                sizes = {**architecture_facts(read_architecture(directory)), **layout_facts(config, config.parallel, 1)}
                for one in broken(architecture_rules("parallel"), config, sizes):
                    if one.path.startswith("parallel."):
                        yield replace(one, formula=f"{label} has the policy's layout: {one.formula}")
        except ValueError as error:
            yield UnusableInput("distillation.teachers", str(error))


def unfit_adapters(config: Config, policy: ModelArchitecture) -> Iterator[Violation]:
    """Yield a violation if the adapters of model.lora.path exist and are not those of [model.lora], or not of the policy's
    shape. Reads adapter_config.json and a header."""
    lora, directory = config.model.lora, Path(config.model.lora.path)
    if not (lora.path and directory.is_dir()):
        return
    try:
        stored = read_adapter_config(directory)
        if lora.rank != stored.rank or lora.scale != stored.scale:
            yield Violation(
                "model.lora.rank" if lora.rank != stored.rank else "model.lora.alpha",
                "model.lora has the rank and alpha of model.lora.path",
                f"set model.lora.rank = {stored.rank} and model.lora.alpha = {stored.rank * stored.scale:g}",
                {"model.lora.rank": lora.rank, "model.lora.alpha": lora.alpha, ADAPTERS: lora.path},
            )
            return
        tensors = read_header(directory / TENSORS_FILE)
        shapes = {adapter_name(name): entry.shape for name, entry in tensors.items()}
        require_adapters(directory, shapes, policy.shapes(), stored.rank, lora.targets)
    except (ValueError, OSError) as error:
        yield UnusableInput(ADAPTERS, str(error))


def _absent(path: str, file: Path, what: str) -> Violation:
    names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    fix = f"did you mean {file.parent / near[0]}?" if near else f"set {path}, or put it there"
    if file.is_file():
        fix = "name the directory; GGUF and other single files are not read"
    return Violation(path=path, formula=what, suggestion=fix, values={path: str(file)})


# ---- the user's functions

_SPELLING = '"package.module:name" or "path/to/file.py:name"'


def hook_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the field and the path of each hook that is set, except rewards and the model's family."""
    for field in FUNCTIONS:
        section, _, name = field.rpartition(".")
        # The section of another loss or advantage has no function.
        if path := getattr(value_of(config, section), name, ""):
            yield field, path
    for path in config.run.callbacks:
        yield CALLBACKS, path


def hook_problems(config: Config) -> list[Violation]:
    """Return a violation for each hook that cannot be imported or whose arguments do not match. Runs the user's
    modules."""
    problems: list[Violation] = []
    for field, path in hook_paths(config):
        if not is_function_path(path):
            problems.append(Violation(field, _SPELLING, f"write {field} in that form", {field: path}))
            continue
        if path.rpartition(":")[0].endswith(".py") and not Path(path.rpartition(":")[0]).is_file():
            continue  # `missing_inputs` names it
        try:
            load_hook(path, field)
        except ValueError as error:
            problems.append(UnusableInput(field, str(error).removeprefix(f"{field} = ")))
    return problems
