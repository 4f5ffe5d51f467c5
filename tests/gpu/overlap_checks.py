"""Program of test_overlap.py, one of two ranks: torchrun --nproc-per-node 2 overlap_checks.py. Prints how log-probs and gradients with
overlapped tensor-parallel communication differ from those without.

On a CPU, where nothing can be overlapped, both models are the same but for the padding of their micro-batches.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "distributed")]

from actor_checks import TEMPERATURE, build_actor, loss_fn, ragged_batch  # noqa: E402
from fp8_checks import wide_model  # noqa: E402

from megatron_dapo.megatron.actor import ActorSettings, MegatronActor  # noqa: E402
from megatron_dapo.megatron.model_config import ModelSettings  # noqa: E402
from megatron_dapo.megatron.tensor_overlap import overlapped_tokens  # noqa: E402
from megatron_dapo.parallel.layout import ParallelLayout  # noqa: E402
from megatron_dapo.parallel.packing import to_device  # noqa: E402

SIZES = {
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
}


def results(actor: MegatronActor, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probs of all trained tokens and this rank's gradients."""
    micro_batches = [to_device(one, device) for _, one in ragged_batch().of_rank(actor.layout, actor.rank)]
    outputs = actor.forward_logprobs(micro_batches, TEMPERATURE)
    masks = [one.loss_mask.bool() for one in micro_batches]
    logprobs = torch.cat([one.logprobs[mask] for one, mask in zip(outputs, masks, strict=True) if one is not None])
    actor.accumulate_gradients(micro_batches, loss_fn, TEMPERATURE)
    return logprobs.float(), {name: one.float().clone() for name, one in actor.gradients().items()}


def main() -> None:
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    layout = ParallelLayout(2, tensor=2, sequence_parallel=True)
    plain = ActorSettings(model=ModelSettings(dtype="bfloat16"))
    options = {"tp_comm_overlap": is_cuda}
    tokens = overlapped_tokens(256, layout)
    overlapped = replace(plain, model=replace(plain.model, megatron=options), fixed_tokens=tokens)
    want = wide_model(**SIZES)
    found = [results(build_actor(want, layout, each), "cuda" if is_cuda else "cpu") for each in (plain, overlapped)]
    (right, right_gradients), (ours, gradients) = found
    worst = max(
        float((gradients[name] - one).norm() / one.norm()) for name, one in right_gradients.items() if float(one.norm())
    )
    report = {"logprob": float((ours - right).abs().mean()), "gradient": worst, "num_tokens": ours.numel()}
    everyone = [None, None]
    dist.all_gather_object(everyone, report)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
