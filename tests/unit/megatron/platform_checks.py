"""Applies every patch of the CPU platform but one, sees that megatron-core fails, applies that one too, sees it work.

Run as a script in a fresh process, because patches are process-wide. Prints JSON: patch -> [error without it, error
with all], "" meaning none.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.megatron.platform import PATCHES, Replacement


def rotary() -> None:
    RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)(4)


def exchange_lengths() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    communicator = P2PCommunicator(dist.group.WORLD, config)
    assert communicator._communicate_shapes(None, None, False, False) == ([0, 0, 0], [0, 0, 0])


def gradient_norm() -> None:
    assert abs(get_grad_norm_fp32([torch.tensor([3.0, 4.0])], grad_stats_parallel_group=dist.group.WORLD) - 5.0) < 1e-6


def clip() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8]))
    assert parameter.type() == "torch.FloatTensor", "the lie must stay inside megatron-core's optimizers"


def tied_output_weight() -> None:
    # The statement of language_module.py:244, run as that module would run it.
    space = {"__name__": "megatron.core.models.common.language_module.language_module", "weight": torch.ones(2)}
    exec("weight.data = weight.data.cuda()", space)
    try:
        torch.ones(2).cuda()
    except (AssertionError, RuntimeError):
        return
    raise AssertionError("tensor.cuda() outside megatron-core must still fail")


def recompute_with_dropout() -> None:
    random.model_parallel_cuda_manual_seed(3, force_reset_rng=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with random.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x, 0.5) * x

    state = torch.get_rng_state()
    x = torch.ones(64, requires_grad=True)
    y = random.checkpoint(dropped, False, x)
    y.sum().backward()
    # With the same mask in both passes the gradient is twice the output (y = m x^2 at x = 1).
    assert torch.equal(x.grad, 2 * y.detach()) and 0 < int((y == 0).sum()) < 64
    assert torch.equal(state, torch.get_rng_state()), "the fork must leave the generator as it was"


def quiet() -> None:
    random.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    with mock.patch.object(logging.getLogger("megatron.core.tensor_parallel.random"), "warning") as warning:
        with random.get_cuda_rng_tracker().fork():
            torch.rand(1)
    assert not warning.called, "the tracker warned"


def dispatcher() -> MoEAlltoAllTokenDispatcher:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_ffn_hidden_size=8,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
    )
    return MoEAlltoAllTokenDispatcher(2, [0, 1], config, get_default_pg_collection())


def dispatch() -> None:
    made, tokens = dispatcher(), torch.arange(24.0).view(3, 8)
    weights = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]])
    sorted_tokens, _ = made.dispatch_preprocess(tokens, weights > 0, weights)
    assert torch.equal(sorted_tokens, tokens[[0, 2, 0, 1]]), "tokens of the first expert come first"


def exchange_tokens() -> None:
    made = dispatcher()
    made.input_splits = made.output_splits = torch.tensor([3])
    made.num_global_tokens_per_local_expert = made.num_out_tokens = None
    made._maybe_dtoh_and_synchronize(made.cuda_dtoh_point, torch.tensor([1, 2]))
    received, sent = torch.zeros(3), torch.arange(3.0)
    dist.all_to_all_single(received, sent, made.output_splits, made.input_splits)
    assert torch.equal(received, sent)


BEHAVIORS: dict[str, Callable[[], None]] = {
    "current_device": rotary,
    "synchronize": exchange_lengths,
    "literal_devices": gradient_norm,
    "tensor_type_names": clip,
    "moves_to_cuda": tied_output_weight,
    "random_states": recompute_with_dropout,
    "quiet_fork": quiet,
    "streams": dispatch,
    "dispatcher_counts": exchange_tokens,
}


def attempt(behavior: Callable[[], None], patches: list[tuple[Replacement, ...]]) -> str:
    """The error of `behavior` under these patches, "" for none; the patches are undone."""
    undo: list[Replacement] = []
    try:
        for patch in patches:
            for new in patch:
                undo.append(Replacement(new.owner, new.name, getattr(new.owner, new.name)))
                setattr(new.owner, new.name, new.value)
        behavior()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for old in reversed(undo):
            setattr(old.owner, old.name, old.value)


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    results = {}
    for name in BEHAVIORS:
        others = [patch() for other, patch in PATCHES.items() if other != name]
        without = attempt(BEHAVIORS[name], others)
        complete = attempt(BEHAVIORS[name], [patch() for patch in PATCHES.values()])
        results[name] = [without, complete]
    print(json.dumps(results))
    dist.destroy_process_group()  # its threads would abort an interpreter that exits


if __name__ == "__main__":
    main()
