"""Workers of one node meet on loopback alone, without a store that unpickles what anyone sends it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_dapo.launch.local import launch_workers, torchrun_command

WORKER = """
import json, os, sys, psutil
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
agent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\\0")
ends = psutil.Process(os.getppid()).net_connections()
stores = [end.laddr.ip for end in ends if end.status == psutil.CONN_LISTEN]
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps([[os.environ[name] for name in names], agent, stores]))
dist.barrier()
dist.destroy_process_group()
"""


def test_workers_meet_on_loopback_by_static_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch_workers("small_worker", [str(tmp_path)], 2, tmp_path / "run") == 0
    for rank in ("0", "1"):
        facts, agent, stores = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts == [rank, "2", rank, "127.0.0.1"]
        assert "--rdzv-backend=static" in agent and "--standalone" not in agent
        assert stores == ["127.0.0.1"]


def test_two_runs_on_a_node_get_ports_of_their_own() -> None:
    ports = {next(part for part in torchrun_command(1, "x", []) if "master-port" in part) for _ in range(8)}
    assert len(ports) > 1 and sys.executable == torchrun_command(1, "x", [])[0]
