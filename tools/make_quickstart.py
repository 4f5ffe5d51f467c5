"""Make everything in `examples/quickstart`: problems, tokenizer and base model, from a seed.

    python -m tools.make_quickstart --output examples/quickstart            # all of it
    python -m tools.make_quickstart --output examples/quickstart --only data

The base model is made the way a real one behaves: it knows the skill but samples it noisily. It is trained from
scratch on an imperfect corpus (`quickstart_task.Flaws`), so at temperature 1.0 it slips now and then, drops or
misspells the answer line, or repeats the whole chain; its most likely continuation is nearly always right (greedy
accuracy 0.95 against 0.39 when sampled). Reinforcement learning therefore sharpens what is there, in minutes on two
cores, and teaches no new skill. Accuracy here always means sampling at temperature 1.0, before and after.

Data and tokenizer are a function of only the seed. The weights are so on one machine, thread count and torch version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from tools.quickstart_task import TEMPLATE, Flaws, Problem, draw_problems, num_hard_steps, to_row, write_corpus
from tools.quickstart_tokenizer import PAD, TURN_END, train_tokenizer

logger = logging.getLogger("make_quickstart")

DEFAULT_SEED = 17
NUM_HELDOUT, NUM_TRAIN, NUM_TOKENIZER_TEXTS = 128, 1920, 4000
NUM_CORPUS = 20000
NUM_SPREAD = 512
VOCAB_LIMIT = 1000  # never reached: merging ends when every piece is one token
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Schedule:
    """Training schedule of the base model."""

    num_steps: int = 2000
    tokens_per_batch: int = 4096  # padded
    muon_learning_rate: float = 0.02  # peaks
    adam_learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01

    def factor(self, step: int) -> float:
        """Share of the peak rates: linear warm-up, flat, and linearly down to nothing over the last 40 %."""
        return min(1.0, (step + 1) / self.warmup_steps, (self.num_steps - step) / (0.4 * self.num_steps))


@dataclass(frozen=True)
class Example:
    """One prompt with its response."""

    token_ids: list[int]
    num_prompt_tokens: int


def split_problems(seed: int, num_corpus: int) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Held-out, training and corpus problems: no exercise is in two of them."""
    problems = draw_problems(seed, NUM_HELDOUT + NUM_TRAIN + num_corpus)
    train_end = NUM_HELDOUT + NUM_TRAIN
    return problems[:NUM_HELDOUT], problems[NUM_HELDOUT:train_end], problems[train_end:]


def spread_problems(seed: int) -> list[Problem]:
    """Problems whose difficulty is as spread as that of real data, for a critic: in turn a short one without a hard step
    and a long one with five or more. None is in another set.

    Slips of the base model are drawn independently, so on `train.jsonl` even a critic that sees every slip at once
    explains but half of the returns' variance; here most of it is between problems.
    """
    used = NUM_HELDOUT + NUM_TRAIN + NUM_CORPUS
    fresh = draw_problems(seed, 2 * used)[used:]
    short = [problem for problem in fresh if len(problem.steps) <= 3 and num_hard_steps(problem) == 0]
    long = [problem for problem in fresh if len(problem.steps) >= 7 and num_hard_steps(problem) >= 5]
    return [problem for pair in zip(short, long, strict=False) for problem in pair][:NUM_SPREAD]


def write_data(seed: int, directory: Path) -> None:
    """`heldout.jsonl`, `train.jsonl` and `spread.jsonl`."""
    heldout, train, _ = split_problems(seed, 0)
    for name, problems in (("heldout", heldout), ("train", train), ("spread", spread_problems(seed))):
        lines = (json.dumps(to_row(problem), ensure_ascii=False) + "\n" for problem in problems)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_tokenizer(seed: int) -> Qwen2Tokenizer:
    """The tokenizer, from a small corpus with every kind of line in it."""
    _, _, problems = split_problems(seed, NUM_TOKENIZER_TEXTS)
    responses = (response for _, response in write_corpus(seed, problems, replace(Flaws(), unformatted_answer=0.3)))
    texts = itertools.chain(["user\n", "assistant\n"] * 100, (problem.text() for problem in problems), responses)
    return train_tokenizer(texts, TEMPLATE, VOCAB_LIMIT)


def model_config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """0.5 million parameters; heads and layers divide by every TP and PP x VPP size a 4-process layout has."""
    turn_end, pad = tokenizer.convert_tokens_to_ids([TURN_END, PAD])
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=turn_end,
        pad_token_id=pad,
    )


def encode(tokenizer: Qwen2Tokenizer, corpus: Sequence[tuple[str, str]]) -> list[Example]:
    """Token ids of chat prompt + response + end of turn."""
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    examples = []
    for prompt, response in corpus:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(text)["input_ids"]
        examples.append(Example(prompt_ids + tokenizer(response)["input_ids"] + [turn_end], len(prompt_ids)))
    return examples


def batches(rng: random.Random, examples: list[Example], tokens_per_batch: int) -> Iterator[list[Example]]:
    """One epoch of batches of like lengths, in random order; each at most `tokens_per_batch` with padding."""
    epoch: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda e: len(e.token_ids)):
        if (len(epoch[-1]) + 1) * len(example.token_ids) > tokens_per_batch:
            epoch.append([])
        epoch[-1].append(example)
    rng.shuffle(epoch)
    return iter(epoch)


def loss_of(model: Qwen2ForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Cross-entropy averaged over the response tokens of a right-padded batch (scalar)."""
    length = max(len(example.token_ids) for example in batch)
    token_ids = torch.zeros(len(batch), length, dtype=torch.long)
    labels = torch.full((len(batch), length), IGNORED_LABEL)
    for row, example in enumerate(batch):
        end = len(example.token_ids)
        token_ids[row, :end] = torch.tensor(example.token_ids)
        labels[row, example.num_prompt_tokens : end] = token_ids[row, example.num_prompt_tokens : end]
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    scored = targets != IGNORED_LABEL
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[scored]), targets[scored])


def train(model: Qwen2ForCausalLM, draw_batch: Callable[[], list[Example]], schedule: Schedule) -> None:
    """`schedule.num_steps` batches, in place: Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    decay = schedule.weight_decay
    optimizers = [
        torch.optim.Muon(matrices, lr=schedule.muon_learning_rate, weight_decay=decay),
        torch.optim.AdamW(others, lr=schedule.adam_learning_rate, betas=(0.9, 0.98), weight_decay=decay),
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor) for optimizer in optimizers]
    started = time.monotonic()
    for step in range(schedule.num_steps):
        loss = loss_of(model, draw_batch())
        loss.backward()
        # A scheduler that steps before its optimizer would skip the first learning rate.
        for part in optimizers + schedulers:
            part.step()
        model.zero_grad()
        if step % 100 == 0 or step == schedule.num_steps - 1:
            logger.info("step %d loss %.4f (%.0f s)", step, loss.item(), time.monotonic() - started)


def make_base_model(seed: int, schedule: Schedule, num_corpus: int) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """The base model and its tokenizer; every epoch writes its responses anew."""
    tokenizer = make_tokenizer(seed)
    _, _, problems = split_problems(seed, num_corpus)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(model_config(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    stream = endless_batches(seed, tokenizer, problems, schedule.tokens_per_batch)
    train(model, lambda: next(stream), schedule)
    return model.eval(), tokenizer


def endless_batches(
    seed: int, tokenizer: Qwen2Tokenizer, problems: list[Problem], tokens_per_batch: int
) -> Iterator[list[Example]]:
    """Batches of epoch after epoch."""
    epoch = 0
    while True:
        examples = encode(tokenizer, write_corpus(seed + 1000 * epoch, problems, Flaws()))
        yield from batches(random.Random(seed + epoch), examples, tokens_per_batch)
        epoch += 1


def save_base_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    """An ordinary Hugging Face directory."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--only", choices=("data", "model", "all"), default="all")
    parser.add_argument("--num-steps", type=int, default=Schedule.num_steps, help="steps the base model is trained")
    parser.add_argument("--num-corpus", type=int, default=NUM_CORPUS, help="problems its corpus is written from")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.only in ("data", "all"):
        write_data(arguments.seed, arguments.output)
    if arguments.only in ("model", "all"):
        schedule = Schedule(num_steps=arguments.num_steps)
        model, tokenizer = make_base_model(arguments.seed, schedule, arguments.num_corpus)
        save_base_model(model, tokenizer, arguments.output / "base_model")


if __name__ == "__main__":
    main()
