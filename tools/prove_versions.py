"""Show that every token of a server has the label of the weights that sampled it:

    python tools/prove_versions.py --engine-python .venv-sglang-0.5.23/bin/python --update-pause retract --tokens 100000 --json

A model whose tokens say which weights sampled them, and whether they read keys and values of others, is served by a stock
SGLang server. Versions of it come at random moments through the weight sync of a run, with 64 requests under way.
--faults kills the server between two weight syncs, kills it in one, and changes a bit of one. --overlap turns SGLang's
overlap scheduler on, which servers on GPUs have unless update_pause is in_place.

Exit code: 0 no wrong label, and no token over a cache of other weights unless the mode keeps it; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_dapo.config.sglang_schema import UpdatePause  # noqa: E402
from tools.version_proof.run import FAULTS, prove_versions  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", type=Path, required=True, help="interpreter of SGLang's environment")
    parser.add_argument("--update-pause", choices=get_args(UpdatePause), default="retract")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and moments")
    parser.add_argument("--faults", action="store_true", help=", ".join(FAULTS))
    parser.add_argument("--overlap", action="store_true", help="SGLang's overlap scheduler")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    proof = prove_versions(
        options.engine_python.absolute(),
        options.update_pause,
        options.tokens,
        seed=options.seed,
        overlap=options.overlap,
        faults=FAULTS if options.faults else (),
        say=lambda text: print(text, file=sys.stderr),
    )
    print(json.dumps(proof.as_json()) if options.json else "\n".join(proof.lines()))
    return 0 if proof.holds else 1


if __name__ == "__main__":
    sys.exit(main())
