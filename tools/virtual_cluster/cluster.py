"""Nodes, network, faults and jobs of a virtual cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.virtual_cluster.machine import unavailable

ROOT = Path(__file__).resolve().parents[2]
CONTROLLER = "ctl"
SUBNET = "10.77.0"
FAULTS = ("crash", "power-off", "unplug", "mute", "deafen", "throttle", "plug", "kill-slurmd", "start-slurmd", "boot")
THROTTLE = ("tbf", "rate", "1mbit", "burst", "32kbit", "latency", "400ms")
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CPU_PERIOD_US = 100_000

SLURM_CONF = """\
ClusterName=virtual
SlurmctldHost={controller}({subnet}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge/socket,cred_expire={requeue_delay_s}
CredType=cred/munge
StateSaveLocation={work}/{controller}/state
SlurmctldPidFile={work}/{controller}/slurmctld.pid
SlurmctldLogFile={work}/{controller}/slurmctld.log
SlurmdSpoolDir={work}/%n/spool
SlurmdPidFile={work}/%n/slurmd.pid
SlurmdLogFile={work}/%n/slurmd.log
SlurmctldDebug=info
SlurmdDebug=info
# Slurm neither pins nor confines: the nodes share the cores of one machine, and their own cgroups limit them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AcctGatherNodeFreq=0
# Nodes claim more CPUs and memory than the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout_s}
KillWait={kill_wait_s}
InactiveLimit=0
ReturnToService=2
JobRequeue=1
MinJobAge=86400
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5,batch_sched_delay=0
JobCompType=jobcomp/filetxt
JobCompLoc={work}/{controller}/jobs.log
{nodes}
PartitionName=main Nodes=node[0-{last}] Default=YES MaxTime=UNLIMITED State=UP OverSubscribe=NO
"""


@dataclass(frozen=True)
class ClusterSettings:
    """Size and timing of a virtual cluster."""

    num_nodes: int = 2
    cpus: int = 128  # CPUs that a node claims
    gpus: int = 8  # GPUs that a node claims: CUDA_VISIBLE_DEVICES is set, but there is no device
    memory_gib: float = 0.0  # limit of a node's cgroup; 0: none
    cpu_cores: float = 0.0  # CPU time of a node, in cores; 0: no limit
    slurmd_timeout_s: int = 30  # silence after which slurmctld gives a node up (Slurm's default: 300)
    kill_wait_s: int = 30  # time from a job's SIGTERM to its SIGKILL (Slurm's default)
    requeue_delay_s: int = 10  # delay of a requeued job (Slurm's default: 120)


@dataclass(frozen=True)
class JobState:
    """State of a batch job as reported by `scontrol show job`."""

    job_id: int
    state: str
    exit_code: str  # "code:signal"
    restarts: int

    @property
    def is_over(self) -> bool:
        return self.state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")


class VirtualCluster:
    """A cluster whose files, logs and sockets are in `work`, an absolute path without blanks.

    Two clusters in different directories do not see each other.
    """

    def __init__(self, work: Path, settings: ClusterSettings | None = None) -> None:
        self.work = work.resolve()
        stored = self.work / "cluster.json"
        if settings is None:
            if not stored.exists():
                raise FileNotFoundError(f"{self.work}: no virtual cluster; start one with `up`")
            settings = ClusterSettings(**json.loads(stored.read_text()))
        self.settings = settings
        # Names of network namespaces and cgroups are global on the machine.
        self.id = f"vc{zlib.crc32(str(self.work).encode()) % 100_000:05d}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the compute nodes."""
        return tuple(f"node{index}" for index in range(self.settings.num_nodes))

    def address(self, name: str) -> str:
        """IP address of a node, or of the controller."""
        return f"{SUBNET}.1" if name == CONTROLLER else f"{SUBNET}.{10 + self.nodes.index(name)}"

    # Life

    def up(self) -> None:
        """Start all nodes and wait until Slurm reports them idle. Raises RuntimeError with the end of the logs."""
        if reason := unavailable():
            raise RuntimeError(f"virtual cluster: {reason}")
        if (self.work / "cluster.json").exists():
            raise RuntimeError(f"{self.work}: a cluster is already there; end it with `down` first")
        self._write_files()
        try:
            self._create_network()
            for name in (CONTROLLER, *self.nodes):
                self.boot(name)
            self._wait_idle(timeout_s=60)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process of the cluster and remove its namespaces and cgroups. Logs stay."""
        for name in (*self.nodes, CONTROLLER):
            self._kill_all(name)
            for path in self.cgroups(name):
                _remove_cgroup(path)
            subprocess.run(["ip", "netns", "del", f"{self.id}-{name}"], capture_output=True, check=False)
        for leftover in ("munge", f"{CONTROLLER}/state", *(f"{name}/spool" for name in self.nodes)):
            shutil.rmtree(self.work / leftover, ignore_errors=True)
        (self.work / "cluster.json").unlink(missing_ok=True)

    def boot(self, name: str) -> None:
        """Start a node that is off, with its cable plugged in."""
        if self.init_pid(name) is not None:
            raise RuntimeError(f"{name} is already on")
        if name != CONTROLLER:
            self._cable(name, "up")
        with (self.work / name / "node.log").open("a") as log:
            # unshare stays outside as the parent; its child is process 1 of the node.
            outer = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.id}-{name}", "unshare", "--mount", "--uts", "--ipc", "--pid"]
                + ["--fork", "--kill-child", "--mount-proc", "--", sys.executable, "-m", "tools.virtual_cluster"]
                + ["init", str(self.work), name],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
            )
        for _ in _polls(10.0, f"{name}: process 1, see {log.name}"):
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            with suppress(OSError):
                if pids := children.read_text().split():
                    (self.work / name / "pid").write_text(pids[0])
                    break
        for _ in _polls(20.0, f"{name}: daemons, see {log.name}"):
            if (self.work / name / "ready").exists():
                return

    # Use

    def command(self, name: str, arguments: Sequence[str], cwd: Path | None = None) -> list[str]:
        """The command line that runs `arguments` on a node. Raises RuntimeError if the node is off."""
        pid = self.init_pid(name)
        if pid is None:
            raise RuntimeError(f"{name} is off")
        # A process that enters from outside is in the caller's cgroup, so it joins the node's first.
        groups = " ".join(str(path / "cgroup.procs") for path in self.cgroups(name))
        join = ["sh", "-c", f'for g in {groups}; do echo $$ > "$g"; done; exec "$@"', "sh"]
        enter = [
            "nsenter",
            "--target",
            str(pid),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            f"--wd={cwd or Path.cwd()}",
        ]
        return ["env", f"SLURM_CONF={self.work}/slurm.conf", *join, *enter, "--", *arguments]

    def run(
        self,
        name: str,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> str:
        """Run a command on a node and return its output. Raises CalledProcessError or TimeoutExpired."""
        done = subprocess.run(
            self.command(name, arguments, cwd), env=env, timeout=timeout, check=True, text=True, stdout=subprocess.PIPE
        )
        return done.stdout

    def submit(self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """Submit a batch job with the caller's environment, as sbatch does; return its number."""
        return int(self.run(CONTROLLER, "sbatch", "--parsable", *arguments, cwd=cwd, env=env).split(";")[0])

    def job(self, job_id: int) -> JobState:
        """Current state of a job."""
        text = self.run(CONTROLLER, "scontrol", "show", "job", str(job_id))
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return JobState(job_id, fields["JobState"], fields["ExitCode"], int(fields["Restarts"]))

    def wait(self, job_id: int, timeout_s: float) -> JobState:
        """Wait until a job is over. Raises TimeoutError with its last state."""
        end = time.monotonic() + timeout_s
        while not (job := self.job(job_id)).is_over:
            if time.monotonic() > end:
                raise TimeoutError(f"job {job_id} is {job.state} after {timeout_s} s")
            time.sleep(0.5)
        return job

    def limit_cpu(self, name: str, cores: float) -> None:
        """Let a node have `cores` of CPU time, as a cgroup's quota; 0: as much as there is."""
        for path in self.cgroups(name):
            if (path / "cpu.cfs_quota_us").exists():
                (path / "cpu.cfs_quota_us").write_text(str(int(cores * CPU_PERIOD_US) or -1))
            elif (path / "cpu.max").exists():
                (path / "cpu.max").write_text(f"{int(cores * CPU_PERIOD_US) or 'max'} {CPU_PERIOD_US}")

    def fault(self, kind: str, name: str) -> None:
        """Inject a fault into a node.

        crash: every process dies at once and the kernel closes its connections. power-off: the cable is unplugged first,
        so peers hear nothing. unplug: only the cable. mute: the node hears and is not heard. deafen: it is heard and
        does not hear. throttle: it sends at 1 Mbit/s. plug: the link is whole again. kill-slurmd: jobs continue. boot: a node that is off starts.
        """
        if kind == "boot":
            self.boot(name)
        elif kind in ("unplug", "plug"):
            self._cable(name, "down" if kind == "unplug" else "up")
            for is_own in (True, False) if kind == "plug" else ():
                # A cable without its own queue has none to delete: the command may fail.
                subprocess.run(self._queue(name, "del", is_own), capture_output=True, check=False)
        elif kind in ("mute", "deafen", "throttle"):
            # A queue of length 0 drops all that goes through it.
            queue = THROTTLE if kind == "throttle" else ("pfifo", "limit", "0")
            subprocess.run([*self._queue(name, "replace", is_own=kind != "deafen"), *queue], check=True)
        elif kind == "kill-slurmd":
            self.run(name, "kill", "-KILL", (self.work / name / "slurmd.pid").read_text().strip())
        elif kind == "start-slurmd":
            self.run(name, "slurmd")
        elif kind in ("crash", "power-off"):
            if kind == "power-off":
                self._cable(name, "down")
            self._kill_all(name)
        else:
            raise ValueError(f"unknown fault {kind}; known: {', '.join(FAULTS)}")

    def lose_path(self, name: str, other: str) -> None:
        """Let what a node sends to another one go to a machine that does not exist; both reach all others."""
        self.run(name, *self._neighbour(name, other, "replace"), "lladdr", "02:00:00:00:00:99", "nud", "permanent")

    def mend_path(self, name: str, other: str) -> None:
        self.run(name, *self._neighbour(name, other, "del"))

    def _neighbour(self, name: str, other: str, action: str) -> tuple[str, ...]:
        route = self.run(name, "ip", "-o", "route", "get", self.address(other)).split()
        return ("ip", "neigh", action, self.address(other), "dev", route[route.index("dev") + 1])

    # Files, network, processes

    def _write_files(self) -> None:
        settings, work = self.settings, self.work
        for name in ("munge", f"{CONTROLLER}/state", "gpus", *(f"{node}/spool" for node in self.nodes)):
            (work / name).mkdir(parents=True, exist_ok=True)
        # munged refuses a socket below a directory that others may write to.
        for path in (work, work / "munge"):
            path.chmod(0o755)
        key = work / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        hosts = [f"{self.address(name)} {name}" for name in (CONTROLLER, *self.nodes)]
        (work / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        for index in range(settings.gpus):
            device = work / "gpus" / f"nvidia{index}"
            device.unlink(missing_ok=True)
            # Slurm accepts only character devices as GPUs; these are /dev/null.
            os.mknod(device, 0o20666, os.makedev(1, 3))
        gres = f"Name=gpu File={work}/gpus/nvidia[0-{settings.gpus - 1}]\n" if settings.gpus else ""
        (work / "gres.conf").write_text(gres)
        (work / "cgroup.conf").write_text("")
        claims = f"CPUs={settings.cpus} RealMemory=64000 State=UNKNOWN" + (
            f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
        )
        nodes = "\n".join(f"NodeName={name} NodeAddr={self.address(name)} {claims}" for name in self.nodes)
        (work / "slurm.conf").write_text(
            SLURM_CONF.format(
                work=work,
                controller=CONTROLLER,
                subnet=SUBNET,
                nodes=nodes,
                last=settings.num_nodes - 1,
                slurmd_timeout_s=settings.slurmd_timeout_s,
                kill_wait_s=settings.kill_wait_s,
                requeue_delay_s=settings.requeue_delay_s,
            )
        )
        (work / "cluster.json").write_text(json.dumps(asdict(settings)))

    def _create_network(self) -> None:
        """Create a switch in the controller's namespace and a cable from it to every node."""
        controller = f"{self.id}-{CONTROLLER}"
        _ip("netns", "add", controller)
        _ip("-n", controller, "link", "set", "lo", "up")
        _ip("-n", controller, "link", "add", "switch", "type", "bridge")
        _ip("-n", controller, "addr", "add", f"{self.address(CONTROLLER)}/24", "dev", "switch")
        _ip("-n", controller, "link", "set", "switch", "up")
        for name in self.nodes:
            space = f"{self.id}-{name}"
            _ip("netns", "add", space)
            _ip("-n", controller, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", controller, "link", "set", f"to-{name}", "master", "switch", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _cable(self, name: str, state: str) -> None:
        _ip("-n", self.namespace(CONTROLLER), "link", "set", f"to-{name}", state)

    def _queue(self, name: str, action: str, is_own: bool) -> list[str]:
        """Return the command line that changes the queue of what a node sends, or of what the switch sends to it."""
        end = (self.namespace(name), "eth0") if is_own else (self.namespace(CONTROLLER), f"to-{name}")
        return ["ip", "netns", "exec", end[0], "tc", "qdisc", action, "dev", end[1], "root"]

    def _wait_idle(self, timeout_s: float) -> None:
        for _ in _polls(timeout_s, f"{self.settings.num_nodes} idle nodes, see {self.work}/*/*.log"):
            with suppress(subprocess.SubprocessError):
                if self.run(CONTROLLER, "sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(
                    self.settings.num_nodes
                ):
                    return

    def namespace(self, name: str) -> str:
        """Name of a node's network namespace on the machine."""
        return f"{self.id}-{name}"

    def init_pid(self, name: str) -> int | None:
        """Process 1 of a node as the machine counts processes; None if the node is off."""
        path = self.work / name / "pid"
        if not path.exists() or not Path(f"/proc/{path.read_text()}").exists():
            return None
        return int(path.read_text())

    def _kill_all(self, name: str) -> None:
        """Kill a node's process 1; the kernel then kills all others of its namespace."""
        pid = self.init_pid(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            for _ in _polls(30.0, f"the end of {name}'s processes"):
                if not Path(f"/proc/{pid}").exists():
                    break
        for file in ("pid", "ready"):
            (self.work / name / file).unlink(missing_ok=True)

    def cgroups(self, name: str) -> tuple[Path, ...]:
        """Directories of a node's cgroup: one for each controller under cgroup v1, a single one under v2."""
        leaf = f"{self.id}-{name}"
        if CGROUP_V1.is_dir():
            others = [CGROUP_V1.parent / name for name in ("cpu", "cpuacct")]
            # Where both are one controller, one is a link to the other.
            return (CGROUP_V1 / leaf, *dict.fromkeys(other.resolve() / leaf for other in others if other.is_dir()))
        return (CGROUP_V1.parent / leaf,)


@contextmanager
def virtual_cluster(work: Path, settings: ClusterSettings) -> Iterator[VirtualCluster]:
    """A cluster that is up inside the `with` block and is removed after it, also after an error."""
    cluster = VirtualCluster(work, settings)
    cluster.up()
    try:
        yield cluster
    finally:
        cluster.down()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _remove_cgroup(path: Path) -> None:
    """Remove a cgroup, whose last processes may take a moment to leave it."""
    for _ in range(100):
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return


def _polls(timeout_s: float, what: str) -> Iterator[None]:
    """Yield every 50 ms. Raises TimeoutError, which names what was waited for."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
    raise TimeoutError(f"virtual cluster: waited {timeout_s:.0f} s for {what}")
