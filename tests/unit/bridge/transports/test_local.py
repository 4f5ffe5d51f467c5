"""Weight sync into an embedded engine of one process: the group of a single rank is None."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.bridge.protocol.receiver import Receiver
from megatron_dapo.bridge.sources import WeightSource
from megatron_dapo.bridge.transports.local import local_weight_sync
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.load import load_from_huggingface
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout


@pytest.fixture
def loaded(make_model_directory):
    directory = make_model_directory("qwen2", tied=True)
    layout = megatron_layout(read_architecture(directory), ParallelLayout(1), torch.float32)
    parameters = {name: torch.empty(shape) for name, shape in layout.local_shapes(0).items()}
    load_from_huggingface(directory, layout, 0, parameters)
    return directory, layout, parameters


class Engine:
    """Stand-in for an embedded engine: tensors full of NaN, and the version it declares."""

    def __init__(self, layout, dtype=torch.float32) -> None:
        self.tensors = {
            name: torch.full(spec.shape, float("nan"), dtype=dtype) for name, spec in layout.tensors.items()
        }
        self.version: int | None = None

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def set_policy_version(self, version: int) -> None:
        self.version = version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_gets_the_model(dtype, loaded):
    directory, layout, parameters = loaded
    engine = Engine(layout, dtype)
    actor = SimpleNamespace(tensors=layout, served_parameters=lambda: parameters)
    sync = local_weight_sync(layout, engine, None, weights=WeightSource(actor, 0, None), bucket_bytes=3000)
    sync.publish(3)
    stored = load_file(directory / "model.safetensors")
    assert all(torch.equal(engine.tensors[name], tensor.to(dtype)) for name, tensor in stored.items())
    assert engine.version == 3 and sync.serving == (0,)
    report = sync.update(4, parameters)
    assert report.engines[0].num_bytes == dtype.itemsize * layout.architecture.num_parameters
    with pytest.raises(ValueError, match="version 3 is older than version 4"):
        sync.publish(3)


def test_a_changed_element_is_noticed(loaded, monkeypatch):
    _, layout, parameters = loaded
    engine = Engine(layout)
    checksums = Receiver.checksums

    def spoil(self: Receiver) -> dict[str, int]:
        self.parameters["model.layers.2.mlp.up_proj.weight"][5, 6] += 1e-6
        return checksums(self)

    actor = SimpleNamespace(tensors=layout, served_parameters=lambda: parameters)
    sync = local_weight_sync(layout, engine, None, weights=WeightSource(actor, 0, None))
    monkeypatch.setattr(Receiver, "checksums", spoil)
    with pytest.raises(RuntimeError, match="1 of 50 parameters .* differ .*: model.layers.2.mlp.up_proj.weight"):
        sync.publish(1)
    assert engine.version is None and sync.serving == ()


def test_engine_with_other_tensors_is_refused(loaded):
    _, layout, _ = loaded
    engine = Engine(layout)
    with pytest.raises(ValueError, match="the source has 1 tensors, its layout"):
        local_weight_sync(layout, engine, None).update(1, {"0.output_layer.weight": torch.zeros(1)})
    engine.tensors["lm_head.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match="has 50 tensors, the embedded engine 51.*lm_head.weight"):
        local_weight_sync(layout, engine, None)
    del engine.tensors["model.norm.weight"]
    with pytest.raises(ValueError, match="model.norm.weight"):
        local_weight_sync(layout, engine, None)


def test_digest_depends_on_both_layouts(loaded):
    _, layout, _ = loaded
    digests = {local_weight_sync(layout, Engine(layout, d), None).plan.digest for d in (torch.float32, torch.bfloat16)}
    assert len(digests) == 2
