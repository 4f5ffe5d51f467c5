"""Models in `torch_dist` checkpoints of Megatron-LM: opened as a stored model, and written.

A directory of Megatron-LM has iter_0000012/ with metadata.json, .metadata and *.distcp, and next to it
latest_checkpointed_iteration.txt, which names the newest iteration. The optimizer's state is neither read nor written, nor
what all ranks share: common.pt of megatron-core 0.16, an entry of .metadata of 0.19.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.checkpoints.export import ExportReport, export_stored_model
from megatron_dapo.checkpoints.formats.safetensors import StoredModel
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.layouts.torch_dist import (
    VOCABULARY,
    TorchDistPlace,
    places,
    state_places,
    written_places,
)
from megatron_dapo.models.architecture import HEADS, ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.execution import execute_from_reader
from megatron_dapo.reshard.layout import Shard, SingleHolderLayout, TensorSpec, shard_view, slice_view
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.slices import Slice
from megatron_dapo.untrusted import blamed_on, one_line, read_json

logger = logging.getLogger(__name__)

LATEST_FILE = "latest_checkpointed_iteration.txt"
CONFIG_FILE, METADATA_FILE = "metadata.json", ".metadata"
RELEASE = "release"  # Megatron-LM's name of a checkpoint that no run saved
BACKEND = "torch_dist"
# Format version, as the tested megatron-core versions write it; a checkpoint does not say which of them wrote it.
VERSION, MEGATRON_CORE = 1, "0.16.1 to 0.19.2"
_OF_MODELS = ("decoder.", "embedding.", "output_layer.")
_ONE_RANK = ParallelLayout(world_size=1)


def is_torch_dist(path: str | Path) -> bool:
    """Return True for a directory of Megatron-LM, of one iteration or of several, in whatever format."""
    path = Path(path)
    names = (LATEST_FILE, METADATA_FILE, CONFIG_FILE)
    return any((path / name).is_file() for name in names) or any(path.glob("mp_rank_*"))


def iteration_directory(path: Path) -> Path:
    """Return the directory of the newest iteration in `path`, or `path` if it is one of an iteration.

    Raises ValueError if it is not a torch_dist checkpoint.
    """
    latest = path / LATEST_FILE
    if latest.is_file():
        name = latest.read_text(encoding="utf-8", errors="replace").strip()
        if name != RELEASE and not re.fullmatch(r"\d{1,12}", name):
            raise ValueError(f"{latest}: holds {one_line(repr(name), 60)}, not the number of an iteration")
        path = path / (RELEASE if name == RELEASE else f"iter_{int(name):07d}")
    if any(path.glob("mp_rank_*")):
        raise ValueError(
            f"{path}: a checkpoint of one file a rank (mp_rank_*), not {BACKEND}; convert it with Megatron-LM first: "
            "load it there and save it with --ckpt-format torch_dist --ckpt-convert-format torch_dist"
        )
    for name in (CONFIG_FILE, METADATA_FILE):
        if not (path / name).is_file():
            raise ValueError(
                f"{path}: no {name}; a {BACKEND} checkpoint has it: the copy is incomplete, or it is another directory"
            )
    with blamed_on(path / CONFIG_FILE):
        backend = read_json(path / CONFIG_FILE).get("sharded_backend")
    if backend != BACKEND:
        raise ValueError(
            f"{path / CONFIG_FILE}: format {backend!r}, this program reads {BACKEND!r}; save it with Megatron-LM's --ckpt-format"
        )
    return path


class TorchDistModel(StoredModel):
    """The model of a `torch_dist` checkpoint, by Hugging Face names; `model`: directory with the config.json of the same model.

    Raises ValueError if files are missing or short, or tensors belong to a different model. One buffer is in memory at
    a time.
    """

    def __init__(self, path: str | Path, model: str | Path) -> None:
        super().__init__()
        self.path = iteration_directory(Path(path))
        self.architecture = read_architecture(model, heads=HEADS)
        stored = _read_metadata(self.path)
        self._prefix = _prefix(stored, self.path)
        probe = megatron_layout(self.architecture, _ONE_RANK, torch.float32)
        self._places = {
            local: self._find(local, tuple(spec.shape), stored, model) for local, spec in probe.local_specs(0).items()
        }
        self._refuse_more(stored, model)
        dtypes = {
            shard.tensor: stored[self._prefix + self._places[shard.local][0].key].dtype for shard in probe.shards(0)
        }
        self.layout: MegatronLayout = megatron_layout(self.architecture, _ONE_RANK, dtypes)
        self.specs = dict(self.layout.tensors)
        self._whole = plan(self.layout, SingleHolderLayout(self.layout.tensors))
        self._buffer: tuple[str, torch.Tensor] | None = None  # the last one that was read

    def read_tensor(self, name: str) -> torch.Tensor:
        name = self.architecture.aliases().get(name, name)
        spec = self.specs[name]
        out = torch.empty(spec.shape, dtype=spec.dtype)
        execute_from_reader(self._whole.receives(0, {name}), self, {name: out})
        return out

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Read `bounds`, in global coordinates, of a shard; see `ShardReader`."""
        # The projections of attention are parts of one buffer, which is read once for all of them.
        if self._buffer is None or self._buffer[0] != shard.local:
            self._buffer = shard.local, self._read_buffer(shard.local)
        out.copy_(shard_view(self._buffer[1], shard, bounds))

    def _read_buffer(self, local: str) -> torch.Tensor:
        from megatron_dapo.megatron.torch_dist import one_process, read_torch_dist

        spec, found = self.layout.local_specs(0)[local], self._places[local]
        buffer = torch.empty(spec.shape, dtype=spec.dtype)
        parts = buffer.chunk(len(found)) if len(found) > 1 else (buffer,)
        with one_process():
            for place, part in zip(found, parts, strict=True):
                key = TorchDistPlace(self._prefix + place.key, place.indices)
                try:
                    read_torch_dist(self.path, key, part, may_be_padded=place.key in VOCABULARY)
                except Exception as error:  # the libraries below raise many types for damaged files
                    raise ValueError(f"{self.path}: {key} cannot be read: {one_line(error, 200)}") from None
        return buffer

    def _find(
        self, local: str, shape: tuple[int, ...], stored: Mapping[str, TensorSpec], model: str | Path
    ) -> tuple[TorchDistPlace, ...]:
        """Return the places of a buffer of this shape. Raises ValueError if there are none or their shape differs."""
        name = local.partition(".")[2]
        for found in places(name, self.architecture):
            if all(self._prefix + place.key in stored for place in found):
                break
        else:
            key = next(places(name, self.architecture))[0].key
            raise ValueError(
                f"{self.path}: no {self._prefix}{key}, which the model of {model} has; name its own with --model"
            )
        rows = (shape[0] // len(found), *shape[1:])
        for place in found:
            have = tuple(stored[self._prefix + place.key].shape)
            need = (*(size for _, size in place.indices), *rows)
            # Padding of the vocabulary depends on the layout that saved it; the tokens themselves have to be there.
            is_enough = place.key in VOCABULARY and have[1:] == need[1:] and have[0] >= self.architecture.vocab_size
            if have != need and not is_enough:
                raise ValueError(
                    f"{self.path}: {place.key} has shape {have}, the model of {model} needs {need}; name the model that was "
                    "trained with --model"
                )
        return found

    def _refuse_more(self, stored: Mapping[str, TensorSpec], model: str | Path) -> None:
        known = {self._prefix + place.key for found in self._places.values() for place in found}
        for local in self._places:
            known |= {
                self._prefix + p.key for found in places(local.partition(".")[2], self.architecture) for p in found
            }
        starts = tuple(self._prefix + start for start in _OF_MODELS)
        more = sorted(key for key in stored if key.startswith(starts) and key not in known)
        if more:
            raise ValueError(
                f"{self.path}: holds {more[0]}, which the model of {model} lacks ({len(more)} such tensors); name the model "
                "that was trained with --model"
            )


def convert_torch_dist(
    source: str | Path, target: str | Path, model: str | Path | None, shard_bytes: int
) -> ExportReport:
    """Write a checkpoint of Megatron-LM as a Hugging Face directory; config, tokenizer and types are those of `model`.

    ValueError or OSError in one line; then `target` is not there. A newer version of the format that could be read is
    logged.
    """
    if model is None:
        raise ValueError(
            f"{source} is of Megatron-LM and has no config.json; name a Hugging Face directory of the same model with --model"
        )
    directory = iteration_directory(Path(source))
    version = read_json(directory / CONFIG_FILE).get("sharded_backend_version", VERSION)
    versions = (
        f"version {one_line(version, 20)} of {BACKEND}; megatron-core {MEGATRON_CORE}, the tested ones, write version {VERSION}"
    )
    try:
        with TorchDistModel(directory, model) as stored:
            report = export_stored_model(target, stored, model, shard_bytes=shard_bytes)
    except ValueError as error:
        raise error if version == VERSION else ValueError(f"{error} ({versions})") from None
    if version != VERSION:
        logger.warning("%s: converted all the same from %s", directory, versions)
    return report


def write_torch_dist_model(
    source: StoredModel, model: str | Path, target: str | Path, iteration: int | None = None
) -> int:
    """Write a stored model as a directory of Megatron-LM, and return its bytes; the whole model is in memory meanwhile.

    model: directory with its config.json. iteration: None for a model that no run saved. Raises ValueError if `target`
    exists or the two models differ, and leaves nothing behind.
    """
    from megatron_dapo.megatron.torch_dist import write_torch_dist

    architecture = read_architecture(model, heads=HEADS)
    layout = megatron_layout(
        architecture, _ONE_RANK, {n: source.specs[n].dtype for n in _checked(source, architecture, model)}
    )
    buffers = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in layout.local_specs(0).items()}
    shards: dict[str, list[Shard]] = {}
    for shard in layout.shards(0):
        shards.setdefault(shard.tensor, []).append(shard)
    for name in layout.tensors:
        tensor = source.read_tensor(name)
        for shard in shards[name]:
            bounds = Slice(shard.global_offset, shard.shape)
            shard_view(buffers[shard.local], shard, bounds).copy_(slice_view(tensor, bounds))
    plain = {local.partition(".")[2]: buffer for local, buffer in buffers.items()}
    tensors = {place: buffer for local, buffer in plain.items() for place in written_places(local, architecture)}
    states = {place for local in plain for place in state_places(local, architecture)}
    with atomic_directory(target) as directory:
        name = RELEASE if iteration is None else f"iter_{iteration:07d}"
        inside = directory / name
        inside.mkdir()
        common = {"checkpoint_version": 3.0, "iteration": iteration or 0}
        write_torch_dist(inside, tensors, sorted(states), common)
        for file in inside.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        (directory / LATEST_FILE).write_text(RELEASE if iteration is None else str(iteration), encoding="utf-8")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _checked(source: StoredModel, architecture: ModelArchitecture, model: str | Path) -> Mapping[str, tuple[int, ...]]:
    """Return the model's shapes. Raises ValueError if those of `source` differ."""
    shapes = architecture.shapes()
    for name, shape in shapes.items():
        found = tuple(source.specs[name].shape) if name in source.specs else "missing"
        if found != tuple(shape):
            raise ValueError(
                f"{source.path}: {name} is {found}, the model of {model} needs {tuple(shape)}; name its own with --model"
            )
    return shapes


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but the records that torch's and megatron-core's checkpoints have in .metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or constant of these records, or raise UnpicklingError."""
        is_record = module.startswith("torch.distributed.checkpoint.") or (
            module == "megatron.core.dist_checkpointing.strategies.torch" and name.startswith("MCore")
        )
        is_plain = (module, name) in _PLAIN or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if "." not in name and (is_record or is_plain):
            found = super().find_class(module, name)
            # A module's functions are no records.
            if isinstance(found, (type, torch.dtype)) or (module, name) in _PLAIN:
                return found
        raise pickle.UnpicklingError(f"names {module}.{name}, which is no record of a checkpoint; it may run code")


_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


def _read_metadata(directory: Path) -> dict[str, TensorSpec]:
    """Return the global tensors of a checkpoint, after checking that its files are as long as .metadata says."""
    path = directory / METADATA_FILE
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        tensors = {
            str(key): TensorSpec(tuple(entry.size), entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "properties")
        }
        ends: dict[str, int] = {}
        for entry in metadata.storage_data.values():
            file_name = os.path.basename(entry.relative_path)
            ends[file_name] = max(ends.get(file_name, 0), int(entry.offset) + int(entry.length))
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        raise ValueError(f"{path}: cannot be read: {one_line(error, 200)}") from None
    for file_name, end in ends.items():
        part = directory / file_name
        size = part.stat().st_size if part.is_file() else -1
        if size < end:
            found = "is missing" if size < 0 else f"has {size} bytes, {METADATA_FILE} needs {end}"
            raise ValueError(f"{part}: {found}; the copy is incomplete")
    return tensors


def _prefix(stored: Mapping[str, TensorSpec], directory: Path) -> str:
    """Return what precedes the names of the model's tensors: nothing, or for example "module."."""
    found = [
        key.removesuffix(VOCABULARY[0]) for key in stored if key.endswith(VOCABULARY[0]) and "optimizer" not in key
    ]
    if len(found) != 1:
        raise ValueError(f"{directory}: {len(found)} tensors are named ...{VOCABULARY[0]}; a GPT model has one")
    return found[0]
