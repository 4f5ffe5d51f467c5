"""One rank of `plan_memory.py`: real models, one after the other, and the bytes of their tensors in a training step.

RANK=r WORLD_SIZE=n MASTER_ADDR=... MASTER_PORT=... python memory_rank.py SPECIFICATION.json
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dapo.megatron import state
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor, TokenOutputs
from megatron_dapo.megatron.experts import GroupedSigmoidRouter, SoftmaxFirstRouter
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.ops import logprob
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import pack
from megatron_dapo.types import MicroBatch, TrainSample

TIMEOUT_S = 300.0
MOMENTS = tuple(f"{name}/" for name in state.MOMENTS)


class LiveBytes:
    """Bytes of storages that are held, each counted once, and their peak."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def hold(self, holder: Any, storage: torch.UntypedStorage) -> None:
        """Count the storage until `holder` is gone."""
        key, size = storage._cdata, storage.nbytes()
        self._holders[key] += 1
        if self._holders[key] == 1:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        weakref.finalize(holder, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.bytes -= size


class Saved:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Allocations(TorchDispatchMode):
    """Live bytes of storages that operators make while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self.live.hold(storage, storage)
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class Meter:
    """Tensors that a training step keeps: those saved by layers, and all that the log-prob head holds."""

    def __init__(self, excluded: set[int]) -> None:
        self._excluded = excluded  # storages of parameters
        self.activations = LiveBytes()
        self.head = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata in self._excluded or not storage.nbytes():
            return tensor
        saved = Saved(tensor)
        self.activations.hold(saved, storage)
        return saved

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, Saved) else saved

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure a training step."""
        kernels_of = logprob.kernels_of

        def measured(name: str) -> Any:
            kernels = kernels_of(name)
            sums, gradients = self._of_head(kernels.sums), self._of_head(kernels.gradients)
            return SimpleNamespace(room=kernels.room, sums=sums, gradients=gradients)

        logprob.kernels_of = measured
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            logprob.kernels_of = kernels_of

    def _of_head(self, function: Any) -> Any:
        def run(inputs: Any, other: Any) -> Any:
            kept = getattr(other, "kept", other)  # a result of the forward pass, an input of the backward
            # Hidden states that the head keeps are its own, not the layers'.
            self._excluded.add(inputs.hidden.untyped_storage()._cdata)
            with Allocations() as allocations:
                result = function(inputs, other)
            before = inputs.hidden.untyped_storage().nbytes() + (kept.values.nbytes if kept is not None else 0)
            self.head = max(self.head, before + allocations.live.peak)
            return result

        return run


def balance_routing() -> None:
    """Make routers choose experts in turn, with their own probabilities."""

    def choose(self: SoftmaxFirstRouter, scores: torch.Tensor) -> torch.Tensor:
        turn = torch.arange(len(scores))[:, None] * self.topk + torch.arange(self.topk)
        return turn % scores.size(1)

    for router in (SoftmaxFirstRouter, GroupedSigmoidRouter):
        router.choose = choose


def fill(parameters: Mapping[str, torch.Tensor], tensors: Any) -> None:
    """Small random weights; norms 1, biases 0."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in parameters.items():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def micro_batches_of(case: dict[str, Any], layout: ParallelLayout, vocab_size: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(dist.get_rank() // layout.tensor)
    samples = []
    for index in range(case["sequences"]):
        samples.append(
            TrainSample(
                sample_id=str(index),
                group_index=index,
                tokens=torch.randint(0, vocab_size, (case["length"],), generator=generator),
                prompt_length=1,
                loss_mask=torch.ones(case["length"] - 1),
                advantages=torch.ones(case["length"] - 1),
                rollout_logprobs=torch.zeros(case["length"] - 1),
            )
        )
    return [pack(samples, [1.0] * len(samples), layout) for _ in range(case["micro_batches"])]


def loss(micro_batch: MicroBatch, outputs: TokenOutputs, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    total = -(outputs.logprobs * micro_batch.loss_mask).mean()
    return total, {"loss": total.detach()}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return bytes of each component on this rank."""
    layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
    architecture = parse_architecture(case["model"])
    settings = ActorSettings(
        model=ModelSettings(dtype=case["dtype"], recompute=case["recompute"], megatron=case["megatron"]),
        use_distributed_optimizer=case["distributed"],
        chunk_tokens=case["chunk_tokens"],
        head_keep_bytes=case["kept_bytes"],
    )
    actor = MegatronActor(architecture, layout, settings, fill)
    micro_batches = micro_batches_of(case, layout, architecture.vocab_size)
    # Adam makes its moments in the first step.
    actor.train_step(micro_batches, loss, 1.0, 1e-4)
    parameters = actor.named_local_parameters()
    held = {parameter.untyped_storage()._cdata for parameter in parameters.values()}
    meter = Meter(held)
    with meter.measuring():
        actor.train_step(micro_batches, loss, 1.0, 1e-4)
    shards = actor.state_shards()
    main_params = [tensor.nbytes for name, tensor in shards.items() if name.startswith("master/")]
    moments = [tensor.nbytes for name, tensor in shards.items() if name.startswith(MOMENTS)]
    return {
        "stage": layout.coordinates(dist.get_rank()).pipeline,
        "weights": sum(parameter.nbytes for parameter in parameters.values()),
        "gradients": sum(one.main_grad.nbytes for one in parameters.values() if one.requires_grad),
        "main_params": sum(main_params),
        "moments": sum(moments),
        "activations": meter.activations.peak,
        "head": meter.head,
    }


def main() -> None:
    specification = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    balance_routing()
    results = []
    for case in specification["cases"]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, measure(case))
        results.append(everyone)
    if dist.get_rank() == 0:
        Path(specification["report"]).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
