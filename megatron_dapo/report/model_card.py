"""The model card of a trained model, from the records of its run: what the README.md of a repository on the Hub says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dapo.config.schema import Config
from megatron_dapo.data.hub import cached_repository, stored_license
from megatron_dapo.data.sources import train_files, train_sources
from megatron_dapo.report.anomalies import held_out_change
from megatron_dapo.report.run_files import RunFiles, read_run

# Sections whose values a card shows if a recipe sets them. Others name machines, paths, addresses or secrets.
_SHOWN_SECTIONS = ("algorithm", "rollout", "training", "optimizer", "precision")
_PACKAGES = ("megatron_dapo", "torch", "megatron-core", "transformers", "sglang")


def model_card(directory: Path, config: Config, step: int | None = None, base: str = "") -> str:
    """Return the README.md of the model that a run has trained.

    `step`: the train step of the model; None: the run's last one. `base`: OWNER/NAME of the model before it, by default
    as `model.path` says.
    """
    run = read_run(directory)
    step = step if step is not None else max((row["train_step"] for row in run.steps), default=0)
    base = base or cached_repository(config.model.path) or ""
    name = base or config.model.path.name
    license_name = stored_license(config.model.path, base)
    lines = [
        *("---", _metadata(config, base, license_name).strip(), "---", ""),
        *(f"# {config.run.name}", ""),
        f"{_linked(name) if base else name}, trained with {config.algorithm.name.upper()} by megatron_dapo ({step} train steps).",
        *("", "## Held-out accuracy", "", *_accuracy_lines(run, step), ""),
        *("## Training", "", "| | |", "|---|---|", *_training_lines(config, run), ""),
        *((f"System prompt: `{' '.join(prompt.split())}`", "") if (prompt := config.data.system_prompt) else ()),
        *("```bash", f"megatron-dapo train {_recipe(run)}", "```", ""),
        *(() if license_name else ("The license of the weights is that of the base model.",)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _metadata(config: Config, base: str, license_name: str | None) -> str:
    from huggingface_hub import ModelCardData

    data = sorted({found for path in train_files(config.data) if (found := cached_repository(path))})
    return ModelCardData(
        base_model=base or None,
        base_model_relation="finetune" if base else None,
        datasets=data or None,
        library_name="transformers",
        license=license_name,
        pipeline_tag="text-generation",
        tags=["megatron_dapo", "reinforcement-learning", config.algorithm.name],
    ).to_yaml()


def _accuracy_lines(run: RunFiles, step: int) -> Iterator[str]:
    """Yield a table of the first evaluation and of the last one up to `step`, with 95 % intervals."""
    rows = [row for row in run.evaluations if row["train_step"] <= step and "eval/avg_at_k" in row]
    if not rows:
        yield "Not evaluated."
        return
    num_samples = run.config.get("evaluation.num_samples")
    yield from (f"| | avg@{num_samples} | 95 % interval |", "|---|---|---|")
    first, last = rows[0], rows[-1]
    for row in rows if len(rows) == 1 else (first, last):
        when = f"after {row['train_step']} steps" if row["train_step"] else "before training"
        low, high = row["eval/avg_at_k_low"], row["eval/avg_at_k_high"]
        yield f"| {when} | {row['eval/avg_at_k']:.3f} | {low:.3f} to {high:.3f} |"
    if change := held_out_change(run, first["train_step"], last["train_step"]) if len(rows) > 1 else None:
        yield f"| difference, paired by problem | {change.value:+.3f} | {change.low:+.3f} to {change.high:+.3f} |"


def _training_lines(config: Config, run: RunFiles) -> Iterator[str]:
    data, reward = config.data, config.reward
    made = [Path(source.name) for source in train_sources(data) if source.made]
    yield f"| data | {_names([*train_files(data), *made])} |"
    held_out = f"{data.held_out_share:.0%} of the training prompts" if not data.eval_paths else _names(data.eval_paths)
    yield f"| held out | {held_out if data.has_held_out else 'nothing'} |"
    verifiers = [part.verifier for part in reward.mix] if reward.verifier == "mix" else [reward.verifier]
    yield f"| reward | {', '.join(f'`{Path(name).name}`' for name in verifiers)} |"
    for key, origin in run.origins.items():
        value = run.config.get(key)
        if origin != "default" and key.partition(".")[0] in _SHOWN_SECTIONS and "/" not in str(value):
            yield f"| `{key}` | {value} |"
    versions = run.provenance.get("versions", {})
    yield f"| library | {', '.join(f'{name} {versions[name]}' for name in _PACKAGES if name in versions)} |"


def _names(paths: Sequence[Path]) -> str:
    """Return the names of data sets, of files without the directories of the machine that they were on."""
    return ", ".join(dict.fromkeys(f"`{cached_repository(path) or path.name}`" for path in paths))


def _recipe(run: RunFiles) -> str:
    """Return the name of the recipe's file, or of a made-up one for a run from Python."""
    files = [Path(origin).name for origin in run.origins.values() if origin.endswith(".toml")]
    return files[0] if files else f"{run.name}.toml"


def _linked(repository: str) -> str:
    return f"[{repository}](https://huggingface.co/{repository})"
