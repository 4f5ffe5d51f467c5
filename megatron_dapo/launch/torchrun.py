"""torchrun whose store listens on the address of --master-addr alone: python -m megatron_dapo.launch.torchrun ARGUMENTS."""

from __future__ import annotations

import sys

from torch.distributed.run import get_args_parser, main

from megatron_dapo.parallel.store import restrict_stores

if __name__ == "__main__":
    arguments = sys.argv[1:]
    restrict_stores(int(get_args_parser().parse_args(arguments).nnodes.split(":")[-1]))
    main(arguments)
