"""Time and memory of the log-prob head on a GPU, forward and backward, compared with the peers that are installed.

    python benchmarks/gpu/head.py [--json] [--save] [--only triton,te_fp8] [--shape 8192,4096,151936]

Cases are "<side> <tokens>x<width>x<vocabulary>". Sides: this package's `reference`, `chunked`, `triton`, `triton_tuned` and
`te_fp8`, those that end in `_kept` with the logits kept for the backward pass (three products, as 6 T H V counts them);
Liger's fused linear cross entropy, verl's and Apple's kernels if they can be imported. bf16 hidden states and weight;
all backpropagate the log-probs to both. Every figure is the median over rounds of events on the device. Effective
TFLOP/s count the three products that training needs (6 T H V), whatever a side computes twice; `tflops_with_recompute`
counts a fourth (8 T H V). Peak memory is beyond what stood before and beyond the gradients. `triton` also names the
blocks it was compiled with, `--blocks 128,128,64,8,4` (tokens, columns, width, warps, stages) tries others. How it runs
and what a result holds: `program.py`. `--tiny` checks the program on any machine; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import program
import torch
from program import Benchmark, Missing, Row, Rows, rounds_of

from megatron_dapo.ops.lm_head.select import IMPLEMENTATIONS, TRITON, TRITON_TUNED, HeadSpec, choose
from megatron_dapo.ops.logprob import vocab_parallel_logprobs

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[[Inputs], torch.Tensor]
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((8192, 4096, 151936), (32768, 5120, 151936))
TINY: Shape = (64, 128, 384)
PACKAGES = ("torch", "triton", "transformer_engine", "liger_kernel", "verl", "cut_cross_entropy")
# What the package's kernels are held to at the first shape. TFLOP/s of the products that a side computes: without kept logits the
# mathematics' three and the logits once more, so 412 of the effective ones.
TRITON_TFLOPS, FP8_FORWARD_SPEEDUP = 550.0, 1.5
LOSS_TOLERANCE = 0.01


KEPT = "_kept"
OWN = (*IMPLEMENTATIONS, *(f"{name}{KEPT}" for name in (TRITON, TRITON_TUNED)))


def own(side: str, place: HeadSpec) -> Loss:
    name, keep_bytes = side.removesuffix(KEPT), sys.maxsize if side.endswith(KEPT) else 0
    try:
        choose(name, place)
    except ValueError as error:
        raise Missing(str(error)) from None
    return lambda inputs: (
        -vocab_parallel_logprobs(*inputs, vocab_size=inputs[1].size(0), implementation=name, keep_bytes=keep_bytes)[
            0
        ].mean()
    )


def liger(place: HeadSpec) -> Loss:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda inputs: function(*inputs)


def apple(place: HeadSpec) -> Loss:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda inputs: function(*inputs)


def verl(place: HeadSpec) -> Loss:
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda inputs: -function(*inputs, 1.0, "none")[0].mean()


PEERS: dict[str, Callable[[HeadSpec], Loss]] = {"liger": liger, "apple": apple, "verl": verl}


def loss_of(side: str, place: HeadSpec) -> Loss:
    """Raise Missing if it cannot run here."""
    if side not in PEERS:
        return own(side, place)
    try:
        return PEERS[side](place)
    except Exception as error:  # noqa: BLE001 - a package that is there and broken fails with more than ImportError
        raise Missing(f"{type(error).__name__}: {error}") from None


class Stopwatch:
    """Milliseconds on the device, or of the clock if there is none."""

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


# All sides of a shape share its inputs; those of the next shape replace them, as both may not fit.
@lru_cache(maxsize=1)
def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    num_tokens, width, vocab_size = shape
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(num_tokens, width, **options).requires_grad_()
    weight = torch.randn(vocab_size, width, **options).mul_(width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(0, vocab_size, (num_tokens,), generator=generator, device=device)


def measure(loss: Loss, inputs: Inputs, arguments: argparse.Namespace) -> Row:
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

    for _ in range(arguments.warm_up):
        forward(), training()
    value = float(training())
    peak = _peak_bytes(training, inputs)
    forward_ms = statistics.median(watch.measure(forward) for _ in rounds_of(arguments))
    training_ms = statistics.median(watch.measure(training) for _ in rounds_of(arguments))
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


def name_of(side: str, shape: Shape) -> str:
    return f"{side} {'x'.join(map(str, shape))}"


def shapes_of(arguments: argparse.Namespace) -> list[Shape]:
    asked = [tuple(int(size) for size in text.split(",")) for text in arguments.shape or ()]
    return asked or ([TINY] if arguments.tiny else list(SHAPES))  # type: ignore[return-value]


def cases(arguments: argparse.Namespace) -> list[str]:
    """Those the targets are about first: time may end before the others."""
    sides = (TRITON, *(name for name in reversed(OWN) if name != TRITON), *PEERS)
    return [name_of(side, shape) for shape in shapes_of(arguments) for side in sides]


def measuring(arguments: argparse.Namespace) -> AbstractContextManager[Callable[[str], Row]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_blocks(arguments.blocks)

    def measure_case(case: str) -> Row:
        side, _, sizes = case.partition(" ")
        inputs = make_inputs(tuple(int(size) for size in sizes.split("x")), device)
        row = measure(loss_of(side, HeadSpec.of(inputs[0], inputs[1])), inputs, arguments)
        return row | ({"blocks": str(blocks_in_use(inputs[0]))} if side == TRITON and device.type == "cuda" else {})

    return program.always(measure_case)


def set_blocks(text: str) -> None:
    """Have the 16-bit kernels compiled with other blocks."""
    if not text:
        return
    fused = importlib.import_module("megatron_dapo.ops.lm_head.fused")
    tokens, columns, width, warps, stages = (int(number) for number in text.split(","))
    for is_hopper in (True, False):
        fused._BLOCKS[2, is_hopper] = fused.Blocks(tokens, columns, width, num_warps=warps, num_stages=stages)


def blocks_in_use(hidden: torch.Tensor) -> Any:
    return importlib.import_module("megatron_dapo.ops.lm_head.fused").fixed_blocks("sums", hidden, hidden)


def summary(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    return {"targets_met": verdicts(rows, SHAPES[0])}


def verdicts(rows: Rows, shape: Shape) -> dict[str, bool]:
    """Return target -> met, for the targets whose sides ran."""
    sides = {side: rows[name] for side in (*OWN, *PEERS) if (name := name_of(side, shape)) in rows}
    peers = [sides[name]["forward_backward_ms"] for name in PEERS if name in sides]
    found: dict[str, bool] = {}
    for side, row in sides.items():
        if side.startswith(TRITON):
            computed = "effective_tflops" if side.endswith(KEPT) else "tflops_with_recompute"
            found[f"{side}_tflops"] = row[computed] >= TRITON_TFLOPS
    if "triton" in sides and peers:
        found["triton_not_slower_than_the_best_peer"] = sides["triton"]["forward_backward_ms"] <= min(peers)
    if {"triton", "te_fp8"} <= set(sides):
        speedup = sides["triton"]["forward_ms"] / sides["te_fp8"]["forward_ms"]
        found["te_fp8_forward_speedup"] = speedup >= FP8_FORWARD_SPEEDUP
    return found


def complaints(rows: Rows) -> Iterator[tuple[str, str]]:
    """A side whose loss is not that of the others computes something else."""
    for shape in {name.partition(" ")[2] for name in rows}:
        of_shape = {name: row["loss"] for name, row in rows.items() if name.endswith(f" {shape}")}
        middle = statistics.median(of_shape.values())
        for name, loss in of_shape.items():
            if not abs(loss - middle) <= LOSS_TOLERANCE * middle:
                yield name, f"its loss is {loss:.4f}, of all sides' the median {middle:.4f}"


def parse() -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.add_argument("--shape", action="append", help="tokens,width,vocabulary; may be repeated")
    parser.add_argument("--blocks", default="", help="tokens,columns,width,warps,stages of Triton's 16-bit kernels")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    return parser.parse_args()


HEAD = Benchmark("gpu_head", __file__, PACKAGES, cases, measuring, lambda rows: dict(complaints(rows)), summary)

if __name__ == "__main__":
    program.run(HEAD, parse())
