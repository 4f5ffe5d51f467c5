"""Split a Hugging Face model for Megatron: hf_to_megatron.py MODEL OUTPUT --tensor 2 --pipeline 2.

The same as `megatron-dapo convert hf-to-megatron`; --help lists the options.
"""

import sys

from megatron_dapo.cli.main import app

if __name__ == "__main__":
    app(["convert", "hf-to-megatron", *sys.argv[1:]])
