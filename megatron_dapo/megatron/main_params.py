"""fp32 main params that are the checkpoint's values, bit for bit, whatever type the model's own weights are rounded to.

megatron-core copies main params from the model's weights, so a checkpoint in fp32, or weights held as FP8, would lose their
last bits before the first step. Here weights are loaded in fp32 and rounded into the model; main params are then set to what
was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor

from megatron_dapo.megatron.state import owned_parts

Buffers = Mapping[str, torch.Tensor]


def load_exactly(parameters: Mapping[str, torch.nn.Parameter], load: Callable[[Buffers], None]) -> Buffers:
    """Fill the parameters by `load`, which is given fp32 buffers by the parameters' names.

    Returns the loaded values of those parameters that cannot hold them, on the CPU. ValueError where something was not
    loaded.
    """
    wide = {name: _buffer_for(parameter) for name, parameter in parameters.items()}
    load(wide)
    for name, buffer in wide.items():
        if torch.isnan(buffer).any():
            raise ValueError(f"{name} was not loaded whole, or is not a number in the checkpoint")
    rounded = {name: buffer for name, buffer in wide.items() if parameters[name].dtype != torch.float32}
    return {name: buffer for name, buffer in rounded.items() if not _holds(parameters[name], buffer)}


def _buffer_for(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.dtype == torch.float32:
        return parameter.data
    return torch.full(parameter.shape, torch.nan, device="cpu")


def _holds(parameter: torch.nn.Parameter, values: torch.Tensor) -> bool:
    """Put the values in; whether none was rounded. Of weights held as FP8 megatron-core takes main params from what they
    were initialized with, so theirs are set in any case."""
    with torch.no_grad():
        parameter.copy_(values)
        return not is_float8tensor(parameter) and torch.equal(parameter.detach().float().cpu(), values)


def set_main_params(parameters: Mapping[str, torch.nn.Parameter], optimizer: Any, values: Buffers) -> None:
    """Overwrite the main params of the parameters that `values` names."""
    for part in owned_parts(parameters, optimizer):
        if part.name in values:
            own = values[part.name].flatten()[part.start : part.end]
            part.main.data.copy_(own.view(part.main.shape))
