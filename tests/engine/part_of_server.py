"""One node's part of a server over two nodes, in the network namespace that this program was started in.

    part_of_server.py JSON     fields of ServerSettings, "meeting_file", and on node 0 "directory" of a Hugging Face model

Node 0 writes where the parts meet, brings two versions by point-to-point, and prints how far the server is from transformers.
Both print "up" once their part is, and end with their standard input.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "distributed"), str(ROOT / "tests" / "engine")]

from megatron_dapo.engines.sglang.server import SglangServer  # noqa: E402
from megatron_dapo.engines.sglang.server_settings import ServerSettings  # noqa: E402

WAIT_S = 300.0


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def synced_gaps(server: SglangServer, directory: Path, host: str) -> list[float]:
    """Return the largest difference of log-probs from transformers, of each of two versions that two trainer ranks bring."""
    from sync_simulation import Rendezvous, ThreadCoordination, World
    from synced_server import PATIENT, SyncedServer

    from megatron_dapo.bridge.transports.p2p import P2PSettings, P2PTransport
    from megatron_dapo.bridge.weight_sync import EngineHandles, WeightSync
    from megatron_dapo.models.config_json import read_architecture
    from megatron_dapo.parallel.layout import ParallelLayout

    world = World(read_architecture(directory), ParallelLayout(2, tensor=2), tensor_parallel=2, bucket_bytes=100_000)
    site = SyncedServer(server, directory, world)
    rendezvous, session, syncs = Rendezvous(world.size), secrets.token_hex(8), []
    for rank in range(world.size):
        handles, coordination = EngineHandles([0], {0: site.client} if rank == 0 else {}), ThreadCoordination(rendezvous, rank)
        transport = P2PTransport(world.plan, handles, coordination, P2PSettings(host=host))
        syncs.append(WeightSync(world.plan, handles, transport, coordination, PATIENT, session))
    gaps = []
    for version, scale in ((1, 1.1), (2, 1.3)):
        report = site.run(syncs, version, scale)
        assert report.is_complete, report.describe()
        gaps.append(site.gap(scale))
    return gaps


def main() -> None:
    fields = json.loads(sys.argv[1])
    meeting_file, directory = Path(fields.pop("meeting_file")), Path(fields["model_path"])
    paths = {name: Path(fields[name]) for name in ("python", "model_path", "key_file", "log_dir")}
    settings = ServerSettings(**fields | paths)
    if settings.node_rank:
        end = time.monotonic() + WAIT_S
        while not meeting_file.exists():
            assert time.monotonic() < end, "the first part does not say where it is"
            time.sleep(0.05)
        settings = ServerSettings(**fields | paths | {"meeting": meeting_file.read_text()})
    server = SglangServer.start(settings)
    try:
        if settings.node_rank:
            server.wait_until_joined()
            say(up=True, pid=server.pid)
        else:
            new = meeting_file.with_suffix(".new")
            new.write_text(server.meeting)
            os.replace(new, meeting_file)
            server.wait_until_healthy()
            say(up=True, pid=server.pid)
            say(gaps=synced_gaps(server, directory, settings.host))
        for line in sys.stdin:
            start = time.monotonic()
            while server.is_alive() and time.monotonic() - start < float(line):
                time.sleep(0.05)
            say(alive=server.is_alive(), seconds=time.monotonic() - start, reason=server.exit_reason())
    finally:
        server.kill()


if __name__ == "__main__":
    main()
