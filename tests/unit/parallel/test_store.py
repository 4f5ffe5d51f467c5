"""torch's stores listen only on the address of their host."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_dapo.launch.environment import free_port
from megatron_dapo.parallel.store import _listen

STORE = """
import json, sys, psutil
from datetime import timedelta
import torch.distributed as dist
from megatron_dapo.parallel.store import open_store, restrict_stores
if sys.argv[1] == "restricted":
    restrict_stores(int(sys.argv[2]))
store, _, _ = open_store(30.0)
store.set("key", "value")
dist.init_process_group("gloo")
print(json.dumps([c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]))
"""


def addresses(*arguments: str) -> list[str]:
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **names, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", STORE, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_store_listens_on_its_host_alone() -> None:
    assert "::" in addresses("stock", "1")  # torch does this, and the module prevents it.
    assert set(addresses("restricted", "1")) == {"127.0.0.1"}


@pytest.mark.parametrize(("host", "num_nodes"), [("127.0.0.1", 2), ("203.0.113.7", 1)])
def test_a_host_that_would_shut_others_out_is_not_bound(host: str, num_nodes: int) -> None:
    """A name that means loopback on its own node, and an address in front of the node (203.0.113.0/24 is nobody's)."""
    assert _listen(host, free_port(), num_nodes) is None
