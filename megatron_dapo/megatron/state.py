"""The exact state of a rank, as flat named tensors.

Tensor names are "<kind>/<local parameter name>" with these kinds:

| kind | tensor |
|---|---|
| parameter | the whole local parameter, in the model's type |
| master | fp32 main params of the 16-bit parameter; if the model is fp32, the parameter is its own main param |
| exp_avg, exp_avg_sq | Adam's moments, fp32 |
| step | Adam's step count of this parameter, a scalar |
| random | state of a random-number generator; the name is the generator's |
| fp8 | scale or history of maxima of an FP8 module under delayed scaling (`megatron.precision`); other recipes have none |

With the distributed optimizer `master` and the moments are flat and cover elements [start, end) of the flattened local
parameter, the shard that this data-parallel rank owns; a parameter without a shard on this rank has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_dapo.megatron.host_memory import HostMemory

Buffers = Mapping[str, torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")
GENERATOR = "torch"


@dataclass(frozen=True)
class OwnedShard:
    """Elements [start, end) of a flattened parameter, which this rank's optimizer updates through `main`."""

    name: str
    parameter: torch.nn.Parameter
    main: torch.Tensor  # the inner optimizer's parameter: the parameter itself, a view of it, or its fp32 main params
    start: int
    end: int
    inner: torch.optim.Optimizer
    group: dict[str, Any]


def owned_shards(parameters: Mapping[str, torch.nn.Parameter], optimizer: Any) -> Iterator[OwnedShard]:
    """Yield the shards that this rank's optimizer owns, in the order of `parameters` (local name -> parameter); none of a
    model that is not trained."""
    for part in optimizer.chained_optimizers if optimizer is not None else ():
        find = _distributed_shards(part) if isinstance(part, DistributedOptimizer) else partial(_whole_shard, part)
        for name, parameter in parameters.items():
            found = find(name, parameter)
            if found is not None:
                yield found


def _distributed_shards(
    optimizer: DistributedOptimizer,
) -> Callable[[str, torch.nn.Parameter], OwnedShard | None]:
    # A group has its fp32 parameters first; `model_param_group_index_map` counts in the order of the buffers.
    groups = zip(optimizer.optimizer.param_groups, optimizer.model_fp32_groups, optimizer.model_float16_groups)
    places = {
        parameter: (main, group)
        for group, wide, narrow in groups
        for parameter, main in zip((*wide, *narrow), group["params"], strict=True)
    }

    def find(name: str, parameter: torch.nn.Parameter) -> OwnedShard | None:
        if parameter not in places:
            return None
        main, group = places[parameter]
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        return OwnedShard(name, parameter, main, owned.start, owned.end, optimizer.optimizer, group)

    return find


def _whole_shard(optimizer: Any, name: str, parameter: torch.nn.Parameter) -> OwnedShard | None:
    main = getattr(parameter, "main_param", parameter)
    for group in optimizer.optimizer.param_groups:
        if any(candidate is main for candidate in group["params"]):
            return OwnedShard(name, parameter, main, 0, parameter.numel(), optimizer.optimizer, group)
    return None


def optimizer_tensors(parameters: Mapping[str, torch.nn.Parameter], optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield main params and moments: the optimizer's memory in addition to parameters and gradients."""
    for part in owned_shards(parameters, optimizer):
        yield from update_tensors(part)


def update_tensors(part: OwnedShard) -> Iterator[torch.Tensor]:
    """Yield the main param and the moments of one shard, if they exist."""
    if has_main_param(part):
        yield part.main
    for value in part.inner.state.get(part.main, {}).values():
        # Step counts have no dimension and are not worth a copy; the moments of a value head's bias have one element.
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            yield value


def state_shards(parameters: Mapping[str, torch.nn.Parameter], optimizer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's state. The tensors are live: write or copy them before the next step."""
    tensors: dict[str, torch.Tensor] = {
        f"parameter/{name}": _plain(parameter) for name, parameter in parameters.items()
    }
    for part in owned_shards(parameters, optimizer):
        if has_main_param(part):
            tensors[f"master/{part.name}"] = part.main.detach()
        state = part.inner.state.get(part.main, {})
        if state:
            tensors.update({f"{moment}/{part.name}": state[moment] for moment in MOMENTS})
            tensors[f"step/{part.name}"] = _step_of(part)
    if optimizer is None:
        return tensors  # the random states of a process are saved with its trained model
    tensors.update({f"random/{name}": state for name, state in random_states().items()})
    return tensors


def random_states() -> dict[str, torch.Tensor]:
    """Return the states of the process's random-number generators."""
    return {GENERATOR: torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}


def _plain(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the parameter in the model's type."""
    # Re-quantizing the dequantized values of an FP8 weight gives the same FP8 values.
    return dequantize_fp8_tensor(parameter).detach() if is_float8tensor(parameter) else parameter.detach()


def has_main_param(part: OwnedShard) -> bool:
    """Return False if the optimizer updates the parameter itself, which is then fp32."""
    return part.parameter.dtype != torch.float32


def _step_of(part: OwnedShard) -> torch.Tensor:
    """Return a parameter's step count."""
    holder = part.inner.state[part.main] if _counts_each_parameter(part) else part.group
    return torch.as_tensor(holder.get("step", 0), dtype=torch.float32).reshape(()).clone()


def _counts_each_parameter(part: OwnedShard) -> bool:
    """Return True for torch's Adam, False for the fused ones of apex and Transformer Engine, which count steps per
    group."""
    # A fused optimizer's group has no count before its first step, so its contents cannot decide this.
    return isinstance(part.inner, torch.optim.Adam | torch.optim.AdamW)


def _set_update_state(part: OwnedShard, moments: dict[str, torch.Tensor], step: float) -> None:
    """Put moments and step count in place. `step` 0 restores the state before the first step."""
    state: dict[str, torch.Tensor] = dict(moments)
    if _counts_each_parameter(part):
        # Every parameter needs a separate step tensor, because Adam adds in place.
        state["step"] = torch.tensor(step, dtype=torch.float32)
    elif step:
        part.group["step"] = int(step)
    else:
        part.group.pop("step", None)
    if step:
        part.inner.state[part.main] = state
    else:
        part.inner.state.pop(part.main, None)


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    if GENERATOR in states:
        torch.set_rng_state(states.pop(GENERATOR).cpu())
        get_cuda_rng_tracker().set_states({name: state.clone() for name, state in states.items()})


# ---- loading in place


def loading_state(
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: Any,
    host: HostMemory | None = None,
) -> dict[str, torch.Tensor]:
    """Return tensors to load this rank's parameters, main params and moments into, by their names in `state_shards`.

    They are the live tensors, except for those that cannot be written in place: FP8 weights, and moments before the
    first step. `finish_loading` puts these in place. New moments are offloaded to `host`, each before the next is
    created.
    """
    found = {
        f"parameter/{name}": torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if is_float8tensor(parameter)
        else parameter.detach()
        for name, parameter in parameters.items()
    }
    for part in owned_shards(parameters, optimizer):
        state = part.inner.state.get(part.main, {})
        if has_main_param(part):
            found[f"master/{part.name}"] = part.main.detach()
        for moment in MOMENTS:
            if moment in state:
                found[f"{moment}/{part.name}"] = state[moment]
                continue
            new = torch.zeros(part.main.shape, dtype=torch.float32, device=part.main.device)
            if host is not None:
                host.offload([new], release=False)
            found[f"{moment}/{part.name}"] = new
    return found


@torch.no_grad()
def finish_loading(
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: Any,
    loaded: Mapping[str, torch.Tensor],
    steps: Mapping[str, float],
) -> None:
    """Put the tensors of `loading_state` in place; `steps`: optimizer steps of each local parameter."""
    for name, parameter in parameters.items():
        if is_float8tensor(parameter):
            parameter.copy_(loaded[f"parameter/{name}"])
    for part in owned_shards(parameters, optimizer):
        _set_update_state(part, {moment: loaded[f"{moment}/{part.name}"] for moment in MOMENTS}, steps[part.name])


# ---- main params from a checkpoint
# megatron-core copies main params from the model's weights, so those of an fp32 checkpoint would lose their last bits before
# the first step. Here weights are loaded in fp32 and rounded into the model, and main params are set to what was loaded.


def loading_buffers(parameters: Mapping[str, torch.nn.Parameter]) -> Buffers:
    """Return fp32 buffers to load the parameters into, by their names; an fp32 parameter is its own buffer."""
    return {
        # NaN marks elements not yet loaded.
        name: parameter.data
        if parameter.dtype == torch.float32
        else torch.full(parameter.shape, torch.nan, device="cpu")
        for name, parameter in parameters.items()
    }


def share_parameters(parameters: Mapping[str, torch.nn.Parameter], others: Mapping[str, torch.nn.Parameter]) -> None:
    """Let the parameters be the memory of another model's; their own is freed."""
    assert parameters.keys() == others.keys(), "one directory and one layout"
    for name, parameter in parameters.items():
        parameter.data = others[name].data


@torch.no_grad()
def round_into(parameters: Mapping[str, torch.nn.Parameter], loaded: Buffers) -> Buffers:
    """Copy the loaded values into the parameters and return the buffers, on the CPU, whose values they cannot hold.

    Raise ValueError if something was not loaded.
    """
    inexact = {}
    for name, values in loaded.items():
        parameter = parameters[name]
        if torch.isnan(values).any():
            raise ValueError(f"{name} was not loaded completely, or is not a number in the checkpoint")
        if parameter.dtype == torch.float32:
            continue
        parameter.copy_(values)
        # megatron-core takes the main params of FP8 weights from their initialization, so always set them.
        if is_float8tensor(parameter) or not torch.equal(parameter.detach().float().cpu(), values):
            inexact[name] = values
    return inexact


def set_main_params(parameters: Mapping[str, torch.nn.Parameter], optimizer: Any, values: Buffers) -> None:
    """Overwrite the main params of the parameters that `values` names."""
    for shard in owned_shards(parameters, optimizer):
        if shard.name in values:
            own = values[shard.name].flatten()[shard.start : shard.end]
            shard.main.data.copy_(own.view(shard.main.shape))
