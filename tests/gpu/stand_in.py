"""A stand-in for a GPU: Transformer Engine's own Python on a CPU, its compiled functions computed by torch.

    pytest tests/gpu/test_layers.py --stand-in       with Transformer Engine installed and no GPU

`torch.cuda` answers for a Hopper device, tensors that name it are made on the CPU, NCCL is gloo, and the functions of
`transformer_engine_torch` that a training step calls compute in fp32 what their CUDA kernels are for. Every module,
quantizer, tensor class, recipe and optimizer of Transformer Engine and megatron-core is the real one: what this shows is
that they are built, called, saved and stepped as they want to be; of kernels, speed and rounding it shows nothing. The
calls are held against the signatures of the compiled functions. Attention under context parallelism is not stood in for.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="stand-in",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    total_memory=80 << 30,
    uuid="stand-in",
    L2_cache_size=50 << 20,
)
COMPILED: dict[str, Callable[..., Any]] = {}


# ---- torch


class OnTheCpu(TorchFunctionMode):
    """Replace devices in calls of torch by the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and is_device(kwargs["device"]):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to:
            args = tuple("cpu" if is_device(arg) else arg for arg in args)
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        return function(*args, **kwargs)


def is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return (isinstance(value, int) and not isinstance(value, bool)) or str(value).startswith("cuda")


class Generator(torch.Generator):
    """A generator on the CPU, whatever device is named."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls)


class Stream:
    """A stream whose work is done as soon as it is enqueued."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return {"elapsed_time": lambda other: 1.0, "query": lambda: True, "wait": lambda: None}.get(
            name, lambda *args, **kwargs: self
        )


def install_cuda() -> None:
    """Replace the functions until the process ends."""
    OnTheCpu().__enter__()
    nothing: Callable[..., Any] = lambda *args, **kwargs: None  # noqa: E731
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_device_properties": lambda *args: PROPERTIES,
        "get_device_capability": lambda *args: CAPABILITY,
        "get_device_name": lambda *args: PROPERTIES.name,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *args: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "reset_peak_memory_stats": nothing,
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "memory_stats": lambda *args: {},
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state.cpu()),
        "manual_seed": torch.manual_seed,
        "default_generators": (torch.default_generator,),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *args: Stream(),
        "default_stream": lambda *args: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda index: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(),
    }
    for name, value in answers.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, value)
    torch.Tensor.is_cuda = property(_is_cuda)  # type: ignore[assignment]
    torch.Tensor.type = _type_name(torch.Tensor.type)  # type: ignore[method-assign]
    torch.Generator = Generator  # type: ignore[misc]
    torch.compile = lambda function=None, **options: function or (lambda later: later)  # type: ignore[assignment]
    # gloo flattens coalesced tensors regardless of their types; NCCL sends each tensor by itself.
    dist._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext(Stream())  # type: ignore[assignment]
    dist.distributed_c10d._coalescing_manager = dist._coalescing_manager  # type: ignore[assignment]
    begin = dist.init_process_group
    dist.init_process_group = lambda backend=None, **rest: begin("gloo", **rest)  # type: ignore[assignment]


def _is_cuda(tensor: torch.Tensor) -> bool:
    """Return True to callers in Transformer Engine and megatron-core only."""
    return sys._getframe(1).f_globals.get("__name__", "").startswith(("transformer_engine", "megatron.core"))


def _type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer if args or kwargs or ".cuda." in answer else answer.replace("torch.", "torch.cuda.", 1)

    return type_


# ---- Transformer Engine's compiled functions


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a replacement of the compiled function of that name."""
    COMPILED[function.__name__] = function
    return function


def install_transformer_engine() -> None:
    """Import Transformer Engine and replace its compiled functions, wherever its modules keep them, by those below."""
    importlib.import_module("transformer_engine.pytorch")
    extension = sys.modules["transformer_engine_torch"]
    originals = {name: getattr(extension, name) for name in COMPILED}
    ours = {id(original): _checked(COMPILED[name], original.__doc__) for name, original in originals.items()}
    for module in [module for name, module in sys.modules.items() if name.startswith("transformer_engine")]:
        tables = [vars(module), *(value for value in vars(module).values() if type(value) is dict)]
        for table in tables:
            table.update({key: ours[id(value)] for key, value in table.items() if id(value) in ours})


def _checked(function: Callable[..., Any], doc: str) -> Callable[..., Any]:
    """Bind the arguments of each call to the compiled function's signature."""
    signature = _signature(doc)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(bound := signature.bind(*args, **kwargs)).args, **bound.kwargs)

    return call


def _signature(doc: str) -> inspect.Signature:
    line = doc.splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(") ->")]
    parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in filter(None, re.split(r", (?=\w+: |\*)", inside)):
        if part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        name = part.partition(":")[0].strip()
        default = None if " = " in part else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


def _wide(matrix: Any, columnwise: bool) -> torch.Tensor:
    """fp32 [rows, columns] of a plain or quantized matrix, from the representation that a product would read."""
    if isinstance(matrix, torch.Tensor) and not hasattr(matrix, "dequantize_of"):
        if type(matrix) in (torch.Tensor, torch.nn.Parameter):
            return matrix.detach().reshape(-1, matrix.shape[-1]).float()
    if hasattr(matrix, "_is_2D_scaled"):
        data, scales = (
            (matrix._columnwise_data, matrix._columnwise_scale_inv)
            if columnwise
            else (matrix._rowwise_data, matrix._rowwise_scale_inv)
        )
        assert data is not None, f"a product wants the {'column' if columnwise else 'row'}-wise values of {matrix}"
        flat = data.reshape(data.shape[0], -1) if columnwise else data.reshape(-1, data.shape[-1])
        values = _of_blocks(flat, scales, matrix._is_2D_scaled, matrix._fp8_dtype)
        return values.t() if columnwise else values
    values = matrix.dequantize().float()
    return values.reshape(-1, values.shape[-1])


def _torch_dtype(name: Any) -> torch.dtype:
    return torch.float8_e5m2 if name.name == "kFloat8E5M2" else torch.float8_e4m3fn


def _of_blocks(data: torch.Tensor, scales: torch.Tensor, is_2d: bool, dtype: Any) -> torch.Tensor:
    values = data.view(_torch_dtype(dtype)).float()
    rows, width = values.shape
    if is_2d:
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
    else:
        spread = scales.t()[:rows].repeat_interleave(128, 1)[:, :width]
    return values * spread


def _in_blocks(
    values: torch.Tensor, is_2d: bool, dtype: Any, shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the quantized values, and scales in the compiled function's order and padding."""
    rows, width = values.shape
    padded = F.pad(values.float(), (0, -width % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    amax = blocks.abs().amax(dim=(1, 3) if is_2d else 3)
    largest = torch.finfo(_torch_dtype(dtype)).max
    power = torch.exp2(torch.floor(torch.log2(largest / amax.clamp(min=2.0**-126))))
    power = torch.where(amax > 0, power, 1.0)
    spread = power[:, None, :, None] if is_2d else power[..., None]
    rounded = (blocks * spread).to(_torch_dtype(dtype)).flatten(2, 3).flatten(0, 1)[:rows, :width]
    scales = power.reciprocal() if is_2d else power.reciprocal().flatten(0, 1)[:rows].t()
    wide = torch.zeros(*shape)
    wide[: scales.size(0), : scales.size(1)] = scales
    return rounded.contiguous().view(torch.uint8), wide


@compiled
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    import transformer_engine.pytorch as te

    shape, in_blocks = tuple(shape), hasattr(quantizer, "block_scaling_dim")
    fields: dict[str, Any] = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if in_blocks:
        found = {
            name: torch.zeros(size, dtype=kind) for name, (size, kind) in quantizer.inner_tensor_specs(shape).items()
        }
        fields |= {name: found.get(f"_{name}") for name in _OF_BLOCKS}
        fields["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    else:
        fields["data"] = torch.zeros(shape, dtype=torch.uint8) if quantizer.rowwise_usage else None
        turned = (shape[-1], *shape[:-1])
        fields["data_transpose"] = torch.zeros(turned, dtype=torch.uint8) if quantizer.columnwise_usage else None
        fields["fp8_scale_inv"] = torch.ones(1)
    if quantizer.internal:
        kind = te.Float8BlockwiseQTensorStorage if in_blocks else te.Float8TensorStorage
        return kind(fake_dtype=dtype, **fields)
    return (te.Float8BlockwiseQTensor if in_blocks else te.Float8Tensor)(
        shape=shape, dtype=dtype, device="cpu", **fields
    )


_OF_BLOCKS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


@compiled
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    plain = tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor
    kind = type(quantizer).__name__
    if output is None:
        output = quantizer.make_empty(tuple(plain.shape), dtype=plain.dtype, device=torch.device("cpu"))
    matrix = plain.detach().reshape(-1, plain.shape[-1])
    if kind == "Float8BlockQuantizer":
        is_2d = quantizer.block_scaling_dim == 2
        for columnwise in (False, True):
            data = output._columnwise_data if columnwise else output._rowwise_data
            scales = output._columnwise_scale_inv if columnwise else output._rowwise_scale_inv
            if data is not None:
                values = matrix.t() if columnwise else matrix
                found, found_scales = _in_blocks(values, is_2d, quantizer.dtype, scales.shape)
                data.copy_(found.view(data.shape))
                scales.copy_(found_scales)
        return output
    return _quantize_whole(matrix, quantizer, output)


def _quantize_whole(matrix: torch.Tensor, quantizer: Any, output: Any) -> Any:
    """Scale per tensor, from its own maximum or from delayed scaling."""
    dtype = _torch_dtype(quantizer.dtype)
    amax = matrix.abs().amax().float() if matrix.numel() else torch.zeros(())
    scale = getattr(quantizer, "scale", None)
    if "Current" in type(quantizer).__name__ or scale is None:
        scale = torch.where(amax > 0, torch.finfo(dtype).max / amax.clamp(min=1e-30), 1.0)
    if getattr(quantizer, "amax", None) is not None:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax).reshape(quantizer.amax.shape))
    largest = torch.finfo(dtype).max
    rounded = (matrix.float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    if output._data is not None:
        output._data.copy_(rounded.view(output._data.shape))
    if getattr(output, "_transpose", None) is not None:
        output._transpose.copy_(rounded.t().reshape(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_((1.0 / scale).reshape(output._scale_inv.shape))
    return output


@compiled
def dequantize(input: Any, otype: Any) -> torch.Tensor:
    dtype = _torch_dtype(input._fp8_dtype)
    data = input._data if input._data is not None else input._transpose
    values = data.view(dtype).float() * input._scale_inv
    if input._data is None:
        values = values.reshape(values.shape[0], -1).t()
    return values.to(_model_dtype(otype))


def _model_dtype(name: Any) -> torch.dtype:
    return {"kBFloat16": torch.bfloat16, "kFloat16": torch.float16, "kFloat32": torch.float32}[name.name]


@compiled
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Row-major: TN is B A^T, NN is B A, NT is B^T A."""
    assert comm_overlap is None and quantizer is None and not gelu, "not stood in for"
    left, right = _wide(B, columnwise=transB), _wide(A, columnwise=not transA)
    product = (left.t() if transB else left) @ (right.t() if transA else right)
    of_bias = None
    if bias is not None and grad:
        of_bias = left.sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    shape = (*_leading(B), product.size(1)) if not transB else product.shape
    if D is None:
        D = torch.empty(shape, dtype=_model_dtype(output_dtype) if output_dtype is not None else _plain_dtype(B))
    D.copy_((product + (D.reshape(product.shape).float() if accumulate else 0.0)).view(D.shape))
    return [D, of_bias, None, extra_output]


@compiled
def te_general_grouped_gemm(*values: Any) -> list[torch.Tensor]:
    left, transposes_left, right, transposes_right, outputs, _, sizes, biases, _, is_one, gelus = values[:11]
    grad, workspace, workspace_size, accumulates, splits = values[11:16]
    assert not any(tensor.numel() for tensor in gelus), "not stood in for"
    outputs = outputs[0].split(list(sizes)) if is_one else outputs
    for one, other, output, bias in zip(left, right, outputs, biases, strict=True):
        given = bias if bias.numel() else None
        if output.numel():
            arguments = (transposes_left, other, transposes_right, output, None, None, given, None, False, None)
            of_bias = generic_gemm(one, *arguments, grad, workspace[0], workspace_size, accumulates, splits)[1]
            if of_bias is not None:
                bias.copy_(of_bias)
    return list(biases)


@compiled
def fused_multi_row_padding(*values: Any) -> None:
    rows, padded, sizes, padded_sizes = values
    for part, place in zip(rows.split(list(sizes)), padded.zero_().split(list(padded_sizes)), strict=True):
        place[: len(part)] = part


@compiled
def fused_multi_row_unpadding(*values: Any) -> None:
    padded, rows, padded_sizes, sizes = values
    for part, place in zip(padded.split(list(padded_sizes)), rows.split(list(sizes)), strict=True):
        place.copy_(part[: len(place)])


@compiled
def split_quantize(
    tensor: torch.Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any], disable_bulk_allocation: bool
) -> list[Any]:
    parts = tensor.split(list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def _leading(matrix: Any) -> tuple[int, ...]:
    return tuple(matrix.size())[:-1]


def _plain_dtype(matrix: Any) -> torch.dtype:
    return getattr(matrix, "_dtype", None) or matrix.dtype


@compiled
def rmsnorm_fwd(
    input: Any, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered: bool
) -> list[Any]:
    wide = input.float()
    rsigma = (wide.square().mean(dim=-1) + eps).rsqrt()
    normed = (wide * rsigma[..., None] * (weight.float() + zero_centered)).to(_model_dtype(otype))
    if quantizer is not None:
        return [quantize(normed, quantizer, ln_out), None, rsigma.flatten()]
    return [normed if ln_out is None else ln_out.copy_(normed), None, rsigma.flatten()]


@compiled
def rmsnorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int, zero_centered: bool
) -> list[Any]:
    wide, scale = x.float().view(dz.shape), rsigma.view(*dz.shape[:-1], 1)
    normed, upstream = wide * scale, dz.float() * (gamma.float() + zero_centered)
    to_x = scale * (upstream - normed * (upstream * normed).mean(dim=-1, keepdim=True))
    to_gamma = (dz.float() * normed).flatten(0, -2).sum(0)
    return [to_x.to(x.dtype), to_gamma.to(gamma.dtype)]


@compiled
def get_fused_attn_backend(fused_attn_params: Any) -> tuple[Any, str]:
    return sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _packed(
    query: Any, key: Any, value: Any, bounds: torch.Tensor, scale: float, window: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention of each sequence of [tokens, heads, head_dim] to the `window` tokens before each (-1: all)."""
    parts, repeats = [], query.size(1) // key.size(1)
    for first, end in pairwise(bounds.tolist()):
        q, k, v = (part[first:end].transpose(0, 1).float() for part in (query, key, value))
        k, v = (part.repeat_interleave(repeats, dim=0) for part in (k, v))
        distance = torch.arange(end - first)[:, None] - torch.arange(end - first)
        unseen = (distance < 0) | (distance > (window if window >= 0 else end))
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(unseen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).float().expand(-1, end - first, 1)), dim=-1)
        parts.append((scores.softmax(-1)[..., : end - first] @ v).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


@compiled
def fused_attn_fwd(*values: Any) -> list[Any]:
    longest, scale, dropout, mask, window, bounds, sinks = (values[index] for index in (0, 3, 4, 10, 12, 14, 27))
    query, key, value = values[16:19]
    assert dropout == 0.0 and mask.name == "NVTE_PADDING_CAUSAL_MASK", f"not stood in for: dropout {dropout}, {mask}"
    assert longest >= int((bounds[1:] - bounds[:-1]).max()) and bounds.dtype == torch.int32
    assert query.dim() == 3 and int(bounds[-1]) == query.size(0), "tokens beyond the last sequence"
    out = _packed(query, key, value, bounds, scale, window[0], sinks)
    kept = [torch.zeros(query.size(0), query.size(1), 1), torch.zeros(2, dtype=torch.int64)]
    return [out, *kept, *(() if sinks is None else (sinks,))]


@compiled
def fused_attn_bwd(*values: Any) -> list[Any]:
    scale, window, bounds, kept = values[2], values[14], values[17], values[25]
    query, key, value, upstream = values[19], values[20], values[21], values[23]
    inputs = [part.detach().requires_grad_() for part in (query, key, value, *kept[2:])]
    with torch.enable_grad():
        out = _packed(*inputs[:3], bounds, scale, window[0], inputs[3] if len(inputs) > 3 else None)
    to_query, to_key, to_value, *to_sinks = torch.autograd.grad(out, inputs, upstream.view(out.shape))
    return [to_query, to_key, to_value, None, to_sinks[0] if to_sinks else None]


@compiled
def convert_thd_to_bshd(packed: torch.Tensor, bounds: torch.Tensor, batch: int, longest: int) -> torch.Tensor:
    padded = packed.new_zeros(batch, longest, *packed.shape[1:])
    for index, (first, end) in enumerate(pairwise(bounds.tolist())):
        padded[index, : end - first] = packed[first:end]
    return padded


@compiled
def convert_bshd_to_thd(padded: torch.Tensor, bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    packed = padded.new_zeros(tokens, *padded.shape[2:])
    for index, (first, end) in enumerate(pairwise(bounds.tolist())):
        packed[first:end] = padded[index, : end - first]
    return packed


@compiled
def fused_rope_forward(*values: Any) -> torch.Tensor:
    cosines, sines = _angles(*values)
    wide, rest = _turned(values[0], cosines)
    return torch.cat((wide * cosines + _half_turned(wide) * sines, rest), dim=-1).to(values[0].dtype)


@compiled
def fused_rope_backward(*values: Any) -> torch.Tensor:
    cosines, sines = _angles(*values)
    wide, rest = _turned(values[0], cosines)
    return torch.cat((wide * cosines - _half_turned(wide * sines), rest), dim=-1).to(values[0].dtype)


def _turned(packed: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of each head that the angles turn, and the others, fp32."""
    width = angles.size(-1)
    return packed[..., :width].float(), packed[..., width:].float()


def _angles(packed: torch.Tensor, freqs: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, 1, width] of packed sequences; positions begin at 0 in each."""
    _, kind, interleaved, bounds, cp_size, _ = others
    assert kind.name == "NVTE_THD" and not interleaved and cp_size == 1, f"not stood in for: {kind}, {cp_size} ranks"
    assert bounds is not None and freqs.size(-1) <= packed.size(-1) and int(bounds[-1]) <= packed.size(0)
    angles = freqs[_positions(packed, bounds).clamp(max=freqs.size(0) - 1)][:, 0]
    return angles.cos(), angles.sin()


def _positions(packed: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return each token's place in its sequence."""
    tokens = torch.arange(packed.size(0))
    return tokens - bounds[torch.searchsorted(bounds.contiguous(), tokens, right=True).sub(1).clamp(max=len(bounds) - 2)]


def _half_turned(values: torch.Tensor) -> torch.Tensor:
    left, right = values.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


@compiled
def multi_tensor_adam(
    chunk: int,
    noop: torch.Tensor,
    lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """AdamW (mode 1). Lists: gradients, parameters, moments, and main params if parameters have them."""
    assert mode == 1
    for gradient, parameter, first, second, *master in zip(*lists, strict=True):
        wide = master[0] if master else parameter
        first.mul_(beta1).add_(gradient.float(), alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
        one, two = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        update = (first / one) / ((second / two).sqrt() + eps) + weight_decay * wide.float()
        wide.copy_(wide.float() - lr * update)
        if master:
            parameter.copy_(wide)


@compiled
def multi_tensor_l2norm(
    chunk: int, noop: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], each: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if each else torch.zeros(0)


@compiled
def multi_tensor_scale(chunk: int, noop: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


@compiled
def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: torch.Tensor | None) -> torch.Tensor:
    found = input.reshape(-1, input.shape[-1]).t().contiguous()
    return found if out is None else out.copy_(found.view(out.shape))


@compiled
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    return [input.reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype), quantize(input, quantizer)]


@compiled
def fused_amax_and_scale_update_after_reduction(
    amaxes: torch.Tensor,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    how: str,
    dtype: Any,
    margin: float,
) -> None:
    """Roll each history by one and take the scale from its maximum."""
    largest = torch.finfo(_torch_dtype(dtype)).max
    for amax, history, scale in zip(amaxes.split([h.size(1) for h in histories]), histories, scales, strict=True):
        history[0].copy_(amax)
        top = history.amax(dim=0) if how == "max" else history[0]
        scale.copy_(torch.where(top > 0, largest / top / 2.0**margin, scale))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


@compiled
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the block maxima of a slice of the flattened matrix."""
    place = torch.arange(start_offset, start_offset + tensor.numel())
    block = place // w // block_len * amax.size(1) + place % w // block_len
    flat = amax.view(-1)
    flat.copy_(flat.scatter_reduce(0, block, tensor.flatten().abs().float(), "amax", include_self=True))


@compiled
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: Any,
) -> None:
    place = torch.arange(start_offset, start_offset + inp.numel())
    block = place // w // block_len * scale.size(1) + place % w // block_len
    rounded = (inp.flatten().float() * scale.flatten()[block]).to(_torch_dtype(out_dtype))
    out.view(-1).copy_(rounded.view(torch.uint8))


@compiled
def multi_tensor_compute_scale_and_scale_inv(
    chunk: int,
    noop: torch.Tensor,
    lists: Sequence[Sequence[torch.Tensor]],
    largest: float,
    powers: bool,
    epsilon: float,
) -> None:
    for amax, scale, inverse in zip(*lists, strict=True):
        found = torch.where(amax > 0, largest / amax.clamp(min=max(epsilon, 2.0**-126)), 1.0)
        found = torch.exp2(torch.floor(torch.log2(found))) if powers else found
        scale.copy_(found)
        inverse.copy_(found.reciprocal())


@compiled
def get_cublasLt_version() -> int:
    return 130100


# ---- megatron-core's kernels of latent attention's rotary angles, with the arguments of its functions


def fused_apply_mla_rope_for_q(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, qk_head_dim: int, emb_dim: int, cu_seqlens_q: Any, *others: Any
) -> torch.Tensor:
    """Turn the last `emb_dim` numbers of each head of packed queries."""
    return torch.cat((t[..., :qk_head_dim], _turned_pairs(t[..., qk_head_dim:], cos, sin, cu_seqlens_q)), dim=-1)


def fused_apply_mla_rope_for_kv(
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Any,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed keys, with the turned numbers that all heads share, and values."""
    keys, values = kv.split((k_dim, v_dim), dim=-1)
    shared = _turned_pairs(k_pos_emb, cos, sin, cu_seqlens_kv).expand(-1, kv.size(1), -1)
    return torch.cat((keys, shared), dim=-1), values


def _turned_pairs(packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbors; the first ones of all pairs come first in the result."""
    places = _positions(packed, bounds)
    cosines, sines = cos[places][:, 0], sin[places][:, 0]
    first, second = packed[..., 0::2].float(), packed[..., 1::2].float()
    neighbors = torch.cat((first, second), dim=-1), torch.cat((-second, first), dim=-1)
    return (neighbors[0] * cosines + neighbors[1] * sines).to(packed.dtype)


def install_rotary_kernels() -> None:
    """Replace Triton kernels, which take a GPU."""
    fused = importlib.import_module("megatron.core.fusions.fused_mla_yarn_rope_apply")
    for function in (fused_apply_mla_rope_for_q, fused_apply_mla_rope_for_kv):
        setattr(fused, function.__name__, function)


def install() -> None:
    """Install the whole stand-in, before megatron-core is imported."""
    install_transformer_engine()
    install_cuda()
    install_rotary_kernels()
