"""A model's training state on disk: slices of Hugging Face tensors in the files of many ranks, and their index.

    <name>.json                  the index: tensors, types, the layout that saved them, every slice with its file
    <name>_00000.safetensors     what one rank saved; see docs/checkpoints.md

A tensor of a file is one slice: "parameter/model.norm.weight[0:64]", and "master/", "exp_avg/" and "exp_avg_sq/" of the same
slice. The scalar "step/model.norm.weight" is in the file with the tensor's first element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.checkpoints.formats.peft import AdapterDescription
from megatron_dapo.checkpoints.formats.safetensors import CODE_OF_DTYPE, DTYPE_OF_CODE, SafetensorsReader, StoredModel
from megatron_dapo.files.checksums import PieceChecksums
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Shard, TensorSpec, slice_view
from megatron_dapo.reshard.reading import StoredSlice
from megatron_dapo.reshard.slices import Coordinates, Slice, intersect, whole
from megatron_dapo.untrusted import blamed_on, one_line, read_json

FORMAT = "megatron_dapo model state"
VERSION, MIXED_VERSION = 2, 3  # MIXED_VERSION: some tensors have another type than the model, which `types` lists
PARAMETER, MAIN, MOMENTS, STEP = "parameter", "master", ("exp_avg", "exp_avg_sq"), "step"
_SLICE = re.compile(r"(?P<tensor>[^\[\]]+)\[(?P<ranges>\d+:\d+(?:, \d+:\d+)*)?\]")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors")


class OtherModelError(ValueError):
    """A saved state belongs to a different model; the message names the first tensor that differs."""


def kinds_of(dtype: torch.dtype, is_trained: bool = True) -> dict[str, torch.dtype]:
    """Return the type of each kind of tensor of a model with parameters of `dtype`. An fp32 parameter is itself the
    main param, and a model that is not trained has only parameters."""
    if not is_trained:
        return {PARAMETER: dtype}
    main = {} if dtype == torch.float32 else {MAIN: torch.float32}
    return {PARAMETER: dtype, **main, **dict.fromkeys(MOMENTS, torch.float32)}


def model_dtype(tensors: Mapping[str, TensorSpec]) -> torch.dtype:
    """Return the type of the model that the tensors make up: that of its 16-bit ones, next to which others may be fp32."""
    narrow = {spec.dtype for spec in tensors.values()} - {torch.float32}
    assert len(narrow) <= 1, f"a model has fp32 and one other type, not {sorted(map(str, narrow))}"
    return narrow.pop() if narrow else torch.float32


def rank_file(name: str, rank: int) -> str:
    """Return the name of the file that a rank writes for a model."""
    return f"{name}_{rank:05d}.safetensors"


def index_file(name: str) -> str:
    return f"{name}.json"


def model_names(files: Collection[str]) -> list[str]:
    """Return the names of the models that the files of a checkpoint hold, the policy's first."""
    names = [file.removesuffix(".json") for file in files if file.endswith(".json")]
    return sorted((name for name in names if rank_file(name, 0) in files), key=lambda name: (name != "policy", name))


def slice_name(tensor: str, bounds: Slice) -> str:
    """Return the name of a slice of a tensor, e.g. "model.norm.weight[0:64]"."""
    return f"{tensor}{bounds}"


def state_index(
    tensors: Mapping[str, TensorSpec],
    parallel: ParallelLayout,
    distributed: bool,
    slices: Mapping[str, Iterable[Shard]],
    is_trained: bool = True,
) -> dict[str, Any]:
    """Return the index of a model that is saved as `slices` of each file."""
    dtype = model_dtype(tensors)
    types = {name: CODE_OF_DTYPE[spec.dtype] for name, spec in tensors.items() if spec.dtype != dtype}
    return {
        "format": FORMAT,
        "version": MIXED_VERSION if types else VERSION,
        "layout": asdict(parallel),
        "distributed_optimizer": distributed,
        "kinds": {kind: CODE_OF_DTYPE[each] for kind, each in kinds_of(dtype, is_trained).items()},
        "tensors": {name: list(spec.shape) for name, spec in tensors.items()},
        **({"types": types} if types else {}),
        "files": {file: [slice_name(each.tensor, each.bounds) for each in found] for file, found in slices.items()},
    }


class SavedModel(StoredModel):
    """A model's state in a checkpoint directory. Errors are ValueErrors that name the file in one line.

    As a `StoredModel` it has the parameters by their Hugging Face names. Files are opened on first read.
    """

    def __init__(
        self,
        directory: str | Path,
        name: str = "policy",
        checksums: Mapping[str, PieceChecksums] | None = None,
        find_copy: Callable[[str], Path | None] = lambda name: None,
        *,
        is_read_once: bool = False,
    ) -> None:
        """`checksums`: of the pieces of files, verified on every read; DamagedError if one is wrong. `find_copy`: returns
        the path to read a file of tensors from instead of `directory`, if any. `is_read_once`: see `SafetensorsReader`."""
        super().__init__()
        self.path, self.name, self._checksums = Path(directory), name, checksums or {}
        self._find_copy, self._is_read_once = find_copy, is_read_once
        path = self.path / index_file(name)
        document = _read_index(path)
        with blamed_on(path):
            self.kinds = {str(kind): DTYPE_OF_CODE[code] for kind, code in document["kinds"].items()}
            if self.kinds not in [kinds_of(self.kinds[PARAMETER], is_trained) for is_trained in (True, False)]:
                raise ValueError(f"kinds are {one_line(document['kinds'], 200)}")
            types = {name: DTYPE_OF_CODE[code] for name, code in document.get("types", {}).items()}
            if not set(types.values()) <= {torch.float32} or not types.keys() <= document["tensors"].keys():
                raise ValueError(f"types are {one_line(document['types'], 200)}, which only name fp32 tensors of the model")
            self.specs = {
                str(tensor): TensorSpec(_shape(shape), types.get(tensor, self.kinds[PARAMETER]))
                for tensor, shape in document["tensors"].items()
            }
            self.layout: Mapping[str, Any] = dict(document["layout"])
            self.distributed = bool(document["distributed_optimizer"])
            # Not None: the tensors are adapters of a model that is not in the checkpoint.
            self.lora = AdapterDescription.from_json(document["lora"]) if "lora" in document else None
            self.slices = [
                _stored_slice(text, str(file), self.specs) for file, texts in document["files"].items() for text in texts
            ]
            _check_complete(self.slices, self.specs)

    @property
    def is_trained(self) -> bool:
        """False if it has only parameters: no main params, moments or steps."""
        return MOMENTS[0] in self.kinds

    def kinds_of(self, tensor: str) -> dict[str, torch.dtype]:
        """Return the type of each kind of a tensor: of `kinds`, an fp32 tensor of a 16-bit model has no main param."""
        return kinds_of(self.specs[tensor].dtype, self.is_trained)

    def reader(self, file: str) -> SafetensorsReader:
        if file not in self._readers:
            copy = self._find_copy(file)  # a copy is in memory, so bypassing the page cache gains nothing
            self._readers[file] = SafetensorsReader(
                copy or self.path / file,
                self._checksums.get(file),
                is_read_once=self._is_read_once and copy is None,
            )
        return self._readers[file]

    def read(self, kind: str, stored: StoredSlice, out: torch.Tensor, bounds: Slice | None = None) -> None:
        """Fill `out` with a slice of one kind, or only with `bounds` (global) of it; any type, device and strides."""
        reader, key = self.reader(stored.file), f"{kind}/{slice_name(stored.tensor, stored.bounds)}"
        self._check(reader, key, TensorSpec(stored.bounds.shape, self.kinds_of(stored.tensor)[kind]))
        reader.read(key, out, None if bounds is None else _inside(stored.bounds, bounds))

    def read_step(self, tensor: str, file: str) -> float:
        """Return the number of optimizer steps of a tensor, from the file that has its first element."""
        reader, key = self.reader(file), f"{STEP}/{tensor}"
        self._check(reader, key, TensorSpec((), torch.float32))
        out = torch.empty(())
        reader.read(key, out)
        return float(out)

    def read_local(self, rank: int) -> dict[str, torch.Tensor]:
        """Return rank-local state, which is not part of any tensor: random states and scales of FP8 modules."""
        reader = self.reader(rank_file(self.name, rank))
        found = {}
        for key, stored in reader.tensors.items():
            if key.partition("/")[0] not in (*self.kinds, STEP):
                found[key] = torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
                reader.read(key, found[key])
        return found

    def read_tensor(self, name: str, kind: str = PARAMETER) -> torch.Tensor:
        """Return a whole tensor by its Hugging Face name: its parameter, or another kind."""
        out = torch.empty(self.specs[name].shape, dtype=self.kinds_of(name)[kind])
        for stored in self.slices_of(name):
            self.read(kind, stored, slice_view(out, stored.bounds))
        return out

    def slices_of(self, name: str) -> list[StoredSlice]:
        return [stored for stored in self.slices if stored.tensor == name]

    def _check(self, reader: SafetensorsReader, key: str, spec: TensorSpec) -> None:
        stored = reader.tensors.get(key)
        if stored is None or stored.spec != spec:
            found = "is missing" if stored is None else f"is {stored.spec.shape} {stored.spec.dtype}"
            raise ValueError(
                f"{reader.path}: {key} {found}, {index_file(self.name)} says {tuple(spec.shape)} {spec.dtype}: the two are of "
                "different checkpoints; copy the whole directory again, or resume from an older one"
            )


def _read_index(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: missing: this checkpoint has no state of that model; resume another run, or start one from its "
            "Hugging Face export"
        ) from None
    found = (document.get("format"), document.get("version")) if isinstance(document, dict) else (None, None)
    if found not in ((FORMAT, VERSION), (FORMAT, MIXED_VERSION)):
        raise ValueError(
            f"{path}: format {one_line(found[0], 50)!r} version {one_line(found[1], 50)}, this release reads {FORMAT!r} "
            f"{VERSION} and {MIXED_VERSION}; resume with the release that wrote it"
        )
    return document


def _shape(sizes: list[int]) -> Coordinates:
    if any(type(size) is not int or not 0 < size < 2**63 for size in sizes):
        raise ValueError(f"{one_line(sizes, 100)} is no shape of a tensor")
    return tuple(sizes)


def _stored_slice(text: str, file: str, specs: Mapping[str, TensorSpec]) -> StoredSlice:
    match = _SLICE.fullmatch(text)
    if match is None or match["tensor"] not in specs or not _FILE.fullmatch(file):
        raise ValueError(
            f"{one_line(text, 100)!r} of {one_line(file, 100)!r} is no slice of a tensor in a file next to the index"
        )
    ranges = [tuple(map(int, each.split(":"))) for each in (match["ranges"] or "").split(", ") if each]
    bounds = Slice(tuple(start for start, _ in ranges), tuple(end - start for start, end in ranges))
    shape: Coordinates = specs[match["tensor"]].shape
    if len(ranges) != len(shape) or any(not start < end <= size for (start, end), size in zip(ranges, shape)):
        raise ValueError(f"{one_line(text, 100)!r} is not inside its tensor of shape {shape}")
    return StoredSlice(match["tensor"], bounds, file)


def _check_complete(slices: Iterable[StoredSlice], specs: Mapping[str, TensorSpec]) -> None:
    """Raise ValueError unless the slices cover each element of each tensor exactly once."""
    by_tensor: dict[str, list[Slice]] = {name: [] for name in specs}
    for stored in slices:
        by_tensor[stored.tensor].append(stored.bounds)
    for name, found in by_tensor.items():
        volume, expected = sum(bounds.volume for bounds in found), whole(specs[name].shape).volume
        if volume != expected:
            raise ValueError(f"slices of {name} have {volume} elements, the tensor has {expected}")
        # Sorted by rows, only neighbors can overlap.
        found.sort()
        for index, bounds in enumerate(found):
            for other in found[index + 1 :]:
                if bounds.shape and other.offset[0] >= bounds.offset[0] + bounds.shape[0]:
                    break
                if intersect(bounds, other) is not None:
                    raise ValueError(f"slices {bounds} and {other} of {name} overlap")


def _inside(outer: Slice, bounds: Slice) -> Slice:
    return Slice(tuple(start - base for start, base in zip(bounds.offset, outer.offset)), bounds.shape)
