"""What a student of 0.1 B parameters learns of its teacher's distribution: the whole vocabulary against the teacher's top 32.

    python benchmarks/distillation_learning.py [--json] [--tiny] [--model runs/models/smollm2] [--steps 10] [--seeds 3]

The teacher is SmolLM2-135M-Instruct (49,152 words; `make runs/models/smollm2` writes it), the student the same model without 6 of
its 30 layers, 0.11 B parameters. All see the same tokens of the quickstart's problems, 256 a step, in an order that the seed
shuffles, and take AdamW steps in fp32 on the forward KL from the teacher:

    whole      over the whole vocabulary, in tiles (ops/distillation.py)
    top_k      over the teacher's 32 likeliest words: sum of p log(p / s) over them
    top_k_1    the same with both distributions rescaled to 1 over them

`kl` is KL(teacher || student) in nats a token over the whole vocabulary on held-out problems after the last step, mean over
seeds; `tail` the student's mass outside of the teacher's top 32, with `teacher_tail` the teacher's. `kl_difference` is top_k
less whole, and top_k_1 less whole: means of paired seeds with Student's interval of 95 %.
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
    """Return [tokens, h]."""
    states: torch.Tensor = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return states.flatten(0, 1)


def loss_of(arm: str, hidden: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of an arm over tokens."""
    if arm == "whole":
        settings = {"vocab_size": weight.size(0), "divergence": "forward"}
        return vocab_parallel_distillation(hidden, weight, teacher, teacher_weight, **settings).mean()
    log_s = torch.log_softmax(hidden @ weight.t(), -1)
    log_p, words = torch.log_softmax(teacher @ teacher_weight.t(), -1).topk(TOP_K, -1)
    log_s = log_s.gather(1, words)
    if arm == "top_k_1":
        log_p, log_s = log_p.log_softmax(-1), log_s.log_softmax(-1)
    return (log_p.exp() * (log_p - log_s)).sum(-1).mean()


@torch.no_grad()
def evaluate(student: Any, held_out: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor) -> dict[str, float]:
    """Return KL(teacher || student) and both masses outside of the teacher's top K, from all logits."""
    hidden, kl, tail, teacher_tail = hidden_states(student, held_out), 0.0, 0.0, 0.0
    for ours, theirs in zip(hidden.split(256), teacher.split(256), strict=True):
        log_s = torch.log_softmax(ours @ student.lm_head.weight.t(), -1)
        log_p = torch.log_softmax(theirs @ teacher_weight.t(), -1)
        words = log_p.topk(TOP_K, -1).indices
        kl += float((log_p.exp() * (log_p - log_s)).sum())
        tail += float((1 - log_s.gather(1, words).exp().sum(-1)).sum())
        teacher_tail += float((1 - log_p.gather(1, words).exp().sum(-1)).sum())
    return {"kl": kl / len(hidden), "tail": tail / len(hidden), "teacher_tail": teacher_tail / len(hidden)}


def train_seed(seed: int, model: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Train a student by each arm in this process; yield its held-out figures before and after."""
    torch.set_num_threads(1)
    number = steps * BATCH
    tokens, held_out = (sequences(model, *each) for each in (("train.jsonl", number), ("heldout.jsonl", 8)))
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).view(-1, BATCH)
    teacher, first = models(model)
    weight = teacher.lm_head.weight.detach()
    with torch.no_grad():
        right, states = hidden_states(teacher, held_out), [hidden_states(teacher, tokens[chosen]) for chosen in order]
    before = evaluate(first, held_out, right, weight)["kl"]
    for arm in ARMS:
        student, start = copy.deepcopy(first), time.process_time()
        # The head is tied to the embedding, as in the model.
        optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95))
        for step, chosen in enumerate(order):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 4, (steps - step) / (steps / 2))
            loss = loss_of(arm, hidden_states(student, tokens[chosen]), student.lm_head.weight, states[step], weight)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
        seconds = time.process_time() - start
        parameters = sum(parameter.numel() for parameter in student.parameters())
        after = evaluate(student, held_out, right, weight)
        yield {"arm": arm, "seed": seed, "before": before, **after, "cpu_seconds": seconds, "parameters": parameters}


def rows(arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield the result of each arm and seed; those of --results if it is given."""
    if arguments.results:
        yield from map(json.loads, arguments.results.read_text().splitlines())
        return
    for seed in range(arguments.seeds):
        yield from train_seed(seed, arguments.model, arguments.steps)


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
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "models" / "smollm2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="train only this seed and print its rows, one a line")
    parser.add_argument("--results", type=Path, help="rows of seeds that were trained one by one")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.steps, arguments.seeds, arguments.model = 4, 1, QUICKSTART / "base_model"
    if arguments.seed is not None:
        for row in train_seed(arguments.seed, arguments.model, arguments.steps):
            print(json.dumps(row), flush=True)
        return
    options.show(summary(list(rows(arguments))), arguments)


if __name__ == "__main__":
    main()
