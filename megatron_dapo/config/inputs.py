"""Checks that read the disk: the model's config.json, and the files that a configuration names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config.rules import Violation
from megatron_dapo.config.schema import Config
from megatron_dapo.untrusted import read_json


@dataclass(frozen=True)
class Family:
    """Properties of a model_type that its config.json has no field for."""

    name: str  # a class name in "architectures" is this and the head's, e.g. "Qwen2" and "ForCausalLM"
    qkv_bias: bool
    qk_norm: bool
    derives_head_dim: bool  # hidden_size / num_attention_heads where the config has no head_dim
    experts: bool = False  # layers may hold a mixture of experts instead of one MLP


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", qkv_bias=False, qk_norm=False, derives_head_dim=True),
    "qwen2": Family("Qwen2", qkv_bias=True, qk_norm=False, derives_head_dim=True),
    "qwen3": Family("Qwen3", qkv_bias=False, qk_norm=True, derives_head_dim=False),
    "qwen3_moe": Family("Qwen3Moe", qkv_bias=False, qk_norm=True, derives_head_dim=True, experts=True),
}


@dataclass(frozen=True)
class ArchitectureFacts:
    """Sizes the parallel layout and the sequence lengths must fit."""

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    num_experts: int = 0  # 0: dense
    moe_intermediate_size: int = 0  # of one expert
    has_dense_layers: bool = True
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    vocab_size: int = 0  # 0: not said
    tie_word_embeddings: bool = True
    num_experts_per_token: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
_OPTIONAL_SIZES = (
    *("num_key_value_heads", "num_experts", "num_local_experts", "decoder_sparse_step", "moe_intermediate_size"),
    *("head_dim", "vocab_size"),
)


def read_architecture(directory: str | Path) -> ArchitectureFacts:
    """Facts of the Hugging Face model in `directory`. Raises ValueError naming what the directory lacks."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path {directory}: no config.json there; name a Hugging Face model directory")
    document = read_json(path)
    document = document if isinstance(document, dict) else {}
    missing = [key for key in _KEYS.values() if not _is_size(document.get(key))]
    if missing:
        raise ValueError(f"{path}: no whole number under {', '.join(missing)}; not a decoder this package knows")
    wrong = [key for key in _OPTIONAL_SIZES if document.get(key) is not None and not _is_size(document[key], 0)]
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} = {document[wrong[0]]!r:.100} is no whole number of 0 to 2**31")
    facts = {name: document[key] for name, key in _KEYS.items()}
    # Without the field, as in old Llama configs, every query head has a key-value head of its own.
    kv_heads = document.get("num_key_value_heads") or facts["num_attention_heads"]
    # transformers 5 writes the number of experts under its second name.
    experts = document.get("num_experts") or document.get("num_local_experts") or 0
    sparse_step = document.get("decoder_sparse_step") or 1
    # An unknown model_type is refused where the model is read; until then it counts as one without bias and norms.
    family = FAMILIES.get(str(document.get("model_type")))
    return ArchitectureFacts(
        **facts,
        num_key_value_heads=kv_heads,
        num_experts=experts,
        moe_intermediate_size=document.get("moe_intermediate_size") or 0,
        has_dense_layers=not experts or sparse_step > 1 or bool(document.get("mlp_only_layers")),
        head_dim=document.get("head_dim") or 0,
        vocab_size=document.get("vocab_size") or 0,
        tie_word_embeddings=bool(document.get("tie_word_embeddings", True)),
        num_experts_per_token=document.get("num_experts_per_tok") or 0,
        qkv_bias=family is not None and family.qkv_bias,
        qk_norm=family is not None and family.qk_norm,
    )


def _is_size(value: object, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def check_inputs(config: Config) -> tuple[ArchitectureFacts | None, list[Violation]]:
    """Return the policy's architecture, None if it cannot be read, and what is wrong with the files that are named."""
    problems = missing_inputs(config)
    if any(problem.path == "model.path" for problem in problems):
        return None, problems
    try:
        policy = read_architecture(config.model.path)
    except ValueError as error:
        return None, [*problems, Violation("model.path", "a model directory this package knows", str(error))]
    return policy, [*problems, *critics_of_other_models(config, policy)]


def missing_inputs(config: Config) -> list[Violation]:
    """Return a violation for each model directory or data file that is not there."""
    found, critic = [], Path(config.critic.path)
    if not config.model.path.is_dir():
        found.append(_absent("model.path", config.model.path, "a Hugging Face directory that exists"))
    if config.has_critic and config.critic.path and not (critic / "config.json").is_file():
        words = "a Hugging Face directory that exists (`megatron-dapo pretrain-value` writes one)"
        found.append(_absent("critic.path", critic, words))
    files = {"data.train_paths": config.data.train_paths, "data.eval_paths": config.data.eval_paths}
    if config.has_critic:
        files["value_pretraining.train_paths"] = config.value_pretraining.train_paths
    absent = ((path, file) for path, paths in files.items() for file in paths if not file.is_file())
    return [*found, *(_absent(path, file, "a file that exists") for path, file in absent)]


def critics_of_other_models(config: Config, policy: ArchitectureFacts) -> list[Violation]:
    """A violation where critic.path is there and of another shape than the policy. Weights and tokenizers are compared when the
    critic is built."""
    directory = Path(config.critic.path)
    if not (config.has_critic and config.critic.path and (directory / "config.json").is_file()):
        return []
    try:
        critic = read_architecture(directory)
    except ValueError as error:
        return [Violation("critic.path", "a model directory this package knows", str(error))]
    # A critic may have been trained at another length, and only one of two configs may spell head_dim out.
    values = {
        f"{name} of critic and policy": (own, getattr(policy, name))
        for name, own in vars(critic).items()
        if own != getattr(policy, name) and name not in ("max_position_embeddings", "head_dim")
    }
    if not values and critic.head_size == policy.head_size:
        return []
    values = values or {"head size of critic and policy": (critic.head_size, policy.head_size)}
    fix = "set critic.path to a critic of this model, or leave it out to start from the policy"
    values = {"critic.path": config.critic.path, **values}
    return [Violation("critic.path", "a critic of the policy's architecture", fix, values)]


def _absent(path: str, file: Path, what: str) -> Violation:
    names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    fix = f"did you mean {file.parent / near[0]}?" if near else f"set {path}, or put it there"
    return Violation(path=path, formula=what, suggestion=fix, values={path: str(file)})
