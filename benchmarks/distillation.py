"""Distillation over the whole vocabulary: its gradients under parallel layouts, and its memory against the logits.

    python benchmarks/distillation.py [--json] [--tiny] [--tokens 1024] [--width 1024] [--vocab 151936]

gradient_error   relative difference of the gradient, all tensors as one vector, from plain transformers in fp64: the largest over
                 TP2, PP2 and CP2 and the three divergences. An fp32 student of 4 layers, two teachers of other sizes and
                 padding, a ragged batch that each teaches a part, one of them after a longer prompt. worst_tensor_error is that of the worst tensor
memory_ratio     peak memory of the divergence, forward and backward, over that from both models' logits, worst of the three:
                 a process's high-water mark beyond inputs and gradients
time_ratio       CPU seconds of the same, forward / backward in tiles over logits, of the reverse divergence

Each side of the memory is a fresh process of one thread, as in head_memory.py. The logits' side is log_softmax of both
models and autograd, with in-place operations where autograd allows them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import head_memory
import options
import torch

from megatron_dapo.ops.distillation import DIVERGENCES, vocab_parallel_distillation

LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "cp2": {"context": 2}}
BETA = 0.3
TEMPERATURE = 0.9
# The sources of the batch's groups, and the model and weight that teach them.
SOURCES = ("sums", "words", "sums", "code")
TEACHERS = (
    {"name": "wide", "sources": ["sums"], "weight": 0.5},
    {"name": "deep", "sources": ["words"], "prompt": "{prompt} {answer}"},
)
SIZES = {
    "wide": {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 300},
    "deep": {"hidden_size": 16, "num_hidden_layers": 6, "vocab_size": 203},
}


# ---- gradients


def plain(logits: torch.Tensor, teacher: torch.Tensor, divergence: str) -> torch.Tensor:
    """The divergence of each token from both models' logits, by its definition."""
    log_s, log_p = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    if divergence == "forward":
        return (log_p.exp() * (log_p - log_s)).sum(-1)
    if divergence == "reverse":
        return (log_s.exp() * (log_s - log_p)).sum(-1)
    mixture = (BETA * log_p.exp() + (1 - BETA) * log_s.exp()).log()
    of_teacher = (log_p.exp() * (log_p - mixture)).sum(-1)
    return BETA * of_teacher + (1 - BETA) * (log_s.exp() * (log_s - mixture)).sum(-1)


def make_models(directory: Path) -> dict[str, Any]:
    """Write a student and the teachers as Hugging Face directories; return them in fp64."""
    import transformers

    from megatron_dapo.proof.oracle import MODEL_FIELDS, in_fp64, with_random_weights

    models = {}
    for seed, name in enumerate(("student", *SIZES)):
        fields = {**MODEL_FIELDS, **SIZES.get(name, {})}
        model = with_random_weights(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields)), seed)
        model.save_pretrained(directory / name)
        models[name] = in_fp64(model)
    return models


def batch() -> tuple[list[Any], list[float]]:
    """Return the samples with their sources, and the weight of each sample's tokens."""
    from megatron_dapo.proof.cases import make_batch
    from megatron_dapo.trainer.updater import loss_weights

    samples = [replace(one, source=SOURCES[one.group_index]) for one in make_batch(203).samples]
    generator = torch.Generator().manual_seed(1)
    for index, sample in enumerate(samples):
        length = int(torch.randint(1, 30, (), generator=generator))
        prompt = torch.randint(0, 203, (length,), generator=generator, dtype=torch.int32)
        if sample.source in TEACHERS[1]["sources"]:
            samples[index] = replace(sample, teacher_prompts=torch.cat((torch.tensor([length], dtype=torch.int32), prompt)))
    return samples, loss_weights(samples, "token_mean")


def read_by(teacher: Mapping[str, Any], sample: Any) -> torch.Tensor:
    """The tokens that a teacher reads."""
    response = sample.tokens[sample.prompt_length :]
    return torch.cat((sample.teacher_prompts[1:], response)) if "prompt" in teacher else sample.tokens


def right_gradients(models: Mapping[str, Any], divergence: str) -> dict[str, torch.Tensor]:
    """Gradients of the batch's loss by Hugging Face name, one sequence at a time."""
    samples, weights = batch()
    names, parameters = zip(*models["student"].named_parameters(), strict=True)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for sample, weight in zip(samples, weights, strict=True):
        for teacher in TEACHERS:
            if sample.source not in teacher["sources"] or not sample.loss_mask.any():
                continue
            read, first = read_by(teacher, sample), -1 - sample.num_response_tokens
            logits, theirs = (
                model(tokens[None]).logits[0, first:-1, :203] / TEMPERATURE
                for model, tokens in ((models["student"], sample.tokens), (models[teacher["name"]], read))
            )
            losses = plain(logits, theirs.detach(), divergence) * sample.loss_mask.double()
            loss = weight * teacher.get("weight", 1.0) * losses.sum()
            for one, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                one += gradient
    return dict(zip(names, total, strict=True))


def layout_errors(rank: int, directory: str, port: int) -> None:
    """One of two processes: compare the gradients of every layout and divergence; rank 0 writes the differences."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron_dapo.megatron.parallel_state import initialize_process_group

    initialize_process_group(600.0)
    errors = {
        f"{name} {divergence}": _layout_error(
            name, divergence, Path(directory), load_file(Path(directory) / f"{divergence}.safetensors")
        )
        for name in LAYOUTS
        for divergence in DIVERGENCES
    }
    if rank == 0:
        (Path(directory) / "errors.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


def _layout_error(name: str, divergence: str, directory: Path, right: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return the difference of the whole gradient and that of its worst tensor."""
    from megatron_dapo.config.loader import config_from_dict
    from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
    from megatron_dapo.parallel.layout import ParallelLayout
    from megatron_dapo.parallel.mini_batch import build_micro_batches
    from megatron_dapo.parallel.packing import MicroBatchLimits
    from megatron_dapo.proof.worker import compare_gradients
    from megatron_dapo.trainer.distillation import Teachers
    from megatron_dapo.trainer.offload import DeviceModels
    from megatron_dapo.trainer.recorder import Phases

    layout = ParallelLayout(2, **LAYOUTS[name])
    section = {"teachers": list(TEACHERS), "divergence": divergence, "beta": BETA}
    data, rollout = {"train_paths": ["rows.jsonl"]}, {"temperature": TEMPERATURE}
    config = config_from_dict({"model": {"path": "student"}, "data": data, "rollout": rollout, "distillation": section})
    actor = MegatronActor.build(directory / "student", layout, ActorSettings(keeps_head_input=True))
    frozen = ActorSettings(is_frozen=True)
    models = {one: MegatronActor.build(directory / one, layout, frozen, [actor]) for one in SIZES}
    teachers = Teachers(config, models, actor, DeviceModels({}, Phases()))
    samples, weights = batch()
    data_rank = layout.coordinates(actor.rank).data
    micro_batches = build_micro_batches(samples, weights, layout, data_rank, MicroBatchLimits(max_tokens=160))
    by_id = {sample.sample_id: sample for sample in samples}
    lessons = teachers.teach(micro_batches, by_id)

    def loss(micro_batch: Any, outputs: Any, index: int) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        distilled, sums = teachers.loss(outputs.head, micro_batch, by_id, lessons[index])
        return (distilled * micro_batch.loss_weights * micro_batch.loss_mask).sum(), sums

    metrics = actor.accumulate_gradients(micro_batches, loss, TEMPERATURE)
    taught = sum(float(one.loss_mask.sum()) for one in samples if one.source != SOURCES[-1])
    counted = sum(metrics[f"distillation/teacher/{one}_tokens"] for one in SIZES)
    assert counted == taught, f"{counted} tokens were taught, the batch has {taught}"
    difference = compare_gradients(actor.gradients(), actor.tensors, actor.rank, right)
    return difference.overall, difference.relative


def gradient_errors() -> dict[str, tuple[float, float]]:
    """Differences of the whole gradient and of its worst tensor by layout and divergence."""
    import socket

    import torch.multiprocessing as multiprocessing
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        models = make_models(Path(name))
        for divergence in DIVERGENCES:
            save_file(right_gradients(models, divergence), Path(name) / f"{divergence}.safetensors")
        multiprocessing.spawn(layout_errors, (name, port), nprocs=2)
        errors: dict[str, tuple[float, float]] = json.loads((Path(name) / "errors.json").read_text())
        return errors


# ---- memory


def from_logits(hidden: torch.Tensor, weight: torch.Tensor, teacher: Sequence[torch.Tensor], divergence: str) -> torch.Tensor:
    log_s = torch.log_softmax(hidden @ weight.t(), -1)
    with torch.no_grad():
        log_p = torch.log_softmax(teacher[0] @ teacher[1].t(), -1)
    if divergence == "forward":
        return (log_p.exp() * (log_p - log_s)).sum(-1)
    if divergence == "reverse":
        return (log_s.exp() * (log_s - log_p)).sum(-1)
    mixture = (0.5 * (log_p.exp() + log_s.exp())).log()
    return 0.5 * ((log_p.exp() * (log_p - mixture)).sum(-1) + (log_s.exp() * (log_s - mixture)).sum(-1))


def in_tiles(hidden: torch.Tensor, weight: torch.Tensor, teacher: Sequence[torch.Tensor], divergence: str) -> torch.Tensor:
    return vocab_parallel_distillation(hidden, weight, *teacher, vocab_size=weight.size(0), divergence=divergence)


SIDES = {
    f"{side} {divergence}": partial(function, divergence=divergence)
    for side, function in (("tiles", in_tiles), ("logits", from_logits))
    for divergence in DIVERGENCES
}


def run_side(side: str, num_tokens: int, width: int, vocab_size: int) -> dict[str, float]:
    """Run one forward and backward pass in this process, after a tiny one that loads everything lazy."""
    import time

    torch.set_num_threads(1)
    for shape in ((4, 8, 16), (num_tokens, width, vocab_size)):
        hidden, weight, _ = head_memory._inputs(*shape)
        generator = torch.Generator().manual_seed(1)
        teacher = hidden.detach().clone(), weight.detach().clone().add_(0.01 * torch.randn(shape[2], 1, generator=generator))
        before, start = head_memory.status_bytes("VmRSS"), time.process_time()
        loss = SIDES[side](hidden, weight, teacher).mean()
        loss.backward()
        seconds = time.process_time() - start
    gradients = sum(one.grad.numel() * one.grad.element_size() for one in (hidden, weight) if one.grad is not None)
    extra = max(0, head_memory.status_bytes("VmHWM") - before - gradients)
    return {"extra_bytes": extra, "cpu_seconds": seconds, "loss": float(loss.detach()), "norm": float(hidden.grad.norm())}


def memory(shape: Sequence[int]) -> dict[str, dict[str, float]]:
    """The run of each side in a process."""
    rows = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side]
        command += [part for name, size in zip(("tokens", "width", "vocab"), shape) for part in (f"--{name}", str(size))]
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=head_memory._environment()).stdout
        rows[side] = json.loads(output)
    for divergence in DIVERGENCES:
        ours, theirs = rows[f"tiles {divergence}"], rows[f"logits {divergence}"]
        for name in ("loss", "norm"):
            if abs(ours[name] - theirs[name]) > 1e-3 * abs(theirs[name]) + 1e-6:
                raise ValueError(f"the sides do not compute the same {divergence}: {ours} against {theirs}")
    return rows


def main() -> None:
    parser = options.parser(__doc__, "64 tokens and 2,048 words")
    for name, size in (("tokens", 1024), ("width", 1024), ("vocab", 151_936)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--side", choices=list(SIDES), help="one side of the memory, in this process")
    arguments = parser.parse_args()
    shape = (64, 32, 2048) if arguments.tiny else (arguments.tokens, arguments.width, arguments.vocab)
    if arguments.side:
        print(json.dumps(run_side(arguments.side, *shape)))
        return
    errors, rows = gradient_errors(), memory(shape)
    ratios = {one: rows[f"tiles {one}"]["extra_bytes"] / rows[f"logits {one}"]["extra_bytes"] for one in DIVERGENCES}
    times = {one: rows[f"tiles {one}"]["cpu_seconds"] / rows[f"logits {one}"]["cpu_seconds"] for one in DIVERGENCES}
    result = {
        "benchmark": "distillation",
        "gradient_error": max(overall for overall, _ in errors.values()),
        "worst_tensor_error": max(worst for _, worst in errors.values()),
        "memory_ratio": max(ratios.values()),
        "time_ratio": times["reverse"],
        "gradient_errors": errors,
        "memory_ratios": ratios,
        "time_ratios": times,
        "shape": list(shape),
        "sides": rows,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
