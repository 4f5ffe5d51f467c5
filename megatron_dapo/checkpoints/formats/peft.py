"""LoRA adapters on disk: which model they belong to, PEFT's directory format, and a stored model with adapters merged in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.formats.safetensors import SafetensorsReader, SafetensorsWriter, StoredModel
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.lora import LORA_A, LORA_B, WEIGHT
from megatron_dapo.models.peft import CONFIG_FILE, PREFIX, TENSORS_FILE, adapter_name, read_adapter_config, require_adapters
from megatron_dapo.reshard.execution import ShardReader
from megatron_dapo.reshard.layout import Shard, TensorSpec
from megatron_dapo.reshard.slices import Slice
from megatron_dapo.untrusted import one_line

_SAMPLE = 64  # elements of a tensor that the fingerprint of a model reads


@dataclass(frozen=True)
class AdapterDescription:
    """What a set of adapters computes, and with which model."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_path: str
    base_fingerprint: str  # see `base_fingerprint`; "": unknown

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def peft_config(self) -> dict[str, Any]:
        """Return PEFT's adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_path,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> AdapterDescription:
        """Raise ValueError, KeyError or TypeError if it is not a description."""
        fields = {name: document[name] for name in cls.__dataclass_fields__}
        found = cls(**{**fields, "targets": tuple(map(str, document["targets"]))})
        if type(found.rank) is not int or found.rank < 1 or not isinstance(found.alpha, float | int):
            raise ValueError(f"adapters of rank {one_line(found.rank, 50)} and alpha {one_line(found.alpha, 50)}")
        return found

    def require_same_as(self, own: AdapterDescription, source: str) -> None:
        """Raise ValueError if adapters described by this, from `source`, mean something else in the model of `own`."""
        if self.base_fingerprint != own.base_fingerprint:
            raise ValueError(
                f"{source}: its adapters belong to the weights of {self.base_path}, and model.path = {own.base_path} has other "
                "ones; set model.path to that model, or start a new run"
            )
        if self.scale != own.scale:
            raise ValueError(
                f"{source}: its adapters were trained with alpha / rank = {self.alpha:g} / {self.rank}, not {own.alpha:g} / "
                f"{own.rank}; set model.lora.alpha = {self.alpha:g}, or start a new run"
            )


def base_fingerprint(directory: Path) -> str:
    """Return a hash of the first elements of every tensor of a model: cheap, and the same for any division into files."""
    digest = hashlib.sha256()
    with HFCheckpoint(directory) as stored:
        for name, spec in sorted(stored.specs.items()):
            # One row at most, so that a slice of a large tensor is one read.
            shape = (*(1 for _ in spec.shape[:-1]), *(min(size, _SAMPLE) for size in spec.shape[-1:]))
            zeros = (0,) * len(shape)
            values = torch.empty(shape, dtype=torch.float32)
            stored.read(0, Shard(name, zeros, spec.shape, name, zeros), Slice(zeros, shape), values)
            digest.update(f"{name} {tuple(spec.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def require_own_base(directory: Path, base_path: str, fingerprint: str) -> None:
    """Raise ValueError if the adapters in a PEFT directory name a model that is here and has other weights than `base_path`."""
    named = read_adapter_config(directory).base
    is_here = bool(named) and any(Path(named).glob("*.safetensors"))
    if is_here and base_fingerprint(Path(named)) != fingerprint:
        raise ValueError(
            f"{directory}: its adapters belong to the weights of {named}, and model.path = {base_path} has other ones; set "
            "model.path to that model, or train new adapters"
        )


def write_peft(
    target: Path, description: AdapterDescription, specs: Mapping[str, TensorSpec], read: Callable[[str], torch.Tensor]
) -> None:
    """Write adapters as a directory that `peft.PeftModel.from_pretrained` reads. It appears complete or not at all.

    Tensors have the names of the class that AutoModelForCausalLM makes of the base, next to a vision tower as well.
    """
    config, prefix = description.peft_config(), read_architecture(description.base_path).decoder_prefix
    if prefix != "model.":  # modules of these names are in the vision tower, too
        config["target_modules"] = rf"{re.escape(prefix)}.*\.({'|'.join(map(re.escape, description.targets))})"
    names = {name: PREFIX + prefix + name.removeprefix("model.") for name in specs}
    with atomic_directory(target) as directory:
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        writer = SafetensorsWriter(directory / TENSORS_FILE, {names[name]: spec for name, spec in specs.items()})
        for name in specs:
            writer.write(names[name], read(name))
        writer.close()


class PeftAdapters(StoredModel):
    """The adapters in a PEFT directory, by our names. Opening it raises ValueError if it is broken or not plain LoRA."""

    specs: dict[str, TensorSpec]

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.config = path, read_adapter_config(path)
        reader = self._readers[TENSORS_FILE] = SafetensorsReader(path / TENSORS_FILE)
        self.stored_names = {adapter_name(stored): stored for stored in reader.tensors}
        self.specs = {name: reader.tensors[stored].spec for name, stored in self.stored_names.items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]], targets: Sequence[str] | None = None) -> None:
        """Raise ValueError unless they are adapters for the matrices of `shapes`, see `require_adapters`."""
        stored = {name: spec.shape for name, spec in self.specs.items()}
        require_adapters(self.path, stored, shapes, self.config.rank, targets)

    def read_tensor(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        out = torch.empty(spec.shape, dtype=spec.dtype)
        self._readers[TENSORS_FILE].read(self.stored_names[name], out)
        return out

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Read `bounds` of a tensor; see `ShardReader`."""
        self._readers[TENSORS_FILE].read(self.stored_names[shard.tensor], out, bounds)


class AddedAdapters:
    """`ShardReader` of a model in `base` with the adapters of a PEFT directory merged in, in the type of what it fills."""

    def __init__(self, base: ShardReader, adapters: PeftAdapters) -> None:
        self._base, self._adapters = base, adapters

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Copy `bounds` of a tensor of the merged model to `out`."""
        self._base.read(rank, shard, bounds, out)
        matrix = shard.tensor.removesuffix(WEIGHT)
        if matrix + LORA_A not in self._adapters.specs:
            return
        a, b = (self._adapters.read_tensor(matrix + kind).to(out) for kind in (LORA_A, LORA_B))
        (row, column), (rows, columns) = bounds
        out.addmm_(b[row : row + rows], a[:, column : column + columns], alpha=self._adapters.config.scale)


class MergedModel(StoredModel):
    """The model of `architecture` in `base` with the adapters of `adapters` merged in, one tensor in memory at a time."""

    def __init__(
        self, base: HFCheckpoint, architecture: ModelArchitecture, adapters: StoredModel, description: AdapterDescription
    ) -> None:
        super().__init__()
        [dtype] = {spec.dtype for spec in adapters.specs.values()}
        self.path = adapters.path
        types = {True: torch.float32, False: dtype}
        self.specs = {n: TensorSpec(shape, types[architecture.is_float32(n)]) for n, shape in architecture.shapes().items()}
        self._base, self._adapters, self._scale = base, adapters, description.scale

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a run with these adapters serves it: rounded to the run's type after the sum."""
        weight, matrix = self._base.read_tensor(name).to(self.specs[name].dtype), name.removesuffix(WEIGHT)
        if matrix + LORA_A not in self._adapters.specs:
            return weight
        a, b = (self._adapters.read_tensor(matrix + kind).float() for kind in (LORA_A, LORA_B))
        return torch.addmm(weight.float(), b, a, alpha=self._scale).to(weight.dtype)
