"""The files of a demo: the page, its settings, the modules it imports, and a model card. Together they are a Hugging Face Space."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config.loader import read_resolved
from megatron_dapo.config.schema import Config
from megatron_dapo.data.files import read_rows
from megatron_dapo.telemetry.summary import RunSummary, read_summary

GRADIO_VERSION = "6.31.0"  # of requirements/demo-cpu-py311.txt
NUM_EXAMPLES = 5
_PACKAGE = Path(__file__).resolve().parents[1]
# What the page imports, and what these modules import.
MODULES = (
    "__init__.py",
    "untrusted.py",
    "data/__init__.py",
    "data/template.py",
    "rewards/__init__.py",
    "rewards/verifiers/dapo.py",
    "rewards/verifiers/lenient.py",
    "rewards/verifiers/math_answers.py",
    "rewards/result.py",
    "rewards/verifiers/__init__.py",
    "rewards/verifiers/adapters.py",
    "rewards/verifiers/verifier.py",
)
_REQUIREMENTS = ("torch", "transformers>=5.0", "safetensors", "numpy", "math-verify[antlr4_13_2]>=0.9")


def write_demo(run: Path, directory: Path, base: str = "", trained: str = "") -> Path:
    """Write the page and its settings for a finished run into `directory`, and return the page's program.

    `base`, `trained`: directories, or repositories of the Hub; by default the run's model.path and its exported model.
    Raises ValueError, in one line, if the run has no export, or has a custom verifier, which a Space lacks.
    """
    config, summary = _read_run(run)
    if config.reward.verifier not in ("dapo", "lenient"):
        raise ValueError(
            f"{run}: reward.verifier = {config.reward.verifier!r} ; a demo has the presets dapo and lenient alone"
        )
    export = run / "huggingface"
    if not trained and not (export / "config.json").is_file():
        raise ValueError(
            f"{run} has no exported model (huggingface/): the run has not ended, or checkpoint.export_huggingface is off"
        )
    for name in MODULES:
        target = directory / "megatron_dapo" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_PACKAGE / name, target)
    shutil.copyfile(_PACKAGE / "demo" / "app.py", directory / "app.py")
    settings = {
        "title": f"{config.run.name}: before and after",
        "text": _text(config, summary),
        "base": base or str(config.model.path.resolve()),
        "trained": trained or str(export.resolve()),
        "dtype": config.model.dtype,
        "template": config.data.template,
        "verifier": config.reward.verifier,
        "sampling": {
            "temperature": config.evaluation.temperature,
            "top_p": config.evaluation.top_p,
            "top_k": config.evaluation.top_k,
            "max_new_tokens": config.evaluation_response_tokens,
        },
        "examples": _examples(config),
    }
    (directory / "demo.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return directory / "app.py"


def write_space(run: Path, directory: Path, base: str = "", trained: str = "") -> Path:
    """Write a whole Space: the demo, requirements.txt and a model card. Models that are directories are copied into it.

    Raises ValueError if `directory` already has files: a Space is written whole.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: name another directory, or remove it")
    program = write_demo(run, directory, base, trained)
    settings_file = directory / "demo.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    for name in ("base", "trained"):
        if Path(settings[name]).is_dir():
            shutil.copytree(settings[name], directory / name)
            settings[name] = name
    settings_file.write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / "requirements.txt").write_text("\n".join(_REQUIREMENTS) + "\n", encoding="utf-8")
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n", encoding="utf-8")
    (directory / "README.md").write_text(_card(settings), encoding="utf-8")
    return program


def _read_run(run: Path) -> tuple[Config, RunSummary | None]:
    file = run / "config.json"
    if not file.is_file():
        raise ValueError(f"{run} is no run's directory: it has no config.json")
    summary = run / "summary.json"
    return read_resolved(file).config, read_summary(summary) if summary.is_file() else None


def _examples(config: Config) -> list[list[str]]:
    """Return the first held-out problems of one turn, with their answers; none if their file is gone."""
    examples: list[list[str]] = []
    for path in config.data.eval_paths:
        for row in read_rows(path) if path.is_file() else ():
            if len(row.messages) == 1:
                examples.append([row.messages[0]["content"], row.answer])
            if len(examples) == NUM_EXAMPLES:
                return examples
    return examples


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
    return (
        "---\n"
        f"title: {json.dumps(settings['title'])}\n"
        "sdk: gradio\n"
        f"sdk_version: {GRADIO_VERSION}\n"
        "app_file: app.py\n"
        "---\n\n"
        f"# {settings['title']}\n\n{settings['text']}\n\n"
        "Both models answer the same problem with the same random numbers; the verifier that gave the reward in training judges "
        f"the responses (`{settings['verifier']}`).\n\n"
        f"Base: `{settings['base']}`. Trained: `{settings['trained']}`. The licence of the weights is that of the base model.\n"
    )
