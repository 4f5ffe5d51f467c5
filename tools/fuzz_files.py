"""Feed hostile files to every reader of files from outside: python -m tools.fuzz_files --inputs 10000 --seed 0 --json.

Valid files are changed by structure (values of other types and sizes, keys that are missing, new or doubled, deep nesting) and by
bytes (flips, cuts, insertions). A reader may accept a file or refuse it by an error in one line that names the file or its
directory, within a second of processor time. Anything else is a finding: another exception (traceback), more time (hang), an
error that no one can read (message). Input N of a seed is the same on every machine; --only N shows it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.fuzzing.fuzzer import fuzz
from tools.fuzzing.readers import targets

_MEMORY = 4 << 30  # address space beyond what the imports take


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print the report, and return 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="feed only this input")
    parser.add_argument("--json", action="store_true")
    settings = parser.parse_args(arguments)
    readers = list(targets())
    # Imports first: they take memory and time that no input asked for.
    fuzz(readers, 1, settings.seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    report = fuzz(readers, settings.inputs, settings.seed, settings.only).to_json()
    if settings.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write("".join(f"{name}: {value}\n" for name, value in report.items() if name != "findings"))
        sys.stdout.write("".join(f"{' | '.join(map(str, finding))}\n" for finding in report["findings"]))
    return 1 if report["findings"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
