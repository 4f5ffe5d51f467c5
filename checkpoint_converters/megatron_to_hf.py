"""Convert a checkpoint of hf_to_megatron.py back to a Hugging Face model: megatron_to_hf.py CONVERTED OUTPUT."""

from __future__ import annotations

import argparse
import sys

from checkpoint_converters.convert import megatron_to_huggingface
from megatron_dapo.checkpoints.huggingface_writer import DEFAULT_SHARD_BYTES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="directory with layout.json and rank_*.safetensors")
    parser.add_argument("target", help="directory to write; must not exist")
    parser.add_argument(
        "--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="largest safetensors file (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        report = megatron_to_huggingface(options.source, options.target, shard_bytes=options.shard_bytes)
    except (ValueError, OSError) as error:
        print(f"megatron_to_hf: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
