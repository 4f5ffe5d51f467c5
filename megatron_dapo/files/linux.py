"""Processes next to a rank: how they are started, and what Linux tells them of others and of their machine.

Imports only the standard library, as they do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)


def signal_at_parents_death(number: int) -> partial[object]:
    """Return a function that has the kernel send its caller signal `number` when the parent dies, for any reason.

    It may be called between fork and exec. Only Linux supports this; on other systems it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return partial(int)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return partial(prctl, _PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent, in the same session, dies. Only Linux supports this."""
    if not sys.platform.startswith("linux"):
        return
    signal_at_parents_death(signal.SIGKILL)()
    # The parent may have died already: then init, which is in another session, is the parent.
    if os.getsid(os.getppid()) != os.getsid(0):
        os.kill(os.getpid(), signal.SIGKILL)


def require_same_user(connection: socket.socket) -> None:
    """Raise PermissionError if the other end belongs to another user: an abstract socket has no file permissions."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user = struct.unpack("3i", credentials)[1]
    if user != os.geteuid():
        raise PermissionError(errno.EPERM, f"the other end belongs to user {user}, this process to {os.geteuid()}")


def local_host(towards: tuple[Any, ...], family: int = socket.AF_INET) -> str:
    """Return this machine's address on the way to another. Raises OSError if there is no route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)  # selects the route and sends nothing
        return str(probe.getsockname()[0])


def start_helper(
    module: str,
    *arguments: str,
    packages: Sequence[str] | None = (),
    environment: Mapping[str, str] = os.environ,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` with this package.

    It keeps open neither the log, whose reader may wait for its end, nor standard input, nor the working directory.

    Args:
        packages: directories of other packages; None: all those of this process. Without site-packages a process
            starts in a tenth of a second and does not depend on what is installed.
        options: of Popen, in place of the ones here.
    """
    paths = [str(Path(__file__).resolve().parents[2]), *(packages or ())]
    if packages is None:
        paths += filter(None, [environment.get("PYTHONPATH")])
    command = [sys.executable, *([] if packages is None else ["-S"]), "-m", module, *arguments]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    variables = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, cwd="/", env=variables, **{**quiet, **options})


def ignore_launcher_signals() -> None:
    """Ignore what a launcher that ends its job sends to every process: a helper ends with its rank, or later."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
