"""Cut a Hugging Face model into one file a Megatron rank: hf_to_megatron.py MODEL OUTPUT --tensor 2 --pipeline 2."""

from __future__ import annotations

import argparse
import sys

from checkpoint_converters.convert import huggingface_to_megatron


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="Hugging Face directory with safetensors")
    parser.add_argument("target", help="directory to write; must not exist")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--virtual-pipeline", type=int, default=1, help="model chunks a pipeline rank")
    parser.add_argument("--expert", type=int, default=1, help="expert-parallel size")
    parser.add_argument("--expert-tensor", type=int, help="ranks each expert is cut over (default: --tensor)")
    options = parser.parse_args(arguments)
    sizes = {
        name: getattr(options, name) for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
    }
    try:
        report = huggingface_to_megatron(options.source, options.target, **sizes)
    except (ValueError, OSError) as error:
        print(f"hf_to_megatron: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
