"""Compare two models bit for bit: verify.py FIRST SECOND.

The same as `megatron-dapo convert verify`; --help lists the options.
"""

import sys

from megatron_dapo.cli.main import app

if __name__ == "__main__":
    app(["convert", "verify", *sys.argv[1:]])
