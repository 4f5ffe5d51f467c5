"""Names and shapes of LoRA adapters (arXiv:2106.09685): X.weight [out, in] gets X.lora_A.weight [r, in] and X.lora_B.weight
[out, r], as in PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

# Linear layer of megatron-core -> the Hugging Face matrices that it fuses, in the order of their lora_A.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_q_proj": ("q_proj",),  # latent attention without compressed queries
        "linear_q_down_proj": ("q_a_proj",),
        "linear_q_up_proj": ("q_b_proj",),
        "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
        "linear_kv_up_proj": ("kv_b_proj",),
        "linear_proj": ("o_proj",),
        # A gated delta net's: two of Qwen3-Next, or four of Qwen3.5.
        "in_proj": ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        "out_proj": ("out_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
    }
)
ADAPTED = tuple(dict.fromkeys(name for names in FUSED.values() for name in names))  # matrices that can have adapters
ROW_PARALLEL = ("linear_proj", "out_proj", "linear_fc2")  # cut by columns over tensor ranks
DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")  # whole on every tensor rank; all others are cut by rows
WEIGHT, LORA_A, LORA_B = ".weight", ".lora_A.weight", ".lora_B.weight"


def matrix_name(name: str) -> str:
    """Return the last part of a matrix's name: q_proj for "model.layers.0.self_attn.q_proj.weight"."""
    return name.removesuffix(WEIGHT).rpartition(".")[2]


def chosen_targets(names: Iterable[str], targets: Sequence[str]) -> tuple[str, ...]:
    """Return `targets` (q_proj, down_proj, ...), or if they are empty the matrices of a model's tensors that can have adapters.

    Raise ValueError for a target that the model does not have, or that cannot have an adapter.
    """
    there = {matrix_name(name) for name in names if name.endswith(WEIGHT)}
    known = [name for name in ADAPTED if name in there]
    if missing := sorted(set(targets).difference(known)):
        raise ValueError(f"model.lora.targets names {', '.join(missing)}; this model has {', '.join(known)}")
    return tuple(targets or known)


def adapter_shapes(
    shapes: Mapping[str, tuple[int, ...]], lora_rank: int, targets: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the adapters for the matrices of `shapes`, see `chosen_targets`."""
    chosen, found = chosen_targets(shapes, targets), dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        if name.endswith(WEIGHT) and matrix_name(name) in chosen:
            matrix = name.removesuffix(WEIGHT)
            found |= {matrix + LORA_A: (lora_rank, shape[1]), matrix + LORA_B: (shape[0], lora_rank)}
    return found
