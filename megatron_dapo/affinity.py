"""The CPUs that processes run on: ranks use those next to their GPU, processes that ranks start use all.

Host copies of a GPU's memory, and the launches of its kernels, cross the link between sockets if a rank runs on the other one.
A process inherits the CPUs of the thread that starts it, so servers, which have GPUs of both sockets, and verifiers are
started inside `all_cpus`. Only Linux supports this; on other systems nothing is bound.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


def parsed_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers in a kernel CPU list such as "0-3,8,10-11". Raise ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpus_near(pci_address: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Return the CPUs of the NUMA node of a PCI device, such as "0000:1b:00.0"; none if the kernel does not report
    them."""
    try:
        return parsed_cpu_list((sysfs / "bus/pci/devices" / pci_address / "local_cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()


@cache
def cpus_at_start() -> frozenset[int]:
    """Return the CPUs that this process was started with, as read by the first call, which must precede `bind`."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else frozenset()


def bind(cpus: frozenset[int]) -> frozenset[int]:
    """Bind this thread, and those it starts, to the given CPUs that the launcher allows; return them.

    If it allows none of them, nothing changes.
    """
    allowed = cpus_at_start() & cpus
    if allowed:
        os.sched_setaffinity(0, allowed)
    return allowed


@contextmanager
def all_cpus() -> Iterator[None]:
    """Let processes started by this thread inside the context use all CPUs that this process was started with."""
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
