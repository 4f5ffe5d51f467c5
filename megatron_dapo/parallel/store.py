"""torch.distributed's key-value stores, listening on one address.

torch's TCPStore answers every connection, and torch lets it listen on every interface of its node. A store that is given
a listening socket keeps to that socket's address, so torch's rendezvous code is handed a store that opens one.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_STORE_MAKERS = ("rendezvous", "elastic.rendezvous.static_tcp_rendezvous")


def restrict_stores(num_nodes: int = 1) -> None:
    """Make the stores of torch's rendezvous (env://, tcp:// and torchrun's static one) listen only on their host's
    address.

    Call this before the process meets the others. `num_nodes`: nodes whose processes connect. With several nodes, a
    host name that means loopback here would shut the others out. In that case, or if the host is not an address of this
    node, the store listens on every interface and a warning is logged.
    """
    # Import by name: torch.distributed's attribute `rendezvous` is the function.
    modules = [import_module(f"torch.distributed.{name}") for name in _STORE_MAKERS]

    opened = set()  # torch gives the second store of a port the server of the first

    # torchrun passes them by position, env:// and tcp:// by name.
    def store(
        host_name: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **options: Any
    ) -> dist.TCPStore:
        listener = _listen(host_name, port, num_nodes) if is_master and port not in opened else None
        if listener is not None:
            opened.add(port)
            options["master_listen_fd"] = listener.detach()  # the store closes it
        return dist.TCPStore(host_name, port, world_size, is_master, timeout, **options)

    for module in modules:
        vars(module)["TCPStore"] = store


def open_store(timeout_s: float) -> tuple[dist.Store, int, int]:
    """Return the store of the processes that torchrun's variables describe (torchrun's, or else one on rank 0), this
    process's rank and the number of processes.

    Wait at most `timeout_s` for it. Its keys belong to one attempt, because torchrun's store outlives its workers.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, size


def _listen(host: str, port: int, num_nodes: int) -> socket.socket | None:
    """Return a socket that listens on the address of `host`; None if that would shut others out."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if num_nodes > 1 and ipaddress.ip_address(address[0]).is_loopback:
        problem = f"{host} means {address[0]} on this node, which the other {num_nodes - 1} nodes do not reach"
    else:
        try:
            return socket.create_server((address[0], port), family=family, backlog=2048)
        except OSError as error:
            problem = f"this node cannot listen on {address[0]} ({error.strerror})"
    logger.warning("torch's store listens on every interface of port %d: %s", port, problem)
    return None
