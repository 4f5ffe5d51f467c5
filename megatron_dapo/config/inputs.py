"""Checks that read the disk: the model's config.json, and the files that a configuration names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.config.hook_rules import hook_problems
from megatron_dapo.config.rollout_schema import TASK_PREFIX
from megatron_dapo.config.rules import Violation
from megatron_dapo.config.schema import Config
from megatron_dapo.hooks import FAMILY, load_hook
from megatron_dapo.untrusted import read_json


@dataclass(frozen=True)
class Family:
    """Properties of a model_type that its config.json has no field for."""

    name: str  # a class name in "architectures" is this and the head's, e.g. "Qwen2" and "ForCausalLM"
    qkv_bias: bool
    qk_norm: bool
    derives_head_dim: bool  # hidden_size / num_attention_heads where the config has no head_dim
    experts: bool = False  # layers may hold a mixture of experts instead of one MLP
    is_gemma3: bool = False  # layers as `architecture.Gemma3` describes them
    class_names: Mapping[str, str] = field(default_factory=dict)  # by head, where the class is not `name` + head

    def class_name(self, head: str) -> str:
        """Return the name of the class with this head, such as "ForCausalLM", under "architectures" of config.json."""
        return self.class_names.get(head, self.name + head)


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", qkv_bias=False, qk_norm=False, derives_head_dim=True),
    "qwen2": Family("Qwen2", qkv_bias=True, qk_norm=False, derives_head_dim=True),
    "qwen3": Family("Qwen3", qkv_bias=False, qk_norm=True, derives_head_dim=False),
    "qwen3_moe": Family("Qwen3Moe", qkv_bias=False, qk_norm=True, derives_head_dim=True, experts=True),
    "gemma3_text": Family(
        *("Gemma3Text", False, True, False),
        is_gemma3=True,
        class_names={"ForCausalLM": "Gemma3ForCausalLM"},
    ),
    # With a vision tower, which is not trained: its tensors go into exports as they are.
    "gemma3": Family(
        *("Gemma3", False, True, False),
        is_gemma3=True,
        class_names={"ForCausalLM": "Gemma3ForConditionalGeneration"},
    ),
}

_BUILT_IN = frozenset(FAMILIES)


def add_family(path: str, directory: Path) -> None:
    """Add the `Family` that `path` names (model.family) under the model_type of the model in `directory`.

    ValueError where it cannot be imported, is no Family, or the model_type has one here.
    """
    family = load_hook(path, FAMILY)
    if not isinstance(family, Family):
        raise ValueError(f"{FAMILY} = {path!r}: it is a {type(family).__name__}, not a megatron_dapo.Family")
    model_type = str(read_json(directory / "config.json").get("model_type"))
    if model_type in _BUILT_IN:
        raise ValueError(f'{FAMILY} = {path!r}: model_type {model_type!r} is supported without it; set {FAMILY} = ""')
    FAMILIES[model_type] = family


# Published configs of Gemma 3 leave out what has these values, those of transformers' Gemma3TextConfig. The two bases of the
# rotary embedding are read with it: rope_theta 1,000,000 and rope_local_base_freq 10,000.
_GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_OF_IMAGES = frozenset(
    """
    text_config vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id
    eoi_token_id image_token_id
    """.split()
)


def text_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model in a parsed config.json: of a Gemma 3 with the defaults that its configs leave
    out, and without the vision tower. ValueError where two places disagree."""
    if not isinstance(document, Mapping):
        raise ValueError(f"config.json is no object but {type(document).__name__}")
    family = FAMILIES.get(str(document.get("model_type")))
    if family is None or not family.is_gemma3:
        return dict(document)
    if document["model_type"] == "gemma3_text":
        return {**_GEMMA3_DEFAULTS, **document}
    text = document.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", "gemma3_text") != "gemma3_text":
        raise ValueError("config.json: a gemma3 needs an object text_config of model_type gemma3_text; write it there")
    outside = {name: value for name, value in document.items() if name not in _OF_IMAGES and value is not None}
    for name in sorted(outside.keys() & text.keys() & {"tie_word_embeddings", "dtype", "torch_dtype"}):
        if text[name] is not None and text[name] != outside[name]:
            raise ValueError(f"config.json: {name} is {outside[name]!r}, in text_config {text[name]!r}; keep one")
    return {**_GEMMA3_DEFAULTS, **text, "architectures": None, **outside}


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
    is_gemma3: bool = False  # four norms a layer, and SGLang holds the whole embedding on each rank
    vision_parameters: int = 0  # of a tower that SGLang holds beside the language model

    @property
    def num_norms(self) -> int:
        """Norms of a layer, over the hidden size."""
        return 4 if self.is_gemma3 else 2

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
    whole = document if isinstance(document, dict) else {}
    try:
        document = text_fields(whole)
    except ValueError as error:
        raise ValueError(f"{path.parent}: {error}") from None
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
        is_gemma3=family is not None and family.is_gemma3,
        vision_parameters=_vision_parameters(whole.get("vision_config"), document["hidden_size"]),
    )


def _vision_parameters(vision: Any, hidden_size: int) -> int:
    """Return the elements of a SigLIP tower (arXiv:2303.15343) without its pooling head, and of the projection to
    `hidden_size`; 0 without sizes of one."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size", "image_size")
    if not isinstance(vision, dict) or not all(_is_size(vision.get(key)) for key in keys):
        return 0
    hidden, inner, layers, patch, image = (vision[key] for key in keys)
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    patches = (3 * patch * patch + 1) * hidden + (image // patch) ** 2 * hidden
    return patches + layers * layer + 2 * hidden + hidden * hidden_size + hidden


def _is_size(value: object, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def check_inputs(config: Config) -> tuple[ArchitectureFacts | None, list[Violation]]:
    """Return the policy's architecture, None if it cannot be read, and what is wrong with the files that are named."""
    problems = [*missing_inputs(config), *hook_problems(config)]
    if any(problem.path == "model.path" for problem in problems):
        return None, problems
    try:
        policy = read_architecture(config.model.path)
    except ValueError as error:
        return None, [*problems, Violation("model.path", "a model directory this package knows", str(error))]
    return policy, [*problems, *critics_of_other_models(config, policy)]


def missing_inputs(config: Config) -> list[Violation]:
    """Return a violation for each model directory, data file or reference that is not there."""
    found, critic = [], Path(config.critic.path)
    if not config.model.path.is_dir():
        found.append(_absent("model.path", config.model.path, "a Hugging Face directory that exists"))
    if config.has_critic and config.critic.path and not (critic / "config.json").is_file():
        words = "a Hugging Face directory that exists (`megatron-dapo pretrain-value` writes one)"
        found.append(_absent("critic.path", critic, words))
    files = {"data.train_paths": config.data.train_paths, "data.eval_paths": config.data.eval_paths}
    if config.has_critic:
        files["value_pretraining.train_paths"] = config.value_pretraining.train_paths
    own = (Path(source.path) for source in config.data.sources if not source.path.startswith(TASK_PREFIX))
    files["data.sources"] = tuple(own)
    absent = ((path, file) for path, paths in files.items() for file in paths if not file.exists())
    found += [_absent(path, file, "a file that exists") for path, file in absent]
    references = (path for path in config.telemetry.references if not path.exists())
    return [*found, *(_absent("telemetry.references", path, "a file or a run's directory") for path in references)]


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
