"""Read a decoder's architecture from config.json: every field is used, known to be neutral, or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.models.architecture import HEADS, LANGUAGE_MODEL, ModelArchitecture
from megatron_dapo.models.config_fields import positive, positive_number, read_rope, required
from megatron_dapo.models.families import FAMILIES, UNSUPPORTED, language_model_fields
from megatron_dapo.models.family import LOCAL_ATTENTION, Family
from megatron_dapo.untrusted import blamed_on, read_json

WEIGHT_DTYPES = ("float32", "float16", "bfloat16")
_USED = frozenset(
    """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings
    tie_word_embeddings torch_dtype dtype layer_types sliding_window use_sliding_window
    """.split()
)
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
    config = language_model_fields(document)
    family, head = _family_and_head(config, supported_heads)
    _check_fields(config, family)
    _check_attention(config, family)
    heads, hidden = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    key_value_heads = heads if config.get("num_key_value_heads") is None else positive(config, "num_key_value_heads")
    if heads % key_value_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {key_value_heads}"
        )
    features = family.features(config)
    if "rope_theta" not in features:
        features["rope_theta"], features["rope_scaling"] = read_rope(config)
    values = {
        "model_type": config["model_type"],
        "num_layers": positive(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": _head_dim(config, family, hidden, heads),
        "vocab_size": positive(config, "vocab_size"),
        "rms_norm_eps": positive_number("rms_norm_eps", required(config, "rms_norm_eps")),
        "max_position_embeddings": positive(config, "max_position_embeddings"),
        # A value head replaces the output matrix, so the embedding has no second use.
        "tie_word_embeddings": head == LANGUAGE_MODEL and bool(required(config, "tie_word_embeddings")),
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
        "dtype": _dtype(config),
        "head": head,
    }
    return ModelArchitecture(**{**values, **features})


def _family_and_head(config: Mapping[str, Any], heads: Collection[str]) -> tuple[Family, str]:
    model_type = required(config, "model_type")
    if model_type not in FAMILIES:
        reason = f": {UNSUPPORTED[model_type]}" if model_type in UNSUPPORTED else ""
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported{reason}; supported are {', '.join(sorted(FAMILIES))}"
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


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None or not family.derives_head_dim:
        return positive(config, "head_dim")
    if hidden % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}; write head_dim there"
        )
    return hidden // heads


def _check_fields(config: Mapping[str, Any], family: Family) -> None:
    known = _USED | _NEUTRAL | family.used | family.neutral
    needed = {**_REQUIRED_VALUES, **family.required}
    for field, value in config.items():
        if field in needed:
            if value not in needed[field]:
                raise ValueError(f"config.json: {field} = {value!r} is not supported, only {needed[field][0]!r}")
        elif field not in known and value not in (None, False):
            raise ValueError(
                f"config.json: unknown field {field} = {value!r} may change the model; remove it "
                "from config.json if it changes neither logits nor gradients"
            )
    for field, values in family.required.items():
        if None not in values:
            required(config, field)


def _check_attention(config: Mapping[str, Any], family: Family) -> None:
    if LOCAL_ATTENTION in family.layer_kinds:
        return
    others = sorted(set(config.get("layer_types") or ()) - family.layer_kinds)
    if others:
        supported = " or ".join(map(repr, sorted(family.layer_kinds)))
        raise ValueError(f"config.json: layer_types holds {others}, supported is only {supported}")
    window = config.get("sliding_window")
    # In Qwen configs use_sliding_window = false switches the window off; in other families a window is always active.
    if config.get("use_sliding_window") or (window is not None and "use_sliding_window" not in config):
        raise ValueError(
            f"config.json: sliding_window = {window} (use_sliding_window = {config.get('use_sliding_window')}) is not "
            "supported; set use_sliding_window to false if the model attends to everything"
        )


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
