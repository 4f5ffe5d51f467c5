"""Tries everything that a run reads and starts before its processes begin: weights, data, chat template, reward,
engine."""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megatron_dapo.config import Config
from megatron_dapo.config.rules import UnusableInput, Violation
from megatron_dapo.data.files import Row
from megatron_dapo.data.sources import Source, eval_sources, train_sources
from megatron_dapo.doctor import gather, recipe
from megatron_dapo.doctor.engine_import import engine_libraries
from megatron_dapo.launch.environment import rendezvous_problem
from megatron_dapo.untrusted import one_line, read_json

if TYPE_CHECKING:
    from megatron_dapo.data.model_inputs import ModelInputs
    from megatron_dapo.types import Prompt

SAMPLING = "of each file the first rows, the last ones and a sample drawn by a fixed seed, 1,024 rows at most; the whole of a small file"
_MAX_ROWS = 2048  # of all files: their answers are checked by the verifier
_CONNECT_S = 2.0  # to a server that runs already
_MAX_HEADER = 100_000_000  # bytes, of a weights file: the limit of the format
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def input_problems(config: Config, is_here: bool = True) -> list[Violation]:
    """Return everything that would stop a run of this configuration before its first step, one line each.

    Of weights all headers are read, of data rows from places all over each file (`SAMPLING`); a made-up response is scored, and
    SGLang is imported by the engines' interpreter. Inputs that are not there at all are left to `config.inputs.missing_inputs`.
    is_here: the run is to start on this machine, so addresses of servers have to be its own. Takes seconds, most of them imports.
    """
    with ThreadPoolExecutor(1) as beside:
        engine = beside.submit(lambda: list(_engine_problems(config, tries_import=True)))
        problems = [*_rendezvous_problems(), *_machine_problems(config, is_here), *_model_problems(config)]
        has_tokenizer = config.model.path.is_dir() and not any(problem.path == "model.path" for problem in problems)
        rows = _rows_of(config, problems)
        if has_tokenizer:
            problems += _prompt_problems(config, rows)
        return problems + engine.result()


def quick_problems(config: Config) -> list[Violation]:
    """Return what can be found in a second or two, before the processes of a run start: nothing of it imports torch.

    Chat template, tensors' shapes and the reward are left to the processes, which load them anyway.
    """
    with ThreadPoolExecutor(1) as beside:
        engine = beside.submit(lambda: list(_engine_problems(config, tries_import=False)))
        problems = [*_machine_problems(config, True), *_model_file_problems(config)]
        _rows_of(config, problems)
        return problems + engine.result()


# ---- this machine, engines


def _machine_problems(config: Config, is_here: bool) -> Iterator[Violation]:
    if problem := gather.output_dir_problem(config.run.output_dir):
        fix = "set run.output_dir to a directory of your own, or wait for the run that uses it"
        yield UnusableInput("run.output_dir", problem, fix)
    own = config.checkpoint.output_dir
    if own and (problem := gather.output_dir_problem(Path(own))):
        yield UnusableInput("checkpoint.output_dir", problem, "set it to a directory of your own")
    if not is_here or config.rollout.engine != "sglang":
        return
    for url in config.sglang.urls:
        if problem := _unreachable(url):
            fix = "start that server first, or leave sglang.urls out to have servers started"
            yield UnusableInput("sglang.urls", problem, fix)
    if config.sglang.api_key_file and (problem := gather.key_problem(config.sglang.api_key_file)):
        yield UnusableInput("sglang.api_key_file", problem, "")
    if not config.sglang.urls and (problem := gather.ports_problem(config.sglang.host, config.sglang.servers_per_node)):
        yield UnusableInput("sglang.host", problem, 'set sglang.host = "auto"')


def _rendezvous_problems() -> Iterator[Violation]:
    """Yield the problem of the port that a launcher's variables name; without a launcher `train` finds a port itself."""
    if problem := rendezvous_problem():
        yield UnusableInput("MASTER_PORT", problem, "unset it where `megatron-dapo train` starts the processes itself")


def _unreachable(url: str) -> str:
    """Return why no server listens at a URL, "" if one does."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return f"{url!r} is no URL of a server such as http://10.0.0.7:30000"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname, port), timeout=_CONNECT_S):
            return ""
    except (OSError, ValueError) as error:  # ValueError: a port that is none
        return f"{url}: no server listens there ({one_line(error)})"


def _engine_problems(config: Config, tries_import: bool) -> Iterator[Violation]:
    if config.rollout.engine != "sglang" or config.sglang.urls:
        return
    facts = gather.sglang_facts(config)
    if tries_import and facts.version is not None:
        facts = replace(facts, libraries=engine_libraries(facts.python, facts.record))
    findings = recipe.sglang_findings(facts)
    for finding in [*findings, *recipe.engine_library_findings(facts.libraries, config.sglang, None)]:
        if finding.verdict == "conflict":
            yield UnusableInput("sglang.python", finding.detail, finding.fix)


# ---- models


_COPY = "copy the directory again, or set model.path to another one"


def _model_problems(config: Config) -> Iterator[Violation]:
    if config.model.path.is_dir() and (problem := gather.model_problem(config)[0]):
        yield UnusableInput("model.path", problem, _COPY)
    if config.has_critic and config.critic.path:
        yield from (
            UnusableInput("critic.path", problem, _COPY) for problem in _broken_weights(Path(config.critic.path))
        )


def _model_file_problems(config: Config) -> Iterator[Violation]:
    """Yield what is wrong with the models' files: truncated or missing weights, tokenizer files that are not JSON."""
    path = config.model.path
    if path.is_dir():
        files = () if config.model.allow_random_init and not any(path.glob("*.safetensors")) else _broken_weights(path)
        for problem in (*files, *_broken_tokenizer(path), *_unknown_family(path)):
            yield UnusableInput("model.path", problem, _COPY)
    if config.has_critic and config.critic.path:
        yield from (
            UnusableInput("critic.path", problem, _COPY) for problem in _broken_weights(Path(config.critic.path))
        )


def _unknown_family(directory: Path) -> Iterator[str]:
    from megatron_dapo.models.families import FAMILIES

    document = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    model_type = document.get("model_type") if isinstance(document, dict) else None
    if isinstance(document, dict) and document and model_type not in FAMILIES:
        yield f"{directory}: model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}"


def _broken_weights(directory: Path) -> Iterator[str]:
    """Yield a line if the safetensors files of a directory are missing or truncated; no tensor is read."""
    if not directory.is_dir():
        return
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = sorted(set(read_json(index)["weight_map"].values()))
        except (ValueError, TypeError, LookupError, AttributeError):
            yield f"{index} is no index of weights files"
            return
        if missing := [name for name in named if not (directory / str(name)).is_file()]:
            yield f"{directory}: {len(missing)} of {len(named)} weights files are missing, e.g. {missing[0]}"
    elif not files:
        has_pickles = any(directory.glob("*.bin"))
        yield f"{directory}: no *.safetensors there" + (
            "; .bin files are pickles, which are not read: save the model with safe_serialization"
            if has_pickles
            else ""
        )
    yield from filter(None, map(_broken_file, files))


def _broken_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            return f"{path}: no safetensors file, or cut off in its header ({size:,} bytes)"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return f"{path}: its header is damaged"
    expected = 8 + length + max((end for end in ends if isinstance(end, int)), default=0)
    return (
        ""
        if size == expected
        else f"{path}: {size:,} bytes, its header asks for {expected:,}: cut off, or not copied whole"
    )


def _broken_tokenizer(directory: Path) -> Iterator[str]:
    found = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not found and not (directory / "tokenizer.model").is_file():
        yield f"{directory}: no tokenizer files there"
    for path in found:
        try:
            read_json(path)
        except ValueError as error:
            yield str(error)


# ---- data


def _rows_of(config: Config, problems: list[Violation]) -> dict[str, list[Row]]:
    """Return the sampled rows of the training and evaluation files by field; what is wrong with them joins `problems`."""
    rows: dict[str, list[Row]] = {}
    if config.algorithm.name == "sft":
        return rows
    name = "data.sources" if config.data.sources else "data.train_paths"
    for field, of in ((name, train_sources), ("data.eval_paths", eval_sources)):
        try:
            sources = of(config.data)
        except ValueError as error:
            problems.append(UnusableInput(field, str(error)))
            continue
        rows[field] = [row for source in sources for row in _rows(source, field, problems)]
    return rows


def _rows(source: Source, field: str, problems: list[Violation]) -> Iterator[Row]:
    """Yield rows of the files that can be read; the first problem of each of the others is added to `problems`."""
    for rows in source.sample():
        try:
            yield from islice(rows, _MAX_ROWS)
        except (ValueError, OSError) as error:
            problems.append(UnusableInput(field, one_line(error)))


def _prompt_problems(config: Config, rows: dict[str, list[Row]]) -> list[Violation]:
    """Return what is wrong with tokenizer, chat template and given responses, then with the reward."""
    # torch and transformers take seconds: what is wrong without them is known by now.
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it names what is not installed
    from megatron_dapo.data.dataset import prompt_template
    from megatron_dapo.data.model_inputs import read_model_inputs

    problems: list[Violation] = []
    try:
        inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
        template = prompt_template(config.data, inputs.tokenizer)
    except ValueError as error:
        return [UnusableInput("model.path", str(error), "copy the tokenizer's files again")]
    if config.algorithm.name == "sft":
        return list(_example_problems(config, template, inputs))
    prompts = {field: _rendered(found, template, field, problems) for field, found in rows.items()}
    for field, found in prompts.items():
        lengths = [len(prompt.token_ids) for prompt in found]
        if lengths and min(lengths) > config.data.max_prompt_tokens:
            values = {"data.max_prompt_tokens": config.data.max_prompt_tokens, "shortest prompt": min(lengths)}
            fix = f"raise it to at least {min(lengths)}"
            problems.append(Violation("data.max_prompt_tokens", f"a prompt of {field} that fits", fix, values))
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


# ---- reward


def _reward_problems(config: Config, inputs: ModelInputs, prompts: dict[str, list[Prompt]]) -> Iterator[Violation]:
    """Start one verifier process and let it see gold answers and made-up responses."""
    from megatron_dapo.rewards.build import open_verifier_pool, self_test

    reward = config.reward.model_copy(update={"num_workers": 1})
    trained = next((found for field, found in prompts.items() if field != "data.eval_paths"), [])
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
                        yield UnusableInput(name, words)
                if trained:
                    self_test(reward, inputs.tokenizer, pool, trained)
        except (ValueError, RuntimeError) as error:
            yield UnusableInput(field, str(error))
