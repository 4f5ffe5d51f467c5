"""Peak memory and time of the log-prob head, forward and backward, against the full logits on a CPU.

    python benchmarks/head_memory.py [--json] [--tiny] [--rounds 3] [--tokens 2048] [--width 1024] [--vocab 151936]

Sides: `chunked`, log-prob and entropy of every token in tiles; `kept`, the same with the logits kept for the backward pass
(`model.logprob_kept_gb`); `logits`, the same two values from the logits (torch's
cross_entropy, and the entropy without a gradient, as trainers report it); `cross_entropy`, only the log-prob, from the
logits. All backpropagate the log-probs to hidden states and weight. Every run is a fresh process of one thread, the
sides take turns, and a side's least figure over the rounds counts, so that other load on the machine hits all. Times
are CPU seconds of that thread, user and system, without waiting for a core; wall-clock seconds are listed next to
them. Peak memory is the process's high-water mark beyond what was allocated before the forward pass (hidden states,
weight) and beyond the gradients.

`memory_ratio` and `time_ratio` are chunked / logits, those that end in `_cross_entropy` are chunked / cross_entropy,
those that begin with `kept_` are kept / chunked (time) and kept / logits (memory). Computing every logit twice costs 8
/ 6 of the arithmetic.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import options
import torch
from torch.nn.functional import cross_entropy

from megatron_dapo.ops.logprob import vocab_parallel_logprobs

Outputs = tuple[torch.Tensor, torch.Tensor]
TOLERANCE = 1e-3  # relative, of the loss over tokens and of gradient norms: sides must compute the same


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    return vocab_parallel_logprobs(hidden, weight, targets, vocab_size=weight.size(0), implementation="chunked")


def kept(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    return vocab_parallel_logprobs(
        hidden, weight, targets, vocab_size=weight.size(0), implementation="chunked", keep_bytes=sys.maxsize
    )


def from_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    logits = hidden @ weight.t()
    with torch.no_grad():
        p = torch.softmax(logits, dim=1)
        # In place: one more tensor of the logits' size would count against this side.
        entropy = torch.logsumexp(logits, dim=1) - p.mul_(logits).sum(dim=1)
        del p
    return -cross_entropy(logits, targets, reduction="none"), entropy


def from_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    return -cross_entropy(hidden @ weight.t(), targets, reduction="none"), hidden.new_zeros(1)


SIDES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]] = {
    "chunked": chunked,
    "kept": kept,
    "logits": from_logits,
    "cross_entropy": from_cross_entropy,
}


def status_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its high-water mark) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def run_side(side: str, num_tokens: int, width: int, vocab_size: int) -> dict[str, float]:
    """Run one forward and backward in this process, after a tiny one that loads everything lazy."""
    torch.set_num_threads(1)
    _forward_backward(side, 4, 8, 16)
    inputs = _inputs(num_tokens, width, vocab_size)
    before = status_bytes("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    loss, entropy = _step(side, inputs)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    gradients = [tensor.grad for tensor in inputs[:2]]
    gradient_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        # The gradients belong to every side, so they are not counted.
        "extra_bytes": max(0, status_bytes("VmHWM") - before - gradient_bytes),
        "loss": loss,
        "entropy": entropy,
        "gradient_norms": [float(gradient.norm()) for gradient in gradients],
    }


def _forward_backward(side: str, num_tokens: int, width: int, vocab_size: int) -> None:
    _step(side, _inputs(num_tokens, width, vocab_size))


def _inputs(num_tokens: int, width: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator).requires_grad_()
    weight = torch.empty(vocab_size, width).normal_(0.0, 0.05, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def _step(side: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    logprobs, entropy = SIDES[side](*inputs)
    loss = -logprobs.mean()
    loss.backward()
    return float(loss.detach()), float(entropy.detach().mean())


def run_rounds(rounds: int, shape: tuple[int, int, int]) -> dict[str, list[dict[str, Any]]]:
    """Every side's runs; sides take turns."""
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            # Each runs in a separate process, as the high-water mark of a process never falls.
            command = [sys.executable, __file__, "--side", side]
            command += [part for name, size in zip(SHAPE, shape, strict=True) for part in (f"--{name}", str(size))]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment()).stdout
            rows[side].append(json.loads(output))
    return rows


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def compare(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of the least figures; ValueError if the sides did not compute the same."""
    theirs = rows["logits"][0]
    for ours in (rows["chunked"][0], rows["kept"][0]):
        pairs = [(ours["loss"], theirs["loss"]), (ours["entropy"], theirs["entropy"])]
        pairs += list(zip(ours["gradient_norms"], theirs["gradient_norms"], strict=True))
        if any(abs(one - other) > TOLERANCE * abs(other) for one, other in pairs):
            raise ValueError(f"the sides do not compute the same: {ours} against {theirs}")
    least = {
        field: {side: min(row[field] for row in side_rows) for side, side_rows in rows.items()}
        for field in ("seconds", "cpu_seconds", "extra_bytes")
    }
    seconds, cpu_seconds, extra = least.values()
    return {
        "memory_ratio": extra["chunked"] / extra["logits"],
        "memory_ratio_cross_entropy": extra["chunked"] / extra["cross_entropy"],
        "time_ratio": cpu_seconds["chunked"] / cpu_seconds["logits"],
        "time_ratio_cross_entropy": cpu_seconds["chunked"] / cpu_seconds["cross_entropy"],
        "kept_memory_ratio": extra["kept"] / extra["logits"],
        "kept_time_ratio": cpu_seconds["kept"] / cpu_seconds["chunked"],
        "wall_time_ratio": seconds["chunked"] / seconds["logits"],
        "wall_time_ratio_cross_entropy": seconds["chunked"] / seconds["cross_entropy"],
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "extra_megabytes": {side: value / 1e6 for side, value in extra.items()},
    }


SHAPE = {"tokens": 2048, "width": 1024, "vocab": 151936}
# The logits are still larger than what the process's memory grows by on its own.
TINY_SHAPE = {"tokens": 512, "width": 32, "vocab": 16384}


def main() -> None:
    parser = options.parser(__doc__, "a small shape, once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES), help="run this side once in this process and print its row")
    for name, size in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    if arguments.tiny:
        vars(arguments).update(TINY_SHAPE, rounds=1)
    shape = (arguments.tokens, arguments.width, arguments.vocab)
    if arguments.side:
        print(json.dumps(run_side(arguments.side, *shape)))
        return
    rows = run_rounds(arguments.rounds, shape)
    result = {
        "benchmark": "head_memory",
        **compare(rows),
        "shape": dict(zip(SHAPE, shape, strict=True)),
        "rounds": arguments.rounds,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "rows": rows,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
