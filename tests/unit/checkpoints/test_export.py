"""Export in one process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.checkpoints.export import export_to_huggingface
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


def test_export_of_one_process(loaded, tmp_path):
    directory, layout, parameters = loaded
    report = export_to_huggingface(tmp_path / "out", directory, layout, parameters, None, batch_bytes=10_000)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert (report.num_tensors, report.num_bytes) == (50, 4 * layout.architecture.num_parameters)


def test_export_in_another_type(loaded, tmp_path):
    directory, layout, parameters = loaded
    export_to_huggingface(tmp_path / "out", directory, layout, parameters, None, dtype=torch.bfloat16)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[n], t.bfloat16()) for n, t in load_file(directory / "model.safetensors").items())
    assert read_architecture(tmp_path / "out").dtype == "bfloat16"
