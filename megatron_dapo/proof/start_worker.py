"""Entry of a worker process: keeps its standard output and megatron-core's import-time warnings from the user, then
checks."""

from __future__ import annotations

import os
import sys
import warnings

if __name__ == "__main__":
    # The one object on standard output is the caller's.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # megatron-core warns in every process about each optional package that is not installed.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # torch renames collectives that older versions have only under the old name.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    from megatron_dapo.proof.worker import main

    main(*sys.argv[1:])
