"""Write a Megatron checkpoint as a Hugging Face directory: megatron_to_hf.py CONVERTED OUTPUT.

The same as `megatron-dapo convert megatron-to-hf`; --help lists the options.
"""

import sys

from megatron_dapo.cli.main import app

if __name__ == "__main__":
    app(["convert", "megatron-to-hf", *sys.argv[1:]])
