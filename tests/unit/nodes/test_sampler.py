"""Samples of a node: counters of cgroups and of the machine, GPUs, files that stay small, and the sampler's process."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from pathlib import Path

import pytest

from megatron_dapo.nodes.counters import NodeCounters
from megatron_dapo.nodes.nvml import Gpus
from megatron_dapo.nodes.records import read_nodes
from megatron_dapo.nodes.sampler import NodeSampler, SampleFile, SamplerSettings, start_sampler
from megatron_dapo.nodes.samples import METRICS, SHOWN_METRICS
from megatron_dapo.watch.heartbeat import Heartbeat, Place
from megatron_dapo.watch.watched_rank import STATUS_BYTES, StatusPage

MACHINE = {
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 2 3\n",
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n",
    "proc/diskstats": " 8 0 sda 1 0 10 0 1 0 20 0 0 0 0\n 8 1 sda1 1 0 10 0 1 0 20 0 0 0 0\n",
    "proc/net/dev": "a\nb\n    lo: 9 0 0 0 0 0 0 0 9 0 0 0 0 0 0 0\n  eth0: 100 0 0 0 0 0 0 0 50 0 0 0 0 0 0 0\n",
    "proc/net/snmp": "Tcp: RtoMin RetransSegs\nTcp: 200 7\n",
    "proc/net/tcp": "head\n"
    " 0: 0A004D0A:0016 0B004D0A:0016 01 00000100:00000000 x\n"
    " 1: 0100007F:0016 0100007F:0016 01 00000400:00000000 x\n",
}
FIRST = {
    "sys/fs/cgroup/cpuacct/cpuacct.usage": "1000000000\n",
    "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 5\nnr_throttled 1\nthrottled_time 500000000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 96\n",
    "sys/fs/cgroup/blkio/blkio.throttle.io_service_bytes_recursive": "8:0 Read 10\nTotal 30\n",
}
SECOND = {
    "sys/fs/cgroup/cpu.stat": "usage_usec 1000000\nthrottled_usec 500000\n",
    "sys/fs/cgroup/cpu.max": "50000 100000\n",
    "sys/fs/cgroup/memory.current": "4096\n",
    "sys/fs/cgroup/memory.stat": "inactive_file 96\n",
    "sys/fs/cgroup/io.stat": "8:0 rbytes=10 wbytes=20 rios=1 wios=1\n",
}
LATER = {
    "sys/fs/cgroup/cpuacct/cpuacct.usage": "1500000000\n",
    "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 1000000000\n",
    "sys/fs/cgroup/blkio/blkio.throttle.io_service_bytes_recursive": "8:0 Read 10\nTotal 130\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 1500000\nthrottled_usec 1000000\n",
    "sys/fs/cgroup/io.stat": "8:0 rbytes=60 wbytes=70 rios=1 wios=1\n",
    "proc/net/dev": MACHINE["proc/net/dev"].replace(" 100 ", " 1100 "),
    "proc/net/snmp": "Tcp: RtoMin RetransSegs\nTcp: 200 11\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("cgroup", [FIRST, SECOND], ids=["version 1", "version 2"])
def test_a_cgroup_counts_before_the_machine(tmp_path: Path, cgroup: dict[str, str]) -> None:
    write(tmp_path, {**MACHINE, **cgroup})
    counters = NodeCounters(tmp_path, Gpus(FakeLibrary([])))
    first = counters.look(100.0)
    assert first == {"memory_usage": 4000.0, "network_send_queue": 256.0}, "rates need two looks"
    write(tmp_path, {name: text for name, text in LATER.items() if name in {**MACHINE, **cgroup}})
    second = counters.look(102.0)
    assert second["cpu_usage"] == pytest.approx(0.25 / 0.5), "of the half core that the quota leaves"
    assert second["cpu_throttled"] == pytest.approx(0.25)
    assert (second["disk_rate"], second["network_rate"], second["network_retransmits"]) == (50.0, 500.0, 2.0)


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    write(tmp_path, MACHINE)
    counters = NodeCounters(tmp_path, Gpus(FakeLibrary([])))
    assert counters.look(0.0)["memory_usage"] == 600 * 1024
    write(tmp_path, {"proc/stat": "cpu  110 0 100 900 0 0 0 0 0 0\n"})
    second = counters.look(1.0)
    seconds = 10 / os.sysconf("SC_CLK_TCK")
    assert second["cpu_usage"] == pytest.approx(seconds / len(os.sched_getaffinity(0)))
    assert "cpu_throttled" not in second and second["disk_rate"] == 0.0


def test_a_counter_that_was_set_back_is_left_out_once(tmp_path: Path) -> None:
    write(tmp_path, MACHINE)
    counters = NodeCounters(tmp_path, Gpus(FakeLibrary([])))
    counters.look(0.0)
    write(tmp_path, {"proc/net/snmp": "Tcp: RtoMin RetransSegs\nTcp: 200 1\n"})
    assert "network_retransmits" not in counters.look(1.0)
    assert counters.look(2.0)["network_retransmits"] == 0.0


def test_a_machine_without_any_counter_has_no_metric(tmp_path: Path) -> None:
    counters = NodeCounters(tmp_path, Gpus(FakeLibrary([])))
    assert counters.look(0.0) == counters.look(1.0) == {"network_send_queue": 0}


class FakeLibrary:
    """NVML with GPUs of given percent of use, watt, bytes and KiB over NVLink."""

    def __init__(self, gpus: list[tuple[int, int, int, int]], code: int = 0) -> None:
        self._gpus, self._code = gpus, code

    def nvmlInit_v2(self) -> int:
        return self._code

    def nvmlDeviceGetCount_v2(self, count: ctypes.c_uint) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: ctypes.c_void_p) -> int:
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, found: ctypes.Structure) -> int:
        found._obj.gpu = self._gpus[device.value - 1][0]
        return 0

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, found: ctypes.c_uint) -> int:
        found._obj.value = 1000 * self._gpus[device.value - 1][1]
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, found: ctypes.Structure) -> int:
        found._obj.used = self._gpus[device.value - 1][2]
        return 0

    def nvmlDeviceGetFieldValues(self, device: ctypes.c_void_p, count: int, values: ctypes.Array) -> int:
        for value in values:
            value.value, value.code = self._gpus[device.value - 1][3], 0 if self._gpus[device.value - 1][3] else 3
        return 0


    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: ctypes.c_char_p, device: ctypes.c_void_p) -> int:
        device._obj.value = 1
        return 0 if bus_id.value == b"00000000:1b:00.0" else 2

    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, device: ctypes.c_void_p, count: ctypes.c_uint, found: ctypes.Array
    ) -> int:
        for index, (pid, used) in enumerate(((11, 5), (22, 7), (33, 2**64 - 1))):  # the last is not told
            found[index].pid, found[index].used = pid, used
        count._obj.value = 3
        return 0


def test_processes_of_a_gpu_have_their_bytes() -> None:
    gpus = Gpus(FakeLibrary([(100, 700, 10, 2)]))
    assert gpus.processes("00000000:1b:00.0") == {11: 5, 22: 7} and gpus.processes("00000000:2b:00.0") == {}


def test_gpus_of_a_node_are_averaged_and_what_they_hold_is_added() -> None:
    read = Gpus(FakeLibrary([(100, 700, 10, 2), (50, 300, 30, 4)])).read()
    assert read["gpu_duty_cycle"] == 0.75 and read["gpu_power"] == 500.0
    assert (read["gpu_memory_usage"], read["nvlink_bytes"]) == (40, 1024 * 2 * (2 + 4))


def test_gpus_without_links_and_a_driver_that_does_not_answer() -> None:
    assert "nvlink_bytes" not in Gpus(FakeLibrary([(100, 700, 10, 0)])).read()
    assert Gpus(FakeLibrary([(100, 700, 10, 0)], code=9)).read() == {}


def test_a_node_keeps_two_files_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "node_0.jsonl"
    file = SampleFile(path, "header\n", max_bytes=100)
    for number in range(30):
        file.append(f"line {number:04d}\n")
    assert sorted(each.name for each in path.parent.iterdir()) == ["node_0.jsonl", "node_0.jsonl.1"]
    assert all(each.stat().st_size <= 110 for each in path.parent.iterdir())
    assert path.read_text().split("\n")[1] == "header" and path.read_text().endswith("line 0029\n")


def test_samples_that_cannot_be_written_are_lost_and_later_ones_have_a_header(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "node_0.jsonl"
    file = SampleFile(path, "header\n")
    (tmp_path / "nodes").write_text("a file where the directory should be")
    file.append("lost\n")
    (tmp_path / "nodes").unlink()
    file.append("line\n")
    assert path.read_text() == "\nheader\nline\n"


def test_samples_read_back_with_phase_step_and_known_metrics(tmp_path: Path) -> None:
    settings = SamplerSettings(str(tmp_path), 3, "node3", "policy", "unused", 8.0)
    sampler = NodeSampler(settings)
    for rank, worked in ((6, 1.5), (7, 0.5)):
        descriptor = os.memfd_create("page")
        os.ftruncate(descriptor, STATUS_BYTES)
        sampler.pages[rank] = StatusPage(descriptor, is_writable=True)
        os.close(descriptor)
        sampler.pages[rank].write({"phase": "train", "step": 4, "seconds": {"train": [2.0, worked]}})
    sampler.sample(1000.0)
    sampler._flushed -= 10.0
    sampler.sample(1001.0)
    (series,) = read_nodes(tmp_path)
    assert (series.node, series.name, series.role) == (3, "node3", "policy")
    assert [(each.time, each.phase, each.step) for each in series.samples] == [
        (1000.0, "changing", 4),
        (1001.0, "train", 4),
    ]
    assert set(NodeCounters.METRICS) <= {metric.name for metric in (*METRICS, *SHOWN_METRICS)}
    last = json.loads((tmp_path / "node_3.jsonl").read_text().splitlines()[-1])
    assert last["seconds_of_ranks"] == {"6": {"train": [2.0, 1.5]}, "7": {"train": [2.0, 0.5]}}


def wait_until(condition: object, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_the_process_samples_a_connected_rank_at_low_cost(tmp_path: Path) -> None:
    """Its rank hands it the page of its heartbeat; files belong only to the user, and it uses little of a core."""
    umask = os.umask(0o077)
    heartbeat = Heartbeat()
    heartbeat.connect(Place(0, 1, 0, 0, 1, f"{os.getpid()}-{time.time_ns()}", ("127.0.0.1", 0)))
    address = f"test-nodes-{os.getpid()}-{time.time_ns()}"
    settings = SamplerSettings(str(tmp_path / "nodes"), 0, socket.gethostname(), "policy", address, 1.0)
    process = start_sampler(settings)
    try:
        heartbeat.show_to_sampler(address)
        heartbeat.train_step = lambda: 17
        path = tmp_path / "nodes" / "node_0.jsonl"
        with heartbeat.phase("train"):
            assert wait_until(lambda: path.exists() and '"phase": "train", "step": 17' in path.read_text())
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
        started = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        time.sleep(5.0)
        used = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        assert (used - started) / os.sysconf("SC_CLK_TCK") / 5.0 < 0.03
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
        (series,) = read_nodes(tmp_path / "nodes")
        gaps = [
            round(after.time - before.time) for before, after in zip(series.samples, series.samples[1:], strict=False)
        ]
        # On a busy machine a sample is late, and the next one is in time again.
        assert abs(sum(gaps) - len(gaps)) <= 2, gaps
    finally:
        os.umask(umask)
        process.kill()
        process.wait()
        heartbeat.close(is_complete=True)
        heartbeat.disconnect()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux counts waits for a CPU")
def test_the_sampler_ends_with_its_rank(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        settings = SamplerSettings(str(tmp_path), 0, "node0", "policy", f"test-orphan-{os.getpid()}", 1.0)
        process = start_sampler(settings)
        (tmp_path / "pid").write_text(str(process.pid))
        time.sleep(600)
        os._exit(0)
    assert wait_until(lambda: (tmp_path / "node_0.jsonl").exists() and (tmp_path / "pid").exists())
    pid = int((tmp_path / "pid").read_text())
    os.kill(child, 9)
    os.waitpid(child, 0)

    def is_gone() -> bool:
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    assert wait_until(is_gone, 10.0)
