"""Facts that need heavy or fragile libraries, each probed in a separate process: a library that crashes on import, or
changes global state, then does not affect the report.

    python -m megatron_dapo.doctor.probes NAME '{"argument": value}'

writes one line to standard output, MARK and the answer as JSON.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

MARK = "doctor-answer:"
# Tokens of each sequence of a micro-batch. The last one has padding slots, which must not affect the result.
PACKINGS = {"one sequence": (96,), "equal sequences": (48, 48), "ragged sequences": (37, 5, 64, 1)}


def torch_facts() -> dict[str, Any]:
    """Return the fields of `machine.TorchFacts`."""
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        facts["devices"] = [_device(index) for index in range(count)]
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if count else None
        if torch.version.cuda and not count:
            torch.cuda.init()  # raises the reason
    except (RuntimeError, AssertionError, AttributeError) as error:
        facts["error"] = str(error).splitlines()[0]
    return facts


def _device(index: int) -> dict[str, Any]:
    import torch

    free, memory = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory": memory,
        "free": free,
        "capability": [properties.major, properties.minor],
    }


def transformer_engine_facts() -> dict[str, Any]:
    """Import Transformer Engine and, with a GPU, return its answers on FP8."""
    import torch
    import transformer_engine.pytorch as te

    if not torch.cuda.is_available():
        return {}
    return {
        "fp8": _support(te, "is_fp8_available"),
        "fp8_block_scaling": _support(te, "is_fp8_block_scaling_available"),
        "flash_attention": _flash_attention(),
    }


def _flash_attention() -> list[Any]:
    try:
        from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils
    except ImportError as error:
        return [False, f"this version has no FlashAttentionUtils ({error})"]
    if FlashAttentionUtils.v3_is_installed:
        return [True, f"FlashAttention {FlashAttentionUtils.fa3_version}"]
    return [False, "FlashAttention 3 is not installed; attention runs on cuDNN"]


def _support(te: Any, name: str) -> list[Any]:
    ask = getattr(te, name, None)
    if ask is None:
        return [False, f"this version has no {name}"]
    available, reason = ask(return_reason=True)
    return [bool(available), str(reason)]


def implementation_table(
    model: str | None, dtype: str, precision: dict[str, Any], head: str = "auto"
) -> list[dict[str, str]]:
    """Return the actor's table for a model directory, or for a small dense decoder if None. `precision`: fields of
    `PrecisionConfig`; `head`: the requested log-prob head."""
    from megatron_dapo.config.model_schema import PrecisionConfig
    from megatron_dapo.megatron.implementations import implementations
    from megatron_dapo.megatron.model_config import ModelSettings, transformer_config
    from megatron_dapo.models.config_json import parse_architecture, read_architecture
    from megatron_dapo.parallel.layout import ParallelLayout
    from megatron_dapo.precision import token_multiple

    asked = PrecisionConfig(**precision)
    architecture = read_architecture(model) if model else parse_architecture(_SMALL)
    layout = ParallelLayout(1, token_multiple=token_multiple(asked.recipe))
    config = transformer_config(architecture, layout, ModelSettings(dtype, precision=asked))
    return [asdict(row) for row in implementations(config, head)]


def precision_answer(dtype: str, precision: dict[str, Any]) -> dict[str, str]:
    """Return what computes linear layers ("recipe", "name", "reason"), or the "problem" of the request."""
    from megatron_dapo.config.model_schema import PrecisionConfig
    from megatron_dapo.megatron.precision import linear_backend

    try:
        return asdict(linear_backend(PrecisionConfig(**precision), dtype))
    except ValueError as error:
        return {"problem": str(error)}


_SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 256,  # FP8 takes multiples of 128
    "intermediate_size": 256,
    "hidden_act": "silu",
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def attention_results(
    head_dim: int, num_heads: int, num_groups: int, dtype: str, back_end: str | None = None
) -> list[dict[str, Any]]:
    """Run the actor's core attention forward and backward; return its errors relative to fp32 attention by the formula.

    Our own attention runs with every back-end of torch; Transformer Engine's with the one that this process's environment
    allows, named `back_end`.
    """
    import torch

    from megatron_dapo.megatron.model_config import DTYPES, uses_transformer_engine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (head_dim, num_heads, num_groups)
    cases = _engine_cases(back_end, *shape) if uses_transformer_engine() else _own_cases()
    results = []
    for back_end_name, attend, context in cases:
        for packing, lengths in PACKINGS.items():
            with context():
                result = _try_attention(attend, lengths, shape, DTYPES[dtype], device)
            results.append({"back_end": back_end_name, "packing": packing, **result})
    return results


# A case: name, function of (query, key, value, cumulative lengths int32) -> [P, heads * head_dim], context to run it in.
def _own_cases() -> Iterator[tuple[str, Any, Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron_dapo.megatron.attention import PackedAttention, PackedSequences

    config = SimpleNamespace(
        context_parallel_size=1,
        window_size=None,
        window_attn_skip_freq=None,
        attention_implementation="auto",
        softmax_type="vanilla",
    )
    module = PackedAttention(config, 1)

    def attend(query: Any, key: Any, value: Any, bounds: Any) -> Any:
        packed = PackedSequences(cu_seqlens_q=bounds)
        return module(query, key, value, packed_seq_params=packed)

    yield "default", attend, nullcontext
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        kind = getattr(SDPBackend, name, None)
        if kind is not None:
            yield name.lower(), attend, lambda kind=kind: sdpa_kernel([kind])


def _engine_cases(
    back_end: str | None, head_dim: int, num_heads: int, num_groups: int
) -> Iterator[tuple[str, Any, Any]]:
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        num_heads,
        head_dim,
        num_gqa_groups=num_groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )

    def attend(query: Any, key: Any, value: Any, bounds: Any) -> Any:
        longest = int((bounds[1:] - bounds[:-1]).max())
        return module(
            query,
            key,
            value,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    yield back_end or "default", attend, nullcontext


def _try_attention(
    attend: Any, lengths: Sequence[int], shape: tuple[int, int, int], dtype: Any, device: Any
) -> dict[str, Any]:
    """Return {"error": largest relative error of output and gradients} or {"failure": why it does not run}."""
    import torch

    head_dim, num_heads, num_groups = shape
    # Made on the CPU: the same inputs for every device.
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(lengths)
    sizes = [(num_tokens, n, head_dim) for n in (num_heads, num_groups, num_groups)]
    inputs = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]
    # Random weights of the sum: equal ones would hide errors that cancel.
    weights = torch.randn((num_tokens, num_heads * head_dim), generator=generator).to(device)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of each reason why a back-end is out
            output = attend(*inputs, bounds).reshape(num_tokens, -1)
            gradients = torch.autograd.grad((output.float() * weights).sum(), inputs)
    # Any exception is the answer: the back-end does not run here.
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    query, key, value = exact = [part.detach().float().requires_grad_() for part in inputs]
    wanted = written_out_attention(query, key, value, lengths)
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), exact)
    pairs = zip((output, *gradients), (wanted, *wanted_gradients), strict=True)
    errors = [float((got.detach().float() - want.detach()).norm() / want.detach().norm()) for got, want in pairs]
    return {"error": max(errors)} if all(map(math.isfinite, errors)) else {"failure": "not a finite result"}


def written_out_attention(query: Any, key: Any, value: Any, lengths: Sequence[int]) -> Any:
    """Compute causal softmax attention by the formula, one sequence at a time: [P, heads * head_dim]."""
    import torch

    repeats = query.size(1) // key.size(1)
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (part.repeat_interleave(repeats, dim=1).transpose(0, 1) for part in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) / q.size(-1) ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        outputs.append((scores.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


# By the names that gather.ask passes on the command line.
PROBES: dict[str, Callable[..., Any]] = {
    "torch": torch_facts,
    "transformer_engine": transformer_engine_facts,
    "implementations": implementation_table,
    "precision": precision_answer,
    "attention": attention_results,
}


def main(arguments: Sequence[str]) -> None:
    name, text = arguments
    sys.stdout.write(f"\n{MARK}{json.dumps(PROBES[name](**json.loads(text)))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
