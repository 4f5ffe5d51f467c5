"""Process 1 of a node: it makes the node's namespaces from inside, starts its daemons and reaps processes."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from tools.virtual_cluster.cluster import CGROUP_V1, CONTROLLER, VirtualCluster

GIB = 1024**3


def run_init(work: Path, name: str) -> None:
    """Set up the namespaces of a node from inside, start its daemons, and reap processes forever."""
    cluster = VirtualCluster(work)
    socket.sethostname(name)
    _enter_cgroup(cluster, name)
    _mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    _mount_cgroups(cluster, name)
    _mount("--bind", str(work / "hosts"), "/etc/hosts")
    os.environ["SLURM_CONF"] = str(work / "slurm.conf")
    os.chdir(work / name)
    if name == CONTROLLER:
        munge = work / "munge"
        files = [f"--{kind}={munge / file}" for kind, file in
                 (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))]  # fmt: skip
        subprocess.run(["munged", *files, "--num-threads=2", "--force"], check=True)
        subprocess.Popen(["slurmctld", "-D"])
    else:
        subprocess.Popen(["slurmd", "-D"])
    (work / name / "ready").touch()
    while True:
        # Orphans of jobs become children of process 1, which must outlive a killed slurmd.
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.5)


def _enter_cgroup(cluster: VirtualCluster, name: str) -> None:
    """Move process 1 into the node's own cgroup, which everything it starts inherits."""
    settings = cluster.settings
    for path in cluster.cgroups(name):
        path.mkdir(exist_ok=True)
        if name != CONTROLLER:
            memory = int(settings.memory_gib * GIB)
            for file in ("memory.limit_in_bytes", "memory.max"):
                if memory and (path / file).exists():
                    (path / file).write_text(str(memory))
        (path / "cgroup.procs").write_text(str(os.getpid()))
    if name != CONTROLLER and settings.cpu_cores:
        cluster.limit_cpu(name, settings.cpu_cores)


def _mount_cgroups(cluster: VirtualCluster, name: str) -> None:
    """Give the node a /sys for its own network whose cgroup directory shows the node's own memory controller."""
    own = cluster.work / name / "cgroup"
    own.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "tmpfs", str(own))
    (own / "systemd").mkdir()
    # slurmd does not start without a cgroup hierarchy, although no plugin here uses one: this has no controllers.
    _mount("-t", "cgroup", "-o", "none,name=virtual", "cgroup", str(own / "systemd"))
    for path in cluster.cgroups(name):
        controller = path.parent.name if CGROUP_V1.is_dir() else "memory"
        (own / controller).mkdir()
        _mount("--bind", str(path), str(own / controller))
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--rbind", str(own), "/sys/fs/cgroup")


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)
