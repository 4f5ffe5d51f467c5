"""What windows save on clusters and engines of several sizes, and whether contexts fit, for the same 8,192 responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tppo.engines import GPUS, Roofline, stored_curves
from tppo.simulation import Setting, rollouts, simulate

NUM_GPUS = (128, 256, 512, 1024)
GPUS_AN_ENGINE = (2, 4, 8)
PUBLISHED = "published"  # engines of two H100


@dataclass(frozen=True)
class Cluster:
    """`num_gpus` of one kind, `gpus_an_engine` of them for every engine."""

    gpu: str
    num_gpus: int
    gpus_an_engine: int

    @property
    def roofline(self) -> Roofline:
        return Roofline(gpu=GPUS[self.gpu], gpus=self.gpus_an_engine)

    def setting(self, base: Setting) -> Setting:
        """`base` on the engines of this cluster, computed."""
        engine = self.roofline
        per_engine = base.num_responses * self.gpus_an_engine // self.num_gpus
        return replace(base, curve=engine.curve(), context_cost=engine.context_cost, per_engine=per_engine)


def peak_context(new_tokens: torch.Tensor, context: torch.Tensor, per_engine: int) -> int:
    """The most tokens any engine keeps at once, of responses with `new_tokens` [N] after `context` [N].

    Just before the k-th shortest ends, it and the longer ones each have their context and its number of new tokens.
    """
    ordered, order = new_tokens.view(-1, per_engine).sort(dim=1)
    behind = context.view(-1, per_engine).gather(1, order).flip(1).cumsum(1).flip(1)
    running = torch.arange(per_engine, 0, -1)
    return int((ordered * running + behind).max())


def cluster_row(cluster: Cluster, base: Setting) -> dict[str, Any]:
    """Figures of one cluster; `published_speedup` if its engine's curve is published."""
    setting = cluster.setting(base)
    found = simulate(setting)
    peak = max(peak_context(new, context, setting.per_engine) for new, context in rollouts(setting))
    row = {
        "gpu": cluster.gpu,
        "gpus": cluster.num_gpus,
        "gpus_an_engine": cluster.gpus_an_engine,
        "responses_an_engine": setting.per_engine,
        **{name: value for name, value in found.items() if name.startswith("speedup")},
        "peak_context_tokens": peak,
        "context_room_tokens": round(cluster.roofline.context_room),
        "is_room_enough": peak <= cluster.roofline.context_room,
    }
    curves = stored_curves()
    if PUBLISHED in curves and (cluster.gpu, cluster.gpus_an_engine) == ("H100", 2):
        published = replace(setting, curve=curves[PUBLISHED], context_cost=0.0)
        row["published_speedup"] = simulate(published)["speedup"]
    return row


def cluster_table(base: Setting) -> Sequence[dict[str, Any]]:
    """Every kind, number and cut."""
    clusters = (Cluster(gpu, num, cut) for gpu in GPUS for num in NUM_GPUS for cut in GPUS_AN_ENGINE)
    return [cluster_row(cluster, base) for cluster in clusters]
