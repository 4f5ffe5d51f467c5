"""Write a Hugging Face model directory tensor by tensor: shards of bounded size, checked against the source, atomic."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.checkpoints.formats.huggingface import (
    INDEX_FILE,
    SINGLE_FILE,
    HFCheckpoint,
    dtype_name,
    untouched_names,
)
from megatron_dapo.checkpoints.formats.safetensors import SafetensorsWriter, StoredModel
from megatron_dapo.checkpoints.formats.stacked_experts import ExpertCollector, stored_specs
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.reshard.layout import TensorSpec

_QUANTIZED = "quantization_config"
DEFAULT_SHARD_BYTES = 5_000_000_000

# Config, tokenizer in its various formats, generation settings and what a vision tower's images need: copied from the
# source unchanged.
_SIDE_FILES = """
    config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model vocab.json vocab.txt
    merges.txt special_tokens_map.json added_tokens.json chat_template.json chat_template.jinja LICENSE
    preprocessor_config.json processor_config.json
""".split()


def output_specs(
    source: StoredModel, architecture: ModelArchitecture, dtype: torch.dtype | None
) -> dict[str, TensorSpec]:
    """Return the tensors of an export of a model that started as `source`: its names and shapes, parameters in `dtype`
    (None: their stored type), those that are fp32 in any model and other tensors in their own."""
    kept = set(untouched_names(source.specs, architecture))
    return {
        name: spec if dtype is None or name in kept or architecture.is_float32(name) else TensorSpec(spec.shape, dtype)
        for name, spec in source.specs.items()
    }


class HFCheckpointWriter:
    """Collects tensors into the shard files of an open directory; made by `hf_checkpoint_writer`."""

    def __init__(
        self,
        directory: Path,
        source: StoredModel,
        architecture: ModelArchitecture,
        specs: Mapping[str, TensorSpec],
        shard_bytes: int,
    ) -> None:
        self._directory = directory
        self._source = source
        self._architecture = architecture
        self._specs = specs
        self._stored = stored_specs(specs)
        self._experts = ExpertCollector(specs)
        self._file_of = _assign_files(self._stored, shard_bytes)
        self._open: dict[str, SafetensorsWriter] = {}
        self._left = Counter(self._file_of.values())  # tensors still to come, by file

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Store a parameter, cast to its announced type, also under the second name that a tied model may store.

        Experts that are stored as one tensor stay in memory until all of their layer are there.
        Raises ValueError for a wrong shape, an unknown name or a repeated one.
        """
        if name not in self._specs:
            raise ValueError(f"export: {name} is not a tensor of the source model")
        if (complete := self._experts.add(name, tensor)) is not None:
            self._write(*complete)
        for alias, tied in self._architecture.aliases().items():
            if tied == name and alias in self._specs:
                self._write(alias, tensor)

    def finish(self) -> None:
        """Copy the tensors that training does not touch, and write the index of a model of several shards.

        Raises ValueError if a tensor was not written.
        """
        for name in untouched_names(self._specs, self._architecture):
            self._write(name, self._source.read_tensor(name))
        missing = [file for file, count in self._left.items() if count]
        if missing:
            raise ValueError(
                f"export: {sum(self._left[f] for f in missing)} tensors were not written, in {', '.join(missing)}"
            )
        if set(self._file_of.values()) == {SINGLE_FILE}:
            return
        index = {
            "metadata": {"total_size": sum(s.num_bytes for s in self._specs.values())},
            "weight_map": {self._source.stored_names.get(name, name): file for name, file in self._file_of.items()},
        }
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        file, stored = self._file_of[name], self._source.stored_names
        if file not in self._open:
            specs = {stored.get(n, n): self._stored[n] for n, f in self._file_of.items() if f == file}
            self._open[file] = SafetensorsWriter(self._directory / file, specs)
        self._open[file].write(stored.get(name, name), tensor.to(self._stored[name].dtype))
        self._left[file] -= 1
        # Close at once: a model of 200 shards would otherwise keep 200 files open.
        if not self._left[file]:
            self._open[file].close()

    def abandon(self) -> None:
        for writer in self._open.values():
            writer.abandon()


@contextmanager
def hf_checkpoint_writer(
    target: str | Path,
    source: StoredModel,
    architecture: ModelArchitecture,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    config_fields: Mapping[str, Any] | None = None,
) -> Iterator[HFCheckpointWriter]:
    """Yield a writer whose directory becomes `target` once it is complete and has the names and shapes of `source`.

    The caller writes every parameter; dtype None keeps its type. Other tensors, config, tokenizer and generation config
    come from `source`; `config_fields` replace those of its config.json. Raises ValueError if `target` exists.
    """
    specs = output_specs(source, architecture, dtype)
    with atomic_directory(target) as directory:
        writer = HFCheckpointWriter(directory, source, architecture, specs, shard_bytes)
        try:
            yield writer
            writer.finish()
        finally:
            writer.abandon()  # no-op if the writer has finished
        copy_side_files(source.path, directory)
        _update_config(directory / "config.json", config_fields or {}, dtype)
        _verify(directory, specs)


def _assign_files(specs: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, str]:
    """Return tensor -> file, in order: a new file starts when the next tensor would exceed the bound; a tensor larger
    than the bound gets a separate file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.num_bytes
    # Readers look for this name when there is no index.
    if len(shards) == 1:
        return dict.fromkeys(specs, SINGLE_FILE)
    return {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, shard in enumerate(shards, 1)
        for name in shard
    }


def copy_side_files(source: Path, directory: Path) -> None:
    """Copy config, tokenizer and generation config, if the source has them."""
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _update_config(path: Path, fields: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype is None and not fields and _QUANTIZED not in config:
        return  # the copied file stays as it is, byte for byte
    config |= fields
    config.pop(_QUANTIZED, None)  # The tensors were dequantized.
    if dtype is not None:
        # transformers 5 renamed torch_dtype to dtype; a second field would contradict the first.
        field = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[field] = dtype_name(dtype)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _verify(directory: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Open the written files again: their names, shapes, types and sizes must be the announced ones."""
    with HFCheckpoint(directory) as written:
        if written.specs != dict(specs):
            different = sorted(n for n in {*written.specs, *specs} if written.specs.get(n) != specs.get(n))
            raise ValueError(f"export: {len(different)} tensors differ from the source's, first {different[0]}")
