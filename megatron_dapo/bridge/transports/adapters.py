"""Transport of LoRA adapters to engines that hold the base weights: SGLang's own endpoint for adapters.

The ranks that lead engines gather the adapters whole, and hand each engine rank a copy. SGLang compares the SHA-256 of each
tensor before it loads them; what was gathered has the checksums of all ranks' sources, as in any weight sync.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol.messages import Command, CommandReply
from megatron_dapo.bridge.protocol.receiver import Channel, Receiver
from megatron_dapo.bridge.sync_plan import SyncPlan
from megatron_dapo.bridge.transports.base import (
    EngineHandles,
    EngineLoads,
    ServerControl,
    SyncDeadline,
    SyncRequest,
    TransferResult,
)
from megatron_dapo.models.peft import PREFIX
from megatron_dapo.reshard.execution import Buffers, execute_distributed
from megatron_dapo.reshard.layout import Layout, PartialLayout, ReplicatedLayout, TensorSpec
from megatron_dapo.reshard.planner import plan


class AdapterControl(ServerControl, Protocol):
    """Control of an engine that loads adapters next to its weights."""

    def replace_adapter(
        self, config: Mapping[str, Any], payloads: Sequence[bytes], checksums: Mapping[str, str]
    ) -> None: ...


class AdapterEngineLayout(ReplicatedLayout):
    """`EngineLayout` of engines of `tensor_parallel` ranks, each of which is handed every adapter whole."""

    def __init__(self, tensors: Mapping[str, TensorSpec], tensor_parallel: int, num_engines: int) -> None:
        super().__init__(tensors, tensor_parallel * num_engines)
        self.tensor_parallel = tensor_parallel

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Return every tensor's shape and type; the same on all ranks."""
        return self.tensors


class AdapterTransport:
    """`Transport` of the adapters of `source`, by the requests of each engine's leader.

    Args:
        config: adapter_config.json of the adapters.
        group: the trainer's ranks; None for one process.
    """

    def __init__(
        self,
        plan_: SyncPlan,
        handles: EngineHandles[AdapterControl],
        source: Layout,
        config: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.plan, self.handles, self.group, self._config = plan_, handles, group, config
        self.rank = 0 if group is None else dist.get_rank(group)
        whole = PartialLayout(ReplicatedLayout(source.tensors, source.num_ranks), frozenset(handles.leaders))
        self._gather = plan(source, whole)

    def begin(self, request: SyncRequest, deadline: SyncDeadline) -> None:
        """Prepare the result: there is nothing to connect."""
        self._request, self._loads = request, EngineLoads(self.plan, self.rank, deadline)

    def send(self, sources: Buffers) -> None:
        """Gather the adapters and have the engines of this rank load them while the checksums are computed."""
        device = next(iter(sources.values())).device
        tensors = self._gather.destination.tensors if self.rank in self.handles.leaders else {}
        whole = {name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for name, spec in tensors.items()}
        with torch.no_grad():
            execute_distributed(self._gather, sources, whole, self.group)
        engines = self.handles.led_by(self.rank, self._request.engines)
        if engines:
            on_host = {name: tensor.cpu() for name, tensor in whole.items()}
            named = {PREFIX + name: tensor for name, tensor in on_host.items()}
            checksums = {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in named.items()}
            payload = encode_tensors(named)
            for engine in engines:
                self._loads.start(engine, partial(self._load, engine, on_host, payload, checksums))
        self._loads.count(self._request.engines, sources)

    def finish(self) -> TransferResult:
        """Collect the replies."""
        return self._loads.collect("adapters")

    def close(self) -> None:
        """Do nothing: no memory or connection outlives a sync."""

    def _load(
        self, engine: int, tensors: Mapping[str, torch.Tensor], payload: bytes, checksums: Mapping[str, str]
    ) -> tuple[CommandReply, ...]:
        """Load one engine, in a thread. The replies have the checksums of what SGLang has compared."""
        ranks = self.plan.ranks_of(engine)
        self.handles.controls[engine].replace_adapter(self._config, [payload] * len(ranks), checksums)
        return tuple(self._reply(rank, tensors) for rank in ranks)

    def _reply(self, engine_rank: int, tensors: Mapping[str, torch.Tensor]) -> CommandReply:
        request = self._request
        manifest = request.manifest(self.plan, engine_rank)
        return Receiver(dict(tensors)).handle(Command(request.sync_id, "adopt", request.sync_id, manifest), Channel())


def encode_tensors(named: Mapping[str, torch.Tensor]) -> bytes:
    """Return one entry of SGLang's `serialized_named_tensors` that holds the values themselves, for any node. Not in two
    threads at a time."""
    theirs = torch.storage._load_from_bytes
    # megatron-core (0.19) replaces this function by one that SGLang does not let through; pickle writes what it finds here.
    torch.storage._load_from_bytes = _load_from_bytes
    try:
        return pickle.dumps({name: _Inline(tensor) for name, tensor in named.items()}, protocol=4)
    finally:
        torch.storage._load_from_bytes = theirs


def _load_from_bytes(content: bytes) -> torch.Tensor:
    raise AssertionError("only a name in a pickle")


_load_from_bytes.__module__, _load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"


class _Inline:
    """Stand-in that is unpickled as a tensor with these values; in SGLang's processes a tensor's own pickle refers to shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.clone(memory_format=torch.contiguous_format)  # the storage holds nothing else

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        tensor = self._tensor
        return torch._utils._rebuild_tensor_v2, (
            *(_Storage(tensor), 0, tuple(tensor.shape), tensor.stride()),
            *(False, OrderedDict()),  # requires_grad and backward hooks
        )


class _Storage:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[bytes]]:
        storage = torch.storage.TypedStorage(
            wrap_storage=self._tensor.untyped_storage(), dtype=self._tensor.dtype, _internal=True
        )
        return _load_from_bytes, storage.__reduce__()[1]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
