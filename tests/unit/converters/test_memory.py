"""Host memory of a conversion in a fresh process: at most 1.5 x the largest shard plus one layer, above the imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dapo.models.config_json import parse_architecture

REPOSITORY = Path(__file__).parents[3]
CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 20_001,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
CHILD = """
import sys
from megatron_dapo.converters.convert import huggingface_to_megatron, megatron_to_huggingface

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

source, target, back = sys.argv[1:]
before = memory("VmRSS:")
huggingface_to_megatron(source, target, tensor=2, pipeline=2)
middle = memory("VmHWM:")
megatron_to_huggingface(target, back, shard_bytes=60_000_000)
print(before, middle, memory("VmHWM:"))
"""


def _synthetic(directory: Path, shard_bytes: int) -> tuple[int, int, int]:
    """(bytes, largest shard, one layer) of a model of random bits."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    architecture = parse_architecture(CONFIG)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in architecture.shapes().items():
        tensor = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    files = [f"model-{number}.safetensors" for number in range(len(shards))]
    for file, shard in zip(files, shards):
        save_file(shard, directory / file)
    weight_map = {name: file for file, shard in zip(files, shards) for name in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    layer = sum(2 * torch.Size(shape).numel() for shape in architecture.layer_shapes(0).values())
    return 2 * architecture.num_parameters, max((directory / file).stat().st_size for file in files), layer


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_of_both_directions(tmp_path, record_property):
    size, largest, layer = _synthetic(tmp_path / "model", shard_bytes=60_000_000)
    assert size > 270_000_000
    result = subprocess.run(
        [sys.executable, "-c", CHILD, *(str(tmp_path / name) for name in ("model", "cut", "back"))],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    before, to_megatron, both = (int(n) for n in result.stdout.split())
    record_property("peak_above_imports_bytes", both - before)
    assert to_megatron - before <= 1.5 * largest + layer
    assert both - before <= 1.5 * largest + layer
    # And far below the model itself, so that the bound means something.
    assert both - before < size / 2
    print(
        f"model {size:,}, largest shard {largest:,}, layer {layer:,}, "
        f"peak {to_megatron - before:,} and {both - before:,}"
    )
