"""The only module that reads the environment variables of a launcher (torchrun or srun)."""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.config.rules import is_loopback
from megatron_dapo.watch.heartbeat import Place

if TYPE_CHECKING:
    from megatron_dapo.engines.sglang.supervisor import Supervision


DRIVER_DEVICE = Path("/dev/nvidiactl")  # exists if the NVIDIA driver does
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # ports that torch's store may have
# Ports there on which services of compute nodes listen: RabbitMQ, Redis, MongoDB, Splunk, SGLang, torchrun.
_SERVICES = {25672, 26379, 27017, 27018, 27019, 28015, 28017, 29015, 29500, *range(29092, 29095)}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # new in torch 2.9, and its older name
SERVERS_ARE_KEPT = "MEGATRON_DAPO_SERVERS_ARE_KEPT"  # set by a batch script that starts server supervisors
ATTEMPT = "MEGATRON_DAPO_ATTEMPT"  # number of the first attempt of a launch, set by what starts the workers


@dataclass(frozen=True)
class ProcessEnvironment:
    """Rank and local rank of this process, number of processes and nodes of the run, and the index of its node."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int = 1
    node_rank: int = 0


# torchrun first: inside a Slurm job both are set, and srun's variables then count the torchrun processes.
_NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
_NODE_RANK = {"torchrun": "GROUP_RANK", "srun": "SLURM_NODEID"}


def process_environment(environment: Mapping[str, str] | None = None) -> ProcessEnvironment:
    """Read rank, world size and local rank from torchrun, otherwise from srun; without either, return a world of one.

    Raises ValueError if only some of torchrun's variables are set.
    """
    environment = os.environ if environment is None else environment
    for launcher, names in _NAMES.items():
        found = [name for name in names if name in environment]
        if len(found) == len(names):
            node_rank = int(environment.get(_NODE_RANK[launcher], "0"))
            rank, world_size, local_rank = (int(environment[name]) for name in names)
            return ProcessEnvironment(rank, world_size, local_rank, _num_nodes(launcher, environment), node_rank)
        if found and launcher == "torchrun":
            missing = sorted(set(names) - set(found))
            raise ValueError(
                f"{', '.join(found)} are set but {', '.join(missing)} are not; start the workers with torchrun or srun"
            )
    return ProcessEnvironment(rank=0, world_size=1, local_rank=0)


def _num_nodes(launcher: str, environment: Mapping[str, str]) -> int:
    if launcher == "srun":
        # A step may run on fewer nodes than its job.
        names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        return int(next((environment[name] for name in names if name in environment), "1"))
    per_node = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
    return -(-int(environment["WORLD_SIZE"]) // per_node)


@dataclass(frozen=True)
class Allocation:
    """Machines of the Slurm job whose batch script runs this command; None for values that Slurm does not provide."""

    num_nodes: int | None = None
    num_tasks: int | None = None  # processes that srun will start
    gpus_per_node: int | None = None


def slurm_allocation(environment: Mapping[str, str] | None = None) -> Allocation:
    """Read the allocation of the Slurm job that this process belongs to; outside a job, all values are unknown."""
    environment = os.environ if environment is None else environment

    def number(name: str) -> int | None:
        # GPUs may include their type, as in "h100:8".
        text = environment.get(name, "").rpartition(":")[2]
        return int(text) if text.isdigit() else None

    return Allocation(
        number("SLURM_JOB_NUM_NODES"),
        number("SLURM_NTASKS"),
        number("SLURM_GPUS_ON_NODE") or number("SLURM_GPUS_PER_NODE"),
    )


def prepare_rendezvous(process: ProcessEnvironment) -> None:
    """Set the variables that torch.distributed reads at start-up if the launcher did not (srun, or a plain single
    process).

    On one node, gloo's connections stay on loopback unless the variable names another interface. Raises ValueError if
    several nodes would each look for rank 0 on themselves.
    """
    if process.num_nodes > 1 and is_loopback(os.environ.get("MASTER_ADDR", "127.0.0.1")):
        raise ValueError(
            f"MASTER_ADDR is {os.environ.get('MASTER_ADDR', 'not set')}, but the run has {process.num_nodes} nodes: export "
            "it as the host name of the first node (examples/launch/slurm.sh does)"
        )
    _prefer_loopback("GLOO_SOCKET_IFNAME", process)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Several ranks must find the same port without asking another; 29500 is torchrun's default.
    port = free_port() if process.world_size == 1 else next(_ports_of_job()) if batch_job() else 29500
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.setdefault("RANK", str(process.rank))
    os.environ.setdefault("WORLD_SIZE", str(process.world_size))
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))


def rendezvous_problem(environment: Mapping[str, str] | None = None) -> str:
    """Return the reason why rank 0 cannot open its store at MASTER_ADDR and MASTER_PORT, "" for none.

    Also "" if one of them is not set, if MASTER_ADDR is another machine, or if torchrun has already opened the store.
    """
    environment = os.environ if environment is None else environment
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not host or not port or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ""
    if not port.isdigit() or not 0 < int(port) < 65536:
        return f"MASTER_PORT is {port!r}: export it as a number from 1 to 65535"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        socket.create_server((address[0], 0), family=family).close()
    except OSError:  # the address of another machine
        return ""
    try:
        socket.create_server((address[0], int(port)), family=family).close()
    except OSError as error:
        return (
            f"MASTER_PORT is {port}, which rank 0 cannot open on {host} ({os.strerror(error.errno or 0)}): end the process that listens there, "
            "or export another number"
        )
    return ""


def leave_compiler_out() -> None:
    """Keep torch.compile from loading its compiler if there is no GPU. Call this before torch is imported.

    megatron-core's decorators would load it in every process, at a cost of 1.2 s and 43 MB, although nothing is
    compiled on a CPU.
    """
    if not DRIVER_DEVICE.exists():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def use_expandable_segments() -> None:
    """Let torch's allocator expand its segments, unless a variable configures it. Call this before torch is imported.

    Packed micro-batches vary in length, which otherwise leaves gigabytes reserved and unused. Not for a run that shares
    device memory with its servers: expandable segments have no handle that another process can open.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ.update(dict.fromkeys(_ALLOCATOR, "expandable_segments:True"))


def keep_nccl_on_loopback(process: ProcessEnvironment) -> None:
    """Keep NCCL's connections on loopback if all processes are on one node, unless its variable names another interface.

    Not for a run whose servers may be on other nodes: NCCL takes the same interfaces for all its groups.
    """
    _prefer_loopback("NCCL_SOCKET_IFNAME", process)


def _prefer_loopback(name: str, process: ProcessEnvironment) -> None:
    if process.num_nodes == 1 and sys.platform.startswith("linux"):
        os.environ.setdefault(name, "lo")


def rendezvous_port() -> int:
    """Return a port for torch's store (TCP) and the watchers (UDP) that nothing has, on this machine as rank 0's.

    Raises RuntimeError if there is none.
    """
    for port in _ports_of_job():
        if _is_free(port):
            return port
    raise RuntimeError(f"no port from {_FIRST_PORT} to {_FIRST_PORT + _NUM_PORTS - 1} is free: export one as MASTER_PORT")


def _ports_of_job() -> Iterator[int]:
    """Yield ports for the store of this batch job, the best first: two jobs may share a node, so each begins at another.

    They are below those that kernels give to outgoing connections, without those of services that may start later.
    """
    for offset in range(_NUM_PORTS):
        port = _FIRST_PORT + (int(batch_job() or 0) + offset) % _NUM_PORTS
        if port not in _SERVICES:
            yield port


def _is_free(port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True


def place_in_run(process: ProcessEnvironment) -> Place:
    """Return the facts that the watchers of a run need. Call it after `prepare_rendezvous`.

    Node 0's watcher listens on the UDP port with the same number as the TCP port of torch.distributed's store.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    # slurm.sh starts a new step in the same job; under torchrun each node may have a separate step.
    start = "TORCHELASTIC_RESTART_COUNT" if "TORCHELASTIC_RESTART_COUNT" in os.environ else "SLURM_STEP_ID"
    starts = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", start))
    run_id = hashlib.sha256("|".join((host, port, *starts)).encode()).hexdigest()[:16]
    return Place(
        process.rank,
        process.world_size,
        process.local_rank,
        process.node_rank,
        process.num_nodes,
        run_id,
        (host, int(port)),
        max(1, launch_attempt() + _num_restarts()),
    )


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def visible_devices(count: int) -> tuple[str, ...]:
    """Return the names of this process's `count` GPUs, as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(named.split(",")[:count]) if named else tuple(map(str, range(count)))


def batch_job() -> str:
    """Return the number of the Slurm job, the same when it is requeued; "" outside one."""
    return os.environ.get("SLURM_JOB_ID", "")


def job_end_time() -> float | None:
    """Return when Slurm ends the job, in seconds since 1970; None if unknown."""
    end = os.environ.get("SLURM_JOB_END_TIME")
    return float(end) if end else None


def is_restarted() -> bool:
    """Return True in a worker that torchrun has started again after a failure."""
    return _num_restarts() > 0


def _num_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_requeued() -> bool:
    """Return True in a batch job that Slurm has started before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def launch_attempt() -> int:
    """Return the number of the first attempt that this launch makes, 0 if its launcher did not say."""
    return int(os.environ.get(ATTEMPT, "0"))


def supervision() -> Supervision | None:
    """Return what restarts these processes after a failure, and so may keep servers; None if nothing does.

    It is torchrun with restarts, whose agent is this process's parent, or a batch script that has started the
    supervisors.
    """
    from megatron_dapo.engines.sglang.supervisor import Supervision

    if os.environ.get(SERVERS_ARE_KEPT):
        return Supervision(f"job {batch_job()}.{os.environ.get('SLURM_RESTART_COUNT', '0')}")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        return Supervision(f"agent {os.getppid()}", os.getppid())
    return None


def rendezvous_host() -> str:
    """Return the node of rank 0 under the launcher's name for it."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def raise_open_files_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit and return it.

    Rank 0 has a connection for every request in flight; a run on 16 nodes exceeds the usual soft limit of 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
