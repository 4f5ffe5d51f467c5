"""Worker of test_one_shard.py: a real actor, the shared memory transport, and the loader of an engine in this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sync_simulation import SimulatedEngine

import megatron_dapo
from megatron_dapo.bridge.sources import WeightSource
from megatron_dapo.bridge.sync_plan import SyncPlan
from megatron_dapo.bridge.transports.base import EngineHandles
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import WeightSync
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.planner import plan

PACKAGE = Path(megatron_dapo.__file__).parent
SHARD = "0.decoder.layers.1.self_attention.linear_proj.weight"
MARKER = torch.tensor([1.2345678e-3, -9.8765432e-5, 3.1415927e-7, 2.7182818e-9])


class Trace:
    """Files of the package whose functions hold the marked bytes, in the order of first sight."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._bytes = MARKER.numpy().tobytes()
        self._lock = threading.Lock()

    def __call__(self, frame: Any, event: str, result: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or PACKAGE not in path.parents:
            return
        if frame.f_code.co_name == "__init__":  # an engine that is late maps memory that has been written already
            return
        name = str(path.relative_to(PACKAGE))
        if name not in self.files and any(map(self._is_marked, _tensors([*frame.f_locals.values(), result]))):
            with self._lock:
                self.files.setdefault(name)

    def _is_marked(self, tensor: torch.Tensor) -> bool:
        return self._bytes in tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensors(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.numel() and value.dtype in (torch.float32, torch.uint8):
                yield value
        elif isinstance(value, dict):
            yield from _tensors(list(value.values()))


def trace(arguments: dict[str, Any]) -> list[str]:
    """Sync an actor of one rank into one engine; return the files that saw the marked shard."""
    actor = MegatronActor.build(arguments["model"], ParallelLayout(1), ActorSettings(use_distributed_optimizer=False))
    with torch.no_grad():
        actor.named_local_parameters()[SHARD].view(-1)[: len(MARKER)] = MARKER
    layout = sglang_layout(actor.architecture, 1, torch.float32, 1, device="cpu")
    engine = SimulatedEngine(layout)
    sync_plan = SyncPlan(plan(actor.tensors, layout), layout, 1 << 16)
    handles, alone = EngineHandles([0], {0: engine}), Coordination()
    transport = SharedMemoryTransport(
        sync_plan, handles, 0, NodeTopology(1, 1), alone, directory=Path(arguments["arenas"])
    )
    sync = WeightSync(sync_plan, handles, transport, alone, weights=WeightSource(actor, 0, None))
    found = Trace()
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        sync.publish(1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    parameter = dict(engine.models[0].named_parameters())["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(parameter.view(-1)[: len(MARKER)], MARKER), "the shard did not arrive"
    return list(found.files)
