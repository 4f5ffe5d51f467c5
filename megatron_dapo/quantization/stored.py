"""Read a quantized directory by the definitions of the formats, without code of the library that wrote it.

transformers cannot check one by itself: it loads the FP8 values of a ModelOpt directory and ignores the scales.
`load_dequantized` returns a transformers model with dequantized weights that rounds the inputs of every quantized
matrix as an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.ops.fp8 import BLOCK, E4M3, LARGEST, quantize_hidden
from megatron_dapo.quantization.experts import separate_experts

Tensors = Mapping[str, torch.Tensor]
# Tensors of one matrix by the suffix of their names -> [rows, columns] fp32.
Widen = Callable[[Tensors], torch.Tensor]
# Inputs [..., columns] as the engine rounds them, given the same tensors.
RoundInputs = Callable[[torch.Tensor, Tensors], torch.Tensor]

# The values of e2m1, by code; bit 3 is the sign.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
NVFP4_BLOCK = 16
INT4_BLOCK = 128
BLOCK_SCALES = "weight_scale_inv"  # the name that DeepSeek's checkpoints, transformers and SGLang use


def load_dequantized(directory: Path, algorithm: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a transformers model. Raises ValueError if the directory lacks a tensor or has an unknown one."""
    widen, round_inputs = ALGORITHMS[algorithm]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain_config(directory), dtype=dtype)
    separate_experts(model)
    model = model.to_empty(device=device)
    # The rotary frequencies, which a model created on the meta device does not have.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config, device=device)
    with HFCheckpoint(directory) as stored:
        groups = _modules(stored)
        for name, tensors in groups.items():
            is_quantized = "weight_scale" in tensors or BLOCK_SCALES in tensors
            values = widen(tensors) if is_quantized else None
            _fill(model, name, tensors, values, directory)
            if values is not None:
                scales = {key: tensor.to(device) for key, tensor in tensors.items() if key not in ("weight", "bias")}
                _round_before(model.get_submodule(name), round_inputs, scales)
        _check_complete(model, {f"{name}.{key}" for name, tensors in groups.items() for key in tensors}, directory)
    model.tie_weights()
    return model.eval()


def plain_config(directory: Path) -> Any:
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _modules(stored: HFCheckpoint) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in stored.specs:
        module, _, key = name.rpartition(".")
        found.setdefault(module, {})[key] = stored.read_tensor(name)
    return found


def _fill(model: nn.Module, name: str, tensors: Tensors, values: torch.Tensor | None, directory: Path) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{directory}: the model has no module {name}, which is stored") from None
    for key in ("weight", "bias"):
        if key in tensors:
            source = values if values is not None and key == "weight" else tensors[key]
            target = getattr(module, key)
            if target.shape != source.shape:
                raise ValueError(
                    f"{directory}: {name}.{key} is {tuple(source.shape)}, the model has {tuple(target.shape)}"
                )
            with torch.no_grad():
                target.copy_(source)


def _check_complete(model: Any, stored: set[str], directory: Path) -> None:
    tied = model.config.tie_word_embeddings
    missing = [
        name for name, _ in model.named_parameters() if name not in stored and not (tied and name == "lm_head.weight")
    ]
    if missing:
        raise ValueError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}")


def _round_before(module: nn.Module, round_inputs: RoundInputs, scales: Tensors) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (round_inputs(inputs[0], scales).to(inputs[0].dtype),))


# ---- e4m3, one scale a matrix


def _widen_fp8(tensors: Tensors) -> torch.Tensor:
    return tensors["weight"].float() * tensors["weight_scale"].float()


def _round_by_one_scale(inputs: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    scale = tensors["input_scale"].float()
    return (inputs.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale


# ---- e4m3, a scale a block


def _widen_blocks(tensors: Tensors) -> torch.Tensor:
    scales = tensors[BLOCK_SCALES].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return tensors["weight"].float() * scales


def _round_in_blocks(inputs: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    return quantize_hidden(inputs.flatten(0, -2)).widened().view_as(inputs)


# ---- 4-bit integers, scaled inputs


def _widen_int4(tensors: Tensors) -> torch.Tensor:
    """Dequantize two rows a byte, the even one in the low half; AWQ's input scales multiply the columns."""
    codes = unpack_nibbles(tensors["weight"])  # [rows / 2, columns, 2]
    signed = torch.where(codes > 7, codes.int() - 16, codes.int())
    values = signed.permute(0, 2, 1).flatten(0, 1).float()
    values = values * tensors["weight_scale"].float().repeat_interleave(INT4_BLOCK, 1)
    return values * tensors["pre_quant_scale"].float() if "pre_quant_scale" in tensors else values


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2]: the low and the high half of every byte."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1)


def _unchanged(inputs: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    return inputs


# ---- e2m1, two levels of scales


def _widen_nvfp4(tensors: Tensors) -> torch.Tensor:
    """Dequantize two columns a byte, the even one in the low half."""
    values = E2M1[unpack_nibbles(tensors["weight"]).flatten(1).long()]
    scales = tensors["weight_scale"].float() * tensors["weight_scale_2"].float()
    return values * scales.repeat_interleave(NVFP4_BLOCK, 1)


def _round_to_nvfp4(inputs: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """Round to e2m1; a block's scale is its largest magnitude / 6 in units of `input_scale`, rounded to e4m3."""
    outer = tensors["input_scale"].float()
    blocks = inputs.float().unflatten(-1, (-1, NVFP4_BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 6 / outer).clamp(2.0**-9, LARGEST).to(E4M3).float() * outer
    return (round_to_e2m1(blocks / scales) * scales).flatten(-2)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 value, ties to the even code; values beyond 6 become 6."""
    magnitude = values.abs().clamp(max=6.0)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (magnitude / step).round() * step * values.sign()


ALGORITHMS: Mapping[str, tuple[Widen, RoundInputs]] = {
    "fp8": (_widen_fp8, _round_by_one_scale),
    "fp8_blockwise": (_widen_blocks, _round_in_blocks),
    "int4_awq": (_widen_int4, _unchanged),
    "nvfp4": (_widen_nvfp4, _round_to_nvfp4),
}
