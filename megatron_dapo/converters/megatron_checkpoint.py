"""A converted model on disk: one safetensors file a model-parallel rank, and a manifest of the parallel sizes.

Files: layout.json (format, parallel sizes, the source's tensors, every file's size), rank_00000.safetensors ... with
the local names of `MegatronLayout`, untouched.safetensors for stored tensors that are no parameters, and the source's
config and tokenizer. The layout itself is not stored: it follows from config.json and the parallel sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.checkpoints.formats.huggingface import check_weight_dtypes, names_in_files, untouched_names
from megatron_dapo.checkpoints.formats.safetensors import CODE_OF_DTYPE, DTYPE_OF_CODE, SafetensorsReader, StoredModel
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.models.architecture import HEADS, ModelArchitecture, tensor_name
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.execution import execute_from_reader
from megatron_dapo.reshard.layout import Shard, SingleHolderLayout, TensorSpec
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.slices import Slice, whole
from megatron_dapo.untrusted import read_json

MANIFEST_FILE = "layout.json"
UNTOUCHED_FILE = "untouched.safetensors"
FORMAT = "megatron_dapo sharded model"
VERSION = 1


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def one_replica(
    *, tensor: int, pipeline: int, virtual_pipeline: int, expert: int, expert_tensor: int | None
) -> ParallelLayout:
    """Return the smallest layout of these sizes. It holds dense tensors `world_size / (tensor x pipeline)` times."""
    stage_size = lcm(tensor, expert * (expert_tensor or tensor))
    return ParallelLayout(
        world_size=stage_size * pipeline,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
    )


def manifest(layout: MegatronLayout, specs: Mapping[str, TensorSpec], file_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Return the manifest of a layout of one replica; `specs` are the source's tensors by stored name, in
    stored order."""
    parallel = layout.parallel
    return {
        "format": FORMAT,
        "version": VERSION,
        "parallel": {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "virtual_pipeline": parallel.virtual_pipeline,
            "expert": parallel.expert,
            "expert_tensor": parallel.expert_tensor_size,
        },
        "tensors": {name: [CODE_OF_DTYPE[spec.dtype], list(spec.shape)] for name, spec in specs.items()},
        "files": dict(file_bytes),
    }


class MegatronCheckpoint(StoredModel):
    """A converted model. Opening it raises ValueError unless files, sizes and buffers match its layout."""

    def __init__(self, path: str | Path, architecture: ModelArchitecture | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        # Value heads are converted like language models.
        self.architecture = architecture or read_architecture(self.path, heads=HEADS)
        parallel, stored, files = _read_manifest(self.path / MANIFEST_FILE)
        self.specs = {tensor_name(name): spec for name, spec in stored.items()}
        self.stored_names = names_in_files(stored)
        self.layout = _layout(self.architecture, parallel, self.specs, self.path)
        self._untouched = untouched_names(self.specs, self.architecture)
        try:
            self._open(files)
        except BaseException:
            self.close()
            raise
        self._whole = plan(self.layout, SingleHolderLayout(self.layout.tensors))

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Read `bounds`, in global coordinates, of a shard of a rank; see `ShardReader`."""
        offset = tuple(
            local + o - base for local, o, base in zip(shard.local_offset, bounds.offset, shard.global_offset)
        )
        self._readers[rank_file(rank)].read(shard.local, out, Slice(offset, bounds.shape))

    def read_local(self, rank: int, local: str) -> torch.Tensor:
        """Return one local buffer of a rank, padding included."""
        spec = self.layout.local_specs(rank)[local]
        out = torch.empty(spec.shape, dtype=spec.dtype)
        self._readers[rank_file(rank)].read(local, out, whole(spec.shape))
        return out

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return one whole tensor by its Hugging Face name, assembled from the ranks' files."""
        spec = self.specs[name]
        out = torch.empty(spec.shape, dtype=spec.dtype)
        if name in self._untouched:
            self._readers[UNTOUCHED_FILE].read(name, out)
            return out
        # The second copy of a tied tensor is not stored again.
        name = self.architecture.aliases().get(name, name)
        execute_from_reader(self._whole.receives(0, {name}), self, {name: out})
        return out

    def _open(self, files: Mapping[str, int]) -> None:
        expected = {rank_file(rank): dict(self.layout.local_specs(rank)) for rank in range(self.layout.num_ranks)}
        if self._untouched:
            expected[UNTOUCHED_FILE] = {name: self.specs[name] for name in self._untouched}
        if set(files) != set(expected):
            raise ValueError(f"{self.path / MANIFEST_FILE}: lists {sorted(files)}, the layout has {sorted(expected)}")
        # Everything is checked before the first read, so a truncated copy fails at once and not after hours.
        for file, specs in expected.items():
            self._readers[file] = reader = SafetensorsReader(self.path / file)
            size = (self.path / file).stat().st_size
            if size != files[file]:
                raise ValueError(f"{self.path / file}: {size} bytes, the manifest says {files[file]}")
            stored = {name: tensor.spec for name, tensor in reader.tensors.items()}
            if stored != specs:
                different = sorted(n for n in {*stored, *specs} if stored.get(n) != specs.get(n))
                raise ValueError(
                    f"{self.path / file}: {len(different)} buffers are not those of the layout, first {different[0]}"
                )


def is_megatron_checkpoint(path: str | Path) -> bool:
    return (Path(path) / MANIFEST_FILE).is_file()


def _layout(
    architecture: ModelArchitecture, parallel: ParallelLayout, specs: Mapping[str, TensorSpec], path: Path
) -> MegatronLayout:
    shapes = architecture.shapes()
    wrong = [name for name, shape in shapes.items() if name not in specs or tuple(specs[name].shape) != shape]
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} tensors of config.json are missing or of another shape in "
            f"{MANIFEST_FILE}: {wrong[:5]}"
        )
    check_weight_dtypes(path, {name: specs[name] for name in shapes})
    return megatron_layout(architecture, parallel, {name: specs[name].dtype for name in shapes})


def _read_manifest(path: Path) -> tuple[ParallelLayout, dict[str, TensorSpec], dict[str, int]]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no {MANIFEST_FILE}; this is not a converted Megatron checkpoint") from None
    try:
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(
                f"format {content['format']!r} version {content['version']}, this program reads {FORMAT!r} {VERSION}: "
                "convert the Hugging Face model again"
            )
        stored = content["parallel"]
        sizes = {axis: int(stored[axis]) for axis in ("tensor", "pipeline", "virtual_pipeline")}
        # Manifests without expert sizes are of dense models.
        expert, expert_tensor = int(stored.get("expert", 1)), int(stored.get("expert_tensor", sizes["tensor"]))
        parallel = one_replica(**sizes, expert=expert, expert_tensor=expert_tensor)
        specs = {
            n: TensorSpec(tuple(int(d) for d in shape), DTYPE_OF_CODE[code])
            for n, (code, shape) in content["tensors"].items()
        }
        return parallel, specs, {str(name): int(size) for name, size in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: broken manifest: {error}") from None
