"""What Linux lets a process know of others: the death of its parent, and the owner of a socket's other end."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
from functools import partial

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
