"""Facts that launchers state, the port two runs on a node do not share, and the limit of open files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.supervisor import Supervision
from megatron_dapo.launch import environment
from megatron_dapo.launch.environment import (
    SERVERS_ARE_KEPT,
    Allocation,
    ProcessEnvironment,
    keep_nccl_on_loopback,
    place_in_run,
    prepare_rendezvous,
    process_environment,
    rendezvous_port,
    rendezvous_problem,
    slurm_allocation,
    supervision,
)

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", *INTERFACES)


def test_torchrun_comes_before_srun_and_a_part_of_it_is_refused() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5"}
    assert process_environment({**SLURM, **torchrun}) == ProcessEnvironment(5, 16, 5)
    assert process_environment(SLURM) == ProcessEnvironment(3, 8, 1)
    assert process_environment({}) == ProcessEnvironment(0, 1, 0)
    with pytest.raises(ValueError, match="RANK are set but LOCAL_RANK, WORLD_SIZE are not"):
        process_environment({"RANK": "5"})


@pytest.fixture
def port_of(monkeypatch: pytest.MonkeyPatch):
    for name in RENDEZVOUS:  # undone even if the code under test sets it
        monkeypatch.setenv(name, "")

    def port(process: ProcessEnvironment, **variables: str) -> str:
        for name in RENDEZVOUS:
            os.environ.pop(name, None)
        os.environ.update(variables)
        prepare_rendezvous(process)
        keep_nccl_on_loopback(process)
        return os.environ["MASTER_PORT"]

    return port


def test_runs_on_one_node_have_ports_of_their_own(port_of) -> None:
    alone, several = ProcessEnvironment(0, 1, 0), ProcessEnvironment(3, 8, 1)
    assert len({port_of(alone) for _ in range(8)}) > 1
    assert port_of(several, SLURM_JOB_ID="70012") == "20012" != port_of(several, SLURM_JOB_ID="70013")
    assert port_of(several, SLURM_JOB_ID="77017") == "27020", "27017 to 27019 are MongoDB's"
    assert port_of(several, SLURM_JOB_ID="70012", MASTER_PORT="4000") == "4000"


def test_a_batch_script_takes_a_port_that_nothing_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TCP listener and a UDP socket are in the way: torch's store and the watchers have the same number."""
    monkeypatch.setenv("SLURM_JOB_ID", "61234")
    first = rendezvous_port()
    with socket.create_server(("", first)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", first + 1))
        assert first >= 21234 and rendezvous_port() >= first + 2
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    monkeypatch.setenv("SLURM_JOB_ID", "69999")
    assert 20000 <= rendezvous_port() < 30000 <= kernels


def test_the_number_of_nodes_is_the_launchers_and_one_node_stays_on_loopback(port_of) -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5"}
    assert process_environment({**torchrun, "LOCAL_WORLD_SIZE": "8"}).num_nodes == 2
    assert process_environment({**SLURM, "SLURM_NNODES": "4"}).num_nodes == 4
    port_of(ProcessEnvironment(0, 1, 0))
    assert [os.environ[name] for name in INTERFACES] == ["lo", "lo"]
    port_of(ProcessEnvironment(0, 1, 0), GLOO_SOCKET_IFNAME="eth0")
    assert [os.environ[name] for name in INTERFACES] == ["eth0", "lo"]
    port_of(ProcessEnvironment(0, 16, 0, num_nodes=2), MASTER_ADDR="node0")
    assert not any(name in os.environ for name in INTERFACES)


def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    code = """
import resource
from megatron_dapo.launch.environment import raise_open_files_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert raise_open_files_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_nodes_of_a_step_come_before_those_of_its_job_and_torchruns_agents_before_both() -> None:
    job = {**SLURM, "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4"}
    assert process_environment(job).num_nodes == 4
    assert process_environment({**job, "SLURM_STEP_NUM_NODES": "2"}).num_nodes == 2
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    assert process_environment({**job, **torchrun}).num_nodes == 2


def test_a_batch_script_learns_the_machines_of_its_job() -> None:
    job = {"SLURM_JOB_NUM_NODES": "16", "SLURM_NTASKS": "128", "SLURM_GPUS_PER_NODE": "h100:8"}
    assert slurm_allocation(job) == Allocation(16, 128, 8)
    assert slurm_allocation({**job, "SLURM_GPUS_ON_NODE": "4"}).gpus_per_node == 4
    assert slurm_allocation({}) == Allocation()


def test_nodes_that_would_each_meet_themselves_are_refused(port_of) -> None:
    several = ProcessEnvironment(3, 8, 1, num_nodes=2)
    with pytest.raises(ValueError, match="MASTER_ADDR is not set, but the run has 2 nodes: export it"):
        port_of(several)
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 127\.0\.1\.1, but the run has 2 nodes"):
        port_of(several, MASTER_ADDR="127.0.1.1")


def test_a_port_that_another_process_has_is_found_before_rank_0_opens_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        assert f"MASTER_PORT is {port}, which rank 0 cannot open on localhost (Address already in use)" in (
            rendezvous_problem(taken)
        )
        assert rendezvous_problem({**taken, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == "", "the store is torchrun's"
        assert rendezvous_problem({**taken, "MASTER_ADDR": "192.0.2.7"}) == "", "another machine"
        assert rendezvous_problem({"MASTER_PORT": str(port)}) == "", "no launcher"
    assert rendezvous_problem(taken) == ""
    assert "from 1 to 65535" in rendezvous_problem({**taken, "MASTER_PORT": "29500x"})


def test_watchers_of_one_start_share_a_name_and_those_of_the_next_have_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """slurm.sh starts steps in one job; torchruns of one run may be in steps of their own."""
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "10017")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)

    def run_id(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return place_in_run(ProcessEnvironment(0, 2, 0)).run_id

    assert run_id(SLURM_JOB_ID="17", SLURM_STEP_ID="0") != run_id(SLURM_STEP_ID="2")
    assert run_id(TORCHELASTIC_RESTART_COUNT="0") == run_id(SLURM_STEP_ID="3") != run_id(TORCHELASTIC_RESTART_COUNT="1")


def test_servers_are_kept_where_something_starts_the_workers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SERVERS_ARE_KEPT, "TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert supervision() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert supervision() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert supervision() == Supervision(f"agent {os.getppid()}", os.getppid())
    monkeypatch.setenv(SERVERS_ARE_KEPT, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert supervision() == Supervision("job 17.0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert supervision() == Supervision("job 17.1"), "a requeued job has other nodes"


def test_the_compiler_is_left_out_only_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(environment, "DRIVER_DEVICE", tmp_path)
    environment.leave_compiler_out()
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    monkeypatch.setattr(environment, "DRIVER_DEVICE", tmp_path / "nvidiactl")
    environment.leave_compiler_out()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize("given", ["", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_user_configures_the_allocator(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(os, "environ", {given: "max_split_size_mb:128"} if given else {})
    environment.use_expandable_segments()
    found = {name: os.environ[name] for name in names if name in os.environ}
    assert found == ({given: "max_split_size_mb:128"} if given else dict.fromkeys(names, "expandable_segments:True"))
