"""Steps of a critic that is offloaded between its phases, or whose optimizer is on the host, against one that never is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from actor_checks import differing, largest_over_ranks, take_over
from critic_checks import CriticReference, layout_of, of_rank, settings_of, snapshot, train

from megatron_dapo.megatron import optimizer
from megatron_dapo.megatron.critic import MegatronCritic
from megatron_dapo.megatron.state import owned_shards

SEEDS = (10, 11, 12)
PIECE_ELEMENTS = 1 << 12  # several pieces in a step
BYTES_EACH = 12  # main param and two moments


def offload(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Worker: the findings of each case, the worst over ranks."""
    return [_case(CriticReference.read(arguments["references"], case["model"]), case) for case in arguments["cases"]]


def _case(want: CriticReference, case: dict[str, Any]) -> dict[str, Any]:
    settings, layout = settings_of(case), layout_of(case)
    plain = MegatronCritic.build(want.directory, layout, settings)
    optimizer.PIECE_ELEMENTS = PIECE_ELEMENTS
    on_host = settings.optimizer.model_copy(update={"on_host": case.get("on_host", False)})
    changed = replace(settings, offload=case["offload"], optimizer=on_host)
    offloaded = MegatronCritic.build(want.directory, layout, changed)
    same_values, history = True, []
    held: list[torch.Tensor] = []
    at_once = _count_bytes_at_once(offloaded, held)
    for seed in SEEDS:
        offloaded.offload()
        same_values = same_values and _same(_values(plain, seed), _values(offloaded, seed))
        offloaded.offload()
        held[:] = offloaded._tensors("optimizer")
        history.append(train(plain, [seed]) == train(offloaded, [seed]))
    offloaded.offload()
    left = [kind for kind in ("gradients", "optimizer", "weights") if _bytes(offloaded, kind)]
    saved = snapshot(offloaded)
    num_saved_otherwise = len(differing(snapshot(plain), saved))
    still_away = not _bytes(offloaded, "optimizer")
    again = MegatronCritic.build(want.directory, layout, changed)
    again.offload()
    take_over(again, saved)
    resumed = [train(model, [13]) for model in (plain, again, offloaded)]
    parameters = offloaded.named_local_parameters()
    counts = {
        "saved": num_saved_otherwise,
        "differing": len(differing(snapshot(plain), snapshot(offloaded))),
        "resumed": len(differing(snapshot(plain), snapshot(again))),
        "moved": offloaded.moved.offloaded,
        "at_once": max(at_once),
        "allowed": BYTES_EACH
        * max(PIECE_ELEMENTS, *(shard.main.numel() for shard in owned_shards(parameters, offloaded.optimizer))),
    }
    return {
        **largest_over_ranks(counts),
        "history": all(history) and resumed[0] == resumed[1] == resumed[2],
        "values": same_values,
        "left": left,
        "still_away": still_away,
    }


def _count_bytes_at_once(model: MegatronCritic, tensors: list[torch.Tensor]) -> list[int]:
    """Return a list that gets the bytes of `tensors` that are on the device after each onloading."""
    found, host = [0], model._host
    onload = host.onload

    def counted(moving: Iterable[torch.Tensor]) -> None:
        onload(moving)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))

    host.onload = counted  # type: ignore[method-assign]
    return found


def _values(model: MegatronCritic, seed: int) -> list[torch.Tensor | None]:
    return model.forward_values(of_rank(model.layout, seed))


def _same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _bytes(model: MegatronCritic, kind: str) -> int:
    """Return the bytes on the device; a view's own size is that of onloaded memory."""
    return sum(tensor.untyped_storage().nbytes() for tensor in model._tensors(kind))
