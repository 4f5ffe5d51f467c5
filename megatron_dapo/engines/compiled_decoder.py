"""One decoding step on a CPU in few operators: torch's matrix products, and `ops/decode.c` for everything between them.

With few rows, a step of transformers' model takes the time of dispatching some fifty operators a layer; this one has eight.
The projections of one input are one product: their weights are parts of one tensor, which the weight sync fills.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_dapo.engines.row_state import (
    COLUMN,
    LIMIT,
    PREFIX,
    PREFIX_SLOT,
    SEED,
    TEMPERATURE,
    TOKEN,
    RowState,
)
from megatron_dapo.engines.sampling import RowSampling, draw, uniforms
from megatron_dapo.engines.slot_cache import SlotCache
from megatron_dapo.ops import native

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOURCE = Path(native.__file__).with_name("decode.c")
FLAGS = ("-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
FAMILIES = ("llama", "qwen2", "qwen3")  # model_type of decoders with RMSNorm, rotary positions, silu(gate) * up
STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")  # kinds whose angles depend on the position only
LANES = 8  # columns that decode.c reads at once, past the last one, too
_SIZE, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _Decoder(ctypes.Structure):
    """`Decoder` of decode.c."""

    _sizes = "heads kv_heads response_slots response_columns prefix_slots prefix_columns vocabulary stop_width"
    _addresses = "cosines sines responses prefixes token column limit prefix_length seed prefix_slot temperature stops"
    _fields_ = [
        *((name, _SIZE) for name in _sizes.split()),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
        *((name, _ADDRESS) for name in [*_addresses.split(), "tokens", "logprobs", "done"]),
    ]


@dataclass(frozen=True)
class _Layer:
    """Weights [in, out] of one layer's products; addresses of its norms, None for heads that have none."""

    attention_norm: int
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: int | None
    key_norm: int | None
    output: torch.Tensor
    mlp_norm: int
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class _Buffers:
    """Results of a layer's operators for all slots, or views of the active rows."""

    hidden: torch.Tensor  # [B, hidden_size], as is normed
    normed: torch.Tensor
    qkv: torch.Tensor  # [B, (heads + 2 kv_heads) head_dim]
    attended: torch.Tensor  # [B, heads head_dim]
    gate_up: torch.Tensor  # [B, 2 intermediate_size]
    product: torch.Tensor  # [B, intermediate_size]
    logits: torch.Tensor  # [B, V]

    def rows(self, count: int) -> _Buffers:
        return _Buffers(*(buffer[:count] for buffer in vars(self).values()))


@cache
def library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return decode.c compiled for heads of this size; None without a compiler that understands it."""
    flags = (*FLAGS, f"-DHEAD_DIM={head_dim}", *(["-DBFLOAT16"] if dtype == torch.bfloat16 else []))
    functions = native.compiled(SOURCE, *flags)
    if functions is not None:
        functions.normalize.argtypes = (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE, ctypes.c_float)
        functions.gate.argtypes = (_ADDRESS, _ADDRESS, _SIZE, _SIZE)
        functions.attend.argtypes = (_ADDRESS, _SIZE, *[_ADDRESS] * 5, _SIZE, _SIZE)
        functions.draw.argtypes, functions.draw.restype = (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE), _SIZE
        functions.normalize.restype = functions.gate.restype = functions.attend.restype = None
    return functions


def compiled_for(model: PreTrainedModel, cache: SlotCache) -> ctypes.CDLL | None:
    """Return the functions for a model; None if its layers are of another kind, or not on a CPU with a compiler."""
    config, responses = model.config, cache.responses
    if config.model_type not in FAMILIES or not type(model).__module__.startswith("transformers."):
        return None
    layers = model.model.layers
    biases = [
        part.bias
        for layer in layers
        for part in (layer.self_attn.o_proj, *layer.mlp.children())
        if hasattr(part, "bias")
    ]
    known = (
        config.hidden_act == "silu"
        and responses.shape[4] >= LANES
        and config.rope_parameters.get("rope_type", "default") in STATIC_ROTATIONS
        and responses.dtype in (torch.float32, torch.bfloat16)
        and responses.device.type == "cpu"
        and not any(bias is not None for bias in biases)
    )
    return library(responses.shape[-1], responses.dtype) if known else None


class CompiledDecoder:
    """`TransformersDecoder` for models that `compiled_for` has functions for.

    It makes weights of `model` parts of larger tensors, so it is built before anyone takes their addresses.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache, state: RowState, functions: ctypes.CDLL):
        self._cache, self._state, self._functions = cache, state, functions
        self._layers = [_read_layer(layer) for layer in model.model.layers]
        self._embedding, self._norm = model.model.embed_tokens.weight, model.model.norm.weight.data_ptr()
        self._head = model.lm_head.weight.T
        self._epsilon = model.config.rms_norm_eps
        self._buffers = self._allocate(model)
        self._rows = self._buffers.rows(0)
        self._num_rows = 0
        self._sampling: RowSampling | None = None
        self._scratch = torch.zeros(max(cache.responses.shape[4] + LANES, self._head.shape[1]))
        self._done = torch.zeros(state.tokens.shape[0], dtype=torch.bool)
        self._rotation = _rotation(model, cache.responses)  # keeps the tables alive
        self._struct = self._describe(model)

    def _allocate(self, model: PreTrainedModel) -> _Buffers:
        config, layer = model.config, self._layers[0]
        of_layer = (layer.qkv.shape[1], layer.output.shape[0], layer.gate_up.shape[1], layer.down.shape[0])
        sizes = (config.hidden_size, config.hidden_size, *of_layer, self._head.shape[1])
        return _Buffers(*(self._embedding.new_zeros(self._state.tokens.shape[0], size) for size in sizes))

    def _describe(self, model: PreTrainedModel) -> _Decoder:
        _, _, slots, kv_heads, columns, head_dim = self._cache.responses.shape
        integers = self._state.integers
        return _Decoder(
            heads=self._layers[0].output.shape[0] // head_dim,
            kv_heads=kv_heads,
            response_slots=slots,
            response_columns=columns,
            vocabulary=self._head.shape[1],
            scale=model.model.layers[0].self_attn.scaling,
            epsilon=self._epsilon,
            cosines=self._rotation[0].data_ptr(),
            sines=self._rotation[1].data_ptr(),
            responses=self._cache.responses.data_ptr(),
            token=integers[TOKEN].data_ptr(),
            column=integers[COLUMN].data_ptr(),
            limit=integers[LIMIT].data_ptr(),
            prefix_length=integers[PREFIX].data_ptr(),
            seed=integers[SEED].data_ptr(),
            prefix_slot=integers[PREFIX_SLOT].data_ptr(),
            temperature=self._state.floats[TEMPERATURE].data_ptr(),
            tokens=self._state.tokens.data_ptr(),
            logprobs=self._state.logprobs.data_ptr(),
            done=self._done.data_ptr(),
        )

    def refresh(self, num_rows: int, prefix_lengths: Sequence[int]) -> None:
        """See `TransformersDecoder.refresh`."""
        self._num_rows = num_rows
        self._rows = self._buffers.rows(num_rows)
        self._sampling = self._state.sampling(num_rows)
        # Tensors that are replaced when they grow.
        prefixes, stops = self._cache.prefixes, self._state.stops
        self._struct.prefixes, self._struct.stops = prefixes.data_ptr(), stops.data_ptr()
        self._struct.prefix_slots, self._struct.prefix_columns = prefixes.shape[2], prefixes.shape[4]
        self._struct.stop_width = stops.shape[1]

    def step(self) -> torch.Tensor | None:
        """See `TransformersDecoder.step`."""
        assert self._sampling is not None, "no rows were announced by refresh"
        logits = self._forward()
        if self._sampling.any_restricted:
            state = self._state.integers[:, : self._num_rows]
            position = state[PREFIX] + state[COLUMN]
            return self._state.append(*draw(logits, self._sampling, uniforms(state[SEED], position + 1)))
        fields, scratch = ctypes.byref(self._struct), self._scratch.data_ptr()
        num_done = self._functions.draw(fields, logits.data_ptr(), scratch, self._num_rows)
        if num_done < 0:
            raise FloatingPointError("logits that are not finite")
        return self._done[: self._num_rows] if num_done else None

    def _forward(self) -> torch.Tensor:
        """Logits [B, V] after the tokens of the active rows."""
        functions, rows, num_rows, fields = self._functions, self._rows, self._num_rows, ctypes.byref(self._struct)
        scratch, hidden_size = self._scratch.data_ptr(), rows.hidden.shape[1]
        torch.index_select(self._embedding, 0, self._state.integers[TOKEN, :num_rows], out=rows.hidden)
        hidden, normed, qkv, attended, gate_up, product, _ = (buffer.data_ptr() for buffer in vars(rows).values())
        for number, layer in enumerate(self._layers):
            functions.normalize(hidden, layer.attention_norm, normed, num_rows, hidden_size, self._epsilon)
            if layer.qkv_bias is None:
                torch.mm(rows.normed, layer.qkv, out=rows.qkv)
            else:
                torch.addmm(layer.qkv_bias, rows.normed, layer.qkv, out=rows.qkv)
            functions.attend(fields, number, qkv, layer.query_norm, layer.key_norm, scratch, attended, 0, num_rows)
            rows.hidden.addmm_(rows.attended, layer.output)
            functions.normalize(hidden, layer.mlp_norm, normed, num_rows, hidden_size, self._epsilon)
            torch.mm(rows.normed, layer.gate_up, out=rows.gate_up)
            functions.gate(gate_up, product, num_rows, layer.down.shape[0])
            rows.hidden.addmm_(rows.product, layer.down)
        functions.normalize(hidden, self._norm, normed, num_rows, hidden_size, self._epsilon)
        return torch.mm(rows.normed, self._head, out=rows.logits)


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (norm.weight.data_ptr() if norm is not None else None for norm in norms)
    return _Layer(
        layer.input_layernorm.weight.data_ptr(),
        qkv,
        bias,
        query_norm,
        key_norm,
        attention.o_proj.weight.T,
        layer.post_attention_layernorm.weight.data_ptr(),
        _fuse([mlp.gate_proj, mlp.up_proj])[0],
        mlp.down_proj.weight.T,
    )


def _fuse(projections: Sequence[torch.nn.Module]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make the weights of projections parts of one, unless they are already (of another engine that shares the model); return it
    as [in, out], and the bias if there is one."""
    fused: list[torch.Tensor | None] = []
    for name in ("weight", "bias"):
        parts = [getattr(projection, name) for projection in projections]
        if parts[0] is None:
            fused.append(None)
            continue
        rows = [part.shape[0] for part in parts]
        if len({part.data.untyped_storage().data_ptr() for part in parts}) == 1:
            fused.append(parts[0].data.as_strided((sum(rows), *parts[0].shape[1:]), parts[0].stride(), 0))
            continue
        whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split(rows), strict=True):
            part.data = view
        fused.append(whole)
    weight, bias = fused
    assert weight is not None, "a projection has a weight"
    return weight.T, bias


def _rotation(model: PreTrainedModel, responses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, head_dim / 2] of all positions, as rounded by the model."""
    positions = torch.arange(responses.shape[4] + 1)[None]
    half = responses.shape[5] // 2
    cosines, sines = (
        table[0, :, :half].float() for table in model.model.rotary_emb(responses[:1, 0, 0, 0, 0], positions)
    )
    return cosines.contiguous(), sines.contiguous()
