"""Runs torchrun with a store that listens only on the address of --master-addr, and leaves error reports to the ranks:
python -m megatron_dapo.launch.torchrun ARGUMENTS."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, main

from megatron_dapo.parallel.store import restrict_stores

if __name__ == "__main__":
    arguments = sys.argv[1:]
    restrict_stores(int(get_args_parser().parse_args(arguments).nnodes.split(":")[-1]))
    # Ranks report why they fail, in one line and in failure.json; torchrun's "Root Cause" box knows only an exit code.
    logging.disable(logging.ERROR)
    try:
        main(arguments)
    except ChildFailedError:
        sys.exit(1)
