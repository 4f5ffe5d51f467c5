"""A rank's part of a model's saved state: the slices it writes, and loading from any layout.

The assignment of slices to the ranks that write and read them is pure arithmetic (`checkpoints.layouts.state`,
`reshard.reading`), computed once per model: a second save plans nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_dapo.checkpoints.formats.saved_model import (
    MAIN,
    MOMENTS,
    PARAMETER,
    STEP,
    OtherModelError,
    SavedModel,
    kinds_of,
    rank_file,
    slice_name,
    state_index,
)
from megatron_dapo.checkpoints.layouts.state import EXPERTS, LAYER_ORDER, Range, StateLayout, is_frozen
from megatron_dapo.device_thread import device_thread_pool
from megatron_dapo.files.checksums import DamagedError, PieceChecksums
from megatron_dapo.megatron.model import named_local_parameters
from megatron_dapo.megatron.state import owned_shards
from megatron_dapo.parallel.collectives import broadcast_json, max_over
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.execution import execute_transfers
from megatron_dapo.reshard.layout import Shard, local_holes, shard_view
from megatron_dapo.reshard.planner import Transfer
from megatron_dapo.reshard.reading import Needs, ReadPlan, StoredSlice
from megatron_dapo.reshard.regions import ReplicaGroups

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from megatron_dapo.megatron.trained_model import TrainedModel

logger = logging.getLogger(__name__)

_OTHER, _DAMAGED = 1.0, 2.0  # failure codes of a load; all ranks use the largest
ROUND_ELEMENTS = 1 << 24  # elements of one kind that a rank reads before sending them on: 64 MiB of fp32
_READERS = 2  # threads: one waits for storage while the other verifies and copies


class _View(NamedTuple):
    """A slice as a view of a local tensor: its flattened elements [start, start + size)."""

    key: str
    local: str
    start: int
    shape: tuple[int, ...]


class _Round:
    """Slices of one kind that are in memory together, with what this rank reads, sends and receives."""

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        dtype_of: Callable[[str], torch.dtype],
        receives: Sequence[Transfer],
        sends: Sequence[Transfer],
        in_place: Mapping[str, Transfer],
    ) -> None:
        """`dtype_of`: type of a tensor on disk. `in_place`: of `receives`, see `transfers_in_place`."""
        self._buffers, self._dtype_of, self._in_place = buffers, dtype_of, in_place
        self._receives = [each for each in receives if in_place.get(each.source_shard.local) is not each]
        self._sends = sends
        self._sources: dict[str, torch.Tensor] = {}
        self._reads: list[Future[None]] = []

    def read(self, saved: SavedModel, kind: str, stored: StoredSlice, source: str, readers: ThreadPoolExecutor) -> None:
        """Begin to read a slice into its place, or into separate memory. Raise ValueError if its file is broken."""
        saved.reader(stored.file)  # opened only by this thread
        transfer = self._in_place.get(source)
        if transfer is None:
            device = next(iter(self._buffers.values())).device
            values = torch.empty(stored.bounds.shape, dtype=self._dtype_of(stored.tensor), device=device)
        else:
            shard = transfer.destination_shard
            values = shard_view(self._buffers[shard.local], shard, transfer.bounds)
        self._sources[source] = values.view(-1)
        self._reads.append(readers.submit(saved.read, kind, stored, values))

    def wait(self) -> None:
        """Wait for the reads and raise the first error."""
        for read in self._reads:
            read.result()

    def exchange(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Send every slice to the ranks that need it. Collective."""
        execute_transfers(self._receives, self._sends, self._dtype_of, self._sources, self._buffers, group)


class ModelState:
    """The saved state of one model, as this rank sees it. Methods that load are collective among the model's ranks."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model

    @property
    def rank(self) -> int:
        """Rank among the model's ranks."""
        return self._model.rank

    @cached_property
    def layout(self) -> StateLayout:
        """The layout of the state. Collective among the model's ranks on first use."""
        model = self._model
        names = model.trained_tensors.local_specs(model.rank)
        # The model's method would bring them back to the device.
        parameters = {name: each for name, each in named_local_parameters(model.chunks).items() if name in names}
        distributed = model.settings.use_distributed_optimizer and self._is_trained
        grouped = bool(model.config.moe_grouped_gemm)
        frozen = model.settings.freeze
        layout = StateLayout(model.trained_tensors, distributed, _layer_order(parameters), grouped=grouped, frozen=frozen)
        if not self._is_trained:
            return layout
        live = {
            part.name: (part.start, part.end)
            for part in owned_shards(parameters, model.optimizer)
            if part.start < part.end
        }
        differs = live != {name: own for name, own in layout.ranges(model.rank).items() if not is_frozen(name, frozen)}
        group = model.part.collective_group
        if group is not None:
            differs = bool(max_over({"differs": float(differs)}, group)["differs"])
        if differs:
            # Weights held as FP8 are in separate buffers, and which ones they are depends on the layer.
            logger.info("ranges of the distributed optimizer are not those of one buffer: ranks tell each other theirs")
            layout = StateLayout(model.trained_tensors, distributed, ranges=_exchanged(live, model), frozen=frozen)
        return layout

    @cached_property
    def _views(self) -> list[_View]:
        tensors = self._model.trained_tensors.tensors
        owned = self.layout.ranges(self.rank)
        views = []
        for shard in self.layout.saved(self.rank):
            name = slice_name(shard.tensor, shard.bounds)
            for kind in kinds_of(tensors[shard.tensor].dtype, self._is_trained):
                # A frozen parameter is itself its main param.
                source = PARAMETER if kind == MAIN and is_frozen(shard.local, self.layout.frozen) else kind
                base = 0 if source == PARAMETER else owned[shard.local][0]
                local, start = f"{source}/{shard.local}", shard.local_offset[0] - base
                views.append(_View(f"{kind}/{name}", local, start, shard.shape))
            if self._is_trained and not any(shard.global_offset):
                views.append(_View(f"{STEP}/{shard.tensor}", f"{STEP}/{shard.local}", 0, ()))
        return views

    @property
    def _is_trained(self) -> bool:
        return not self._model.settings.is_frozen

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what this rank saves, by the names of `checkpoints.formats.saved_model`. Tensors are live: write or copy them
        before the next step. Collective on first use."""
        local = self._model.state_shards()
        found = {}
        for key, name, start, shape in self._views:
            if name in local:
                view = _view(local[name], start, shape)
                found[key] = view.float() if key.startswith(MAIN) else view
            else:
                assert key.startswith((*MOMENTS, STEP)), (
                    f"{name}: only moments and steps may be missing, before the first step or of a frozen parameter"
                )
                found[key] = torch.zeros(()).expand(shape)  # views of one zero
        for key, tensor in local.items():
            if key.partition("/")[0] not in (PARAMETER, MAIN, *MOMENTS, STEP):
                found[key] = tensor
        return found

    def index(self, name: str) -> dict[str, Any] | None:
        """Return the index of all ranks' files on the model's first rank, and None on the others. Collective on first
        use."""
        layout = self.layout
        if self.rank:
            return None
        if self._index is None:
            slices = {rank_file(name, rank): layout.saved(rank) for rank in range(layout.num_ranks)}
            self._index = state_index(layout.weights.tensors, layout.weights.parallel, layout.distributed, slices, self._is_trained)
            if (lora := self._model.adapter_description()) is not None:
                self._index["lora"] = lora.to_json()
        return self._index

    _index: dict[str, Any] | None = None

    def load(
        self,
        directory: Path,
        name: str,
        checksums: Mapping[str, PieceChecksums] | None = None,
        find_copy: Callable[[str], Path | None] = lambda name: None,
    ) -> None:
        """Load a state saved by any layout. Collective among the model's ranks.

        `find_copy`: returns the copy to read instead of a file of `directory`, or None. Files with `checksums` are verified
        while they are read. Random states and scales of FP8 modules belong to ranks, so they are loaded only if the
        layout is the same. All ranks raise DamagedError if a file is not what was written, and ValueError if the state
        does not fit this model or cannot be read; the model may then be partly loaded.
        """
        model, group = self._model, self._model.part.collective_group
        with _failing_together(group):
            saved = SavedModel(directory, name, checksums, find_copy, is_read_once=True)
        with saved:
            with _failing_together(group):
                _check_tensors(saved, model)
            buffers = model.loading_state()
            self._fill(saved, buffers)
            model.finish_loading(buffers, self._steps(saved))
            # A checkpoint older than a field gets the field's default.
            there = {**asdict(ParallelLayout(1)), **saved.layout}
            if there == asdict(model.layout) and saved.distributed == self.layout.distributed:
                with _failing_together(group):
                    model.load_rank_state(saved.read_local(self.rank))
            elif self.rank == 0:
                logger.info(
                    "%s/%s was saved by another layout: random states start from the seed", saved.path, saved.name
                )

    def _fill(self, saved: SavedModel, buffers: Mapping[str, torch.Tensor]) -> None:
        """Fill the buffers of `loading_state`, and zero the padding."""
        model, layout = self._model, self.layout
        shapes = model.trained_tensors.local_shapes(self.rank)
        padded = {local for local, holes in local_holes(model.trained_tensors.shards(self.rank), shapes).items() if holes}
        places = {tensor: place for place, tensor in enumerate(saved.specs)}
        slices = sorted(saved.slices, key=lambda stored: (places[stored.tensor], stored.bounds))
        weights, updates = _needs_of_weights(layout), _needs_of_updates(layout)
        plan = ReadPlan(slices, updates, layout.num_ranks, ROUND_ELEMENTS)
        own = model.trained_tensors.tensors
        trained = {tensor: needs for tensor, needs in updates.items() if not is_frozen(needs[0][1].local, layout.frozen)}
        main = {tensor: needs for tensor, needs in trained.items() if MAIN in kinds_of(own[tensor].dtype)}
        with device_thread_pool(_READERS, "checkpoint read") as readers:
            for kind in saved.kinds:
                named = {key.partition("/")[2]: buffer for key, buffer in buffers.items() if key.startswith(f"{kind}/")}
                needs = weights if kind == PARAMETER else main if kind == MAIN else trained
                # Load one kind at a time: the device may not have room for a whole optimizer kept on the host.
                with model.on_device(list(named.values())):
                    for local in named.keys() & padded:
                        named[local].zero_()
                    _complete(self._rounds(saved, kind, plan, needs, named, readers), model.part.collective_group)

    def _rounds(
        self,
        saved: SavedModel,
        kind: str,
        plan: ReadPlan,
        needs: Needs,
        named: Mapping[str, torch.Tensor],
        readers: ThreadPoolExecutor,
    ) -> Iterator[_Round]:
        """Yield the rounds of a kind, equally many on every rank, each after its reads have begun."""
        rank, mine, own = self.rank, _of_rank(needs, self.rank), self._model.trained_tensors.tensors
        source = {tensor: _kind_to_read(saved, kind, tensor, own[tensor].dtype) for tensor in needs}

        def dtype_of(tensor: str) -> torch.dtype:
            return saved.kinds_of(tensor)[source[tensor]]

        for indices in plan.rounds:
            receives, sends = plan.receives(rank, indices, mine), plan.sends(rank, indices, needs)
            begun = _Round(named, dtype_of, receives, sends, transfers_in_place(receives, rank, named, dtype_of))
            for index in plan.read_by(rank, indices):
                tensor = plan.slices[index].tensor
                if tensor in needs:  # not the optimizer state of a frozen parameter
                    begun.read(saved, source[tensor], plan.slices[index], str(index), readers)
            yield begun

    def _steps(self, saved: SavedModel) -> dict[str, float]:
        """Return the optimizer steps of each local parameter; one rank reads each. None of a model that is not trained."""
        if not self._is_trained:
            return {}
        model, group = self._model, self._model.part.collective_group
        places = {tensor: place for place, tensor in enumerate(saved.specs)}
        steps = torch.zeros(len(places))
        firsts = [stored for stored in saved.slices if not any(stored.bounds.offset)]
        with _failing_together(group):
            for index, stored in enumerate(firsts):
                if index % self.layout.num_ranks == self.rank:
                    steps[places[stored.tensor]] = saved.read_step(stored.tensor, stored.file)
        if group is not None:
            steps = max_over({"steps": steps}, group)["steps"]  # ranks that did not read it have 0
        found: dict[str, float] = {}
        for shard in model.trained_tensors.shards(self.rank):
            found.setdefault(shard.local, float(steps[places[shard.tensor]]))
        # A buffer with only padding belongs to no tensor; too low a count would set back its whole optimizer group.
        rest = float(steps.max())
        return {local: found.get(local, rest) for local in model.trained_tensors.local_specs(self.rank)}


def _view(tensor: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """Return elements [start, start + size) of a contiguous tensor, in `shape`, as a single view: each save makes
    hundreds."""
    assert tensor.is_contiguous()
    strides = accumulate(reversed(shape[1:]), mul, initial=1) if shape else ()
    return tensor.as_strided(shape, tuple(strides)[::-1], tensor.storage_offset() + start)


def _layer_order(parameters: Mapping[str, object]) -> list[str]:
    """Return the names of a layer's parameters in the order of this rank's modules, then those it does not have."""
    found: dict[str, None] = {}
    for local in parameters:
        name = local.partition(".decoder.layers.")[2].partition(".")[2]
        if EXPERTS in local:
            name = name.partition("local_experts.")[2].partition(".")[2]
        if name:
            found[name] = None
    return [*found, *(name for name in LAYER_ORDER if name not in found)]


def _exchanged(live: Mapping[str, Range], model: TrainedModel) -> list[dict[str, Range]]:
    """Return every rank's ranges. Collective."""
    group, count = model.part.collective_group, model.layout.world_size
    if group is None:
        return [dict(live)]
    everyone = (broadcast_json(live if source == model.rank else None, source, group) for source in range(count))
    return [{local: (start, end) for local, (start, end) in ranges.items()} for ranges in everyone]


def _complete(rounds: Iterator[_Round], group: torch.distributed.ProcessGroup | None) -> None:
    """Read and exchange round after round. Collective."""
    with _failing_together(group):
        current = next(rounds, None)
    while current is not None:
        with _failing_together(group):
            # Read the next round from storage while this one is sent.
            following = next(rounds, None)
            current.wait()
        current.exchange(group)
        current = following


def _needs_of_updates(layout: StateLayout) -> Needs:
    """Return what each rank's optimizer updates, as shards of flat buffers that start at its range."""
    found: dict[str, list[tuple[Sequence[int], Shard]]] = {}
    for rank in range(layout.num_ranks):
        ranges = layout.ranges(rank)
        for shard in layout.updated(rank):
            place = (shard.local_offset[0] - ranges[shard.local][0],)
            found.setdefault(shard.tensor, []).append(((rank,), shard._replace(local_offset=place)))
    return found


def _needs_of_weights(layout: StateLayout) -> Needs:
    groups = ReplicaGroups(layout.weights)
    return {
        tensor: [(groups.ranks[group], shard) for group, shard in shards]
        for tensor, shards in groups.by_tensor().items()
    }


def transfers_in_place(
    receives: Iterable[Transfer], rank: int, buffers: Mapping[str, torch.Tensor], dtype_of: Callable[[str], torch.dtype]
) -> dict[str, Transfer]:
    """Return, by source name, transfers of whole slices that a rank reads itself into contiguous memory of their type.

    Such a slice is read straight into its place, one place per slice."""
    found: dict[str, Transfer] = {}
    for transfer in receives:
        source, shard = transfer.source_shard, transfer.destination_shard
        is_whole = transfer.source == rank and transfer.bounds == source.bounds
        if is_whole and buffers[shard.local].dtype == dtype_of(transfer.tensor):
            if shard_view(buffers[shard.local], shard, transfer.bounds).is_contiguous():
                found.setdefault(source.local, transfer)
    return found


def _of_rank(needs: Needs, rank: int) -> dict[str, list[Shard]]:
    return {tensor: [shard for ranks, shard in found if rank in ranks] for tensor, found in needs.items()}


def _kind_to_read(saved: SavedModel, kind: str, tensor: str, dtype: torch.dtype) -> str:
    """Return the kind to read for `kind` of a tensor that is `dtype` here."""
    # Releases that held all parameters in one type saved the exact values of a tensor that is fp32 now as its main param.
    is_exact = kind == PARAMETER and dtype == torch.float32 and MAIN in saved.kinds_of(tensor)
    return MAIN if is_exact else kind


def _check_tensors(saved: SavedModel, model: TrainedModel) -> None:
    own, is_float32 = model.trained_tensors.tensors, model.architecture.is_float32
    # A checkpoint of a release that held all parameters in one type is read, too.
    there = {n: spec._replace(dtype=torch.float32) if is_float32(n) else spec for n, spec in saved.specs.items()}
    different = [name for name in dict.fromkeys((*own, *there)) if there.get(name) != own.get(name)]
    if different:
        name = different[0]
        stored, here = (_described(specs.get(name)) for specs in (saved.specs, own))
        raise OtherModelError(
            f"{saved.path}: {saved.name} is another model: {len(different)} tensors differ, first {name}: saved {stored}, here "
            f"{here}; set model.path, model.dtype, model.lora and critic.path to those of the checkpoint, or start a new run"
        )
    lora = model.adapter_description()
    if model.rank == 0 and saved.lora is not None and lora is not None:  # only rank 0 has read the base
        saved.lora.require_same_as(lora, str(saved.path))


def _described(spec: Any) -> str:
    return "none" if spec is None else f"{tuple(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"


class _OtherRankDamagedError(DamagedError):
    is_consequence = True


class _OtherRankRefusedError(ValueError):
    is_consequence = True


@contextmanager
def _failing_together(group: torch.distributed.ProcessGroup | None) -> Iterator[None]:
    """Raise on all ranks of the group if the body raises ValueError or OSError on one, so that no rank waits for it.

    If a rank cannot read what was written, all raise DamagedError or OSError: another checkpoint may be loaded.
    """
    problem: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = error
    failed = _OTHER * (problem is not None)
    if isinstance(problem, (DamagedError, OSError)):
        failed = _DAMAGED
    worst = failed if group is None else max_over({"failed": failed}, group)["failed"]
    if problem is not None and failed == worst:
        raise problem
    if worst:
        message = "the state was not loaded: another rank could not read its part; its own message says why"
        raise (_OtherRankDamagedError if worst == _DAMAGED else _OtherRankRefusedError)(message) from problem
