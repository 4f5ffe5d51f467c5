"""Rejection sampling: responses of the recipe's model to its prompts, verified, selected, written with a data card."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.algorithms.selection import KEPT
from megatron_dapo.config import Config
from megatron_dapo.data.files import question_of
from megatron_dapo.data.model_inputs import read_model_inputs
from megatron_dapo.data.sources import train_files
from megatron_dapo.evaluation.build import evaluation_protocol, load_eval_dataset
from megatron_dapo.evaluation.runner import sample_and_score
from megatron_dapo.megatron.model_config import DTYPES
from megatron_dapo.rewards.build import open_verifier_pool
from megatron_dapo.run.derive import with_rollout_sampling
from megatron_dapo.run.evaluate import opened_engine
from megatron_dapo.selection.card import card, pictures, statistics
from megatron_dapo.selection.choose import choose_all, examples_of, responses_of
from megatron_dapo.selection.embed import Embed, by_ngrams, hidden_states, sentence_encoder
from megatron_dapo.trainer.build_rollout import load_train_dataset
from megatron_dapo.types import Prompt
from megatron_dapo.untrusted import printable
from megatron_dapo.watch.heartbeat import watched_alone

EXAMPLES, RESPONSES, CARD, REPORT = "examples.jsonl", "responses.jsonl", "README.md", "report.json"


def rejection_sample(config: Config, directory: Path) -> dict[str, Any]:
    """Write examples.jsonl, responses.jsonl, README.md with its pictures and report.json to `directory`; return the report.

    An existing directory is replaced once the new one is complete. One made from the same settings, model and data is
    left unchanged. ValueError if nothing can be sampled, or no response is kept.
    """
    with watched_alone("rejection-sample"):
        settings = sampling_settings(config)
        if (found := finished_report(directory, settings)) is not None:
            return found
        report = _sample(config, settings, directory.with_name(f"{directory.name}.tmp"))
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(directory.with_name(f"{directory.name}.tmp"), directory)
        return report


def sampling_settings(config: Config) -> dict[str, Any]:
    """Return everything that determines the examples, JSON-serializable."""
    rollout = config.rollout
    return {
        "model": str(config.model.path),
        "model_sha256": _digest(sorted(config.model.path.glob("*.safetensors"))),
        "data": [str(path) for path in train_files(config.data)],
        "data_sha256": _digest([path for path in train_files(config.data) if path.is_file()]),
        "left_out": [str(path) for path in config.data.eval_paths],
        "seed": config.run.seed,
        "engine": rollout.engine,
        "dtype": config.model.dtype,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "max_response_tokens": rollout.max_response_tokens,
        "template": config.data.template,
        "verifier": config.reward.verifier,
        **config.rejection_sampling.model_dump(mode="json"),
    }


def finished_report(directory: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the report in `directory` if it was made with `settings`; None otherwise."""
    path = directory / REPORT
    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report if report.get("settings") == json.loads(json.dumps(settings)) else None


def _sample(config: Config, settings: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    section = config.rejection_sampling
    rollout = config.rollout
    if config.environment.is_on:
        raise ValueError("rejection sampling selects responses of one turn: leave [environment] out")
    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    with open_verifier_pool(config.reward) as pool:
        dataset = load_train_dataset(config, inputs, pool)
        prompts = dataset.prompts
        if config.data.eval_paths:
            prompts = without(prompts, load_eval_dataset(config, inputs, pool).prompts)
        if not prompts:
            raise ValueError("every prompt of data.train_paths is in data.eval_paths: name other files")
        # The evaluation's protocol with the rollout's sampling.
        sampled = with_rollout_sampling(config, section.num_samples)
        protocol = evaluation_protocol(sampled, str(config.model.path), dataset, inputs.stop_tokens, pool.version)
        with opened_engine(config, config.model.path) as (engine, max_in_flight, _):
            problems, rows = sample_and_score(
                prompts, engine, pool, inputs.decode, protocol, max_in_flight=max_in_flight
            )
    responses = [(problem.prompt, row) for problem, row in zip(problems, rows, strict=True)]
    chosen = choose_all(responses, section, rollout.max_response_tokens, _embedding(config), config.run.seed)
    figures = {**statistics(chosen, config.run.seed), "prompts_left_out": len(dataset.prompts) - len(prompts)}
    if not figures["fates"].get(KEPT):
        raise ValueError(
            f"none of {figures['responses']} responses is kept ({figures['fates']}): sample more, from a better model or on "
            "easier prompts"
        )
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _write_lines(directory / EXAMPLES, examples_of(chosen))
    _write_lines(directory / RESPONSES, responses_of(chosen))
    drawn = pictures(chosen)
    for name, document in drawn.items():
        (directory / f"{name}.svg").write_text(document, encoding="utf-8")
    (directory / CARD).write_text(card(figures, settings, list(drawn)), encoding="utf-8")
    report = {"figures": figures, "settings": dict(settings)}
    (directory / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def without(prompts: tuple[Prompt, ...], others: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """Return the prompts whose questions differ from all of `others`, so that no evaluation problem is learned."""
    held_out = {question_of(prompt.messages) for prompt in others}
    return tuple(prompt for prompt in prompts if question_of(prompt.messages) not in held_out)


def _embedding(config: Config) -> Embed:
    section = config.rejection_sampling
    trusted = config.model.trust_remote_code
    if section.embedding == "ngrams":
        return by_ngrams
    if section.embedding == "encoder":
        return sentence_encoder(Path(section.encoder_path), trusted)
    return hidden_states(config.model.path, DTYPES[config.model.dtype], trusted)


def _digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the files' contents, in their order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(printable(json.dumps(record, ensure_ascii=False)) + "\n" for record in records)
