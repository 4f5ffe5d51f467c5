"""Products of bfloat16 on a CPU: torch's kernels, those of float32 that `ops/bf16_products.py` puts in their place, and float32.

The three products of a linear layer (forward, gradient of the input, gradient of the weight) for 512 tokens of SmolLM2-135M, in its
MLP and its head, on one core. Each rate is the best of several rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import options
from megatron_dapo.config.process_limits import multiplies_bf16
from megatron_dapo.ops.bf16_products import widen_bf16_products

SHAPES = {"mlp": (512, 576, 1536), "head": (512, 576, 49152)}  # tokens, inputs, outputs
TINY = {"mlp": (8, 32, 48), "head": (8, 32, 256)}


def gflops(product: Callable[[], torch.Tensor], count: int, rounds: int) -> float:
    """Return the rate of a product of `count` FLOPs, in GFLOP/s."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)
    return count / min(seconds) / 1e9


def rates(shapes: dict[str, tuple[int, int, int]], dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Return the rates of the products of each layer."""
    found = {}
    for name, (tokens, inputs, outputs) in shapes.items():
        hidden, weight, gradient = (torch.randn(size).to(dtype) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        products: dict[str, Callable[[], torch.Tensor]] = {
            "forward": lambda x=hidden, w=weight: torch.nn.functional.linear(x, w),
            "to_input": lambda w=weight, g=gradient: g @ w,
            "to_weight": lambda x=hidden, g=gradient: g.t() @ x,
        }
        found[name] = {kind: gflops(product, 2 * tokens * inputs * outputs, rounds) for kind, product in products.items()}
    return found


def main() -> None:
    arguments = options.parser(__doc__, "small matrices").parse_args()
    shapes, rounds = (TINY, 2) if arguments.tiny else (SHAPES, 5)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: dict[str, Any] = {"has_instructions": multiplies_bf16(), "gflops": {}}
    for name, dtype in (("torch", torch.bfloat16), ("float32", torch.float32)):
        result["gflops"][name] = rates(shapes, dtype, rounds)
    widen_bf16_products()
    result["gflops"]["widened"] = rates(shapes, torch.bfloat16, rounds)
    own, torchs = result["gflops"]["widened"], result["gflops"]["torch"]
    speedups = {f"{layer}/{kind}": rate / torchs[layer][kind] for layer, kinds in own.items() for kind, rate in kinds.items()}
    options.show({**result, "speedup": speedups}, arguments)


if __name__ == "__main__":
    main()
