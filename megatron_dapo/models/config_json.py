"""Read a decoder's architecture from config.json: every field is used, known to be neutral, or refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.models.architecture import (
    HEADS,
    LANGUAGE_MODEL,
    Gemma3,
    MixtureOfExperts,
    ModelArchitecture,
    RopeScaling,
)
from megatron_dapo.models.families import FAMILIES, Family, text_fields
from megatron_dapo.untrusted import blamed_on, read_json

WEIGHT_DTYPES = ("float32", "float16", "bfloat16")
_USED = frozenset(
    """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings
    tie_word_embeddings torch_dtype dtype layer_types sliding_window use_sliding_window
    """.split()
)
# Further fields of families with experts; num_local_experts is transformers 5's name of num_experts.
_USED_BY_EXPERTS = frozenset(
    """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers
    """.split()
)
_USED_BY_GEMMA3 = frozenset(
    """
    hidden_activation query_pre_attn_scalar rope_local_base_freq sliding_window_pattern _sliding_window_pattern
    """.split()
)
_NEUTRAL_FOR_GEMMA3 = frozenset({"cache_implementation"})
# They switch on transformers' load-balancing loss, which changes no logits and is no part of the policy losses here.
_NEUTRAL_FOR_EXPERTS = frozenset({"router_aux_loss_coef", "output_router_logits"})
# Fields that say nothing about logits or gradients: bookkeeping, generation, outputs to return, initialization.
_NEUTRAL = frozenset(
    """
    _name_or_path _attn_implementation attn_implementation transformers_version use_cache initializer_range
    max_window_layers bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id output_attentions output_hidden_states return_dict return_dict_in_generate
    output_scores torchscript id2label label2id num_labels problem_type tokenizer_class prefix task_specific_params
    finetuning_task pruned_heads is_decoder is_encoder_decoder chunk_size_feed_forward max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty remove_invalid_values tf_legacy_loss use_bfloat16
    is_llama_config transformers.js_config
    """.split()
)
# Fields that would change the math: the values with which they do not.
_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
}
# The config decides how long loops over layers and experts run, so these bounds refuse a broken one at once.
_LARGEST = {"num_hidden_layers": 10_000, "num_experts": 10_000}
_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"  # values of layer_types
_PUBLISHED = Path(__file__).with_name("published")  # config.json of the models that shipped recipes train


def planned_directory(directory: Path) -> Path:
    """Return the directory whose config.json a plan reads: `directory`, or the package's copy of the published model of
    that name if `directory` has none."""
    copy = _PUBLISHED / directory.name
    return copy if copy.is_dir() and not (directory / "config.json").is_file() else directory


def read_architecture(directory: str | Path, *, heads: Collection[str] = (LANGUAGE_MODEL,)) -> ModelArchitecture:
    """Read config.json of a model directory; see `parse_architecture`."""
    path = Path(directory) / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        known = ", ".join(sorted(path.name for path in _PUBLISHED.iterdir()))
        raise ValueError(
            f"{directory}: no config.json; give a Hugging Face model directory (plans need no other file of it, and none "
            f"of {known})"
        ) from None
    with blamed_on(Path(directory)):
        return parse_architecture(config, heads=heads)


def parse_architecture(config: Mapping[str, Any], *, heads: Collection[str] = (LANGUAGE_MODEL,)) -> ModelArchitecture:
    """Return the architecture of a parsed config.json (transformers 4 or 5) whose head is one of `heads`.

    Raises ValueError, naming the field, for an unknown model_type, another head, a value that changes the math
    in an unsupported way, a missing field, a value of a wrong type or size, and an unknown field that is set.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config.json: holds a {type(config).__name__}, not an object of fields")
    try:
        return _parse(config, heads)
    except (TypeError, AttributeError, OverflowError) as error:
        # For example a list in place of a number: there are too many fields to check each one's type.
        raise ValueError(f"config.json: a field has a value of the wrong type: {error}") from error


def _parse(document: Mapping[str, Any], supported_heads: Collection[str]) -> ModelArchitecture:
    config = text_fields(document)
    family, head = _family_and_head(config, supported_heads)
    _check_fields(config, family)
    if not family.is_gemma3:
        _check_full_attention(config)
    heads, hidden = _positive(config, "num_attention_heads"), _positive(config, "hidden_size")
    key_value_heads = (
        heads if config.get("num_key_value_heads") is None else _positive(config, "num_key_value_heads")
    )
    if heads % key_value_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {key_value_heads}"
        )
    gemma3, (theta, scaling) = _gemma3(config) if family.is_gemma3 else (None, _rope(config))
    return ModelArchitecture(
        model_type=config["model_type"],
        num_layers=_positive(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=_head_dim(config, family, hidden, heads),
        vocab_size=_positive(config, "vocab_size"),
        rms_norm_eps=_positive_number("rms_norm_eps", _required(config, "rms_norm_eps")),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_positive(config, "max_position_embeddings"),
        # A value head replaces the output matrix, so the embedding has no second use.
        tie_word_embeddings=head == LANGUAGE_MODEL and bool(_required(config, "tie_word_embeddings")),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        dtype=_dtype(config),
        experts=_experts(config) if family.experts else None,
        head=head,
        gemma3=gemma3,
        vision_parameters=_vision_parameters(document.get("vision_config"), hidden),
    )


def _family_and_head(config: Mapping[str, Any], heads: Collection[str]) -> tuple[Family, str]:
    model_type = _required(config, "model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    # Configs written by hand often lack the class; the family's language model is meant.
    declared = list(config.get("architectures") or [family.class_name(LANGUAGE_MODEL)])
    supported = {family.class_name(head): head for head in HEADS if head in heads}
    if len(declared) != 1 or declared[0] not in supported:
        raise ValueError(
            f"config.json: architectures {declared} of a {model_type} is not supported, "
            f"only {' or '.join(repr([name]) for name in supported)}"
        )
    return family, supported[declared[0]]


def _required(config: Mapping[str, Any], field: str) -> Any:
    if config.get(field) is None:
        raise ValueError(
            f"config.json: {field} is missing; it changes the model, so no default is taken: write it there"
        )
    return config[field]


def _experts(config: Mapping[str, Any]) -> MixtureOfExperts | None:
    """Return the mixture of experts; None if every layer is dense."""
    counts = {config[field] for field in ("num_experts", "num_local_experts") if config.get(field) is not None}
    if len(counts) > 1:
        raise ValueError(f"config.json: num_experts and num_local_experts are {sorted(counts)}; keep one")
    num_experts = _positive({"num_experts": counts.pop() if counts else None}, "num_experts")
    per_token = _positive(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok {per_token} is more than num_experts {num_experts}")
    normalize = _required(config, "norm_topk_prob")
    if not isinstance(normalize, bool):
        raise ValueError(f"config.json: norm_topk_prob = {normalize!r} must be true or false")
    layers = _layers_with_experts(config)
    return (
        MixtureOfExperts(num_experts, per_token, _positive(config, "moe_intermediate_size"), normalize, layers)
        if layers
        else None
    )


def _layers_with_experts(config: Mapping[str, Any]) -> frozenset[int]:
    """Return every decoder_sparse_step-th layer except those of mlp_only_layers."""
    num_layers, step = _positive(config, "num_hidden_layers"), _positive(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) or not 0 <= layer < num_layers for layer in dense):
        raise ValueError(f"config.json: mlp_only_layers = {dense!r} must list layers from 0 to {num_layers - 1}")
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0) - frozenset(dense)


def _positive(config: Mapping[str, Any], field: str) -> int:
    value = _required(config, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {field} = {value!r} must be a positive integer")
    largest = _LARGEST.get(field, 2**31 - 1)
    if value > largest:
        raise ValueError(f"config.json: {field} = {value} is more than {largest}, which no model has; correct it")
    return value


def _positive_number(field: str, value: Any) -> float:
    # Python's JSON reader accepts NaN and Infinity.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {field} = {value!r} must be a finite number above 0")
    return float(value)


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None or not family.derives_head_dim:
        return _positive(config, "head_dim")
    if hidden % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}; write head_dim there"
        )
    return hidden // heads


def _check_fields(config: Mapping[str, Any], family: Family) -> None:
    known = _USED | _NEUTRAL
    required = {**_REQUIRED_VALUES, "hidden_act": ("silu",)}
    if family.experts:
        known |= _USED_BY_EXPERTS | _NEUTRAL_FOR_EXPERTS
    if family.is_gemma3:
        known |= _USED_BY_GEMMA3 | _NEUTRAL_FOR_GEMMA3
        required |= {"hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": ("gelu_pytorch_tanh", None)}
    for field, value in config.items():
        if field in required:
            if value not in required[field]:
                raise ValueError(f"config.json: {field} = {value!r} is not supported, only {required[field][0]!r}")
        elif field not in known and value not in (None, False):
            raise ValueError(
                f"config.json: unknown field {field} = {value!r} may change the model; remove it "
                "from config.json if it changes neither logits nor gradients"
            )
    _required(config, "hidden_activation" if family.is_gemma3 else "hidden_act")


def _check_full_attention(config: Mapping[str, Any]) -> None:
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise ValueError(f"config.json: layer_types holds {others}, supported is only 'full_attention'")
    window = config.get("sliding_window")
    # In Qwen configs use_sliding_window = false switches the window off; in other families a window is always active.
    if config.get("use_sliding_window") or (window is not None and "use_sliding_window" not in config):
        raise ValueError(
            f"config.json: sliding_window = {window} (use_sliding_window = {config.get('use_sliding_window')}) is not "
            "supported; set use_sliding_window to false if the model attends to everything"
        )


def _gemma3(config: Mapping[str, Any]) -> tuple[Gemma3, tuple[float, RopeScaling | None]]:
    """Return the differences of Gemma 3, and (theta, scaling) of its global layers."""
    num_layers = _positive(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        period = _positive({"sliding_window_pattern": pattern}, "sliding_window_pattern")
        kinds = [_GLOBAL if (layer + 1) % period == 0 else _LOCAL for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {_LOCAL, _GLOBAL}:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} entries of {sorted(map(str, set(kinds)))}; num_hidden_layers "
            f"{num_layers} of {_LOCAL} or {_GLOBAL} are supported"
        )
    ropes = _object(config, "rope_parameters")
    if not ropes.keys() <= {_LOCAL, _GLOBAL}:
        raise ValueError(
            f"config.json: rope_parameters has {sorted(ropes)}; a Gemma 3 has one each for {_LOCAL}, {_GLOBAL}"
        )
    of_global, of_local = _object(ropes, _GLOBAL), _object(ropes, _LOCAL)
    if (
        config.get("rope_theta") is None
        and "rope_theta" not in of_global
        and "rope_theta" not in _object(config, "rope_scaling")
    ):
        of_global["rope_theta"] = 1_000_000.0
    if config.get("rope_local_base_freq") is None:
        of_local.setdefault("rope_theta", 10_000.0)
    theta, scaling = _rope({**config, "rope_parameters": of_global})
    local_theta, local_scaling = _rope({"rope_parameters": of_local, "rope_theta": config.get("rope_local_base_freq")})
    if local_scaling is not None:
        raise ValueError(f"config.json: rope_parameters scale {_LOCAL} layers by {local_scaling}; supported is none")
    local = frozenset(layer for layer, kind in enumerate(kinds) if kind == _LOCAL)
    scale = _positive_number("query_pre_attn_scalar", _required(config, "query_pre_attn_scalar")) ** -0.5
    window = _positive(config, "sliding_window") if local else 0
    return Gemma3(scale, local, window, local_theta), (theta, scaling)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling) from rope_parameters (transformers 5) or rope_theta and rope_scaling (4), which must agree."""
    new, old = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    # Early versions of transformers 4 wrote "type".
    for fields in (new, old):
        if "type" in fields:
            fields.setdefault("rope_type", fields.pop("type"))
    thetas = {
        _positive_number("rope_theta", v)
        for v in (new.pop("rope_theta", None), old.pop("rope_theta", None), config.get("rope_theta"))
        if v is not None
    }
    if len(thetas) != 1:
        stated = (
            f"is {sorted(thetas)} at once"
            if thetas
            else "is missing (at top level or in rope_parameters); no default is taken"
        )
        raise ValueError(f"config.json: rope_theta {stated}: write the one it was trained with")
    scalings = {_rope_scaling(fields) for fields in (new, old) if fields}
    if len(scalings) > 1:
        raise ValueError(f"config.json: rope_parameters {new} and rope_scaling {old} disagree; keep one")
    return thetas.pop(), scalings.pop() if scalings else None


def _object(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {field} = {value!r} must be an object of fields")
    return dict(value)


def _rope_scaling(fields: dict[str, Any]) -> RopeScaling | None:
    kind = fields.get("rope_type", "default")
    if kind not in _ROPE_FIELDS:
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported; supported are {', '.join(sorted(_ROPE_FIELDS))}"
        )
    if fields.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"config.json: partial_rotary_factor = {fields['partial_rotary_factor']} is not supported, only 1.0"
        )
    given = {name for name, value in fields.items() if value is not None} - {"rope_type", "partial_rotary_factor"}
    if given != _ROPE_FIELDS[kind]:
        raise ValueError(
            f"config.json: rope type {kind!r} takes {sorted(_ROPE_FIELDS[kind])}, the config has {sorted(given)}"
        )
    if kind == "default":
        return None
    values = {name: _positive_number(name, fields[name]) for name in _ROPE_FIELDS[kind]}
    original = values.pop("original_max_position_embeddings", None)
    return RopeScaling(kind, original_max_position_embeddings=None if original is None else int(original), **values)


def _dtype(config: Mapping[str, Any]) -> str | None:
    names = {
        str(config[field]).removeprefix("torch.") for field in ("dtype", "torch_dtype") if config.get(field) is not None
    }
    if not names:
        return None
    if len(names) > 1:
        raise ValueError(f"config.json: dtype and torch_dtype are {' and '.join(sorted(names))}; keep the right one")
    if not names <= set(WEIGHT_DTYPES):
        raise ValueError(f"config.json: dtype {sorted(names)} is not one of {', '.join(WEIGHT_DTYPES)}")
    return names.pop()


def _vision_parameters(vision: Any, hidden_size: int) -> int:
    """Return the elements of a SigLIP tower (arXiv:2303.15343) without its pooling head, and of the projection to
    `hidden_size`; 0 if the config has no sizes of a tower."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size", "image_size")
    if not isinstance(vision, dict) or not all(type(vision.get(key)) is int and 0 < vision[key] < 2**31 for key in keys):
        return 0
    hidden, inner, layers, patch, image = (vision[key] for key in keys)
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    patches = (3 * patch * patch + 1) * hidden + (image // patch) ** 2 * hidden
    return patches + layers * layer + 2 * hidden + hidden * hidden_size + hidden
