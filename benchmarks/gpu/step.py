"""A training step of a Qwen2.5-shaped model on one GPU: bf16 against FP8 in blocks.

    python benchmarks/gpu/step.py [--json] [--save] [--model 1.5b] [--only bf16,fp8_blockwise] [--recompute none] [--profile]

The actor as training builds it (TP1, data-parallel wrapper, AdamW with fp32 main params), on random weights made on the
device; packed sequences with a long tail of lengths, drawn anew for each step as in training, so that no two
micro-batches are alike; the token-mean policy gradient. A step is the forward and backward pass of all micro-batches,
the sum over ranks, clipping and AdamW. Figures are medians over rounds, with the device synchronized before the clock
stops. Sides run one after the other, each on a separate model from the same seed:

    bf16                 everything in bf16
    fp8_blockwise        linear layers multiply e4m3 in blocks, weights are kept in bf16
    fp8_param            the same with weights kept only as FP8, next to their main params
    fp8_blockwise_head   the same as fp8_blockwise, and the log-prob head multiplies FP8 too
    bf16_flash           bf16 with torch's flash attention instead of Transformer Engine's
    bf16_unfused         bf16 without the fusions that are the defaults on a GPU (rotary angles, sums of weight gradients)
    bf16_repeated        bf16 with the same lengths in every step: what a new shape of a micro-batch costs
    bf16_on_host         bf16 with main params and moments in host memory: saves 12 bytes a parameter on the device;
                         they cross PCIe both ways in every step

`--model 30b-a3b` has three of the 48 layers of Qwen3-30B-A3B, and other sides: `bf16` and `fp8_blockwise` with grouped experts,
`bf16_fused` with their permutation fused, and `bf16_single` and `fp8_blockwise_single` one expert after another.

    tokens_per_second    real tokens of a step (no padding) / its seconds
    mfu                  FLOPs the mathematics needs / seconds / the device's dense bf16 peak, for FP8 sides too:
                         6 N T + 6 L D sum(s^2), with N the weights that multiply a token (layers and output matrix), T real
                         tokens, L layers, D query heads x their size, s the length of each sequence (causal attention
                         does half of its square). What is computed twice (the head, recomputed activations) counts once

`--profile` adds one more step under torch's profiler: `busy`, the share of its time in which the device works, and `kernels`,
the milliseconds of the longest kernels. `--syncs` adds one more step and a log-prob pass, and counts how often
each line of code makes the host wait for the device (`syncs`: line -> count; torch reports only waits in torch operators).
`fragmentation_gb` is the allocator's peak memory minus that of tensors.

How it runs and what a result holds: `program.py`. `--tiny` checks the program on any machine, FP8 emulated if there is no
device; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import program
import torch
import torch.distributed as dist
from program import Benchmark, Missing, Row, Rows, bf16_peak, finish, machine_name, rounds_of
from torch.profiler import ProfilerActivity, profile

from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.config.model_schema import OptimizerConfig, PrecisionConfig
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor, TokenOutputs
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import build_micro_batches
from megatron_dapo.parallel.packing import MicroBatchLimits
from megatron_dapo.precision import token_multiple
from megatron_dapo.types import MicroBatch, TrainSample

PACKAGES = ("torch", "triton", "megatron-core", "transformer_engine")
SEED, LEARNING_RATE = 0, 1e-6
NUM_KERNELS = 15
WEIGHT_DEVIATION = 0.02
# FP8 rounds: its first loss differs from that of bf16 by no more than this share.
LOSS_TOLERANCE = 0.02

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
}
# What `--tiny` changes of a model with experts.
TINY_EXPERTS = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Side:
    """A precision of the linear layers, and the log-prob head."""

    precision: PrecisionConfig
    head: str = "auto"
    attention: str = "auto"
    repeats_lengths: bool = False
    megatron: Mapping[str, bool] = field(default_factory=dict)
    on_host: bool = False


UNFUSED = {"apply_rope_fusion": False, "gradient_accumulation_fusion": False}
SIDES: Mapping[str, Side] = {
    "bf16": Side(PrecisionConfig(recipe="bf16")),
    "fp8_blockwise": Side(PrecisionConfig(recipe="fp8_blockwise")),
    "fp8_param": Side(PrecisionConfig(recipe="fp8_blockwise", fp8_param=True)),
    "fp8_blockwise_head": Side(PrecisionConfig(recipe="fp8_blockwise"), "te_fp8"),
    "bf16_flash": Side(PrecisionConfig(recipe="bf16"), attention="flash"),
    "bf16_unfused": Side(PrecisionConfig(recipe="bf16"), megatron=UNFUSED),
    "bf16_repeated": Side(PrecisionConfig(recipe="bf16"), repeats_lengths=True),
    "bf16_on_host": Side(PrecisionConfig(recipe="bf16"), on_host=True),
}
SINGLE = {"moe_grouped_gemm": False}
EXPERT_SIDES: Mapping[str, Side] = {
    "bf16": SIDES["bf16"],
    "bf16_fused": Side(PrecisionConfig(recipe="bf16"), megatron={"moe_permute_fusion": True}),
    "fp8_blockwise": SIDES["fp8_blockwise"],
    "bf16_single": Side(PrecisionConfig(recipe="bf16"), megatron=SINGLE),
    "fp8_blockwise_single": Side(PrecisionConfig(recipe="fp8_blockwise"), megatron=SINGLE),
}


@dataclass(frozen=True)
class Work:
    """Contents of a step: about `step_tokens` tokens in sequences of at most `max_length`, packed into micro-batches
    of at most `micro_batch_tokens`."""

    step_tokens: int
    micro_batch_tokens: int
    max_length: int


def architecture_of(model: str) -> ModelArchitecture:
    return parse_architecture({**QWEN, **MODELS[model]})


def draw_lengths(work: Work, step: int = 0) -> list[int]:
    """Draw mostly short lengths, a few at the limit: log-normal, with a sixth of the limit as the median, cut at it."""
    generator = torch.Generator().manual_seed(SEED + step)
    lengths: list[int] = []
    while sum(lengths) < work.step_tokens:
        drawn = torch.randn((), generator=generator).exp().item() * work.max_length / 6
        lengths.append(int(min(max(drawn, 16), work.max_length)))
    return lengths


def make_samples(lengths: Sequence[int], vocab_size: int) -> list[TrainSample]:
    """Random tokens, an eighth of them prompt; advantages of either sign."""
    generator = torch.Generator().manual_seed(SEED)
    samples = []
    for index, length in enumerate(lengths):
        prompt = max(1, length // 8)
        response = length - prompt
        samples.append(
            TrainSample(
                sample_id=str(index),
                group_index=index,
                tokens=torch.randint(0, vocab_size, (length,), generator=generator),
                prompt_length=prompt,
                loss_mask=torch.ones(response),
                advantages=torch.full((response,), 1.0 if index % 2 else -0.5),
                rollout_logprobs=torch.zeros(response),
            )
        )
    return samples


def token_mean(samples: Sequence[TrainSample]) -> list[float]:
    total = sum(float(sample.loss_mask.sum()) for sample in samples)
    return [1.0 / total] * len(samples)


def policy_gradient(
    part: MicroBatch, outputs: TokenOutputs, index: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss -A log pi, and separately the mean -log pi, by which sides are compared."""
    weighted = part.loss_weights * part.loss_mask
    nll = -(outputs.logprobs.detach() * weighted).sum()
    return -(outputs.logprobs * part.advantages * weighted).sum(), {"nll": nll}


def fill_randomly(parameters: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
    """Set norms to 1, biases to 0, the rest to normal numbers drawn on the device, as a billion take a CPU minutes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for index, (name, parameter) in enumerate(parameters.items()):
        is_norm = "norm" in name.rpartition("linear_")[2] and parameter.dim() == 1
        if is_norm or name.endswith("bias"):
            parameter.fill_(1.0 if is_norm else 0.0)
            continue
        generator = torch.Generator(device).manual_seed(SEED + index)
        parameter.copy_(torch.randn(parameter.shape, device=device, generator=generator) * WEIGHT_DEVIATION)


def build(side: Side, architecture: ModelArchitecture, recompute: str) -> tuple[MegatronActor, ParallelLayout]:
    layout = ParallelLayout(1, token_multiple=token_multiple(side.precision.recipe))
    settings = ActorSettings(
        model=ModelSettings("bfloat16", recompute, side.precision, side.attention, side.megatron),
        optimizer=OptimizerConfig(on_host=side.on_host),
        head_implementation=side.head,
        seed=SEED,
    )
    return MegatronActor(architecture, layout, settings, fill_randomly), layout


def flops_of(architecture: ModelArchitecture, lengths: Sequence[int]) -> float:
    """Compute the figures of one step; the module's docstring defines them."""
    experts = architecture.experts
    share = experts.num_experts_per_token / experts.num_experts if experts else 1.0
    matrices = {name: shape for name, shape in architecture.shapes().items() if name.endswith("_proj.weight")}
    weights = sum(
        rows * columns * (share if ".experts." in name else 1.0) for name, (rows, columns) in matrices.items()
    )
    weights += architecture.vocab_size * architecture.hidden_size
    width = architecture.num_attention_heads * architecture.head_dim
    squares = sum(length**2 for length in lengths)
    # A weight costs 2 flops a token forward, 4 backward; attention 12 * width * length**2 a layer, halved by causality.
    return 6.0 * weights * sum(lengths) + 6.0 * architecture.num_layers * width * squares


def measure(side: Side, architecture: ModelArchitecture, arguments: argparse.Namespace) -> Row:
    work, device = work_of(arguments), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    try:
        actor, layout = build(side, architecture, arguments.recompute)
    except (ValueError, ImportError) as error:  # a precision, head or attention that cannot run here
        raise Missing(str(error)) from None
    limits = MicroBatchLimits(max_tokens=work.micro_batch_tokens)
    losses: list[float] = []

    def micro_batches_of(lengths: Sequence[int]) -> list[MicroBatch]:
        samples = make_samples(lengths, architecture.vocab_size)
        return build_micro_batches(samples, token_mean(samples), layout, 0, limits)

    def train(micro_batches: Sequence[MicroBatch]) -> float:
        """Return the seconds of a step."""
        finish(device)
        started = time.perf_counter()
        result = actor.train_step(micro_batches, policy_gradient, 1.0, LEARNING_RATE)
        finish(device)
        losses.append(result.metrics["nll"])
        if not result.applied:
            raise ValueError(f"the gradients of step {len(losses)} were not finite")
        return time.perf_counter() - started

    def next_lengths() -> list[int]:
        return draw_lengths(work, 0 if side.repeats_lengths else len(losses))

    for _ in range(arguments.warm_up):
        train(micro_batches_of(next_lengths()))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the peak of steady steps, not that of building the model
    rows: list[tuple[float, int, float]] = []  # seconds, tokens and flops of each step
    for _ in rounds_of(arguments):
        lengths = next_lengths()
        rows.append((train(micro_batches_of(lengths)), sum(lengths), flops_of(architecture, lengths)))
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    reserved_bytes = torch.cuda.max_memory_reserved() if peak_bytes else 0
    tflops = statistics.median(flops / seconds for seconds, _, flops in rows) / 1e12
    peak = bf16_peak(machine_name(device))
    micro_batches = micro_batches_of(lengths)
    return {
        "step_ms": 1e3 * statistics.median(seconds for seconds, _, _ in rows),
        "tokens_per_second": statistics.median(tokens / seconds for seconds, tokens, _ in rows),
        "tflops": tflops,
        "mfu": tflops * 1e12 / peak if peak else None,
        "padded_tokens": sum(micro_batch.token_ids.numel() for micro_batch in micro_batches),
        "num_micro_batches": len(micro_batches),
        "num_steps": len(losses),
        "first_nll": losses[0],
        "last_nll": losses[-1],
        "peak_gb": (peak_bytes - held_bytes) / 1e9 if peak_bytes else None,
        "fragmentation_gb": (reserved_bytes - peak_bytes) / 1e9 if peak_bytes else None,
        "held_gb": held_bytes / 1e9,  # memory that the previous side left allocated
        **(profiled(lambda: train(micro_batches), device) if arguments.profile else {}),
        **(syncs_of(actor, train, micro_batches, device) if arguments.syncs else {}),
    }


def profiled(train: Callable[[], float], device: torch.device) -> Row:
    """Milliseconds of the kernels of one step; on a CPU, of torch's operators."""
    on_device = device.type == "cuda"
    # The CPU's events of a step on a device are many, and take longer to sum up than a case may last.
    activities = [ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        seconds = train()
    name = "self_device_time_total" if on_device else "self_cpu_time_total"
    # With a device, an operator's own entry repeats the time of the kernels it started.
    events = [event for event in found.key_averages() if not on_device or event.device_type.name == "CUDA"]
    times = sorted(((event.key, getattr(event, name) / 1e3) for event in events), key=lambda each: -each[1])
    kernels = {key[:100]: milliseconds for key, milliseconds in times[:NUM_KERNELS]}
    return {"busy": sum(milliseconds for _, milliseconds in times) / (1e3 * seconds), "kernels": kernels}


def syncs_of(
    actor: MegatronActor, train: Callable[..., float], parts: Sequence[MicroBatch], device: torch.device
) -> Row:
    """Count the host's waits for the device in a train step and in a log-prob pass; there are none on a CPU."""
    passes = {"train": lambda: train(parts), "logprobs": lambda: actor.forward_logprobs(parts, 1.0)}
    return {"syncs": {name: dict(waits(each, device).most_common(10)) for name, each in passes.items()}}


def waits(work: Callable[[], Any], device: torch.device) -> Counter[str]:
    """Return file:line -> waits for the device, without those of `finish`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    places = (one for one in caught if "synchronizing" in str(one.message))
    return Counter(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in places)


def complaints(rows: Rows) -> Iterator[tuple[str, str]]:
    """Report sides that do not compute what bf16 does."""
    right = rows["bf16"]["first_nll"] if "bf16" in rows else None
    for name, row in rows.items():
        if right is not None and not abs(row["first_nll"] - right) <= LOSS_TOLERANCE * right:
            yield name, f"first loss {row['first_nll']:.4f}, of bf16 {right:.4f}: not the same model"


def speedups(rows: Rows) -> dict[str, float]:
    """Return side -> speedup over bf16."""
    if "bf16" not in rows:
        return {}
    return {name: rows["bf16"]["step_ms"] / row["step_ms"] for name, row in rows.items() if name != "bf16"}


def model_of(arguments: argparse.Namespace) -> ModelArchitecture:
    if has_experts(arguments):
        config = {**QWEN, **MODELS[arguments.model], **(TINY_EXPERTS if arguments.tiny else {})}
        return parse_architecture(config)
    return architecture_of("tiny" if arguments.tiny else arguments.model)


def has_experts(arguments: argparse.Namespace) -> bool:
    return "num_experts" in MODELS[arguments.model]


def sides_of(arguments: argparse.Namespace) -> Mapping[str, Side]:
    return EXPERT_SIDES if has_experts(arguments) else SIDES


def work_of(arguments: argparse.Namespace) -> Work:
    return Work(700, 256, 200) if arguments.tiny else Work(arguments.step_tokens, arguments.micro_batch_tokens, 8192)


@contextmanager
def measuring(arguments: argparse.Namespace) -> Iterator[Callable[[str], Row]]:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield lambda case: measure(sides_of(arguments)[case], model_of(arguments), arguments)
    finally:
        dist.destroy_process_group()


def summary(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    lengths = draw_lengths(work_of(arguments))
    return {
        "num_parameters": model_of(arguments).num_parameters,
        "tokens": sum(lengths),
        "num_sequences": len(lengths),
        "speedup_over_bf16": speedups(rows),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.add_argument("--model", choices=[name for name in MODELS if name != "tiny"], default="1.5b")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--step-tokens", type=int, default=65536)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="one more step, with the time of each kernel")
    parser.add_argument(
        "--syncs", action="store_true", help="one more step, that counts the host's waits for the device"
    )
    return parser.parse_args(arguments)


def benchmark_of(arguments: argparse.Namespace) -> Benchmark:
    """Return the benchmark of a model; dense models and those with experts keep separate results."""
    return Benchmark(
        "gpu_step_experts" if has_experts(arguments) else "gpu_step",
        __file__,
        PACKAGES,
        lambda arguments: list(sides_of(arguments)),
        measuring,
        lambda rows: dict(complaints(rows)),
        summary,
    )


if __name__ == "__main__":
    parsed = parse()
    program.run(benchmark_of(parsed), parsed)
