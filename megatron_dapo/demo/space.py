"""The files of a demo: the page, its settings, the modules it imports, and a model card. Together they are a Hugging Face Space."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_dapo.config.loader import read_resolved
from megatron_dapo.config.schema import Config
from megatron_dapo.data.dataset import prompt_id_of
from megatron_dapo.data.files import Row
from megatron_dapo.data.sources import eval_sources
from megatron_dapo.demo.modules import imported_files, required_distributions
from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.telemetry.completions import distinct_tasks
from megatron_dapo.telemetry.summary import RunSummary, read_summary

GRADIO_VERSION = "6.31.0"  # pinned in requirements/demo-cpu-py311.txt
NUM_EXAMPLES = 5
_NUM_SHOWN = 50  # characters of an example that Gradio shows
_PACKAGE = Path(__file__).resolve().parents[1]
_REWARDS = "rewards"  # directory of a Space with the user's reward functions
_REQUIREMENTS = (
    "torch",
    "transformers>=5.0",
    "safetensors",
    "numpy",
    "pydantic>=2",
    "httpx",
    "math-verify[antlr4_13_2]>=0.9",
)


def write_demo(run: Path, directory: Path, base: str = "", trained: str = "") -> Path:
    """Write the page and its settings for a finished run into `directory`, and return the page's program.

    `base`, `trained`: directories, or repositories of the Hub; by default the run's model.path and its exported model.
    Raises ValueError, in one line, if the run has no export, or a file of its reward function is missing.
    """
    config, summary = _read_run(run)
    export = run / "huggingface"
    if not trained and not (export / "config.json").is_file():
        raise ValueError(
            f"{run} has no exported model (huggingface/): the run has not ended, or checkpoint.export_huggingface is off"
        )
    _copy_modules(directory)
    rows = _rows_to_show(run, config)
    settings = {
        "title": f"{config.run.name}: before and after",
        "text": _text(config, summary),
        "base": base or str(config.model.path.resolve()),
        "trained": trained or str(export.resolve()),
        "dtype": config.model.dtype,
        "template": config.data.template,
        "template_options": dict(config.data.chat_template_options),
        "turns": _turns_before(rows, config.data.system_prompt),
        "reward": _reward(config, directory),
        "sampling": {
            "temperature": config.evaluation.temperature,
            "top_p": config.evaluation.top_p,
            "top_k": config.evaluation.top_k,
            "max_new_tokens": config.evaluation_response_tokens,
        },
        "examples": _examples(rows),
    }
    _write_settings(directory, settings)
    return directory / "app.py"


def write_space(run: Path, directory: Path, base: str = "", trained: str = "") -> Path:
    """Write a whole Space: the demo, requirements.txt and a model card. Models that are directories are copied into it.

    Raises ValueError if `directory` already has files: a Space is written whole.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: name another directory, or remove it")
    program = write_demo(run, directory, base, trained)
    settings = json.loads((directory / "demo.json").read_text(encoding="utf-8"))
    for name in ("base", "trained"):
        if Path(settings[name]).is_dir():
            shutil.copytree(settings[name], directory / name)
            settings[name] = name
    classifier = settings["reward"]["reward_model"]
    if classifier["path"] and Path(classifier["path"]).is_dir():
        shutil.copytree(classifier["path"], directory / "reward_model")
        classifier["path"] = "reward_model"
    _write_settings(directory, settings)
    own = sorted((directory / _REWARDS).rglob("*.py"))
    known = {name.partition("[")[0].partition(">")[0] for name in _REQUIREMENTS}
    more = [name for name in required_distributions(directory, own) if name not in known and name != "megatron-dapo"]
    (directory / "requirements.txt").write_text("\n".join([*_REQUIREMENTS, *more]) + "\n", encoding="utf-8")
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n", encoding="utf-8")
    (directory / "README.md").write_text(_card(settings), encoding="utf-8")
    return program


def _copy_modules(directory: Path) -> None:
    """Copy the page and the modules of the package that it and the verifier processes import."""
    program = _PACKAGE / "demo" / "app.py"
    # Verifiers are imported by names that are made at run time, so all of them are roots.
    roots = [program, *(_PACKAGE / "rewards").rglob("*.py")]
    modules = imported_files(_PACKAGE.parent, roots)
    # Modules read the files of data next to them.
    _copy({*modules, *(data for file in modules for data in file.parent.glob("*.json"))}, _PACKAGE.parent, directory)
    shutil.copyfile(program, directory / "app.py")


def _write_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    (directory / "demo.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_run(run: Path) -> tuple[Config, RunSummary | None]:
    file = run / "config.json"
    if not file.is_file():
        problem = "is no run's directory: it has no config.json" if run.is_dir() else "does not exist"
        raise ValueError(f"{run} {problem}; name the run.output_dir of a run")
    summary = run / "summary.json"
    return read_resolved(file).config, read_summary(summary) if summary.is_file() else None


# ---- the reward


def _reward(config: Config, directory: Path) -> dict[str, Any]:
    """Return the run's section [reward] for the page: one process of each verifier, and the user's functions as files of
    `directory`."""
    reward = config.reward.model_dump(mode="json")
    reward |= {"num_workers": 1, "shadow_verifier": "", "verifier": _with_files(config.reward.verifier, directory)}
    for component, written in zip(reward["mix"], config.reward.mix, strict=True):
        # The name of a part is that of its function, which stays.
        component["verifier"] = _with_files(written.verifier, directory)
    if (model := reward["reward_model"])["path"]:
        model["path"] = str(Path(model["path"]).resolve())
    return reward


def _with_files(verifier: str, directory: Path) -> str:
    """Copy the files of a user's function and return its path from the page; a preset stays as it is."""
    place, _, name = verifier.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            raise ValueError(f"reward.verifier = {verifier!r}: {file} is not there; call this where the run was started")
        _copy(imported_files(file.parent, [file]), file.parent, directory / _REWARDS / file.parent.name)
        return f"{_REWARDS}/{file.parent.name}/{file.name}:{name}"
    # A module of the directory in which the run was started; any other one is installed.
    module = Path.cwd().joinpath(*place.split("."))
    if files := [each for each in (module.with_suffix(".py"), module / "__init__.py") if place and each.is_file()]:
        if place.partition(".")[0] != _PACKAGE.name:
            _copy(imported_files(Path.cwd(), files), Path.cwd(), directory / _REWARDS)
    return verifier


def _copy(files: Iterable[Path], root: Path, target: Path) -> None:
    for file in files:
        copy = target / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


# ---- the examples


def _rows_to_show(run: Path, config: Config) -> list[Row]:
    """Return held-out problems, those first whose accuracy has risen most; none if their file is gone."""
    rises = _rises(run)
    rows = [
        row
        for source in eval_sources(config.data)
        for row in (source.rows() if all(path.exists() for one in (source, *source.others) for path in one.paths) else ())
        if row.messages[-1]["role"] == "user"
    ]
    unique = {prompt_id_of(row.messages, row.answer): row for row in reversed(rows)}
    order = sorted(reversed(unique), key=lambda name: -rises.get(name, 0.0))
    return [unique[name] for name in islice(order, NUM_EXAMPLES)]


def _rises(run: Path) -> dict[str, float]:
    """Return prompt_id -> accuracy of the last evaluation minus that of the first."""
    files = sorted((run / "evaluations").glob("step_*.json"))
    if len(files) < 2:
        return {}
    try:
        first, last = (
            {one.problem_id: sum(one.accuracies) / len(one.accuracies) for one in EvaluationResult.from_json(text).problems}
            for text in (files[place].read_text(encoding="utf-8") for place in (0, -1))
        )
    except (OSError, ValueError):
        return {}
    return {name: last[name] - first[name] for name in last.keys() & first.keys()}


def _turns_before(rows: Sequence[Row], system_prompt: str) -> list[dict[str, str]]:
    """Return the turns before a visitor's problem: those before the first example, such as solved ones that show the form."""
    if rows:
        return [dict(turn) for turn in rows[0].messages[:-1]]
    return [{"role": "system", "content": system_prompt}] if system_prompt else []


def _examples(rows: Sequence[Row]) -> list[dict[str, Any]]:
    prompts = [row.messages[-1]["content"] for row in rows]
    tasks = [" ".join(task.split()) for task in distinct_tasks(prompts)]
    if len({task[:_NUM_SHOWN] for task in tasks}) < len(tasks):  # the problem follows an instruction in the same line
        tasks = [f"... {task[-_NUM_SHOWN:].partition(' ')[2]}" for task in tasks]
    return [
        {
            "prompt": prompt,
            "answer": row.answer,
            "turns": [dict(turn) for turn in row.messages[:-1]],
            "label": task,
            "data_source": row.data_source,
            "extra": json.loads(json.dumps(dict(row.extra), default=str)),
        }
        for row, prompt, task in zip(rows, prompts, tasks, strict=True)
    ]


# ---- texts


def _text(config: Config, summary: RunSummary | None) -> str:
    """Return the description of the run for the page and the card."""
    parts = [f"{config.model.path.name}, trained with {config.algorithm.name.upper()} by megatron_dapo."]
    evaluations: Mapping[str, Mapping[str, float]] = summary.extra.get("evaluations", {}) if summary else {}
    if summary:
        parts.append(f"{summary.train_steps} train steps ({summary.optimizer_steps} optimizer steps).")
    if evaluations:
        steps: Sequence[str] = sorted(evaluations, key=int)
        scores = [_score(evaluations[step]) for step in (steps[0], steps[-1])]
        parts.append(f"Held-out avg@{config.evaluation.num_samples}: {scores[0]} before, {scores[1]} after.")
    return " ".join(parts)


def _score(metrics: Mapping[str, Any]) -> str:
    low, high = metrics["eval/avg_at_k_low"], metrics["eval/avg_at_k_high"]
    return f"{metrics['eval/avg_at_k']:.3f} [{low:.3f}, {high:.3f}]"


def _card(settings: Mapping[str, Any]) -> str:
    reward = settings["reward"]
    names = [one["verifier"] for one in reward["mix"]] if reward["verifier"] == "mix" else [reward["verifier"]]
    keys = [reward[name]["key_variable"] for name in names if name in ("judge", "remote", "reward_model")]
    secrets = [name for name in (*reward["environment"], *keys) if name]
    needs = f"Set {', '.join(secrets)} in the Space's settings: the reward needs them.\n\n" if secrets else ""
    return (
        "---\n"
        f"title: {json.dumps(settings['title'])}\n"
        "sdk: gradio\n"
        f"sdk_version: {GRADIO_VERSION}\n"
        "app_file: app.py\n"
        "---\n\n"
        f"# {settings['title']}\n\n{settings['text']}\n\n"
        "Both models answer the same problem with the same random numbers; the reward of the training judges "
        f"the responses (`{', '.join(names)}`).\n\n{needs}"
        f"Base: `{settings['base']}`. Trained: `{settings['trained']}`. The licence of the weights is that of the base model.\n"
    )
