"""GPU rates from data sheets, and the share of each that programs reach.

Shares marked as measured come from one H100 (`benchmarks/results/gpu_*.json`); the others are published or assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_dapo.plan.cluster import GPUS_PER_NODE


@dataclass(frozen=True)
class Gpu:
    """Data sheet of one GPU; link rates are per direction."""

    name: str
    memory_gib: float  # CUDA reports it
    flops: float  # bf16, dense
    memory_bytes_s: float
    nvlink_bytes_s: float  # other GPUs of its node
    network_bytes_s: float  # its share of the node's network
    host_bytes_s: float = 50e9  # PCIe 5, device to host


# nvidia.com: H100 and H200 SXM, H800, A100 SXM 80 GB, H20, B200. Networks: 400 Gbit/s a GPU, 200 for A100.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "H100": Gpu("H100", 79.0, 989.4e12, 3.35e12, 450e9, 50e9),
        "H200": Gpu("H200", 140.0, 989.4e12, 4.8e12, 450e9, 50e9),
        "H800": Gpu("H800", 79.0, 989.4e12, 3.35e12, 200e9, 50e9),
        "H20": Gpu("H20", 95.0, 148e12, 4.0e12, 450e9, 50e9),
        "A100": Gpu("A100", 79.0, 312e12, 2.04e12, 300e9, 25e9, 25e9),
        "B200": Gpu("B200", 179.0, 2250e12, 8.0e12, 900e9, 50e9),
    }
)


@dataclass(frozen=True)
class Shares:
    """Shares of a GPU's rates that are reached."""

    # Measured: a step of a 1.5 B model in bf16, 65,536 tokens in micro-batches of 8,192, MFU 0.456. Executed FLOPs
    # include the head's recomputation, so their share is slightly higher.
    training: float = 0.5
    fp8_speedup: float = 1.078  # measured, blockwise, the same step
    experts: float = 0.08  # grouped, between 0.2 of device time and 0.05 of wall time measured in three layers of Qwen3-30B-A3B (H200)
    fp32_slowdown: float = 15.0  # H100's data sheet: bf16 on tensor cores over fp32, in which torch keeps products of fp32 tensors
    packing: float = 0.9  # measured: share of micro-batch tokens that are not padding
    decode_memory: float = 0.78  # fits published decoding times of a 32 B model on two H100
    decode_experts: float = 0.6  # share of the memory rate when reading experts' weights; calibrated (docs/plan.md)
    decode_flops: float = 0.6  # calibrated like the one above
    prefill: float = 0.5  # assumed equal to training
    nvlink: float = 0.75  # assumed: a collective's bandwidth
    network: float = 0.8  # assumed
    hidden: float = (
        0.5  # assumed: of what overlaps with products (gradients of data ranks, keys and values of context ranks)
    )


SHARES = Shares()
SLOWEST = min(GPUS.values(), key=lambda gpu: gpu.memory_bytes_s)  # conservative choice for an unknown GPU
# Overhead of a decoding step besides reads and products: launches, reductions over ranks, scheduling (published, as
# above).
TICK_SECONDS = 2.5e-3
# Measured: 256 requests of 512 tokens on a 1.5 B model at 33,526 tokens/s, with Triton's attention and torch's
# sampling.
REQUEST_SECONDS = 1.2e-5  # a request's in a decoding step: sampling and log-probs
SYNC_BYTES_S = 26e9  # measured: weights into a server on the same GPU through slots in host memory
DEVICE_SYNC_BYTES_S = 59e9  # measured: through slots in GPU memory
CHECKSUM_BYTES_S = 6.3e9  # measured tensor by tensor, at both ends together, 3.09 GB in 0.49 s; one pass is not measured yet


def collective_seconds(
    num_bytes: float, ranks: int, gpu: Gpu, gpus_per_node: int = GPUS_PER_NODE, stride: int = 1
) -> float:
    """Return the seconds in which each of `ranks` gathers or scatters `num_bytes` in all.

    `stride`: distance between neighbors of the group in rank numbering, in which a node is a contiguous range.
    """
    if ranks < 2:
        return 0.0
    inside = ranks * stride <= gpus_per_node
    rate = gpu.nvlink_bytes_s * SHARES.nvlink if inside else gpu.network_bytes_s * SHARES.network
    return num_bytes * (ranks - 1) / ranks / rate
