"""Whether the files a configuration names are there, and the critic of the policy's shape: the only checks that look at the
disk, apart from the pure validator."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_dapo.config.architecture import ArchitectureFacts, read_architecture
from megatron_dapo.config.errors import Violation
from megatron_dapo.config.schema import Config


def missing_inputs(config: Config) -> list[Violation]:
    """One violation for each model folder or data file that is not there."""
    return list(_missing(config))


def _missing(config: Config) -> Iterator[Violation]:
    model = config.model.path
    if not model.is_dir():
        yield _absent("model.path", model, "a Hugging Face folder that exists")
    critic = Path(config.critic.path)
    if config.has_critic and config.critic.path and not (critic / "config.json").is_file():
        yield _absent(
            "critic.path", critic, "a Hugging Face folder that exists (`megatron-dapo pretrain-value` writes one)"
        )
    yield from _absent_files("data.train_paths", config.data.train_paths)
    yield from _absent_files("data.eval_paths", config.data.eval_paths)
    if config.has_critic:
        yield from _absent_files("value_pretraining.train_paths", config.value_pretraining.train_paths)


def critics_of_other_models(config: Config, policy: ArchitectureFacts) -> list[Violation]:
    """A violation where critic.path is there and of another shape than the policy. Weights and tokenizers are compared when the
    critic is built."""
    folder = Path(config.critic.path)
    if not (config.has_critic and config.critic.path and (folder / "config.json").is_file()):
        return []
    try:
        critic = read_architecture(folder)
    except ValueError as error:
        return [Violation("critic.path", "a model folder this package knows", str(error))]
    values = {
        f"{name} of critic and policy": (own, getattr(policy, name))
        for name, own in vars(critic).items()
        if own != getattr(policy, name) and name not in ("max_position_embeddings", "head_dim")
    }
    if not values and critic.head_size == policy.head_size:
        return []
    values = values or {"head size of critic and policy": (critic.head_size, policy.head_size)}
    fix = "set critic.path to a critic of this model, or leave it out to start from the policy"
    return [
        Violation(
            "critic.path", "a critic of the policy's architecture", fix, {"critic.path": config.critic.path, **values}
        )
    ]


def _absent_files(path: str, files: Iterable[Path]) -> Iterator[Violation]:
    for file in files:
        if not file.is_file():
            yield _absent(path, file, "a file that exists")


def _absent(path: str, file: Path, what: str) -> Violation:
    names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    fix = f"did you mean {file.parent / near[0]}?" if near else f"set {path}, or put it there"
    return Violation(path=path, formula=what, suggestion=fix, values={path: str(file)})
