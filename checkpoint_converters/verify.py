"""Compare two models bit for bit: verify.py FIRST SECOND, each a Hugging Face directory or one of hf_to_megatron.py.

Exit code 0: same names, shapes, types and bits. 1: they differ; prints the first difference. 2: one cannot be read.
"""

from __future__ import annotations

import argparse
import sys

from checkpoint_converters.convert import first_difference


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    options = parser.parse_args(arguments)
    try:
        difference = first_difference(options.first, options.second)
    except (ValueError, OSError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    print(f"different: {difference}" if difference else "identical")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
