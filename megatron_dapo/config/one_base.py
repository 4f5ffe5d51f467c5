"""Runs that may share one set of processes and the weights of one base model (`trainer.turns`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron_dapo.config.schema import Config

_EQUAL = ("model", "parallel", "precision", "megatron", "rollout.engine", "run.deterministic")
_OWN = ("model.lora",)  # within those


def require_one_base(configs: Sequence[Config]) -> None:
    """Raise ValueError, a line for each problem, unless the runs can train their adapters next to each other."""
    if len(configs) > 1 and (problems := [*_single_problems(configs), *_shared_problems(configs)]):
        raise ValueError("\n".join(["these recipes cannot train together:", *(f"  - {each}" for each in problems)]))


def _single_problems(configs: Sequence[Config]) -> Iterator[str]:
    for config in configs:
        copies = config.checkpoint.memory_copies
        refusals = (
            (not config.model.lora.rank, "model.lora.rank = 0: full training changes the weights that the others share; set it above 0"),
            (config.rollout.engine != "embedded", f'rollout.engine = "{config.rollout.engine}": only the embedded engine takes turns'),
            (config.model.offload == "all", 'model.offload = "all" would move the weights of the others; set "optimizer" or "none"'),
            (config.has_critic, f'algorithm.name = "{config.algorithm.name}" trains a critic, all of its weights'),
            (bool(config.distillation.models), "distillation.teachers that are models hold all of their weights"),
            (copies != "none", f'checkpoint.memory_copies = "{copies}": copies in memory are of one run; set "none"'),
        )
        yield from (f"{config.run.name}: {text}; or train it apart" for is_refused, text in refusals if is_refused)


def _shared_problems(configs: Sequence[Config]) -> Iterator[str]:
    first, *others = configs
    for other in others:
        values = _common(first), _common(other)
        for key in dict.fromkeys((*values[0], *values[1])):
            one, two = (repr(each[key]) if key in each else "its default" for each in values)
            if one != two:
                yield f"{other.run.name}: {key} = {two}, and {first.run.name} has {one}; adapters of one base have the same"
    for a, b in combinations(configs, 2):
        if a.run.name == b.run.name:
            yield f'run.name = "{a.run.name}" is the name of two runs; give each another'
        if _places(a) & _places(b):
            yield f"{a.run.name} and {b.run.name} write to {min(_places(a) & _places(b))}; set another run.output_dir"
        if (port := a.telemetry.prometheus_port) and port == b.telemetry.prometheus_port:
            yield f"{a.run.name} and {b.run.name}: telemetry.prometheus_port = {port} twice; set another, or 0"
        if "wandb" in a.telemetry.trackers and "wandb" in b.telemetry.trackers:
            yield f'{a.run.name} and {b.run.name}: wandb follows one run a process; take it out of the telemetry.trackers of one, or use "mlflow"'


def _common(config: Config) -> dict[str, Any]:
    """Return the values that runs of one base have in common, by dotted key."""
    common: dict[str, Any] = {"run.seed": config.run.seed} if config.model.allow_random_init else {}  # may make the weights

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                walk(f"{prefix}.{name}" if prefix else name, each)
        elif any(f"{prefix}.".startswith(f"{key}.") for key in _EQUAL) and not prefix.startswith(_OWN):
            common[prefix] = value

    walk("", config.model_dump())
    return common


def _places(config: Config) -> set[Path]:
    return {config.run.output_dir.absolute(), config.checkpoint_dir.absolute()}
