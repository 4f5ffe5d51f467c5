"""Time and memory of the log-prob head on a GPU, forward and backward, beside the peers that are installed.

    python benchmarks/gpu/head.py [--json] [--save] [--only triton,te_fp8] [--device cuda]

Sides: this package's `reference`, `chunked`, `triton` and `te_fp8`; Liger's fused linear cross entropy, verl's and
Apple's kernels where they can be imported. bf16 hidden states and weight; all backpropagate the log-probs to both. Every
figure is the median over rounds of events on the device. Effective TFLOP/s count the three products that training needs
(6 T H V), whatever a side computes twice; `tflops_with_recompute` counts a fourth (8 T H V). Peak memory is beyond what
stood before and beyond the gradients. What is skipped stands in `skipped` with its reason; `--save` writes the result to
benchmarks/results/. `--device cpu` with small sizes checks the program; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import machine_name, report, versions

from megatron_dapo.ops.head.choice import IMPLEMENTATIONS, Place, choose
from megatron_dapo.ops.logprob import vocab_parallel_logprobs

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[[Inputs], torch.Tensor]
SHAPES = ((8192, 4096, 151936), (32768, 5120, 151936))
PACKAGES = ("torch", "triton", "transformer_engine", "liger_kernel", "verl", "cut_cross_entropy")
# What the package's kernels are held to at the first shape.
TRITON_TFLOPS, FP8_FORWARD_SPEEDUP = 550.0, 1.5


def own(name: str, place: Place) -> Loss:
    """ValueError where it cannot run here."""
    choose(name, place)
    return lambda inputs: -vocab_parallel_logprobs(*inputs, vocab_size=inputs[1].size(0), implementation=name)[0].mean()


def liger(place: Place) -> Loss:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda inputs: function(*inputs)


def apple(place: Place) -> Loss:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda inputs: function(*inputs)


def verl(place: Place) -> Loss:
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda inputs: -function(*inputs, 1.0, "none")[0].mean()


PEERS: dict[str, Callable[[Place], Loss]] = {"liger": liger, "apple": apple, "verl": verl}


def loss_of(side: str, place: Place) -> Loss:
    return PEERS[side](place) if side in PEERS else own(side, place)


class Stopwatch:
    """Milliseconds on the device, or of the clock where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"

    def measure(self, work: Callable[[], Any]) -> float:
        if not self._on_device:
            start = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def make_inputs(shape: tuple[int, int, int], device: torch.device) -> Inputs:
    num_tokens, width, vocab_size = shape
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(num_tokens, width, **options).requires_grad_()
    weight = torch.randn(vocab_size, width, **options).mul_(width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(0, vocab_size, (num_tokens,), generator=generator, device=device)


def measure(loss: Loss, inputs: Inputs, rounds: int, warm_up: int) -> dict[str, float]:
    """Median milliseconds of a forward pass as for old log-probs and of forward and backward, peak bytes, the loss."""
    watch = Stopwatch(inputs[0].device)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return loss(inputs)

    def training() -> torch.Tensor:
        inputs[0].grad = inputs[1].grad = None
        value = loss(inputs)
        value.backward()
        return value.detach()

    for _ in range(warm_up):
        forward(), training()
    value = float(training())
    peak = _peak_bytes(training, inputs)
    forward_ms = statistics.median(watch.measure(forward) for _ in range(rounds))
    training_ms = statistics.median(watch.measure(training) for _ in range(rounds))
    flops = 2.0 * inputs[0].numel() * inputs[1].size(0)
    return {
        "forward_ms": forward_ms,
        "forward_backward_ms": training_ms,
        "forward_tflops": flops / forward_ms / 1e9,
        "effective_tflops": 3 * flops / training_ms / 1e9,
        "tflops_with_recompute": 4 * flops / training_ms / 1e9,
        "peak_gb": peak / 1e9,
        "loss": value,
    }


def _peak_bytes(training: Callable[[], torch.Tensor], inputs: Inputs) -> int:
    if inputs[0].device.type != "cuda":
        return 0
    inputs[0].grad = inputs[1].grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training()
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in inputs[:2])
    return torch.cuda.max_memory_allocated() - before - gradients


def run_shape(
    shape: tuple[int, int, int], sides: list[str], device: torch.device, rounds: int, warm_up: int
) -> dict[str, Any]:
    inputs = make_inputs(shape, device)
    place, rows, skipped = Place.of(inputs[0], inputs[1]), {}, {}
    for side in sides:
        try:
            rows[side] = measure(loss_of(side, place), inputs, rounds, warm_up)
        except torch.cuda.OutOfMemoryError as error:
            skipped[side] = f"out of memory: {error}"
        except Exception as error:  # noqa: BLE001 - a peer that breaks is a line of the result, not its end
            skipped[side] = f"{type(error).__name__}: {error}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"shape": dict(zip(("tokens", "width", "vocab"), shape, strict=True)), "sides": rows, "skipped": skipped}


def verdicts(row: dict[str, Any]) -> dict[str, bool]:
    """Whether the targets are met; only those that can be judged from what ran."""
    sides = row["sides"]
    peers = [sides[name]["forward_backward_ms"] for name in PEERS if name in sides]
    found: dict[str, bool] = {}
    if "triton" in sides:
        found["triton_tflops"] = sides["triton"]["effective_tflops"] >= TRITON_TFLOPS
    if "triton" in sides and peers:
        found["triton_not_slower_than_the_best_peer"] = sides["triton"]["forward_backward_ms"] <= min(peers)
    if {"triton", "te_fp8"} <= set(sides):
        speedup = sides["triton"]["forward_ms"] / sides["te_fp8"]["forward_ms"]
        found["te_fp8_forward_speedup"] = speedup >= FP8_FORWARD_SPEEDUP
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write it to benchmarks/results/")
    parser.add_argument("--only", default="", help="sides, comma separated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", action="append", help="tokens,width,vocab; may be repeated")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    return parser.parse_args()


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return {"benchmark": "gpu_head", "skipped": "torch sees no CUDA device"}
    sides = arguments.only.split(",") if arguments.only else [*IMPLEMENTATIONS, *PEERS]
    shapes = [tuple(int(size) for size in text.split(",")) for text in arguments.shape or ()] or list(SHAPES)
    rows = [run_shape(shape, sides, device, arguments.rounds, arguments.warm_up) for shape in shapes]
    return {
        "benchmark": "gpu_head",
        "machine": machine_name(device),
        "versions": versions(PACKAGES),
        "targets_met": verdicts(rows[0]) if device.type == "cuda" else {},
        "rows": rows,
    }


def main() -> None:
    arguments = parse()
    report(run_all(arguments), arguments.json, arguments.save)


if __name__ == "__main__":
    main()
