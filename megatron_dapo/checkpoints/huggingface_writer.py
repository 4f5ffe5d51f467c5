"""Writes a Hugging Face model folder tensor by tensor: shards of bounded size, verified against its source, atomic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from megatron_dapo.checkpoints.architecture import DTYPES, ModelArchitecture
from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.checkpoints.huggingface import INDEX_FILE, SINGLE_FILE, HFCheckpoint, untouched_names
from megatron_dapo.checkpoints.safetensors_file import SafetensorsWriter
from megatron_dapo.parallel.reshard.layout import TensorSpec

DEFAULT_SHARD_BYTES = 5_000_000_000
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})

# What else makes a folder a model: the config, the tokenizer in its several formats, and how to generate.
_SIDE_FILES = """
    config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model vocab.json vocab.txt
    merges.txt special_tokens_map.json added_tokens.json chat_template.json chat_template.jinja LICENSE
""".split()


class ModelSource(Protocol):
    """The model an export is compared with and takes the rest from: a Hugging Face folder or a converted one."""

    @property
    def path(self) -> Path:
        """Folder with config and tokenizer."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Hugging Face name -> shape and type, in stored order."""

    def read_tensor(self, name: str) -> torch.Tensor:
        """One whole tensor."""


def output_specs(
    folder: ModelSource, architecture: ModelArchitecture, dtype: torch.dtype | None
) -> dict[str, TensorSpec]:
    """What an export of a model that came from `folder` has to contain: the same names and shapes, in `dtype` where
    given.

    Tensors that are no parameters keep their type.
    """
    kept = set(untouched_names(folder.specs, architecture))
    return {
        name: spec if dtype is None or name in kept else TensorSpec(spec.shape, dtype)
        for name, spec in folder.specs.items()
    }


class HuggingFaceWriter:
    """Collects tensors into shard files of an open folder; made by `huggingface_writer`."""

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], shard_bytes: int) -> None:
        self._folder = folder
        self._specs = dict(specs)
        self._file_of = _assign_files(specs, shard_bytes)
        self._open: dict[str, SafetensorsWriter] = {}
        self._left = {file: sum(f == file for f in self._file_of.values()) for file in self._file_of.values()}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Stores one tensor, cast to its announced type. ValueError for a wrong shape, an unknown or a second one."""
        if name not in self._specs:
            raise ValueError(f"export: {name} is not a tensor of the source model")
        file = self._file_of[name]
        if file not in self._open:
            specs = {n: self._specs[n] for n, f in self._file_of.items() if f == file}
            self._open[file] = SafetensorsWriter(self._folder / file, specs)
        self._open[file].write(name, tensor.to(self._specs[name].dtype))
        self._left[file] -= 1
        if not self._left[file]:
            self._open[file].close()

    def finish(self) -> None:
        missing = [file for file, count in self._left.items() if count]
        if missing:
            raise ValueError(
                f"export: {sum(self._left[f] for f in missing)} tensors were not written, in {', '.join(missing)}"
            )
        if set(self._file_of.values()) == {SINGLE_FILE}:
            return
        index = {
            "metadata": {"total_size": sum(s.num_bytes for s in self._specs.values())},
            "weight_map": self._file_of,
        }
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def abandon(self) -> None:
        for writer in self._open.values():
            writer.abandon()


@contextmanager
def huggingface_writer(
    target: str | Path,
    source: ModelSource,
    architecture: ModelArchitecture,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    config_fields: Mapping[str, Any] = NO_FIELDS,
) -> Iterator[HuggingFaceWriter]:
    """A writer whose folder becomes `target` once complete and equal to `source` in names, shapes, types and bytes.

    dtype None keeps each tensor's type. Aliases of tied tensors and tensors that are no parameters are the caller's to
    write: see `copy_untouched`. Config, tokenizer and generation config come from `source`; `config_fields` replace
    those of its config.json. Raises ValueError where `target` exists.
    """
    specs = output_specs(source, architecture, dtype)
    with atomic_directory(target) as folder:
        writer = HuggingFaceWriter(folder, specs, shard_bytes)
        try:
            yield writer
            writer.finish()
        finally:
            writer.abandon()
        copy_side_files(source.path, folder)
        changed = dict(config_fields)
        if dtype is not None:
            changed |= _dtype_field(folder / "config.json", dtype)
        if changed:
            _set_config_fields(folder / "config.json", changed)
        _verify(folder, specs)


def written_names(folder: ModelSource, architecture: ModelArchitecture, name: str) -> tuple[str, ...]:
    """The names under which `folder` stores architecture tensor `name`: itself, and aliases where it has them."""
    return (
        name,
        *(alias for alias, tensor in architecture.aliases().items() if tensor == name and alias in folder.specs),
    )


def copy_untouched(writer: HuggingFaceWriter, source: ModelSource, architecture: ModelArchitecture) -> tuple[str, ...]:
    """Takes over what training does not touch from the source folder; returns the names."""
    names = untouched_names(source.specs, architecture)
    for name in names:
        writer.write(name, source.read_tensor(name))
    return names


def _assign_files(specs: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, str]:
    """Tensor -> file: in order, a new file where the next tensor would exceed the bound (a larger one alone)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.num_bytes
    if len(shards) == 1:
        return dict.fromkeys(specs, SINGLE_FILE)
    return {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, shard in enumerate(shards, 1)
        for name in shard
    }


def copy_side_files(source: Path, folder: Path) -> None:
    """Config, tokenizer and generation config, where the source has them."""
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _dtype_field(path: Path, dtype: torch.dtype) -> dict[str, str]:
    config = json.loads(path.read_text(encoding="utf-8"))
    field = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {field: next(name for name, value in DTYPES.items() if value == dtype)}


def _set_config_fields(path: Path, fields: Mapping[str, Any]) -> None:
    config = json.loads(path.read_text(encoding="utf-8")) | dict(fields)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _verify(folder: Path, specs: Mapping[str, TensorSpec]) -> None:
    """The written files, read back: names, shapes, types and bytes are those of the source."""
    with HFCheckpoint(folder) as written:
        if written.specs != dict(specs):
            different = sorted(n for n in {*written.specs, *specs} if written.specs.get(n) != specs.get(n))
            raise ValueError(f"export: {len(different)} tensors differ from the source's, first {different[0]}")
