"""`megatron-dapo init DATA`: a recipe and a reward for your rows, with steps of under a minute on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_dapo.cli.options import refuse, refusing
from megatron_dapo.cli.recipes import DIRECTIVE, SCHEMA, schema_text
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.derive import derive
from megatron_dapo.config.loader import toml_value
from megatron_dapo.data.files import Columns, read_table
from megatron_dapo.plan import cpu
from megatron_dapo.rounding import round_up
from megatron_dapo.run.plan import Machines, machines_of
from megatron_dapo.telemetry.terminal import status

if TYPE_CHECKING:
    from megatron_dapo.models.architecture import ModelArchitecture

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "task", "messages")
ANSWERS = ("answer", "final_answer", "solution", "target", "label", "output", "expected", "gold", "ground_truth")
_NUM_ROWS = 1024  # rows read at most
_STEP_SECONDS, _RUN_SECONDS = 45.0, 900.0  # targets for a step and for a run
_RESPONSES = (512, 256, 128, 64, 32, 16)  # lengths to try, longest first
_SMALL_MODEL = 1e9  # parameters below which a larger learning rate is right
_REWARD = '''"""Rewards of own.toml; `reward.verifier` names one of them. Each gets a `sample` with `response`, `answer` and `extra_info`."""

import json
import os
import re


def exact(sample):
    """1 if the final answer is the gold one: what follows the last "Answer:", otherwise the last word."""
    return 1.0 if _final(sample.response) == _plain(sample.answer) else 0.0


def partial(sample):
    """1 for the right final answer, 0.5 if the gold answer is anywhere in the response: a small model finds that first."""
    if exact(sample):
        return 1.0
    words = [_plain(word) for word in sample.response.split()]
    return 0.5 if _plain(sample.answer) in (*words, _plain(sample.response)) else 0.0


async def judge(sample):
    """The share of 10 points that a language model gives. Set JUDGE_URL and JUDGE_KEY, and name them in reward.environment."""
    import httpx

    task = f"Reference answer: {sample.answer}\\nResponse: {sample.response}\\nGive 0 to 10 points. Reply with the number only."
    body = {"model": os.environ.get("JUDGE_MODEL", "judge"), "messages": [{"role": "user", "content": task}]}
    headers = {"Authorization": "Bearer " + os.environ["JUDGE_KEY"]}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(os.environ["JUDGE_URL"], content=json.dumps(body), headers=headers)
    number = re.search(r"\\d+", reply.json()["choices"][0]["message"]["content"])
    return min(10, int(number.group())) / 10 if number else 0.0


def _final(response):
    after = response.rpartition("Answer:")[2].strip()
    words = after.splitlines()[0] if "Answer:" in response and after else (response.split() or [""])[-1]
    return _plain(words)


def _plain(text):
    return str(text).strip().strip(".,;:!?$*\\"'`()").lower()
'''


def init(
    data: Annotated[Path, typer.Argument(help="rows: .jsonl, .json, .csv, .parquet or a saved data set")],
    model: Annotated[str, typer.Option(help="Hugging Face directory, or OWNER/NAME of the Hub")] = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(help="recipe to write; reward.py is written next to it")] = Path("own.toml"),
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
) -> None:
    """Write a recipe for your rows, sized for this machine, and a reward with three variants; then `try` and `train` it."""
    reward = output.parent / "reward.py"
    if there := [str(path) for path in (output, reward) if path.exists()]:
        if not force:
            refuse(f"{' and '.join(there)}: there already; --force replaces them, --output names others")
    with refusing(ValueError, OSError), status("reading rows and model"):
        rows = list(islice((values for _, values in read_table(data, Columns((), None))), _NUM_ROWS))
        columns = columns_of(rows, data)
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = base_settings(data, model, columns, output)
        lines = sized_lines(settings, rows, columns, output)
        if not reward.exists() or force:
            reward.write_text(_REWARD.replace("own.toml", output.name), encoding="utf-8")
        (output.parent / SCHEMA).write_text(schema_text(), encoding="utf-8")
    for line in lines:
        typer.echo(line)
    typer.echo(f"wrote {output} and {reward}: megatron-dapo try {output}, then megatron-dapo train {output}")


def columns_of(rows: Iterable[Mapping[str, Any]], data: Path) -> dict[str, str]:
    """Return the columns of prompt and gold answer, the latter "" if there is none. ValueError if no column looks like a
    prompt."""
    rows = list(rows)
    names = {name.lower(): name for name in rows[0]}
    prompt = next((names[name] for name in PROMPTS if name in names), None)
    if prompt is None:
        raise ValueError(
            f"{data}: none of its columns ({', '.join(rows[0])}) is called {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}; rename one"
        )
    if isinstance(nested := rows[0].get("reward_model"), Mapping) and "ground_truth" in nested:
        return {"prompt": prompt, "answer": "reward_model.ground_truth"}
    return {"prompt": prompt, "answer": next((names[name] for name in ANSWERS if name in names), "")}


def base_settings(data: Path, model: str, columns: Mapping[str, str], output: Path) -> dict[str, Any]:
    """Return what does not depend on sizes, by path."""
    is_directory = Path(model).is_dir()
    near = os.path.relpath(data.resolve(), output.resolve().parent)
    return {
        "run.name": output.stem,
        "run.output_dir": f"runs/{output.stem}",
        "model.path": os.path.relpath(Path(model).resolve(), output.resolve().parent) if is_directory else model,
        "data.train_paths": [near],
        "data.columns": dict(columns),
        "data.held_out_share": 0.1,
        "reward.verifier": f"reward.py:{'partial' if columns['answer'] else 'judge'}",
        "rollout.group_size": 8,
        "rollout.dynamic_sampling": "soft",
        "optimizer.warmup_steps": 2,
        "evaluation.num_samples": 8,
        "evaluation.top_p": 1.0,
        "checkpoint.interval": 0,
        "telemetry.samples_per_step": 16,
    }


def sized_lines(
    settings: dict[str, Any], rows: list[Mapping[str, Any]], columns: Mapping[str, str], output: Path
) -> list[str]:
    """Write the recipe with sizes for this machine, and return the lines about it."""
    from megatron_dapo.doctor.hub_inputs import local_model
    from megatron_dapo.models.config_json import read_architecture

    write_recipe(output, settings, [])
    try:
        copy, absent = local_model(load_config(output))
        if absent:
            raise ConfigError(absent, str(output))
        config = load_config(output, copy).config
        architecture = read_architecture(config.model.path)
        machines = machines_of(dry_run=False)
        settings |= sizes_for(architecture, machines, longest_prompt(rows, columns["prompt"]))
        settings, found, comments = fitted(settings, architecture, machines, len(rows), output)
    except Exception:
        output.unlink(missing_ok=True)  # it has no sizes
        raise
    write_recipe(output, settings, comments)
    return [f"data: {len(rows):,} rows read; prompt in {columns['prompt']!r}, answer in {columns['answer'] or 'no column'!r}", *found]


def longest_prompt(rows: list[Mapping[str, Any]], column: str) -> int:
    """Return tokens that hold every prompt with its template, by its characters: two a token is rarely exceeded."""
    characters = max(len(row[column] if isinstance(row[column], str) else json.dumps(row[column], default=str)) for row in rows)
    return round_up(characters // 2 + 64, 64)


def sizes_for(architecture: ModelArchitecture, machines: Machines, prompt_tokens: int) -> dict[str, Any]:
    """Return the settings that follow from the model and the kind of machine."""
    is_small = cpu.num_parameters(architecture) < _SMALL_MODEL
    prompt_tokens = min(prompt_tokens, architecture.max_position_embeddings // 2)
    on_gpus = machines.gpus_per_node > 0
    return {
        "model.dtype": "bfloat16" if on_gpus or machines.has_bf16 else "float32",
        "parallel.num_processes": max(1, machines.gpus_per_node),
        "data.max_prompt_tokens": prompt_tokens,
        "optimizer.learning_rate": 2e-5 if is_small else 1e-6,
        "rollout.prompts_per_step": 8 * max(1, machines.gpus_per_node),
        "training.mini_batch_prompts": 8 * max(1, machines.gpus_per_node),
    }


def fitted(
    settings: dict[str, Any], architecture: ModelArchitecture, machines: Machines, num_rows: int, output: Path
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the settings with the longest responses whose step takes less than a minute, lines about them, and comments."""
    limit = architecture.max_position_embeddings - settings["data.max_prompt_tokens"]
    sized: dict[str, Any] = {}
    for tokens in (length for length in _RESPONSES if length < limit):
        longest = settings["data.max_prompt_tokens"] + tokens
        sized = settings | {
            "rollout.max_response_tokens": tokens,
            "training.micro_batch_tokens": max(1024, round_up(longest, 256)),
            "rollout.slots_per_rank": 64,
        }
        write_recipe(output, sized, [])
        config = load_config(output).config
        if machines.gpus_per_node:
            return sized | {"run.total_steps": 100}, ["sizes are for GPUs: `train --dry-run` says whether they fit"], []
        estimate = cpu.estimate(config, architecture, machines.cores, machines.has_bf16, round(num_rows / 10))
        if estimate.step <= _STEP_SECONDS:
            break
    steps = int(min(40, max(10, _RUN_SECONDS / estimate.step)))
    config = derive(config, {"run": {"total_steps": steps}})
    estimate = cpu.estimate(config, architecture, machines.cores, machines.has_bf16, round(num_rows / 10))
    line = cpu.step_line(config, estimate, machines.cores)
    return sized | {"run.total_steps": steps}, [line], [f"Sized for this machine: {line}"]


def write_recipe(output: Path, settings: Mapping[str, Any], comments: Iterable[str]) -> None:
    """Write settings by path as a recipe with a table for each section."""
    tables: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        tables.setdefault(section, {})[name] = value
    output.write_text("\n".join(_recipe_lines(tables, comments)) + "\n", encoding="utf-8")


def _recipe_lines(tables: Mapping[str, Mapping[str, Any]], comments: Iterable[str]) -> Iterator[str]:
    yield f"{DIRECTIVE} {SCHEMA}"
    yield "# A recipe for your rows, written by `megatron-dapo init`. Paths are relative to this file."
    yield from (f"# {comment}" for comment in comments)
    for section, values in tables.items():
        yield f"\n[{section}]"
        for name, value in values.items():
            note = "  # others: exact, judge (reward.py)" if (section, name) == ("reward", "verifier") else ""
            yield f"{name} = {toml_value(value)}{note}"
