"""Write a small model in the shape of Qwen2.5, with random weights, for the smoke run on one GPU.

    python -m tools.make_smoke_model runs/smoke-gpu-model [--size small]

`small` has heads of 128, sizes FP8 multiplies in blocks of 128, grouped queries and biases, as the published models; `tiny` is
the same in a size a CPU runs. The tokenizer is the quickstart's. Random weights answer nothing right: what a run on them
shows is that everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from megatron_dapo.checkpoints.atomic_directory import atomic_directory

TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "base_model"
SEED = 0
SIZES: Mapping[str, Mapping[str, int]] = {
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


def write(target: Path, size: str) -> None:
    """Write an ordinary Hugging Face directory in bf16. ValueError if it exists or the size is unknown."""
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES[size],
    )
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(config)
    # transformers gives the padding token zeros. Random weights sample it, and each norm of zeros multiplies gradients by
    # 1 / sqrt(rms_norm_eps), 1000 here.
    torch.nn.init.normal_(model.model.embed_tokens.weight.data[config.pad_token_id], std=config.initializer_range)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    with atomic_directory(target) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory to be written; must not exist")
    parser.add_argument("--size", default="small", help=f"one of {', '.join(SIZES)}")
    options = parser.parse_args(arguments)
    try:
        write(options.target, options.size)
    except (ValueError, OSError) as error:
        print(f"make_smoke_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
