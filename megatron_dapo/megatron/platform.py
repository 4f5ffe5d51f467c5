"""The CPU platform of stock megatron-core, a table of small replacements installed once per process; and deterministic
kernels.

The docstring of each replacement names the lines of megatron-core 0.16.1 that need it. None changes the mathematics.
With CUDA present, nothing is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")
PACKAGE = "megatron.core"
OPTIMIZER_PACKAGE = "megatron.core.optimizer"


@dataclass(frozen=True)
class Replacement:
    """`owner.name` becomes `value`."""

    owner: Any
    name: str
    value: Any


class Overlay:
    """A module or namespace with some attributes replaced; all others are the original's."""

    def __init__(self, original: Any, replaced: Mapping[str, Any]) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def current_device() -> tuple[Replacement, ...]:
    """`torch.cuda.current_device()` returns the CPU device.

    models/common/embeddings/rotary_pos_embedding.py:162, tensor_parallel/mappings.py:91, :141, :181,
    tensor_parallel/layers.py:552, pipeline_parallel/p2p_communication.py:190, :313 and many more pass it as `device=`.
    """
    return (Replacement(torch.cuda, "current_device", lambda: CPU),)


def synchronize() -> tuple[Replacement, ...]:
    """`torch.cuda.synchronize()` does nothing: CPU kernels have finished when they return.

    pipeline_parallel/p2p_communication.py:242 calls it after the lengths of packed micro-batches were exchanged.
    """
    return (Replacement(torch.cuda, "synchronize", lambda *args, **kwargs: None),)


def literal_devices() -> tuple[Replacement, ...]:
    """A literal `device="cuda"` means the CPU in the modules that a training step reaches.

    pipeline_parallel/schedules.py:596, :983, :2138; optimizer/clip_grads.py:103, :115, :174;
    optimizer/optimizer.py:481, :485, :907; utils.py:1207 (the norm of gradients without Transformer Engine and apex).
    """
    overlay = Overlay(torch, {name: _on_cpu(name) for name in FACTORIES})
    names = ("pipeline_parallel.schedules", "optimizer.clip_grads", "optimizer.optimizer", "utils")
    return tuple(Replacement(importlib.import_module(f"megatron.core.{name}"), "torch", overlay) for name in names)


def _on_cpu(name: str) -> Any:
    factory = getattr(torch, name)

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return call


def tensor_type_names() -> tuple[Replacement, ...]:
    """`tensor.type()` of a CPU tensor names the CUDA type, but only when a megatron-core optimizer asks.

    optimizer/clip_grads.py:167, optimizer/optimizer.py:671, :690 and optimizer/distrib_optimizer.py:361, :420, :582
    compare it with "torch.cuda.FloatTensor" and its 16-bit counterparts.
    """
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if args or kwargs or self.device.type != "cpu":
            return answer
        return answer.replace("torch.", "torch.cuda.", 1) if _called_from(OPTIMIZER_PACKAGE) else answer

    return (Replacement(torch.Tensor, "type", type_),)


def moves_to_cuda() -> tuple[Replacement, ...]:
    """`tensor.cuda()` in megatron-core leaves the tensor where it is.

    models/common/language_module/language_module.py:244 moves the last stage's tied output weight this way.
    """
    original = torch.Tensor.cuda

    @functools.wraps(original)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from(PACKAGE) else original(self, *args, **kwargs)

    return (Replacement(torch.Tensor, "cuda", cuda),)


def _called_from(package: str) -> bool:
    """Return True if the caller's caller is in `package`: other libraries must see the original behavior."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(package)


def random_states() -> tuple[Replacement, ...]:
    """The CPU generator takes the place of the CUDA generator in the random-number tracker.

    tensor_parallel/random.py:55, :113 (get and set the state: recompute, `fork`), :235-240, :422 (`add`, seeding).
    """
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    cuda = Overlay(torch.cuda, {"get_rng_state": _get_state, "manual_seed": torch.manual_seed})
    return (
        Replacement(module, "_get_cuda_rng_state", _get_state),
        Replacement(module, "_set_cuda_rng_state", _set_state),
        Replacement(module, "torch", Overlay(torch, {"cuda": cuda})),
    )


def _get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def quiet_fork() -> tuple[Replacement, ...]:
    """Forking the tracker does not warn that the CPU generator moved, because here it manages that generator.

    tensor_parallel/random.py:262 logs the warning at every dropout and recompute.
    """
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    return (Replacement(module, "logging", Overlay(module.logging, {"getLogger": lambda name: _Silent()})),)


class _Silent:
    def warning(self, *args: Any, **kwargs: Any) -> None:
        """Drop the message."""


class _Stream:
    """A CUDA stream or event on a CPU, whose work is complete once enqueued."""

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Do nothing."""


def streams() -> tuple[Replacement, ...]:
    """Streams of the token dispatcher and of the gradient buffers do nothing.

    transformer/moe/token_dispatcher.py:445 makes one to copy counts to the host; :871-874, :895, :899 use it.
    distributed/param_and_grad_buffer.py waits for the current one before it reduces (0.19.2: :632, 0.16.1 only if
    communication overlaps).
    """
    stream = _Stream()
    cuda = Overlay(
        torch.cuda,
        {"Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda s: contextlib.nullcontext()},
    )
    names = ("transformer.moe.token_dispatcher", "distributed.param_and_grad_buffer")
    overlay = Overlay(torch, {"cuda": cuda})
    return tuple(Replacement(importlib.import_module(f"megatron.core.{name}"), "torch", overlay) for name in names)


def dispatcher_counts() -> tuple[Replacement, ...]:
    """Counts of tokens to send become numpy arrays although they are already on the CPU: torch.distributed's
    all_to_all_single does not accept tensors as sizes.

    transformer/moe/token_dispatcher.py:879-887 gets them from transformer/moe/moe_utils.py:1078, which only converts
    CUDA tensors.
    """
    module = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return (Replacement(module, "maybe_move_tensor_to_cpu", on_host),)


def uneven_collectives() -> tuple[Replacement, ...]:
    """all_gather and reduce_scatter pad parts of different lengths, because gloo only supports equal lengths.

    tensor_parallel/mappings.py:150, :193, which the token dispatcher reaches if an expert is cut over several
    ranks (expert tensor parallelism).
    """
    module = importlib.import_module("megatron.core.tensor_parallel.mappings")
    replaced = {"all_gather": _gather_uneven, "reduce_scatter": _reduce_scatter_uneven}
    return (Replacement(module, "torch", Overlay(torch, {"distributed": Overlay(dist, replaced)})),)


def _gather_uneven(parts: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    longest = max(part.size(0) for part in parts)
    gathered = mine.new_empty(len(parts) * longest, *mine.shape[1:])
    dist.all_gather_into_tensor(gathered, _pad_rows(mine, longest), group=group)
    for part, row in zip(parts, gathered.split(longest) if longest else parts, strict=True):
        part.copy_(row[: part.size(0)])


def _reduce_scatter_uneven(mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    longest = max(part.size(0) for part in parts)
    padded = torch.cat([_pad_rows(part, longest) for part in parts])
    reduced = mine.new_empty(longest, *mine.shape[1:])
    dist.reduce_scatter_tensor(reduced, padded, group=group)
    mine.copy_(reduced[: mine.size(0)])


def _pad_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(num_rows - tensor.size(0), *tensor.shape[1:])))


PATCHES = MappingProxyType(
    {
        "current_device": current_device,
        "synchronize": synchronize,
        "literal_devices": literal_devices,
        "tensor_type_names": tensor_type_names,
        "moves_to_cuda": moves_to_cuda,
        "random_states": random_states,
        "quiet_fork": quiet_fork,
        "streams": streams,
        "dispatcher_counts": dispatcher_counts,
        "uneven_collectives": uneven_collectives,
    }
)


def install_cpu_platform() -> bool:
    """Install every patch once if CUDA is absent. Return True if the CPU platform is in use."""
    if torch.cuda.is_available():
        return False
    if not _is_installed():
        for patch in PATCHES.values():
            for replacement in patch():
                setattr(replacement.owner, replacement.name, replacement.value)
    return True


# Environment variable -> values with which its library repeats a result; the first is set if there is none.
DETERMINISTIC_ENVIRONMENT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # cuBLAS: one workspace per stream, so that split-K sums do not race. Read when the first handle is created.
        "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
        # Transformer Engine: attention's backward pass without atomic additions. Read at import.
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
        # NCCL: if it chooses by message size and load, it may add in another order after a restart.
        "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
    }
)


def use_deterministic_kernels() -> None:
    """Make results of PyTorch, cuDNN, cuBLAS, NCCL, Transformer Engine and megatron-core repeat bit for bit.

    Call this before the first process group, matrix product on a GPU, or import of Transformer Engine. Raise ValueError
    if the environment asks for the opposite.
    """
    for name, values in DETERMINISTIC_ENVIRONMENT.items():
        found = os.environ.setdefault(name, values[0])
        if found not in values:
            raise ValueError(
                f"run.deterministic = true, but {name} = {found!r} in the environment; unset it or choose one of "
                f"{', '.join(values)}"
            )
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # `transformer_config` reads this switch too, for megatron-core's own `deterministic_mode`.
    torch.use_deterministic_algorithms(True)
    # Every buffer is written before it is read, so filling it with NaN first would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _is_installed() -> bool:
    try:
        return torch.cuda.current_device() is CPU
    except (RuntimeError, AssertionError):
        return False
