"""What a student of 0.1 B parameters learns of its teacher's distribution: the whole vocabulary against the teacher's top 32.

    python benchmarks/distillation_learning.py [--json] [--tiny] [--on-policy] [--model runs/models/smollm2] [--steps 10] [--seeds 3]

The teacher is SmolLM2-135M-Instruct (49,152 words; `make runs/models/smollm2` writes it), the student the same model without 6 of
its 30 layers, 0.11 B parameters. All see the same tokens of the quickstart's problems, 256 a step, in an order that the seed
shuffles, and take AdamW steps in fp32 on the forward KL from the teacher, with --on-policy on the reverse KL at 128 tokens a
step that each student samples itself after the beginnings of the same sequences:

    whole      over the whole vocabulary, in tiles (ops/distillation.py)
    top_k      over the teacher's 32 likeliest words: the sum of p log(p / s), or s log(s / p), over them
    top_k_1    the same with both distributions rescaled to 1 over them

`kl` is the same divergence in nats a token over the whole vocabulary on held-out problems after the last step, with --on-policy at
tokens that the trained student samples, mean over seeds; `tail` the student's mass outside of the teacher's top 32, with
`teacher_tail` the teacher's. `kl_difference` is top_k less whole, and top_k_1 less whole: means of paired seeds with Student's
interval of 95 %.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import options
import torch

from megatron_dapo.evaluation.estimators import student_mean
from megatron_dapo.ops.distillation import vocab_parallel_distillation

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
TOP_K = 32
ARMS = ("whole", "top_k", "top_k_1")
DROPPED = (5, 9, 13, 17, 21, 25)  # layers that the student lacks; of a tiny model the second
LENGTH, BATCH = 128, 2  # tokens of a sequence and sequences of a step
SAMPLED, HELD_OUT_SEED = 64, 1_000_000  # tokens of a sequence that the student samples, and the seed of held-out ones
LEARNING_RATE = 3e-4


def sequences(model: Path, name: str, number: int) -> torch.Tensor:
    """Return the first `number` problems of a file as [number, LENGTH] tokens, joined and cut."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids: list[int] = []
    for line in (QUICKSTART / name).read_text(encoding="utf-8").splitlines():
        if len(ids) >= number * LENGTH:
            break
        # Only the story differs between problems; the instruction around it is one text.
        story = json.loads(line)["prompt"][-1]["content"].split("\n\n")[1]
        ids += tokenizer(story + "\n")["input_ids"]
    return torch.tensor(ids[: number * LENGTH]).view(number, LENGTH)


def models(directory: Path) -> tuple[Any, Any]:
    """Return (teacher, student)."""
    import transformers

    teacher = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    student = copy.deepcopy(teacher)
    dropped = DROPPED if len(student.model.layers) > max(DROPPED) else (1,)
    layers = [layer for index, layer in enumerate(student.model.layers) if index not in dropped]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    student.model.layers = torch.nn.ModuleList(layers)
    student.config.num_hidden_layers = len(layers)
    return teacher, student


def hidden_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return [sequences, tokens, h]."""
    states: torch.Tensor = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return states


def both(student: Any, teacher: Any, tokens: torch.Tensor, sampling_seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both models' hidden states, [N, h], at given tokens or, with a seed, at those that the student samples."""
    part = slice(None)
    if sampling_seed is not None:
        tokens, part = sampled(student, tokens, sampling_seed), slice(LENGTH - SAMPLED - 1, -1)
    with torch.no_grad():
        theirs = hidden_states(teacher, tokens)[:, part].flatten(0, 1)
    return hidden_states(student, tokens)[:, part].flatten(0, 1), theirs


@torch.no_grad()
def sampled(student: Any, given: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the beginnings of sequences, each with SAMPLED tokens of the student."""
    torch.manual_seed(seed)
    student.generation_config.eos_token_id = None  # all have SAMPLED tokens, and none is banned
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": SAMPLED, "pad_token_id": 0}
    tokens: torch.Tensor = student.generate(given[:, : LENGTH - SAMPLED], **settings)
    return tokens


def loss_of(
    arm: str, divergence: str, hidden: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss of an arm over tokens."""
    if arm == "whole":
        settings = {"vocab_size": weight.size(0), "divergence": divergence}
        return vocab_parallel_distillation(hidden, weight, teacher, teacher_weight, **settings).mean()
    log_s = torch.log_softmax(hidden @ weight.t(), -1)
    log_p, words = torch.log_softmax(teacher @ teacher_weight.t(), -1).topk(TOP_K, -1)
    log_s = log_s.gather(1, words)
    if arm == "top_k_1":
        log_p, log_s = log_p.log_softmax(-1), log_s.log_softmax(-1)
    if divergence == "reverse":
        return (log_s.exp() * (log_s - log_p)).sum(-1).mean()
    return (log_p.exp() * (log_p - log_s)).sum(-1).mean()


@torch.no_grad()
def evaluate(student: Any, teacher: Any, held_out: torch.Tensor, on_policy: bool) -> dict[str, float]:
    """Return the divergence and both masses outside of the teacher's top K, from all logits."""
    hidden, states = both(student, teacher, held_out, HELD_OUT_SEED if on_policy else None)
    kl = tail = teacher_tail = 0.0
    for ours, theirs in zip(hidden.split(256), states.split(256), strict=True):
        log_s = torch.log_softmax(ours @ student.lm_head.weight.t(), -1)
        log_p = torch.log_softmax(theirs @ teacher.lm_head.weight.t(), -1)
        words = log_p.topk(TOP_K, -1).indices
        weighing, other = (log_s, log_p) if on_policy else (log_p, log_s)
        kl += float((weighing.exp() * (weighing - other)).sum())
        tail += float((1 - log_s.gather(1, words).exp().sum(-1)).sum())
        teacher_tail += float((1 - log_p.gather(1, words).exp().sum(-1)).sum())
    return {"kl": kl / len(hidden), "tail": tail / len(hidden), "teacher_tail": teacher_tail / len(hidden)}


def train_seed(seed: int, model: Path, steps: int, on_policy: bool = False) -> Iterator[dict[str, Any]]:
    """Train a student by each arm in this process; yield its held-out figures before and after."""
    torch.set_num_threads(1)
    number = steps * BATCH
    tokens, held_out = (sequences(model, *each) for each in (("train.jsonl", number), ("heldout.jsonl", 8)))
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).view(-1, BATCH)
    teacher, first = models(model)
    divergence, weight = "reverse" if on_policy else "forward", teacher.lm_head.weight.detach()
    before = evaluate(first, teacher, held_out, on_policy)["kl"]
    for arm in ARMS:
        student, start = copy.deepcopy(first), time.process_time()
        # The head is tied to the embedding, as in the model.
        optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95))
        for step, chosen in enumerate(order):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 4, (steps - step) / (steps / 2))
            ours, theirs = both(student, teacher, tokens[chosen], seed * steps + step if on_policy else None)
            loss = loss_of(arm, divergence, ours, student.lm_head.weight, theirs, weight)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
        seconds = time.process_time() - start
        parameters = sum(parameter.numel() for parameter in student.parameters())
        after = evaluate(student, teacher, held_out, on_policy)
        yield {"arm": arm, "seed": seed, "before": before, **after, "cpu_seconds": seconds, "parameters": parameters}


def rows(arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield the result of each arm and seed; those of --results if it is given."""
    if arguments.results:
        yield from map(json.loads, arguments.results.read_text().splitlines())
        return
    for seed in range(arguments.seeds):
        yield from train_seed(seed, arguments.model, arguments.steps, arguments.on_policy)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    by_arm = {arm: {row["seed"]: row for row in found if row["arm"] == arm} for arm in ARMS}
    result: dict[str, Any] = {"benchmark": "distillation_learning", "seeds": len(by_arm["whole"])}
    result["before"], result["teacher_tail"] = found[0]["before"], found[0]["teacher_tail"]
    result["kl"] = {arm: fmean(row["kl"] for row in of_seeds.values()) for arm, of_seeds in by_arm.items()}
    result["tail"] = {arm: fmean(row["tail"] for row in of_seeds.values()) for arm, of_seeds in by_arm.items()}
    differences = {
        arm: [row["kl"] - by_arm["whole"][seed]["kl"] for seed, row in by_arm[arm].items()] for arm in ARMS if arm != "whole"
    }
    result["kl_difference"] = {
        arm: {"value": one.value, "interval": [one.low, one.high] if len(values) > 1 else None}
        for arm, values in differences.items()
        for one in [student_mean(values)]
    }
    return {**result, "parameters": found[0]["parameters"], "rows": found}


def main() -> None:
    parser = options.parser(__doc__, "one seed of four steps on the quickstart's model")
    parser.add_argument("--on-policy", action="store_true", help="students learn at tokens that they sample")
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "models" / "smollm2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="train only this seed and print its rows, one a line")
    parser.add_argument("--results", type=Path, help="rows of seeds that were trained one by one")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.steps, arguments.seeds, arguments.model = 4, 1, QUICKSTART / "base_model"
    if arguments.seed is not None:
        for row in train_seed(arguments.seed, arguments.model, arguments.steps, arguments.on_policy):
            print(json.dumps(row), flush=True)
        return
    options.show(summary(list(rows(arguments))), arguments)


if __name__ == "__main__":
    main()
