"""The CPUs that processes run on: ranks on those next to their GPU, and what ranks start on all.

Host copies of a GPU's memory, and the launches of its kernels, cross the link between sockets if a rank runs on the other one.
A process inherits the CPUs of the thread that starts it, so servers, which have GPUs of both sockets, and verifiers are
started inside `all_cpus`. Only Linux has this; elsewhere nothing is bound.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


def parsed_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it, such as "0-3,8,10-11". Raise ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpus_near(pci_address: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Return the CPUs of the NUMA node of a PCI device, such as "0000:1b:00.0"; none if the kernel does not tell."""
    try:
        return parsed_cpu_list((sysfs / "bus/pci/devices" / pci_address / "local_cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()


@cache
def cpus_at_start() -> frozenset[int]:
    """Return the CPUs that this process may use as it was started: the first call, before `bind`, decides."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else frozenset()


def bind(cpus: frozenset[int]) -> frozenset[int]:
    """Run this thread, and those that it starts, on the given CPUs as far as the launcher allows them; return them.

    Nothing changes if it allows none of them.
    """
    allowed = cpus_at_start() & cpus
    if allowed:
        os.sched_setaffinity(0, allowed)
    return allowed


@contextmanager
def all_cpus() -> Iterator[None]:
    """Processes that this thread starts inside may use all CPUs that this process was started with."""
    cpus = cpus_at_start()
    if not cpus:
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
