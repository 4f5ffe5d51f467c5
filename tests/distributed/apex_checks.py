"""Program of test_apex.py: python apex_checks.py MODE OUTPUT, MODE one of torch, installed (apex before megatron-core is
imported), requested (by the recipe, in a process that had none; with the optimizer on the host)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STAND_IN = str(Path(__file__).parent / "apex_stand_in")
NUM_STEPS = 3


def main(mode: str, output: Path) -> None:
    if mode == "installed":
        sys.path.append(STAND_IN)
    import torch
    import torch.distributed as dist

    from megatron_dapo.config.model_schema import OptimizerConfig
    from megatron_dapo.megatron import optimizer
    from megatron_dapo.megatron.actor import ActorSettings
    from megatron_dapo.megatron.implementations import implementations
    from megatron_dapo.megatron.model_config import ModelSettings
    from megatron_dapo.parallel.layout import ParallelLayout

    if mode == "requested":
        sys.path.append(STAND_IN)
    optimizer.PIECE_ELEMENTS = 1 << 12  # several pieces in a step
    from actor_checks import (
        LEARNING_RATE,
        TEMPERATURE,
        Reference,
        build_actor,
        differing,
        loss_fn,
        ragged_batch,
        snapshot,
    )
    from state_checks import NAME, save

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    want, layout = Reference.read(str(output.parent), "qwen2"), ParallelLayout(1)
    settings = ActorSettings(
        model=ModelSettings(megatron={"gradient_accumulation_fusion": True} if mode == "installed" else {}),
        optimizer=OptimizerConfig(
            implementation="apex" if mode == "requested" else "auto",
            weight_decay=0.1,
            clip_grad=0.5,
            on_host=mode == "requested",
        ),
    )
    actor = build_actor(want, layout, settings)
    micro_batches = [micro_batch for _, micro_batch in ragged_batch().of_rank(layout, 0)]

    def step(model: Any) -> tuple[float, float]:
        result = model.train_step(micro_batches, loss_fn, TEMPERATURE, LEARNING_RATE)
        assert result.applied
        return result.metrics["loss"], result.grad_norm

    history = [step(actor) for _ in range(NUM_STEPS - 1)]
    save(actor, output.with_suffix(""))
    history.append(step(actor))
    resumed = build_actor(want, layout, settings)
    resumed.saved_state.load(output.with_suffix(""), NAME)
    again = step(resumed)
    tensors = actor.state_shards()
    calls = [sys.modules[name].CALLS for name in ("amp_C", "fused_weight_gradient_mlp_cuda") if name in sys.modules]
    torch.save({name: tensor for name, tensor in tensors.items() if name.startswith("parameter/")}, output)
    rows = {row.op: row.name for row in implementations(actor.config)}
    print(
        json.dumps(
            {
                "history": history,
                "resumed": again,
                "differing": differing(snapshot(actor), snapshot(resumed)),
                "calls": calls,
                "rows": rows,
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
