"""Counters of a node's NVIDIA GPUs, read through the driver's own library (NVML) without any package."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_NVLINK_FIELDS = (138, 139)  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB so far
_ALL_LINKS = 0xFFFFFFFF
_MOST_PROCESSES = 64  # limit per GPU
_NOT_TOLD = 0xFFFFFFFFFFFFFFFF


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("code", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


class Gpus:
    """The GPUs visible to this process. Without a driver there are none, and every reading is empty."""

    def __init__(self, library: Any = None) -> None:
        """library: stands in for NVML in tests."""
        self._library = library or _load()
        self._devices: list[ctypes.c_void_p] = []
        count = ctypes.c_uint()
        if self._library is None or self._library.nvmlInit_v2() or self._call("DeviceGetCount_v2", count):
            return
        for index in range(count.value):
            device = ctypes.c_void_p()
            if not self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                self._devices.append(device)

    def read(self) -> Mapping[str, float]:
        """Return gpu_duty_cycle (mean share), gpu_power (mean, W), gpu_memory_usage (sum, bytes) and nvlink_bytes (sum so
        far, both directions); values that the driver does not report are left out."""
        found: dict[str, list[float]] = {}
        for device in self._devices:
            utilization, memory, power = _Utilization(), _Memory(), ctypes.c_uint()
            if not self._call("DeviceGetUtilizationRates", utilization, device):
                found.setdefault("gpu_duty_cycle", []).append(utilization.gpu / 100)
            if not self._call("DeviceGetPowerUsage", power, device):
                found.setdefault("gpu_power", []).append(power.value / 1000)
            if not self._call("DeviceGetMemoryInfo", memory, device):
                found.setdefault("gpu_memory_usage", []).append(memory.used)
            links = (_FieldValue * len(_NVLINK_FIELDS))(*(_FieldValue(field, _ALL_LINKS) for field in _NVLINK_FIELDS))
            if not self._library.nvmlDeviceGetFieldValues(device, len(links), links):
                if not any(link.code for link in links):
                    found.setdefault("nvlink_bytes", []).append(1024 * sum(link.value for link in links))
        sums = {name: sum(values) for name, values in found.items()}
        means: dict[str, float] = {name: sums[name] / len(found[name]) for name in ("gpu_duty_cycle", "gpu_power") if name in sums}
        return {**sums, **means}

    def processes(self, bus_id: str) -> Mapping[int, int]:
        """Return the bytes of each process, by its id, on the GPU with this PCI bus id; empty if the driver does not
        report it."""
        device, count = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES)
        if self._library is None or self._library.nvmlDeviceGetHandleByPciBusId_v2(
            ctypes.c_char_p(bus_id.encode()), ctypes.byref(device)
        ):
            return {}
        processes = (_Process * _MOST_PROCESSES)()
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes):
            return {}
        return {one.pid: one.used for one in processes[: count.value] if one.used != _NOT_TOLD}

    def _call(self, name: str, target: Any, device: ctypes.c_void_p | None = None) -> int:
        """Call an NVML function that fills `target`; return its code, 0 on success."""
        function = getattr(self._library, f"nvml{name}")
        return function(*([device] if device is not None else []), ctypes.byref(target))


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
