"""Print the sockets on which a process and its descendants listen: python -m tools.listening PID [--seconds 60].

It looks again and again until the process ends or the seconds are over, since some sockets live for a moment only.
docs/security.md says what each socket of a run is for.
"""

from __future__ import annotations

import argparse
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_TICK_S = 0.05


@dataclass(frozen=True, order=True)
class ListeningSocket:
    """One address of one process."""

    address: str
    port: int
    program: str  # end of the command line's program or module

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listening_sockets(pid: int) -> set[ListeningSocket]:
    """Return the TCP sockets on which a process and its descendants listen now."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return set()
    return {socket for member in family for socket in _sockets_of(member)}


def watch_sockets(pid: int, is_over: Callable[[], bool]) -> set[ListeningSocket]:
    """Return every socket seen until `is_over`."""
    found: set[ListeningSocket] = set()
    while not is_over():
        found |= listening_sockets(pid)
        time.sleep(_TICK_S)
    return found


def _sockets_of(process: psutil.Process) -> set[ListeningSocket]:
    try:
        ends = [end for end in process.net_connections("tcp") if end.status == psutil.CONN_LISTEN]
        return {ListeningSocket(end.laddr.ip, end.laddr.port, _program(process.cmdline())) for end in ends}
    except psutil.Error:  # it has ended
        return set()


def _program(command: list[str]) -> str:
    """Return the module of `python -m MODULE`, else the first word that is no option."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return next((word for word in command if not word.startswith("-")), "")


def main() -> None:
    """Print a line for each socket."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    is_over = lambda: time.monotonic() > end or not psutil.pid_exists(arguments.pid)  # noqa: E731
    for socket in sorted(watch_sockets(arguments.pid, is_over)):
        print(f"{socket.address}:{socket.port} {socket.program}{'' if socket.is_loopback else '  (not loopback)'}")


if __name__ == "__main__":
    main()
