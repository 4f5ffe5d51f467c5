"""Cut a Hugging Face model into one file a Megatron rank: hf_to_megatron.py MODEL OUTPUT --tensor 2 --pipeline 2.

Or into a torch_dist checkpoint, which Megatron-LM loads in any layout: hf_to_megatron.py MODEL OUTPUT --format torch_dist.
"""

from __future__ import annotations

import argparse
import sys

from checkpoint_converters.convert import huggingface_to_megatron
from checkpoint_converters.torch_dist import write_torch_dist_model
from megatron_dapo.checkpoints.huggingface import HFCheckpoint


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Hugging Face directory with safetensors")
    parser.add_argument("target", help="directory to write; must not exist")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--virtual-pipeline", type=int, default=1, help="model chunks a pipeline rank")
    parser.add_argument("--expert", type=int, default=1, help="expert-parallel size")
    parser.add_argument("--expert-tensor", type=int, help="ranks each expert is cut over (default: --tensor)")
    parser.add_argument("--format", choices=("ranks", "torch_dist"), default="ranks", help="default: one file a rank")
    options = parser.parse_args(arguments)
    sizes = {
        name: getattr(options, name) for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
    }
    try:
        if options.format == "torch_dist":
            if any(size not in (None, 1) for size in sizes.values()):
                raise ValueError("--format torch_dist has no layout: leave the parallel sizes out")
            with HFCheckpoint(options.source) as model:
                print(f"{write_torch_dist_model(model, options.source, options.target):,} bytes")
            return 0
        report = huggingface_to_megatron(options.source, options.target, **sizes)
    except (ValueError, OSError) as error:
        print(f"hf_to_megatron: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
