"""Rounds of sampling and fine-tuning, then reinforcement learning: stages of one recipe, each an existing command.

    [sft on sft.train_paths]  ->  rounds.num_rounds x (rejection-sample -> sft on its examples)  ->  [train]

Each stage starts from the model that the previous one wrote. When a command is run again, a finished stage does nothing
and an unfinished one continues, so the whole sequence resumes by being run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config

RECORD = "rounds.json"


@dataclass(frozen=True)
class Stage:
    """One command of the sequence."""

    name: str  # name of its directory, e.g. round_1/sft
    command: str
    directory: Path
    overrides: tuple[str, ...]

    @property
    def model(self) -> Path:
        """Return the Hugging Face directory that the stage writes; a sampling stage writes none."""
        return self.directory / "huggingface"


def stages(config: Config, directory: Path) -> list[Stage]:
    """Return the stages of a recipe, in order, with the values that each overrides."""
    section = config.rounds
    found: list[Stage] = []

    def add(name: str, command: str, model: Path, *overrides: str) -> Stage:
        start = f"model.path={json.dumps(str(model.absolute()))}"
        # If checkpoints are not below the stages' directories, each stage needs a separate checkpoint directory.
        apart = config.checkpoint.output_dir and [f"checkpoint.output_dir={config.checkpoint.output_dir}/{name}"]
        found.append(Stage(name, command, directory / name, (start, *overrides, *apart)))
        return found[-1]

    first = model = config.model.path
    if config.sft.train_paths:
        first = model = add("sft", "sft", model).model
    for number in range(1, section.num_rounds + 1):
        sampled = add(f"round_{number}/rejection_sampling", "rejection-sample", model)
        paths = [str((sampled.directory / "examples.jsonl").absolute())]
        start = model if section.start == "previous" else first
        model = add(f"round_{number}/sft", "sft", start, f"sft.train_paths={json.dumps(paths)}").model
    if section.train:
        add("train", "train", model)
    return found


def begin(config: Config, directory: Path) -> None:
    """Record the settings and data of the sequence in `directory`. ValueError if it was begun with different ones.

    Otherwise later stages would count as finished although an earlier one had changed.
    """
    path = directory / RECORD
    current = {**_values(config.model_dump(mode="json")), **_digests(config)}
    current = {
        name: value for name, value in current.items() if name.partition(".")[0] not in ("telemetry", "evaluation")
    }
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": current}, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))["settings"]
    changed = [name for name in (*current, *before) if current.get(name) != before.get(name)]
    if changed:
        name = changed[0]
        raise ValueError(
            f"the rounds in {directory} were begun with {name} = {before.get(name)!r}, now {current.get(name)!r} "
            f"({len(set(changed))} settings differ): name another --output-dir, or set what they began with"
        )


def _values(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _values(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _digests(config: Config) -> dict[str, str]:
    paths = (*config.sft.train_paths, *config.data.train_paths)
    return {f"sha256 of {path}": hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def outcome_lines(sequence: Sequence[Stage]) -> list[str]:
    """Return a line for each stage: examples kept, or held-out accuracy before and after."""
    lines = []
    for stage in sequence:
        report, summary = stage.directory / "report.json", stage.directory / "summary.json"
        if report.is_file():
            figures = json.loads(report.read_text(encoding="utf-8"))["figures"]
            rate, kept = figures["pass_rate_mean"], figures["fates"].get("kept", 0)
            lines.append(f"{stage.name}: pass rate {rate:.3f}, {kept} of {figures['responses']} responses kept")
        elif summary.is_file():
            values = json.loads(summary.read_text(encoding="utf-8"))
            before, after = (_shown(values.get(f"accuracy_{name}")) for name in ("before", "after"))
            lines.append(f"{stage.name}: accuracy {before} -> {after} in {values['train_steps']} train steps")
    return lines


def _shown(accuracy: float | None) -> str:
    return "not evaluated" if accuracy is None else f"{accuracy:.3f}"
