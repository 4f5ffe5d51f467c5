"""Names of a model's tensors in megatron-core's `torch_dist` checkpoints, whatever layout saved them.

Their global tensors are the buffers of one rank without parallelism (`MegatronLayout`), with layers and experts either
stacked along leading axes or stored under separate names:

| local buffer | global tensors |
|---|---|
| decoder.layers.3.self_attention.linear_qkv.weight | decoder.layers.self_attention.linear_qkv.weight[3], or with the 3 in the name |
| decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight | decoder.layers.mlp.experts.experts.linear_fc2.weight[3, 5], or with one or both in the name |
| ...linear_fc1.weight | the same, or the gate as linear_fc1.weight_w and the rest as linear_fc1.weight_v |
| ...pre_mlp_layernorm.weight | the same, or mlp.linear_fc1.layer_norm_weight, as megatron-core's layers without Transformer Engine have it |
| embedding.word_embeddings.weight, output_layer.weight | the same, padded to any number of rows |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from megatron_dapo.models.architecture import ModelArchitecture

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_NORM_OF_EXPERTS, _FUSED_NORM = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
_FUSED = "linear_fc1.weight"


class TorchDistPlace(NamedTuple):
    """An element of a global tensor along its leading axes, or the whole of it."""

    key: str
    indices: tuple[tuple[int, int], ...] = ()  # (index, size) of each leading axis

    def __str__(self) -> str:
        return self.key + (f"[{', '.join(str(index) for index, _ in self.indices)}]" if self.indices else "")


def places(local: str, architecture: ModelArchitecture) -> Iterator[tuple[TorchDistPlace, ...]]:
    """Yield where a buffer may be, `local` without its model chunk; two places hold its upper and its lower half of rows.

    The first one is megatron-core's default for a model with identical layers.
    """
    for name in _names(local):
        for place in _places(name, architecture):
            yield (place,)
            if name.endswith(_FUSED):
                yield tuple(TorchDistPlace(f"{place.key}_{half}", place.indices) for half in "wv")


def written_places(local: str, architecture: ModelArchitecture) -> Iterator[TorchDistPlace]:
    """Yield where a buffer is written: under each of its names, its layer in the name if layers differ."""
    experts = architecture.experts
    is_mixed = architecture.delta is not None or (experts is not None and len(experts.layers) < architecture.num_layers)
    for name in _names(local):
        found = list(_places(name, architecture))
        # Second in the list of two or four: the layer in the name, the expert on an axis.
        yield found[1 if is_mixed and len(found) > 1 else 0]


def state_places(local: str, architecture: ModelArchitecture) -> Iterator[TorchDistPlace]:
    """Yield the places of the module states that a model's layers look for next to a weight; they are empty without FP8."""
    for place in written_places(local, architecture):
        module, _, parameter = place.key.rpartition(".")
        if parameter != "weight" or not place.key.startswith("decoder."):
            continue
        yield TorchDistPlace(f"{module}._extra_state", place.indices)
        if module.endswith("self_attention.linear_qkv"):
            yield TorchDistPlace(f"{module.removesuffix('linear_qkv')}core_attention._extra_state", place.indices)


def _names(local: str) -> tuple[str, ...]:
    if local.endswith(_NORM_OF_EXPERTS):
        return local, local.removesuffix(_NORM_OF_EXPERTS) + _FUSED_NORM
    return (local,)


def _places(local: str, architecture: ModelArchitecture) -> Iterator[TorchDistPlace]:
    found = _LAYER.fullmatch(local)
    if found is None:
        yield TorchDistPlace(local)
        return
    layer, rest = int(found[1]), found[2]
    stacked = (layer, architecture.num_layers)
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        yield TorchDistPlace(f"decoder.layers.{rest}", (stacked,))
        yield TorchDistPlace(f"decoder.layers.{layer}.{rest}")
        return
    assert architecture.experts is not None, f"{local} is of an expert"
    index, tail = int(expert[1]), expert[2]
    if architecture.linear_biases:
        raise ValueError(
            f"torch_dist: rows of gate and up alternate in the experts of a {architecture.model_type}, those of other Megatron tools "
            "do not: convert it without --format torch_dist"
        )
    along = (index, architecture.experts.num_experts)
    yield TorchDistPlace(f"decoder.layers.mlp.experts.experts.{tail}", (stacked, along))
    yield TorchDistPlace(f"decoder.layers.{layer}.mlp.experts.experts.{tail}", (along,))
    yield TorchDistPlace(f"decoder.layers.mlp.experts.experts.{index}.{tail}", (stacked,))
    yield TorchDistPlace(f"decoder.layers.{layer}.mlp.experts.experts.{index}.{tail}")
