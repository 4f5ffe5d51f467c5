"""The worker's end of its pipes, and the limits that it sets itself. Uses only the standard library."""

from __future__ import annotations

import io
import json
import os
import resource
from collections.abc import Mapping
from typing import Any, BinaryIO

MAX_MESSAGE_CHARACTERS = 500


def claim_pipes() -> tuple[io.FileIO, BinaryIO]:
    """Move the protocol off file descriptors 0 and 1, and point those to /dev/null. The first one is read without a buffer."""
    requests = io.FileIO(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return requests, replies


def limit_resources(memory_limit_mb: int, file_limit_mb: int) -> None:
    """Set limits for this process and each of its children."""
    for limited, megabytes in ((resource.RLIMIT_AS, memory_limit_mb), (resource.RLIMIT_FSIZE, file_limit_mb)):
        if megabytes == 0:  # no limit
            continue
        wanted, hard = megabytes * 2**20, resource.getrlimit(limited)[1]
        # Keep a lower limit set by the site, because only root may raise it.
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limited, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file for every answer that crashes


def send(replies: BinaryIO, message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message, allow_nan=False).encode() + b"\n")
    replies.flush()


def describe(error: BaseException) -> str:
    message = "memory limit reached" if isinstance(error, MemoryError) else str(error)
    return f"{type(error).__name__}: {message}"[:MAX_MESSAGE_CHARACTERS]
