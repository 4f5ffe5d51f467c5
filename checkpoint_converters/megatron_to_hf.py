"""Convert a checkpoint of hf_to_megatron.py back to a Hugging Face model: megatron_to_hf.py CONVERTED OUTPUT.

Or a torch_dist checkpoint of Megatron-LM: megatron_to_hf.py DIRECTORY OUTPUT --model HUGGING_FACE_DIRECTORY, from which config,
tokenizer and types of the tensors are taken over.
"""

from __future__ import annotations

import argparse
import sys

from checkpoint_converters.convert import megatron_to_huggingface
from checkpoint_converters.torch_dist import TorchDistModel, is_torch_dist
from megatron_dapo.checkpoints.export import export_stored_model
from megatron_dapo.checkpoints.huggingface_writer import DEFAULT_SHARD_BYTES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="directory with layout.json and rank_*.safetensors, or of Megatron-LM")
    parser.add_argument("target", help="directory to write; must not exist")
    parser.add_argument(
        "--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="largest safetensors file (default %(default)s)"
    )
    parser.add_argument("--model", help="Hugging Face directory of the same model; for a checkpoint of Megatron-LM")
    options = parser.parse_args(arguments)
    try:
        if is_torch_dist(options.source):
            print(_convert_torch_dist(options))
            return 0
        report = megatron_to_huggingface(options.source, options.target, shard_bytes=options.shard_bytes)
    except (ValueError, OSError) as error:
        print(f"megatron_to_hf: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


def _convert_torch_dist(options: argparse.Namespace) -> str:
    if options.model is None:
        raise ValueError(
            f"{options.source} is of Megatron-LM and has no config.json; name a Hugging Face directory of the same model with --model"
        )
    with TorchDistModel(options.source, options.model) as model:
        report = export_stored_model(options.target, model, options.model, shard_bytes=options.shard_bytes)
    return f"{report.num_tensors} tensors, {report.num_bytes:,} bytes"


if __name__ == "__main__":
    sys.exit(main())
