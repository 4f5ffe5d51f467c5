"""Everything that a run reads and starts, tried before a process of it begins: weights, data, chat template, reward, engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.config import Config
from megatron_dapo.config.rules import UnusableInput, Violation
from megatron_dapo.data.files import Row, sampled_rows
from megatron_dapo.doctor import gather, recipe

if TYPE_CHECKING:
    from megatron_dapo.trainer.build_rollout import ModelInputs
    from megatron_dapo.types import Prompt

_MAX_ROWS = 2048  # of all files: their answers are checked by the verifier


def input_problems(config: Config) -> list[Violation]:
    """Return everything that would stop a run of this configuration before its first step, one line each.

    Of weights all headers are read, of data rows from places all over each file; a made-up response is scored. Inputs that are
    not there at all are left to `config.inputs.missing_inputs`. Takes seconds, most of them imports.
    """
    with ThreadPoolExecutor(1) as beside:
        engine = beside.submit(lambda: list(_engine_problems(config)))
        problems = [*_directory_problems(config), *_model_problems(config)]
        has_tokenizer = config.model.path.is_dir() and not any(problem.path == "model.path" for problem in problems)
        rows: dict[str, list[Row]] = {}
        if config.rollout.responses == "sampled":
            for name in ("train_paths", "eval_paths"):
                rows[name] = list(_rows(config, name, problems))
        if has_tokenizer:
            problems += _prompt_problems(config, rows)
        return problems + engine.result()


def _directory_problems(config: Config) -> Iterator[Violation]:
    if problem := gather.output_dir_problem(config.run.output_dir):
        fix = "set run.output_dir to a directory of your own, or wait for the run that uses it"
        yield UnusableInput("run.output_dir", problem, fix)


def _model_problems(config: Config) -> Iterator[Violation]:
    if config.model.path.is_dir() and (problem := gather.model_problem(config)[0]):
        yield UnusableInput("model.path", problem, "copy the directory again, or set model.path to another one")


def _engine_problems(config: Config) -> Iterator[Violation]:
    if config.rollout.engine == "sglang" and not config.sglang.urls:
        for finding in recipe.sglang_findings(gather.sglang_facts(config), config.sglang.router):
            if finding.verdict == "conflict":
                yield UnusableInput("sglang.python", finding.detail, finding.fix)


def _rows(config: Config, name: str, problems: list[Violation]) -> Iterator[Row]:
    """Yield rows of the files `data.NAME` that can be read; the first problem of each of the others is added to `problems`."""
    from megatron_dapo.trainer.build_rollout import row_format

    for path in filter(Path.is_file, getattr(config.data, name)):
        try:
            yield from islice(sampled_rows(path, row_format(config.data)), _MAX_ROWS)
        except ValueError as error:
            problems.append(UnusableInput(f"data.{name}", str(error)))


def _prompt_problems(config: Config, rows: dict[str, list[Row]]) -> list[Violation]:
    """Return what is wrong with tokenizer, chat template and given responses, then with the reward."""
    # torch and transformers take seconds: what is wrong without them is known by now.
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it names what is not installed
    from megatron_dapo.data.template import PromptTemplate
    from megatron_dapo.trainer.build_rollout import read_model_inputs

    problems: list[Violation] = []
    try:
        inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
        template = PromptTemplate(inputs.tokenizer, config.data.template)
    except ValueError as error:
        return [UnusableInput("model.path", str(error), "copy the tokenizer's files again")]
    if config.rollout.responses == "given":
        return list(_example_problems(config, template, inputs))
    prompts = {name: _rendered(found, template, f"data.{name}", problems) for name, found in rows.items()}
    for name, found in prompts.items():
        lengths = [len(prompt.token_ids) for prompt in found]
        if lengths and min(lengths) > config.data.max_prompt_tokens:
            values = {"data.max_prompt_tokens": config.data.max_prompt_tokens, "shortest prompt": min(lengths)}
            fix = f"raise it to at least {min(lengths)}"
            problems.append(Violation("data.max_prompt_tokens", f"a prompt of data.{name} that fits", fix, values))
    return problems + list(_reward_problems(config, inputs, prompts))


def _example_problems(config: Config, template: Any, inputs: ModelInputs) -> Iterator[Violation]:
    from megatron_dapo.data.examples import load_examples

    data = config.data
    try:
        load_examples(
            data.train_paths, template, inputs.stop_tokens, data.max_prompt_tokens, config.rollout.max_response_tokens
        )
    except ValueError as error:
        yield UnusableInput("data.train_paths", str(error))


def _rendered(rows: Sequence[Row], template: Any, field: str, problems: list[Violation]) -> list[Prompt]:
    """Return the prompts of the rows up to the first one that the chat template refuses, which is added to `problems`."""
    from megatron_dapo.types import Prompt

    prompts: list[Prompt] = []
    for number, row in enumerate(rows):
        try:
            token_ids = template.render(row.messages)
        except ValueError as error:
            problems.append(UnusableInput(field, f"{row.location}: {error}"))
            break
        prompts.append(Prompt(str(number), row.messages, token_ids, row.answer, row.data_source, row.extra))
    return prompts


def _reward_problems(config: Config, inputs: ModelInputs, prompts: dict[str, list[Prompt]]) -> Iterator[Violation]:
    """Start one verifier process and let it see gold answers and made-up responses."""
    from megatron_dapo.trainer.build_rollout import open_verifier_pool, self_test

    reward = config.reward.model_copy(update={"num_workers": 1})
    for verifier in filter(None, (reward.verifier, reward.shadow_verifier)):
        field = "reward.verifier" if verifier == reward.verifier else "reward.shadow_verifier"
        try:
            with open_verifier_pool(reward, verifier) as pool:
                if verifier != reward.verifier:
                    continue
                for name, found in prompts.items():
                    bad = pool.validate_answers({prompt.answer for prompt in found})
                    for answer, why in islice(bad.items(), 1):
                        words = f"{len(bad)} gold answers cannot be used by {verifier}, such as {answer!r}: {why}"
                        yield UnusableInput(f"data.{name}", words)
                if prompts.get("train_paths"):
                    self_test(config, inputs, pool, prompts["train_paths"])
        except (ValueError, RuntimeError) as error:
            yield UnusableInput(field, str(error))
