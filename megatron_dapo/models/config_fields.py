"""Read single fields of config.json, with an error that names the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_dapo.models.blocks import RopeScaling, Yarn

# The config decides how long loops over layers and experts run, so these bounds refuse a broken one at once.
_LARGEST = {"num_hidden_layers": 10_000, "num_experts": 10_000}
_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}


def required(config: Mapping[str, Any], field: str) -> Any:
    if config.get(field) is None:
        raise ValueError(
            f"config.json: {field} is missing; it changes the model, so no default is taken: write it there"
        )
    return config[field]


def positive(config: Mapping[str, Any], field: str) -> int:
    value = required(config, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {field} = {value!r} must be a positive integer")
    largest = _LARGEST.get(field, 2**31 - 1)
    if value > largest:
        raise ValueError(f"config.json: {field} = {value} is more than {largest}, which no model has; correct it")
    return value


def positive_number(field: str, value: Any) -> float:
    # Python's JSON reader accepts NaN and Infinity.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {field} = {value!r} must be a finite number above 0")
    return float(value)


def read_rope(
    config: Mapping[str, Any], read_scaling: Callable[[dict[str, Any]], Any] | None = None
) -> tuple[float, Any]:
    """Return (theta, scaling) from rope_parameters (transformers 5) or rope_theta and rope_scaling (4), which must agree.
    `read_scaling` reads the fields of the scaling (None: `rope_scaling`)."""
    new, old = object_of(config, "rope_parameters"), object_of(config, "rope_scaling")
    # Early versions of transformers 4 wrote "type".
    for fields in (new, old):
        if "type" in fields:
            fields.setdefault("rope_type", fields.pop("type"))
    thetas = {
        positive_number("rope_theta", v)
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
    scalings = {(read_scaling or rope_scaling)(fields) for fields in (new, old) if fields}
    if len(scalings) > 1:
        raise ValueError(f"config.json: rope_parameters {new} and rope_scaling {old} disagree; keep one")
    scaling = scalings.pop() if scalings else None
    if isinstance(scaling, Yarn):
        _require_reached(positive(config, "max_position_embeddings"), scaling)
    return thetas.pop(), scaling


def _require_reached(positions: int, yarn: Yarn) -> None:
    """Raise ValueError if YaRN does not reach all positions: SGLang scales the angles of later ones by the rope base in place of
    the factor (`RotaryEmbedding._ensure_cos_sin_cache_length` of 0.5.17)."""
    reached = int(yarn.factor * yarn.original_max_position_embeddings)
    if positions > reached:
        raise ValueError(
            f"config.json: max_position_embeddings is {positions}, but factor {yarn.factor:g} x original_max_position_embeddings "
            f"{yarn.original_max_position_embeddings} reach {reached} positions; set it to {reached}, or raise the factor"
        )


def with_partial_rotary(document: Mapping[str, Any], default: float) -> dict[str, Any]:
    """Move partial_rotary_factor, which some configs have at top level, into rope_parameters. ValueError if both places have
    one and they differ: transformers reads the latter, SGLang the former."""
    fields = dict(document)
    outside, inside = fields.pop("partial_rotary_factor", None), object_of(fields, "rope_parameters")
    factor = inside.setdefault("partial_rotary_factor", default if outside is None else outside)
    if outside not in (None, factor):
        raise ValueError(f"config.json: partial_rotary_factor is {outside}, in rope_parameters {factor}; keep one")
    return {**fields, "rope_parameters": inside}


def read_partial_rope(config: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return base, scaling and number of rotated dims of the fields of `with_partial_rotary`, as an architecture has them.
    `ignored`: fields of rope_parameters that change nothing."""
    rope = object_of(config, "rope_parameters")
    factor = positive_number("partial_rotary_factor", rope.pop("partial_rotary_factor"))
    rope = {name: value for name, value in rope.items() if name not in ignored}
    theta, scaling = read_rope({**config, "rope_parameters": rope})
    head_dim = positive(config, "head_dim")
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor {factor} of head_dim {head_dim} rotates {rotary_dim} dims; they must be "
            f"an even number up to {head_dim}"
        )
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotary_dim}


def object_of(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {field} = {value!r} must be an object of fields")
    return dict(value)


def rope_scaling(fields: dict[str, Any]) -> RopeScaling | None:
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
    values = {name: positive_number(name, fields[name]) for name in _ROPE_FIELDS[kind]}
    original = values.pop("original_max_position_embeddings", None)
    return RopeScaling(kind, original_max_position_embeddings=None if original is None else int(original), **values)


def yarn_scaling(fields: Mapping[str, Any], optional: Collection[str]) -> Yarn | None:
    """Read rotary scaling by YaRN with those optional fields that the family's implementations read alike, or none."""
    kind, needed = fields.get("rope_type", "default"), {"factor", "original_max_position_embeddings"}
    given = {name: value for name, value in fields.items() if value is not None and name != "rope_type"}
    if kind == "default" and not given:
        return None
    if kind != "yarn" or not needed <= given.keys() <= needed | {*optional}:
        raise ValueError(
            f"config.json: rope type {kind!r} with {sorted(given)} is not supported, only default, or yarn with "
            f"{sorted(needed)} and, optionally, {sorted(optional)}"
        )
    truncate = given.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"config.json: truncate = {truncate!r} must be true or false")
    # DeepSeek's weights of log(factor) may be 0, which is as if they were not given.
    numbers = {name: positive_number(name, v) for name, v in given.items() if v or not name.startswith("mscale")}
    original = int(numbers.pop("original_max_position_embeddings"))
    return Yarn(original_max_position_embeddings=original, truncate=truncate, **numbers)


def fields_beside_vision(document: Mapping[str, Any], text_type: str, of_images: Collection[str]) -> dict[str, Any]:
    """Return the fields of text_config, whose model_type is `text_type`, and those outside it that say nothing of images,
    except the vision tower's sizes. ValueError if both places give a field and disagree."""
    family, text = document["model_type"], document.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", text_type) != text_type:
        raise ValueError(f"config.json: a {family} needs an object text_config of model_type {text_type}; write it there")
    outside = {name: value for name, value in document.items() if name not in of_images and value is not None}
    for name in sorted(outside.keys() & text.keys() & {"tie_word_embeddings", "dtype", "torch_dtype"}):
        if text[name] is not None and text[name] != outside[name]:
            raise ValueError(f"config.json: {name} is {outside[name]!r}, in text_config {text[name]!r}; keep one")
    return {**text, "architectures": None, **outside}
