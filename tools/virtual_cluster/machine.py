"""What a virtual cluster needs of its machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare")
PACKAGES = ("slurm-wlm", "munge", "iproute2")
INSTALL_S = 240.0
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork")


def missing_programs() -> list[str]:
    """Return the programs that this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def unavailable() -> str:
    """Return why this machine cannot run a virtual cluster, "" if it can."""
    if os.geteuid() != 0:
        return f"needs root, this is uid {os.geteuid()}"
    if missing := missing_programs():
        return f"misses {', '.join(missing)}: apt-get install {' '.join(PACKAGES)}"
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    # Containers often grant root without the right to make namespaces or mounts.
    for command in (["ip", "netns", "list"], ["unshare", *_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]):
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        if tried.returncode:
            return f"{' '.join(command)} fails: {(tried.stderr.strip() or str(tried.returncode)).splitlines()[-1]}"
    return ""


def install() -> None:
    """Install missing programs with apt-get. A failure is printed; `unavailable` reports what is still missing."""
    if os.geteuid() != 0 or not missing_programs() or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        command = ["apt-get", "-q", "-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=30", *arguments]
        try:
            done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            print(f"{' '.join(command)} did not end in {INSTALL_S:.0f} s", file=sys.stderr)
            return
        if done.returncode:
            print(f"{' '.join(command)} failed with {done.returncode}", file=sys.stderr)
