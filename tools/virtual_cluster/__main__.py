"""The command line of a virtual cluster, see the package's docstring."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tools import virtual_cluster
from tools.virtual_cluster.cluster import CONTROLLER, FAULTS, ClusterSettings, VirtualCluster
from tools.virtual_cluster.machine import install, unavailable
from tools.virtual_cluster.node import run_init


def main() -> int:
    """Run the command line in the package's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.virtual_cluster",
        description=virtual_cluster.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="start a cluster")
    up.add_argument("work", type=Path)
    defaults = ClusterSettings()
    for key, option in (
        ("num_nodes", "--nodes"),
        *((key, f"--{key.replace('_', '-')}") for key in list(asdict(defaults))[1:]),
    ):
        up.add_argument(option, dest=key, type=type(getattr(defaults, key)), default=getattr(defaults, key))
    down = actions.add_parser("down", help="end a cluster, if there is one")
    down.add_argument("work", type=Path)
    check = actions.add_parser("check", help="print why this machine cannot run a cluster; exit code 1 then")
    check.add_argument("--install", action="store_true", help="install missing packages with apt-get first")
    run = actions.add_parser("run", help="run a command on a node")
    run.add_argument("work", type=Path)
    run.add_argument("node")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    fault = actions.add_parser("fault", help="inject a fault into a node")
    fault.add_argument("work", type=Path)
    fault.add_argument("kind", choices=FAULTS)
    fault.add_argument("node")
    init = actions.add_parser("init")
    init.add_argument("work", type=Path)
    init.add_argument("node")
    options = parser.parse_args()
    if options.action == "init":
        run_init(options.work, options.node)
    elif options.action == "up":
        cluster = VirtualCluster(
            options.work, ClusterSettings(**{key: getattr(options, key) for key in asdict(defaults)})
        )
        cluster.up()
        print(cluster.run(CONTROLLER, "sinfo"), end="")
    elif options.action == "down":
        if (options.work / "cluster.json").exists():
            VirtualCluster(options.work).down()
    elif options.action == "check":
        if options.install:
            install()
        if reason := unavailable():
            print(f"no virtual cluster on this machine: {reason}", file=sys.stderr)
            return 1
    elif options.action == "run":
        arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
        return subprocess.run(VirtualCluster(options.work).command(options.node, arguments), check=False).returncode
    else:
        VirtualCluster(options.work).fault(options.kind, options.node)
    return 0


if __name__ == "__main__":
    sys.exit(main())
