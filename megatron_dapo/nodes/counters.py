"""Linux counters of a node, and the metrics between two readings of them.

A container's cgroup (version 1 or 2) takes precedence, because /proc/stat, /proc/meminfo and /proc/diskstats describe
the machine that the container runs on. Counters that a machine lacks are left out.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from megatron_dapo.nodes.nvml import Gpus
from megatron_dapo.watch.evidence import read_text

_SIOCETHTOOL = 0x8946
_GET_STRINGS, _GET_STATISTICS, _COUNT_STRINGS = 0x1B, 0x1D, 0x37  # ETHTOOL_GSTRINGS, _GSTATS, _GSSET_INFO
_STATISTICS = 1  # ETH_SS_STATS
_NAME_BYTES = 32
# Priority flow control pause frames sent by a card, as mlx5, bnxt and ice name them.
_PAUSE = re.compile(r"tx_prio\d_pause|tx_pfc_ena_frames_pri\d|tx_priority_\d_xoff\S*")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Monotonic counter -> the metric that is its growth per second.
_RATES = {
    "pfc_tx_packets": "pfc_tx_rate",
    "cpu_throttled_s": "cpu_throttled",
    "cpu_s": "cpu_usage",
    "nvlink_bytes": "nvlink_bandwidth",
    "retransmits": "network_retransmits",
    "network_bytes": "network_rate",
    "disk_bytes": "disk_rate",
}
_LEVELS = ("gpu_duty_cycle", "gpu_power", "memory_usage", "gpu_memory_usage", "network_send_queue")


class NodeCounters:
    """Counters of this node. `root`: directory of /proc and /sys; tests pass their own."""

    METRICS = (*_RATES.values(), *_LEVELS)

    def __init__(self, root: Path = Path("/"), gpus: Gpus | None = None) -> None:
        self._proc, self._cgroup, self._sys = root / "proc", root / "sys" / "fs" / "cgroup", root / "sys" / "class"
        self._gpus = gpus or Gpus()
        self._before: Mapping[str, float] = {}
        self._at = 0.0

    def look(self, now: float) -> dict[str, float]:
        """Return the metrics since the last call; the first call has only levels. `now`: seconds on any clock."""
        counters = self._read()
        seconds, before = now - self._at, self._before
        self._before, self._at = counters, now
        metrics = {name: counters[name] for name in _LEVELS if name in counters}
        for counter, metric in _RATES.items():
            # A counter that falls was reset, by a new card or cgroup.
            if counter in counters and counters[counter] >= before.get(counter, float("inf")) and seconds > 0:
                metrics[metric] = (counters[counter] - before[counter]) / seconds
        if "cpu_usage" in metrics:
            metrics["cpu_usage"] /= self._cores()
        for share in {"cpu_throttled", "cpu_usage"} & metrics.keys():
            metrics[share] = min(metrics[share], 1.0)
        return metrics

    def _read(self) -> dict[str, float]:
        found = {
            **self._cpu(),
            "memory_usage": self._memory(),
            "disk_bytes": self._disk(),
            **self._network(),
            **self._gpus.read(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _text(self, *names: str) -> str:
        """Return the text of the first readable file of the cgroup, "" if there is none."""
        return next((text for name in names if (text := read_text(self._cgroup / name))), "")

    def _cpu(self) -> dict[str, float | None]:
        usage = self._text("cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage").strip()  # version 1: ns
        limits = _numbers(self._text("cpu.stat", "cpu/cpu.stat", "cpu,cpuacct/cpu.stat"))
        if usage.isdigit():
            seconds: float | None = int(usage) / 1e9
        elif "usage_usec" in limits:
            seconds = limits["usage_usec"] / 1e6
        else:
            ticks = [int(each) for each in _line(self._proc / "stat", "cpu ")]
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already
            seconds = (sum(ticks[:3]) + sum(ticks[5:7])) / _TICKS_PER_S if ticks else None
        throttled = limits["throttled_usec"] / 1e6 if "throttled_usec" in limits else None
        if "throttled_time" in limits:
            throttled = limits["throttled_time"] / 1e9
        return {"cpu_s": seconds, "cpu_throttled_s": throttled}

    def _cores(self) -> float:
        """Return the cores that the node may use."""
        quota, period = (self._text("cpu.max").split() or ["max", ""])[:2]
        for place in ("cpu", "cpu,cpuacct"):
            if quota in ("max", "-1"):
                quota = self._text(f"{place}/cpu.cfs_quota_us").strip() or "max"
                period = self._text(f"{place}/cpu.cfs_period_us").strip()
        cores = float(len(os.sched_getaffinity(0)))
        return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores

    def _memory(self) -> float | None:
        used = self._text("memory.current", "memory/memory.usage_in_bytes").strip()
        if used.isdigit():
            details = _numbers(self._text("memory.stat", "memory/memory.stat"))
            return int(used) - details.get("total_inactive_file", details.get("inactive_file", 0))
        machine = _numbers(read_text(self._proc / "meminfo"))
        if {"MemTotal", "MemAvailable"} <= machine.keys():
            return 1024 * (machine["MemTotal"] - machine["MemAvailable"])
        return None

    def _disk(self) -> float | None:
        if text := self._text("io.stat"):
            return sum(int(count) for count in re.findall(r"[rw]bytes=(\d+)", text))
        if found := re.findall(r"^Total (\d+)", self._text("blkio/blkio.throttle.io_service_bytes_recursive"), re.M):
            return int(found[-1])
        rows = [line.split() for line in read_text(self._proc / "diskstats").splitlines()]
        # Partitions, and devices stacked on disks, would count twice.
        disks = [row for row in rows if re.fullmatch(r"[sv]d[a-z]+|xvd[a-z]+|nvme\d+n\d+", row[2])]
        return 512 * sum(int(row[5]) + int(row[9]) for row in disks) if disks else None

    def _network(self) -> dict[str, float | None]:
        moved = {
            name.strip(): sum(int(fields.split()[index]) for index in (0, 8))
            for name, _, fields in (line.partition(":") for line in read_text(self._proc / "net/dev").splitlines()[2:])
        }
        # Only physical cards, if there are any: bridges and bonds carry the same bytes again.
        cards = [name for name in moved if (self._sys / "net" / name / "device").exists()]
        chosen = cards or [name for name in moved if name != "lo"]
        infiniband = [
            4 * int(read_text(path) or 0)  # 4-byte words
            for path in (self._sys / "infiniband").glob("*/ports/*/counters/port_*_data")
        ]
        head, values = ([*_lines_of(self._proc / "net/snmp", "Tcp:"), [], []])[:2]
        tcp = dict(zip(head, values, strict=False))
        pauses = [count for card in cards if (count := _pause_frames(card)) is not None]
        return {
            "network_bytes": sum(moved[name] for name in chosen) + sum(infiniband) if chosen or infiniband else None,
            "retransmits": int(tcp["RetransSegs"]) if "RetransSegs" in tcp else None,
            "network_send_queue": self._send_queue(),
            "pfc_tx_packets": sum(pauses) if pauses else None,
        }

    def _send_queue(self) -> float:
        """Return the unacknowledged bytes of TCP connections to other nodes."""
        total = 0
        for line in read_text(self._proc / "net/tcp").splitlines()[1:]:
            fields = line.split()
            if not fields[2].partition(":")[0].endswith("7F"):  # 127.0.0.0/8, in native byte order
                total += int(fields[4].split(":")[0], 16)
        return total


def _numbers(text: str) -> dict[str, int]:
    """Parse the rows "name number" or "name: number" of a kernel file."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", text, re.M)}


def _lines_of(path: Path, begin: str) -> list[list[str]]:
    return [line.split()[1:] for line in read_text(path).splitlines() if line.startswith(begin)]


def _line(path: Path, begin: str) -> list[str]:
    return next(iter(_lines_of(path, begin)), [])


def _pause_frames(interface: str) -> int | None:
    """Return the pause frames of priority flow control that a card has sent, None if it does not count them."""
    try:
        counts = [count for name, count in _card_statistics(interface) if _PAUSE.fullmatch(name)]
    except OSError:
        return None
    return sum(counts) if counts else None


def _card_statistics(interface: str) -> list[tuple[str, int]]:
    """Return what `ethtool -S` shows. Raises OSError if the card has no such statistics."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:

        def ask(request: bytearray) -> None:
            # The kernel fills the buffer that the request points at.
            shared = (ctypes.c_char * len(request)).from_buffer(request)
            pointer = ctypes.addressof(shared)
            fcntl.ioctl(handle, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode()[:15], pointer))

        size = bytearray(struct.pack("IIQI", _COUNT_STRINGS, 0, 1 << _STATISTICS, 0))
        ask(size)
        count = struct.unpack_from("I", size, 16)[0]
        names = bytearray(struct.pack("III", _GET_STRINGS, _STATISTICS, count) + bytes(count * _NAME_BYTES))
        ask(names)
        values = bytearray(struct.pack("II", _GET_STATISTICS, count) + bytes(8 * count))
        ask(values)
    texts = (names[12 + _NAME_BYTES * index :][:_NAME_BYTES] for index in range(count))
    keys = [bytes(text).split(b"\0")[0].decode(errors="replace") for text in texts]
    return list(zip(keys, struct.unpack_from(f"{count}Q", values, 8), strict=True))
