"""Tries everything that a run reads and starts before its processes begin: weights, data, chat template, reward,
engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megatron_dapo.checkpoints.disk_space import existing_parent
from megatron_dapo.config import Config
from megatron_dapo.config.rules import Doubt, UnusableInput, Violation, broken_rules
from megatron_dapo.data.dataset import ALL_TRAINED, also_trained, collect_rows, find_conflicts
from megatron_dapo.data.files import Row
from megatron_dapo.data.sources import Source, eval_sources, train_sources
from megatron_dapo.data.template import check_tokenizer_files
from megatron_dapo.doctor import gather, recipe
from megatron_dapo.doctor.engine_import import engine_libraries
from megatron_dapo.doctor.machine import Finding, TorchFacts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.files.safetensors import read_header
from megatron_dapo.launch.environment import rendezvous_problem
from megatron_dapo.launch.lifetime import require_unused
from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.models.lora import adapter_shapes
from megatron_dapo.telemetry.terminal import quiet_libraries
from megatron_dapo.untrusted import blamed_on, one_line, read_json

if TYPE_CHECKING:
    from megatron_dapo.data.model_inputs import ModelInputs
    from megatron_dapo.types import Prompt

SAMPLING = "of each file the first rows, the last ones and a sample drawn by a fixed seed, 1,024 rows at most; the whole of a small file"
_MAX_ROWS = 2048  # total of all files: the verifier checks their answers
_SAVED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # safetensors' names
_CONNECT_S = 2.0  # a server that already runs
_COPY = "copy the directory again, or set model.path to another one"


def input_problems(config: Config, is_here: bool = True) -> list[Violation]:
    """Return everything that would stop a run of this configuration before its first step, one line each, and doubts.

    Of weights all headers are read, of data rows from places all over each file (`SAMPLING`); a made-up response is scored, and
    SGLang is imported by the engines' interpreter. Inputs that are not there at all are left to `config.inputs.missing_inputs`.
    is_here: the run is to start on this machine, so addresses of servers have to be its own. Takes seconds, most of them imports.
    """
    with ThreadPoolExecutor(1) as executor:
        engine = executor.submit(lambda: list(_engine_problems(config, tries_import=True)))
        problems = [*_rendezvous_problems(), *machine_problems(config, is_here), *model_problems(config)]
        has_tokenizer = config.model.path.is_dir() and not any(problem.path == "model.path" for problem in problems)
        rows = _rows_of(config, problems)
        if has_tokenizer:
            problems += _prompt_problems(config, rows)
        return problems + engine.result()


def quick_problems(config: Config) -> list[Violation]:
    """Return what can be found in a second or two, before the processes of a run start: nothing of it imports torch.

    Chat template, tensors' shapes and the reward are left to the processes, which load them anyway.
    """
    with ThreadPoolExecutor(1) as executor:
        engine = executor.submit(lambda: list(_engine_problems(config, tries_import=False)))
        problems = [*machine_problems(config, True), *_file_problems(config)]
        _rows_of(config, problems)
        return problems + engine.result()


# ---- this machine, engines


def machine_problems(config: Config, is_here: bool) -> Iterator[Violation]:
    """Yield what is wrong with the directories that a run writes and, if it starts here, with its servers' addresses and key."""
    own_directory = "set it to a directory of your own, or wait for the run that uses it"
    for field, directory in (
        ("run.output_dir", config.run.output_dir),
        ("checkpoint.output_dir", config.checkpoint.output_dir),
    ):
        if directory and (problem := _directory_problem(Path(directory))):
            yield UnusableInput(field, problem, own_directory)
    if problem := _other_model(config):
        fix = "set checkpoint.output_dir or run.output_dir to a new directory, or model.path and model.dtype to that model's"
        yield UnusableInput("checkpoint.output_dir" if config.checkpoint.output_dir else "run.output_dir", problem, fix)
    if not is_here or config.rollout.engine != "sglang":
        return
    for url in config.sglang.urls:
        if problem := _unreachable(url):
            fix = "start that server first, or leave sglang.urls out to have servers started"
            yield UnusableInput("sglang.urls", problem, fix)
    try:
        if config.sglang.api_key_file:
            read_key(Path(config.sglang.api_key_file))
    except ValueError as error:
        yield UnusableInput("sglang.api_key_file", str(error), "")
    # Each server needs a port for requests, one for its ranks' rendezvous and, over several nodes, one for its parts'.
    num_ports = (3 if config.sglang.nodes_per_server > 1 else 2) * config.sglang.servers_per_node
    if not config.sglang.urls and (problem := _ports_problem(config.sglang.host, num_ports)):
        yield UnusableInput("sglang.host", problem, 'set sglang.host = "auto", or end the processes that use the ports')


def _directory_problem(output_dir: Path) -> str:
    """Return the reason why a run cannot write into `output_dir`, "" for none. Nothing is created."""
    parent = existing_parent(output_dir)
    if not os.statvfs(parent).f_blocks:
        return f"{output_dir} cannot be created: {parent} holds no files of users"  # /proc, /sys
    if not parent.is_dir():
        return f"{parent} is a file, not a directory"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written by user {os.geteuid()}"
    try:
        require_unused(output_dir)
    except (RuntimeError, OSError) as error:
        return str(error)
    return ""


def _other_model(config: Config) -> str:
    """Return the difference between the policy and that of the newest checkpoint which the run would resume, "" for none."""
    # The trainer compares every tensor when it loads. Only what needs no torch is read here.
    found = sorted(path for path in config.checkpoint_dir.glob("step_*/policy.json") if path.parent.name[5:].isdigit())
    if not found or not (planned_directory(config.model.path) / "config.json").is_file():
        return ""
    try:
        index = read_json(found[-1])
        saved = {name: tuple(shape) for name, shape in index["tensors"].items()}
        kind = index["kinds"]["parameter"]
        own, lora = read_architecture(planned_directory(config.model.path)).shapes(), config.model.lora
        own = adapter_shapes(own, lora.rank, lora.targets) if lora.rank else own
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return ""  # a damaged checkpoint falls back to an older one, and a model's directory has its own check
    different = [name for name in {**saved, **own} if saved.get(name) != own.get(name)]
    words = {name: f"{name} {saved.get(name, 'is missing')} there, {own.get(name, 'missing')} in the model" for name in different[:1]}
    if different:
        return f"{found[-1].parent} is of another model: {len(different)} tensors differ, first {words[different[0]]}"
    if kind != _SAVED_DTYPES[config.model.dtype]:
        return f"{found[-1].parent} holds parameters of type {kind}, model.dtype is {config.model.dtype}"
    return ""


def _ports_problem(host: str, count: int) -> str:
    """Return the reason why `count` ports cannot be reserved on `host` at once, "" for none. They are released."""
    from megatron_dapo.engines.sglang.ports import listen_address, reserve_port

    # All at once: a port that is released before the next is reserved would be found twice.
    with ExitStack() as stack:
        try:
            for _ in range(count):
                stack.callback(reserve_port(listen_address(host, "127.0.0.1").bind).release)
        except (ValueError, RuntimeError) as error:
            return str(error)
    return ""


def _rendezvous_problems() -> Iterator[Violation]:
    """Yield the problem of the port that a launcher's variables name; without a launcher `train` finds a port itself."""
    if problem := rendezvous_problem():
        yield UnusableInput("MASTER_PORT", problem, "unset it: slurm.sh and `megatron-dapo train` find a free port")


def _unreachable(url: str) -> str:
    """Return why no server listens at a URL, "" if one does."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return f"{url!r} is no URL of a server such as http://10.0.0.7:30000"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname, port), timeout=_CONNECT_S):
            return ""
    except (OSError, ValueError) as error:  # ValueError: an invalid port
        return f"{url}: no server listens there ({one_line(error)})"


def engine_findings(config: Config, trainer: TorchFacts | None, tries_import: bool = True) -> list[Finding]:
    """Check the environment of the servers that a run would start. `trainer` None: versions are not compared with its torch."""
    facts = gather.sglang_facts(config)
    if tries_import and facts.version is not None:
        facts = replace(facts, libraries=engine_libraries(facts.python, facts.record))
    findings = recipe.sglang_findings(facts, config.sglang.update_pause, config.rollout.is_restricted)
    return [*findings, *recipe.engine_library_findings(facts.libraries, config.sglang, trainer)]


def _engine_problems(config: Config, tries_import: bool) -> Iterator[Violation]:
    if config.rollout.engine != "sglang" or config.sglang.urls:
        return
    for finding in engine_findings(config, None, tries_import):
        if finding.verdict == "conflict":
            yield UnusableInput("sglang.python", finding.detail, finding.fix)


# ---- models


def model_problems(config: Config) -> Iterator[Violation]:
    """Yield what is wrong with the models' directories. Headers of weights are read, tensors are not."""
    from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint

    problems = list(_file_problems(config))
    yield from problems
    if _has_weights(config) and not any(problem.path == "model.path" for problem in problems):
        try:
            with HFCheckpoint(config.model.path) as weights:
                weights.check(read_architecture(config.model.path))
        except (ValueError, OSError) as error:
            yield UnusableInput("model.path", str(error), _COPY)


def _file_problems(config: Config) -> Iterator[Violation]:
    """Yield the first problem of each model's files: truncated or missing weights, a tokenizer's file that is broken."""
    models = {"model.path": config.model.path}
    if config.has_critic and config.critic.path:
        models["critic.path"] = Path(config.critic.path)
    for field, path in models.items():
        try:
            if path == config.model.path and path.is_dir():
                check_tokenizer_files(path)
            if path.is_dir() and (path != config.model.path or _has_weights(config)):
                _check_weights(path)
        except (ValueError, OSError) as error:
            yield UnusableInput(field, str(error), _COPY)


def _has_weights(config: Config) -> bool:
    path = config.model.path
    return path.is_dir() and not (config.model.allow_random_init and not any(path.glob("*.safetensors")))


def _check_weights(directory: Path) -> None:
    """Raise ValueError if the safetensors files of a directory are missing or truncated; no tensor is read."""
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        with blamed_on(index):
            named = sorted(set(read_json(index)["weight_map"].values()))
        if missing := [name for name in named if not (directory / str(name)).is_file()]:
            raise ValueError(
                f"{directory}: {len(missing)} of {len(named)} weights files are missing, e.g. {missing[0]}"
            )
    elif not files:
        pickles = "; .bin files are pickles, which are not read: save the model with safe_serialization"
        raise ValueError(f"{directory}: no *.safetensors there" + (pickles if any(directory.glob("*.bin")) else ""))
    for path in files:
        read_header(path)


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
    problems += [*_shared_problems(config, rows), *_contradictions(rows)]
    return rows


def _shared_problems(config: Config, rows: Mapping[str, list[Row]]) -> Iterator[Violation]:
    """Yield a violation if the run evaluates on nothing but what it trains on, a doubt if it does so in part."""
    evaluation, held_out = config.evaluation, rows.get("data.eval_paths", [])
    if not (evaluation.interval or evaluation.at_start or evaluation.at_end):
        return
    trained = next((found for field, found in rows.items() if field != "data.eval_paths"), [])
    shared = also_trained(held_out, trained)
    if shared and len(shared) == len(held_out):
        yield UnusableInput("data.eval_paths", ALL_TRAINED.format(len(shared)))
    elif shared:
        count = f"{len(shared)} of {len(held_out)} held-out problems are also trained on, the first at {shared[0].location}"
        yield Doubt("data.eval_paths", f"{count}, which makes accuracy look better", "remove them from one of both")


def _contradictions(rows: Mapping[str, list[Row]]) -> Iterator[Violation]:
    for field, found in rows.items():
        if conflicts := find_conflicts(collect_rows(found).rows):
            first = conflicts[0]
            pair = " and ".join(f"{answer!r} ({at})" for answer, at in list(zip(first.answers, first.locations))[:2])
            count = f"{len(conflicts)} prompt{'s have' if len(conflicts) > 1 else ' has'} several gold answers"
            yield Doubt(field, f"{count}, of which at most one is right: {pair}", "keep the right row of each")


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
    quiet_libraries()
    from megatron_dapo.data.dataset import prompt_template
    from megatron_dapo.data.model_inputs import read_model_inputs

    problems: list[Violation] = []
    try:
        inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
        template = prompt_template(config.data, inputs.tokenizer, inputs.vocab_size)
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
        elif field != "data.eval_paths" and (
            long := sum(length > config.data.max_prompt_tokens for length in lengths)
        ):
            words = f"{long} of {len(lengths)} prompts that were read are longer than {config.data.max_prompt_tokens} tokens"
            fix = f"none if they may be left out; the longest has {max(lengths)}"
            problems.append(Doubt("data.max_prompt_tokens", words, fix))
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

    # The validator names what is wrong with the section, which no verifier process could be started with.
    if next(broken_rules(config.reward), None):
        return
    trained = next((found for field, found in prompts.items() if field != "data.eval_paths"), [])
    reward = config.reward
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
