"""Names and shapes of LoRA adapters (arXiv:2106.09685): X.weight [out, in] gets X.lora_A.weight [r, in] and X.lora_B.weight
[out, r], as in PEFT."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

# Linear layer of megatron-core -> the Hugging Face matrices that it fuses, in the order of their lora_A.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
    }
)
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")  # cut by rows over tensor ranks; the others by columns
WEIGHT, LORA_A, LORA_B = ".weight", ".lora_A.weight", ".lora_B.weight"


def matrix_name(name: str) -> str:
    """Return the last part of a matrix's name: q_proj for "model.layers.0.self_attn.q_proj.weight"."""
    return name.removesuffix(WEIGHT).rpartition(".")[2]


def adapter_shapes(
    shapes: Mapping[str, tuple[int, ...]], lora_rank: int, targets: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the adapters for the matrices of `shapes` named `targets` (q_proj, down_proj, ...).

    Raise ValueError for a target that the model does not have, or that cannot have an adapter.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name.endswith(WEIGHT) and len(shape) == 2 and matrix_name(name) in targets:
            if ".shared_expert" in name:
                raise ValueError(f"model.lora.targets names {matrix_name(name)}: {name} is of a shared expert, which takes no adapter")
            matrix = name.removesuffix(WEIGHT)
            found |= {matrix + LORA_A: (lora_rank, shape[1]), matrix + LORA_B: (shape[0], lora_rank)}
    if missing := sorted(set(targets) - {matrix_name(name.removesuffix(LORA_A)) for name in found}):
        known = sorted({matrix_name(name) for name in shapes if name.endswith("_proj.weight")})
        raise ValueError(f"model.lora.targets names {', '.join(missing)}; this model has {', '.join(known)}")
    return found
