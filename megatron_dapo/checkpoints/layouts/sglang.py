"""Layout of SGLang's decoders under tensor and expert parallelism: names, rows and padding of each Hugging Face tensor.

Local names are those of the SGLang model's `named_parameters()` (0.5.17 to 0.5.23, one pipeline stage, no data-parallel
attention, no quantization, no redundant experts, an MoE runner that takes [gate; up] untransposed as the Triton and the
native one do). See the table in `SglangLayout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_dapo.checkpoints.layouts.computed import Buffer, ComputedLayout, RankContents, collect_buffers
from megatron_dapo.models.architecture import EMBEDDING, FINAL_NORM, LM_HEAD, ModelArchitecture
from megatron_dapo.models.parts.sink_attention import SINKS
from megatron_dapo.models.placement import EngineCut, PerExpert, StackedExperts, check_cut, check_divides
from megatron_dapo.plan.memory import SGLANG_VOCABULARY_MULTIPLE as VOCABULARY_MULTIPLE
from megatron_dapo.reshard.layout import Shard, TensorSpec, local_holes
from megatron_dapo.reshard.slices import Slice
from megatron_dapo.rounding import round_up


class SglangLayout(ComputedLayout):
    """Layout of `num_engines` equal engines; rank = engine * T + tensor-parallel rank t.

    | local buffer | content of rank t of T |
    |---|---|
    | model.embed_tokens, lm_head | rows [t V'/T, ...) of the vocabulary padded to V' |
    | model.layers.i | what the layer's parts say (`LayerPart.sglang`) |
    | experts.w13_weight [n, 2 i, h] | of each of its n experts [gate rows; up rows] |
    | experts.w2_weight [n, h, i] | of each of its n experts the columns |

    Under expert parallelism E, rank t holds the experts of expert rank t // (T / E), cut into T / E. A tied dense model has
    no separate lm_head; a tied one with experts has a copy. `ModelArchitecture.serving` has what else differs between
    families. Elements without a shard are `padding`. They must be zero, which they are not in an engine that starts with
    random weights.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        tensor_parallel: int,
        expert_parallel: int,
        dtype: torch.dtype,
        num_engines: int,
        pads: bool,
    ) -> None:
        types = {name: torch.float32 if architecture.is_float32(name) else dtype for name in architecture.shapes()}
        super().__init__({name: TensorSpec(shape, types[name]) for name, shape in architecture.shapes().items()})
        self.architecture = architecture
        self.tensor_parallel = tensor_parallel
        self.expert_parallel = expert_parallel
        self.num_engines = num_engines
        self.cut = EngineCut(tensor_parallel, expert_parallel, pads)
        self.dtype = dtype

    @property
    def num_ranks(self) -> int:
        return self.num_engines * self.tensor_parallel

    def padding(self, rank: int) -> dict[str, tuple[Slice, ...]]:
        """Return the slices of the parameters, in local coordinates, that no tensor fills; they must be zero."""
        holes = local_holes(self.shards(rank), self.local_shapes(rank))
        return {name: slices for name, slices in holes.items() if slices}

    def _replica_key(self, rank: int) -> int:
        return rank % self.tensor_parallel

    def _compute(self, rank: int) -> RankContents:
        buffers = self._buffers(self._replica_key(rank))
        return collect_buffers((_prefixed(self.prefix, buffer), self._dtype_of(buffer)) for buffer in buffers)

    def _dtype_of(self, buffer: Buffer) -> torch.dtype:
        if buffer.name.endswith(SINKS):
            return torch.bfloat16  # any model's, unless attention is TensorRT-LLM's
        return self.tensors[buffer.shards[0].tensor].dtype if buffer.shards else self.dtype

    @property
    def prefix(self) -> str:
        """Prefix of the names of all local buffers."""
        return self.architecture.serving.prefix

    def _buffers(self, tensor: int) -> Iterator[Buffer]:
        architecture, serving = self.architecture, self.architecture.serving
        if serving.whole_embedding:
            yield self._whole(EMBEDDING, EMBEDDING)
        else:
            yield self._vocabulary(EMBEDDING, EMBEDDING, tensor)
        for layer in range(architecture.num_layers):
            prefix = f"model.layers.{layer}."
            for part in architecture.parts(layer):
                for placement in part.sglang(self.cut):
                    if isinstance(placement, StackedExperts):
                        yield from self._experts(placement, prefix, tensor)
                    else:
                        assert not isinstance(placement, PerExpert), f"{placement.local} is Megatron's"
                        yield self._placed(placement, prefix, prefix, tensor, self.tensor_parallel)
        yield self._whole(FINAL_NORM, FINAL_NORM)
        if not architecture.tie_word_embeddings:
            yield self._vocabulary(LM_HEAD, LM_HEAD, tensor)
        elif not serving.ties_output:
            yield self._vocabulary(LM_HEAD, EMBEDDING, tensor)

    def _vocabulary(self, local: str, name: str, tensor: int) -> Buffer:
        rows = _padded_vocabulary(self.architecture, self.cut) // self.tensor_parallel
        return self._rows(local, [(name, tensor * rows, rows, None)])

    def _experts(self, placement: StackedExperts, prefix: str, tensor: int) -> Iterator[Buffer]:
        cut = self.tensor_parallel // self.expert_parallel
        rank, index = divmod(tensor, cut)
        size, num_local = placement.inner // cut, placement.num_experts // self.expert_parallel
        names = [prefix + placement.name.format(expert) for expert in range(rank * num_local, (rank + 1) * num_local)]
        if placement.biased:
            yield from self._biased_experts(names, prefix + placement.local, index, size)
            return
        inner, hidden = self.tensors[names[0] + "gate_proj.weight"].shape
        real = min(inner - index * size, size)
        gate_up, down = prefix + placement.local + "w13_weight", prefix + placement.local + "w2_weight"
        # Offsets and shapes are the same for every expert; a large model would otherwise have a million such tuples.
        rows, columns = ((index * size, 0), (real, hidden)), ((0, index * size), (hidden, real))
        gate_up_shards: list[Shard] = []
        down_shards: list[Shard] = []
        for slot, name in enumerate(names):
            if real > 0:
                gate_up_shards.append(Shard(name + "gate_proj.weight", *rows, gate_up, (slot, 0, 0)))
                gate_up_shards.append(Shard(name + "up_proj.weight", *rows, gate_up, (slot, size, 0)))
                down_shards.append(Shard(name + "down_proj.weight", *columns, down, (slot, 0, 0)))
        yield Buffer(gate_up, (num_local, 2 * size, hidden), tuple(gate_up_shards))
        yield Buffer(down, (num_local, hidden, size), tuple(down_shards))

    def _biased_experts(self, names: Sequence[str], local: str, index: int, size: int) -> Iterator[Buffer]:
        hidden, inner = self.tensors[names[0] + "down_proj"].shape
        first, real = index * size, max(0, min(inner - index * size, size))
        pairs, columns = Slice((2 * first, 0), (2 * real, hidden)), Slice((0, first), (hidden, real))
        kinds = (
            ("w13_weight", "gate_up_proj", (2 * size, hidden), pairs),
            ("w13_weight_bias", "gate_up_proj_bias", (2 * size,), Slice(pairs.offset[:1], pairs.shape[:1])),
            ("w2_weight", "down_proj", (hidden, size), columns),
            # The ranks that share an expert sum their outputs, and its bias once.
            ("w2_weight_bias", "down_proj_bias", (hidden,), Slice((0,), (hidden,) if index == 0 else (0,))),
        )
        for buffer, kind, shape, bounds in kinds:
            zeros = (0,) * len(shape)
            shards = (Shard(name + kind, *bounds, local + buffer, (n, *zeros)) for n, name in enumerate(names))
            yield Buffer(local + buffer, (len(names), *shape), tuple(shards) if bounds.volume > 0 else ())


def _prefixed(prefix: str, buffer: Buffer) -> Buffer:
    if not prefix:
        return buffer
    name = prefix + buffer.name
    return Buffer(name, buffer.shape, tuple(shard._replace(local=name) for shard in buffer.shards))


def sglang_layout(
    architecture: ModelArchitecture,
    tensor_parallel: int,
    dtype: torch.dtype,
    num_engines: int = 1,
    *,
    expert_parallel: int = 1,
    device: str = "cuda",
) -> SglangLayout:
    """Return the layout of `num_engines` engines of `tensor_parallel` ranks each, all parameters in `dtype`.

    `device` of the engine is "cuda" or "cpu", on which SGLang pads differently. Raises ValueError if the engine would
    refuse the sizes.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"engine device {device!r}: choose one of cuda, cpu")
    if tensor_parallel < 1 or num_engines < 1:
        raise ValueError(f"engines: {num_engines} of {tensor_parallel} ranks; both must be at least 1")
    _check_experts(architecture, tensor_parallel, expert_parallel)
    if architecture.serving.whole_embedding and not architecture.tie_word_embeddings:
        raise ValueError(
            f"tie_word_embeddings is false, but SGLang computes the logits of a {architecture.model_type} with its embedding; "
            "it cannot serve this model"
        )
    cut = EngineCut(tensor_parallel, expert_parallel, device == "cpu")
    _check_divisible(architecture, cut)
    return SglangLayout(architecture, tensor_parallel, expert_parallel, dtype, num_engines, cut.pads)


def _padded_vocabulary(architecture: ModelArchitecture, cut: EngineCut) -> int:
    """Return the rows of the embedding over all ranks of an engine."""
    vocabulary = round_up(architecture.vocab_size, VOCABULARY_MULTIPLE)
    if cut.pads and vocabulary % cut.tensor:
        return round_up(architecture.vocab_size, VOCABULARY_MULTIPLE * cut.tensor)
    return vocabulary


def _check_divisible(architecture: ModelArchitecture, cut: EngineCut) -> None:
    for part in (part for parts in architecture.kinds_of_layers for part in parts):
        placements = list(part.sglang(cut))
        check_cut("engine tensor", cut.tensor, placements, "SGLang")
        for experts in placements:
            if isinstance(experts, StackedExperts):
                check_divides("engine expert", cut.expert, "num_experts", experts.num_experts)
                check_divides("engine tensor", cut.tensor // cut.expert, "moe_intermediate_size", experts.inner)
    check_divides("engine tensor", cut.tensor, "the padded vocabulary", _padded_vocabulary(architecture, cut))


def _check_experts(architecture: ModelArchitecture, tensor_parallel: int, expert_parallel: int) -> None:
    if expert_parallel < 1 or tensor_parallel % expert_parallel:
        raise ValueError(
            f"engine expert parallel size {expert_parallel} does not divide its tensor parallel size "
            f"{tensor_parallel}; choose a divisor"
        )
    if architecture.experts is not None and architecture.has_dense_layers and not architecture.serving.dense_layers:
        dense = architecture.num_layers - len(architecture.experts.layers)
        raise ValueError(
            f"{dense} of {architecture.num_layers} layers have no experts (mlp_only_layers, decoder_sparse_step), but "
            f"SGLang builds every layer of a {architecture.model_type} with experts; it cannot serve this model"
        )
    if expert_parallel > 1 and not architecture.serving.expert_parallel:
        raise ValueError(
            f"engine expert parallel size {expert_parallel}: SGLang gives each rank all experts of a {architecture.model_type} "
            "that is not quantized; set sglang.ep_size = 1"
        )
    if expert_parallel > 1 and architecture.experts is None:
        raise ValueError(f"engine expert parallel size {expert_parallel} needs a mixture-of-experts model")
