"""A Hugging Face model directory as a layout: every tensor is whole, and any slice of it can be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.checkpoints.atomic_directory import plain_file_name
from megatron_dapo.checkpoints.formats.safetensors import SafetensorsReader, StoredModel, StoredTensor
from megatron_dapo.checkpoints.formats.stacked_experts import (
    ExpertTensor,
    PackedExpertTensor,
    StoredStack,
    scales_of,
    separate,
)
from megatron_dapo.models.architecture import ModelArchitecture, tensor_name
from megatron_dapo.reshard.layout import Shard, SingleHolderLayout, TensorSpec
from megatron_dapo.reshard.slices import Slice, whole
from megatron_dapo.untrusted import blamed_on, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_COMPARE_BYTES = 16 << 20  # read size of each copy when two are compared

# Rotary frequencies, which old exports store although they follow from the config.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

# Parameters of any other type are quantized codes, which are not the weights without their scales.
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class HFCheckpoint(StoredModel):
    """The safetensors files of a Hugging Face model directory.

    Opening it checks the index and every header, so missing or truncated files fail at once with ValueError.
    """

    specs: dict[str, TensorSpec]
    stored_names: dict[str, str]

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        try:
            with blamed_on(self.path):
                stored = _weight_map(self.path)
                for file in dict.fromkeys(stored.values()):
                    self._readers[file] = SafetensorsReader(self.path / file)
                self._check_index(stored)
                self.stored_names = names_in_files(stored)
        except BaseException:
            self.close()
            raise
        self.files = {tensor_name(name): file for name, file in stored.items()}  # tensor name -> file name
        self.specs = {name: self._stored(name).spec for name in self.files}
        with blamed_on(self.path):
            self._separate_experts()

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs.values())

    def read_tensor(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        out = torch.empty(spec.shape, dtype=spec.dtype)
        self._read(name, out)
        return out

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Read `bounds` of a tensor; see `ShardReader`."""
        self._read(shard.tensor, out, bounds)

    def _separate_experts(self) -> None:
        """Replace the tensors of all experts of a layer by one for each expert and projection."""
        stacks = {
            name: StoredStack(self._readers[file], self.stored_names.get(name, name), self.specs[name])
            for name, file in self.files.items()
        }
        self._experts: dict[str, ExpertTensor | PackedExpertTensor] = {}
        parts, replaced = separate(stacks), set()
        for own, (name, tensor) in parts.items():
            self._experts[own], self.specs[own], self.files[own] = tensor, tensor.spec, self.files[name]
            if stacks[name].stored != name:
                there, here = (whole.rpartition(".")[0] for whole in (stacks[name].stored, name))
                self.stored_names[own] = there + own.removeprefix(here)
            replaced |= {name, scales_of(name) or name}
        for name in replaced:
            del self.specs[name], self.files[name]
            self.stored_names.pop(name, None)
        self.num_dequantized = sum(isinstance(tensor, PackedExpertTensor) for tensor in self._experts.values())

    def _stored(self, name: str) -> StoredTensor:
        return self._readers[self.files[name]].tensors[self.stored_names.get(name, name)]

    def _read(self, name: str, out: torch.Tensor, bounds: Slice | None = None) -> None:
        if (expert := self._experts.get(name)) is not None:
            expert.read(out, bounds or whole(expert.spec.shape))
            return
        self._readers[self.files[name]].read(self.stored_names.get(name, name), out, bounds)

    def layout(self, architecture: ModelArchitecture) -> SingleHolderLayout:
        """Return the layout of the architecture's tensors in this directory. Raises ValueError like `check`."""
        self.check(architecture)
        return SingleHolderLayout({name: self.specs[name] for name in architecture.shapes()})

    def dtypes(self, architecture: ModelArchitecture) -> dict[str, torch.dtype]:
        return {name: self.specs[name].dtype for name in architecture.shapes()}

    def check(self, architecture: ModelArchitecture) -> None:
        """Raise ValueError listing tensors that are missing, unknown, quantized, or of a different shape than
        config.json says."""
        shapes, aliases = architecture.shapes(), architecture.aliases()
        missing = [name for name in shapes if name not in self.specs]
        unknown = [
            name
            for name in untouched_names(self.specs, architecture)
            if not _DERIVED.fullmatch(name) and not architecture.is_carried(name)
        ]
        expected = {**shapes, **{alias: shapes[name] for alias, name in aliases.items()}}
        wrong = [
            f"{n} {self.specs[n].shape} instead of {s}"
            for n, s in expected.items()
            if n in self.specs and self.specs[n].shape != s
        ]
        problems = [
            f"{len(names)} {what}: {_first(names)}"
            for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", wrong))
            if names
        ]
        if problems:
            raise ValueError(
                f"{self.path}: the tensors do not fit the {architecture.model_type} of its config.json "
                f"({len(self.specs)} stored, {len(shapes)} expected): {'; '.join(problems)}"
            )
        check_weight_dtypes(self.path, {name: self.specs[name] for name in expected if name in self.specs})

    def check_aliases(self, architecture: ModelArchitecture) -> None:
        """Raise ValueError if a tied model's directory stores a second copy with other values."""
        for alias, name in architecture.aliases().items():
            if alias not in self.specs:
                continue
            # Rows are compared in blocks that fit the bound: the embedding of a large vocabulary takes gigabytes.
            rows = max(1, _COMPARE_BYTES * self.specs[name].shape[0] // max(1, self.specs[name].num_bytes))
            for start in range(0, self.specs[name].shape[0], rows):
                # Taking either copy would be a guess.
                if not torch.equal(self._rows(alias, start, rows), self._rows(name, start, rows)):
                    raise ValueError(
                        f"{self.path}: tie_word_embeddings is true, but {alias} and {name} differ from row {start} on; "
                        f"remove {alias} or set tie_word_embeddings to false"
                    )

    def _rows(self, name: str, start: int, count: int) -> torch.Tensor:
        spec = self.specs[name]
        shape = (min(count, spec.shape[0] - start), *spec.shape[1:])
        out = torch.empty(shape, dtype=spec.dtype)
        self._read(name, out, Slice((start, *(0 for _ in shape[1:])), shape))
        return out

    def _check_index(self, files: Mapping[str, str]) -> None:
        for name, file in files.items():
            if name not in self._readers[file].tensors:
                raise ValueError(f"{self.path}: the index says {name!r} is in {file}, whose header does not have it")
        for file, reader in self._readers.items():
            unlisted = [name for name in reader.tensors if files.get(name) != file]
            if unlisted:
                raise ValueError(
                    f"{self.path / file}: {len(unlisted)} tensors are not in the index: {_first(unlisted)}"
                )


def check_weight_dtypes(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Raise ValueError that names the first parameter stored in a quantized type, which reading would cast silently."""
    quantized = [name for name, spec in specs.items() if spec.dtype not in _WEIGHT_DTYPES]
    if quantized:
        name = quantized[0]
        raise ValueError(
            f"{path}: {name} is {dtype_name(specs[name].dtype)} ({len(quantized)} of {len(specs)} parameters are "
            f"quantized), but its config.json has no quantization_config: start from the original checkpoint in "
            f"{', '.join(map(dtype_name, _WEIGHT_DTYPES[:3]))}, or dequantize this one"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as configurations write it."""
    return str(dtype).removeprefix("torch.")


def untouched_names(stored: Iterable[str], architecture: ModelArchitecture) -> tuple[str, ...]:
    """Return the stored tensors that are neither parameters nor copies of one; an export takes them over unchanged."""
    known = architecture.shapes() | architecture.aliases()
    return tuple(name for name in stored if name not in known)


def names_in_files(stored: Iterable[str]) -> dict[str, str]:
    """Return tensor name -> stored name for those that differ. Raises ValueError for two tensors of one name."""
    found: dict[str, str] = {}
    for name in stored:
        other = found.setdefault(tensor_name(name), name)
        if other != name:
            raise ValueError(f"{other} and {name} are both stored, and are one tensor of the model; remove one")
    return {name: there for name, there in found.items() if name != there}


def _weight_map(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name, from the index or from the header of the single file."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    # Saving a model twice with different shard sizes leaves both, one of them outdated.
    if single.exists() and index.exists():
        raise ValueError(f"{directory}: has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is not the model")
    if index.exists():
        return _read_index(index)
    if not single.exists():
        pickled = (
            sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
            if directory.is_dir()
            else []
        )
        hint = f"; {pickled[0]} is a pickle, which is not read: save the model as safetensors" if pickled else ""
        if shards := sorted(path.name for path in directory.glob("*.safetensors")):
            hint = f", which says what is in {shards[0]} and other files: copy {INDEX_FILE}, too"
        raise ValueError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} exists{hint}")
    with SafetensorsReader(single) as reader:
        return dict.fromkeys(reader.tensors, SINGLE_FILE)


def _read_index(path: Path) -> dict[str, str]:
    document: Any = read_json(path)
    try:
        pairs = dict(document["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: broken index: {error!r}") from None
    if not pairs:
        raise ValueError(f"{path}: the index lists no tensor")
    return {name: plain_file_name(file, path) for name, file in pairs.items()}


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
