"""Faults of every kind into runs of every phase on a virtual cluster with real Slurm: python tools/chaos.py --nodes 2 --json

A run is the shipped `examples/launch/slurm.sh` on virtual nodes (tools/virtual_cluster; root). Faults hit it at random
moments of the phase that its heartbeats show; it must name the culprit, continue, and end with the bits of a run that was
left alone. docs/chaos.md says what the keys and records mean.

    python tools/chaos.py --list                                what there is, and which cells mean nothing
    python tools/chaos.py --faults 20                           20 faults, cells with the fewest results of this commit first
    python tools/chaos.py --cells sigkill oom:checkpoint        these cells, each once
    python tools/chaos.py --ettr --cells sigkill                the same faults with role restart and with whole-job restart
    python tools/chaos.py --soak 1800                           no faults, a busy core as well: nothing may be declared
    python tools/chaos.py --faults 0 --json                     sum up what is on record for this commit
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.fault_injection import report  # noqa: E402
from tools.fault_injection.campaign import Campaign  # noqa: E402
from tools.fault_injection.cells import CELLS, FAULTS, TINY, chosen_cells, next_cells, table  # noqa: E402
from tools.fault_injection.faults import small_disk  # noqa: E402
from tools.virtual_cluster import ClusterSettings, unavailable, virtual_cluster  # noqa: E402

# Short, so that a fault takes a minute and not ten; a real site's are longer.
SETTINGS = {"slurmd_timeout_s": 15, "kill_wait_s": 10, "requeue_delay_s": 5}


def job_environment() -> dict[str, str]:
    """Return the environment of a user who submits jobs: this interpreter first on the path."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    import_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PREFLIGHT": "0"}
    return {"HOME": os.environ.get("HOME", "/root"), "PATH": path, "PYTHONPATH": import_path, **one_thread}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cells", nargs="+", metavar="FAULT[:PHASE]", help="inject each of these; `*` for all")
    parser.add_argument("--faults", type=int, help="number of faults; default: each chosen cell once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="inject no fault after this time")
    parser.add_argument("--per-run", type=int, default=10, help="faults that one run takes")
    parser.add_argument("--tiny", action="store_true", help=f"{len(TINY)} faults in one run")
    parser.add_argument(
        "--ettr", action="store_true", help="the plan into runs with servers, with role restart and without"
    )
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="a healthy run under load instead")
    parser.add_argument("--seed", type=int, default=0, help="of cells and moments")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument(
        "--commit", nargs="*", help="sum up these commits' results; without a name all; default: this one"
    )
    parser.add_argument("--work", type=Path, help="keep logs and runs here; default: a temporary directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print the table of cells")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Exit code 0: all that was injected now went as it must; 1: something fell short, or nothing could run."""
    parsed = parse(arguments)
    # As Ctrl-C: the cluster is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if parsed.list:
        print(table())
        return 0
    head, is_dirty = report.commit()
    cells = chosen_cells(parsed.cells) if parsed.cells else list(CELLS)
    if not parsed.engine_python.exists():
        cells = [cell for cell in cells if FAULTS[cell[0]].configuration == "embedded"]
    known = report.counts(report.read(parsed.results, [head]))
    draw = random.Random(f"{parsed.seed} {sum(known.values())}")
    num = len(cells) if parsed.faults is None else parsed.faults
    plan = list(TINY) if parsed.tiny else [] if parsed.soak else next_cells(cells, known, num, draw)
    new: list[dict[str, Any]] = []

    def append(record: dict[str, Any]) -> None:
        record = {"commit": head, "dirty": is_dirty, "nodes": parsed.nodes, **record}
        new.append(record)
        parsed.results.parent.mkdir(parents=True, exist_ok=True)
        with open(parsed.results, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    if plan or parsed.soak:
        if reason := unavailable():
            print(f"no virtual cluster on this machine: {reason}", file=sys.stderr)
            return 1
        with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
            inject(parsed, plan, (parsed.work or Path(temporary)).resolve(), append)
    commits = [head] if parsed.commit is None else parsed.commit
    records = report.read(parsed.results, commits)
    figures = {"commits": commits or "all", "is_dirty": any(each["dirty"] for each in records), **SETTINGS}
    figures |= report.summary(records)
    print(json.dumps(figures) if parsed.json else "\n".join(f"{key}: {value}" for key, value in figures.items()))
    short = report.failures(new)
    print("\n".join(short), file=sys.stderr)
    return 1 if short else 0


def inject(parsed: argparse.Namespace, plan: list[tuple[str, str]], work: Path, append: Any) -> None:
    """Start a cluster in `work`, put the plan's faults into its runs, and take everything down."""
    end = time.monotonic() + parsed.seconds
    with small_disk(work / "disk.img", work / "disk") as disk:
        # No fault of a soak is waited for, and a busy machine answers Slurm late: Slurm's own timeout.
        settings = SETTINGS | {"slurmd_timeout_s": 300} if parsed.soak else SETTINGS
        with virtual_cluster(work / "cluster", ClusterSettings(num_nodes=parsed.nodes, **settings)) as cluster:
            campaign = Campaign(
                cluster=cluster,
                environment=job_environment(),
                directory=work / "runs",
                disk=disk,
                engine_python=parsed.engine_python.absolute(),
                append=append,
                say=lambda line: print(line, file=sys.stderr, flush=True),
                seed=parsed.seed,
                deadline=end,
            )
            if parsed.soak:
                campaign.soak(parsed.soak)
                return
            for configuration in ("servers", "servers_job") if parsed.ettr else ("embedded", "servers"):
                chosen = [cell for cell in plan if parsed.ettr or FAULTS[cell[0]].configuration == configuration]
                size = max(len(chosen), 1) if parsed.tiny else parsed.per_run
                for start in range(0, len(chosen), size):
                    if time.monotonic() < end:
                        campaign.run(configuration, chosen[start : start + size])
            campaign.compare()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
