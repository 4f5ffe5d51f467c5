"""Cost of rounding to FP8: seconds to fill an engine's buckets, and the rounding error of a gradient.

    python benchmarks/fp8_costs.py [--only filling | gradients] [--json] [--tiny] [--repeats 3] [--layers 1 2 4 8]

FILLING. One rank's model of 334 M parameters, in bfloat16 and in float32, is written into buckets of 32 MiB for an
engine that serves bfloat16 and for one that serves FP8, as every update does: rounding, copy and checksums. Times are
CPU seconds of one thread, the least of the repeats. `scales` is the part that reads every weight to find the largest
magnitude of its block. `extra_mb` is the growth of the process's peak memory while FP8 was filled.

GRADIENTS. A random Qwen3 of L layers (hidden size 128) computes log-probs and gradients of a packed batch in fp32, in
emulated `fp8_blockwise` and in bfloat16, with the same weights. `relative_error` is |difference| / |gradient in fp32|,
2-norms over all parameters; `expected` is what errors of either sign add up to over the products that a gradient
passes through (docs/precision.md).
"""

from __future__ import annotations

import argparse
import math
import platform
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import options
import torch
import torch.distributed as dist

from megatron_dapo.bridge.fp8_weights import Fp8Weights
from megatron_dapo.bridge.sync_plan import EngineLayout, ExpectedChecksums, SyncPlan, write_chunks
from megatron_dapo.checkpoints.layouts.fp8 import Fp8EngineLayout, Fp8SourceLayout, expected_parameters
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.checkpoints.load import random_normal
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import FP8_BLOCKWISE, token_multiple
from megatron_dapo.reshard.layout import Layout, shard_view
from megatron_dapo.reshard.planner import plan

BUCKET_BYTES = 32 << 20
SERVED = {
    "model_type": "qwen2",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# Still blocks of 128: FP8 scales have no smaller ones.
TINY_SERVED = {
    **SERVED,
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
TRAINED = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 128,
    "head_dim": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SCALE = 0.08  # standard deviation of random matrices
LENGTHS = (5, 17, 30, 70, 3, 40, 2, 8, 8, 9, 8, 64)
TEMPERATURE = 0.8
# Relative rms error of rounding log-uniform numbers to 3 bits after the leading one, and of a product of two rounded
# operands.
ROUNDING = math.sqrt((1 / 8) ** 2 / 12 * 3 / (8 * math.log(2)))
PRODUCT = math.sqrt(2) * ROUNDING


def cpu_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def largest_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fill(source: Layout, engine: EngineLayout, sources: Mapping[str, torch.Tensor], slot: torch.Tensor) -> float:
    """Return the CPU seconds to write every bucket of the only engine rank, each into the same memory."""
    sync_plan = SyncPlan(plan(source, engine), engine, BUCKET_BYTES)
    checksums, buckets = ExpectedChecksums(sync_plan), sync_plan.buckets(0)
    return cpu_seconds(lambda: [write_chunks(sync_plan, bucket, 0, sources, slot, checksums) for bucket in buckets])[0]


def gigabytes(engine: EngineLayout) -> float:
    return sum(spec.num_bytes for spec in engine.local_specs(0).values()) / 1e9


def measure_filling(architecture: ModelArchitecture, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    master = megatron_layout(architecture, ParallelLayout(1), dtype)
    parameters = {name: torch.randn(shape).to(dtype) for name, shape in master.local_shapes(0).items()}
    plain = sglang_layout(architecture, 1, torch.bfloat16)
    engine = Fp8EngineLayout(plain, expected_parameters(plain))
    source = Fp8SourceLayout(master, engine)
    slot = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
    rounds = []
    for _ in range(repeats):
        copied = fill(master, plain, parameters, slot)
        before = largest_memory()
        scales, weights = cpu_seconds(lambda: Fp8Weights(source, 0, parameters))
        values = fill(source, engine, weights, slot)
        grown = (largest_memory() - before) / 1e6
        rounds.append({"bf16_s": copied, "fp8_s": scales + values, "scales_s": scales, "extra_mb": grown})
    return {
        **min(rounds, key=lambda row: row["fp8_s"]),
        "bf16_s": min(row["bf16_s"] for row in rounds),
        "extra_mb": max(row["extra_mb"] for row in rounds),
        "bf16_gb": gigabytes(plain),
        "fp8_gb": gigabytes(engine),
    }


def filling(repeats: int, served: Mapping[str, Any] = SERVED) -> dict[str, Any]:
    """Measure both source types for the model with the config.json `served`."""
    architecture = parse_architecture(dict(served))
    sides = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return {
        "parameters": architecture.num_parameters,
        **{name: measure_filling(architecture, dtype, repeats) for name, dtype in sides.items()},
    }


def load_random(local: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
    """Return the same weights for every type, drawn by the names and shapes of the whole tensors."""
    whole = {name: SCALE * random_normal(7, name, spec.shape) for name, spec in tensors.tensors.items()}
    for name in whole:
        whole[name] += float("norm" in name)
    for buffer in local.values():
        buffer.zero_()
    for piece in tensors.shards(0):
        there = tuple(slice(start, start + size) for start, size in zip(piece.global_offset, piece.shape, strict=True))
        shard_view(local[piece.local], piece).copy_(whole[piece.tensor][there])


def gradient(num_layers: int, recipe: str, dtype: str) -> torch.Tensor:
    """Return the gradient of all parameters, concatenated [P] in float64."""
    from megatron_dapo.config.model_schema import PrecisionConfig
    from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
    from megatron_dapo.megatron.model_config import ModelSettings

    architecture = parse_architecture({**TRAINED, "num_hidden_layers": num_layers})
    layout = ParallelLayout(1, token_multiple=token_multiple(FP8_BLOCKWISE))
    settings = ActorSettings(model=ModelSettings(dtype=dtype, precision=PrecisionConfig(recipe=recipe)))
    actor = MegatronActor(architecture, layout, settings, load_random)

    def loss(micro_batch: Any, outputs: Any, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weighted = micro_batch.loss_weights * micro_batch.advantages * outputs.logprobs
        return -weighted.sum(), {}

    actor.accumulate_gradients([batch(layout)], loss, TEMPERATURE)
    return torch.cat([part.flatten().double() for part in actor.gradients().values()])


def batch(layout: ParallelLayout) -> Any:
    """Return random tokens and advantages; everything after a sequence's first token is response."""
    from megatron_dapo.parallel.packing import pack
    from megatron_dapo.types import TrainSample

    generator = torch.Generator().manual_seed(3)
    samples = [
        TrainSample(
            sample_id=f"s/{index}",
            group_index=0,
            tokens=torch.randint(1, TRAINED["vocab_size"], (length,), generator=generator),
            prompt_length=1,
            loss_mask=torch.ones(length - 1),
            advantages=torch.randn(length - 1, generator=generator),
            rollout_logprobs=torch.zeros(length - 1),
        )
        for index, length in enumerate(LENGTHS)
    ]
    return pack(samples, [1.0 / sum(LENGTHS)] * len(samples), layout)


def gradients(layers: list[int]) -> list[dict[str, float]]:
    """Return one row per number of layers."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for count in layers:
        exact = gradient(count, "fp32", "float32")
        sides = {"fp8": gradient(count, FP8_BLOCKWISE, "float32"), "bf16": gradient(count, "bf16", "bfloat16")}
        errors = {name: float((found - exact).norm() / exact.norm()) for name, found in sides.items()}
        expected = PRODUCT * math.sqrt(8 * count + 1)
        rows.append({"layers": count, "relative_error": errors["fp8"], "expected": expected, "bf16": errors["bf16"]})
    if started:
        dist.destroy_process_group()
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "one small layer, once")
    parser.add_argument("--only", choices=("filling", "gradients"), help="one of the two")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8])
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    if arguments.only != "gradients":
        result["filling"] = filling(1, TINY_SERVED) if arguments.tiny else filling(arguments.repeats)
    if arguments.only != "filling":
        result["gradients"] = gradients([1] if arguments.tiny else arguments.layers)
    options.show(result, arguments)


if __name__ == "__main__":
    main()
