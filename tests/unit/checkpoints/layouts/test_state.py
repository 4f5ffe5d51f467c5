"""Training state saved under one layout and loaded under another, ranks simulated by buffers of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch

from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.state import StateLayout
from megatron_dapo.models.architecture import TOKEN_VALUE, ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Shard, shard_view, slice_view
from megatron_dapo.reshard.reading import Needs, ReadPlan, StoredSlice
from tests.examples import first

DENSE = {
    "model_type": "qwen2",
    "vocab_size": 301,  # padded under every layout
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def architecture(name: str) -> ModelArchitecture:
    if name == "experts":
        return parse_architecture(EXPERTS)
    found = parse_architecture({**DENSE, "tie_word_embeddings": name == "tied"})
    return replace(found, head=TOKEN_VALUE) if name == "critic" else found


def parallel_layouts(name: str) -> list[ParallelLayout]:
    """All layouts of up to 8 ranks that the model allows."""
    found = []
    for world, tensor, pipeline, virtual, context, expert in product(
        (1, 2, 3, 4, 6, 8), (1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4) if name == "experts" else (1,)
    ):
        try:
            layout = ParallelLayout(
                world,
                tensor=tensor,
                pipeline=pipeline,
                virtual_pipeline=virtual,
                context=context,
                expert=expert,
                expert_tensor=1 if expert > 1 else None,
            )
            megatron_layout(architecture(name), layout, torch.float32)
        except ValueError:
            continue
        found.append(layout)
    return found


def state_layout(name: str, parallel: ParallelLayout, distributed: bool) -> StateLayout:
    return StateLayout(megatron_layout(architecture(name), parallel, torch.float32), distributed)


def global_tensors(layout: StateLayout) -> dict[str, torch.Tensor]:
    """Every element of the model is another number."""
    found, start = {}, 1
    for name, spec in layout.weights.tensors.items():
        found[name] = torch.arange(start, start + spec.num_elements, dtype=torch.int64).view(spec.shape)
        start += spec.num_elements
    return found


def rank_buffers(layout: StateLayout, rank: int, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Local parameters of a rank, padding 0, made without the layout of the state."""
    buffers = {
        local: torch.zeros(shape, dtype=torch.int64) for local, shape in layout.weights.local_shapes(rank).items()
    }
    for shard in layout.weights.shards(rank):
        shard_view(buffers[shard.local], shard).copy_(slice_view(full[shard.tensor], shard.bounds))
    return buffers


def flat_part(buffers: Mapping[str, torch.Tensor], shard: Shard) -> torch.Tensor:
    return buffers[shard.local].view(-1)[shard.local_offset[0] :][: prod(shard.shape)].view(shard.shape)


def save(layout: StateLayout, full: Mapping[str, torch.Tensor]) -> dict[StoredSlice, torch.Tensor]:
    stored = {}
    for rank in range(layout.num_ranks):
        buffers = rank_buffers(layout, rank, full)
        for shard in layout.saved(rank):
            place = StoredSlice(shard.tensor, shard.bounds, f"{rank}")
            assert place not in stored
            stored[place] = flat_part(buffers, shard).clone()
    return stored


def needs_of(layout: StateLayout, of_weights: bool) -> Needs:
    """Return what ranks need: whole local parameters, or what their optimizers update."""
    needs: dict[str, list[tuple[tuple[int, ...], Shard]]] = {}
    for rank in range(layout.num_ranks):
        for shard in layout.weights.shards(rank) if of_weights else layout.updated(rank):
            needs.setdefault(shard.tensor, []).append(((rank,), shard))
    return needs


def load(
    layout: StateLayout, stored: Mapping[StoredSlice, torch.Tensor], of_weights: bool
) -> Iterator[tuple[int, dict[str, torch.Tensor], int]]:
    """Yield (rank, its filled buffers, elements it read) for the parameters of each rank, or for its optimizer's part."""
    needs = needs_of(layout, of_weights)
    slices = sorted(stored, key=lambda stored: (stored.tensor, stored.bounds))
    # Whoever updates an element reads it, of all kinds.
    plan = ReadPlan(slices, needs_of(layout, of_weights=False), layout.num_ranks, round_elements=500)
    for rank in range(layout.num_ranks):
        shapes = layout.weights.local_shapes(rank)
        buffers = {local: torch.zeros(shape, dtype=torch.int64) for local, shape in shapes.items()}
        mine = {tensor: [shard for ranks, shard in found if rank in ranks] for tensor, found in needs.items()}
        num_read = 0
        for indices in plan.rounds:
            num_read += sum(slices[index].bounds.volume for index in plan.read_by(rank, indices))
            received = plan.receives(rank, indices, mine)
            # Sender and receiver list the same transfers in the same order.
            for source in range(layout.num_ranks):
                sent = [each for each in plan.sends(source, indices, needs) if each.destination == rank]
                assert sent == [each for each in received if each.source == source]
            for transfer in received:
                values = shard_view(
                    stored[slices[int(transfer.source_shard.local)]].view(-1), transfer.source_shard, transfer.bounds
                )
                shard_view(
                    buffers[transfer.destination_shard.local], transfer.destination_shard, transfer.bounds
                ).copy_(values)
        yield rank, buffers, num_read


def pairs() -> list[tuple[str, ParallelLayout, bool, ParallelLayout, bool]]:
    chosen = random.Random(0)
    found = []
    for name in ("dense", "tied", "experts", "critic"):
        layouts = parallel_layouts(name)
        for _ in range(20):
            first, second = chosen.choice(layouts), chosen.choice(layouts)
            found.append((name, first, chosen.random() < 0.7, second, chosen.random() < 0.7))
    return found


def test_pairs_are_of_many_sizes_and_kinds_of_layouts() -> None:
    chosen = pairs()
    sizes = {(first.world_size, second.world_size) for _, first, _, second, _ in chosen}
    assert len(chosen) >= 60 and len(sizes) >= 15 and {size for pair in sizes for size in pair} >= {1, 2, 4, 6, 8}
    layouts = [layout for _, first, _, second, _ in chosen for layout in (first, second)]
    for field in ("tensor", "pipeline", "context", "expert"):
        assert max(getattr(layout, field) for layout in layouts) > 1, field
    assert any((layout.virtual_pipeline or 1) > 1 for layout in layouts)


@pytest.mark.parametrize(
    ("name", "saved_by", "is_cut", "loaded_by", "is_cut_again"),
    [case for start in range(0, 80, 20) for case in first(5, pairs()[start : start + 20])],
    ids=lambda value: value.describe() if isinstance(value, ParallelLayout) else str(value),
)
def test_every_element_is_saved_once_and_loaded_where_it_belongs(
    name: str, saved_by: ParallelLayout, is_cut: bool, loaded_by: ParallelLayout, is_cut_again: bool
) -> None:
    source, target = state_layout(name, saved_by, is_cut), state_layout(name, loaded_by, is_cut_again)
    full = global_tensors(source)
    stored = save(source, full)
    assert sum(values.numel() for values in stored.values()) == sum(each.numel() for each in full.values())
    for rank, buffers, _ in load(target, stored, of_weights=True):
        expected = rank_buffers(target, rank, full)
        assert all(torch.equal(buffers[local], values) for local, values in expected.items()), rank
    total = 0
    for rank, buffers, num_read in load(target, stored, of_weights=False):
        expected = rank_buffers(target, rank, full)
        for local, (start, end) in target.ranges(rank).items():
            assert torch.equal(buffers[local].view(-1)[start:end], expected[local].view(-1)[start:end]), (rank, local)
        total += num_read
    assert total == sum(each.numel() for each in full.values())
