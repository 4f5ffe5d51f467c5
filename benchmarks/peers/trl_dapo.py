"""TRL's GRPOTrainer with the DAPO loss on a recipe of ours, for `dapo_vs_trl.py` and `trl_recipe.py`, in a separate environment.

    python trl_dapo.py SPEC.json         one process
    torchrun --nproc-per-node 2 trl_dapo.py SPEC.json

The specification is `trl_process.peer_specification`'s; the report is written to `report_path` after every evaluation
and at the end, the model to `model_dir` if given, in bfloat16 if it trained so. The clock runs while the trainer
trains: it is stopped around held-out evaluations, and model loading comes before it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_dapo.rewards.pool.repetition import ngram_repetition
from megatron_dapo.rewards.verifiers.dapo import score  # needs nothing but Python itself

Specification = Mapping[str, Any]
EVALUATION_ROWS = 256  # responses generated at a time in held-out evaluations


def read_rows(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Prompt (messages) and gold answer of every row of JSONL files in the DAPO schema."""
    lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
    return [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in map(json.loads, lines)]


def train_rows(specification: Specification, tokenizer: Any) -> list[dict[str, Any]]:
    """The training rows whose prompts are not too long; ours leaves out the same."""
    rows, limit = read_rows(specification["train_paths"]), specification["max_prompt_tokens"]
    prompts = [row["prompt"] for row in rows]
    lengths = map(len, tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False))
    return [row for row, length in zip(rows, lengths) if length <= limit]


def write_model(specification: Specification, model: Any) -> None:
    """A Hugging Face directory of the trained weights, with the tokenizer and other small files of the model it began with."""
    target, source = Path(specification["model_dir"]), Path(specification["model"])
    model.to(torch.bfloat16 if specification["save_bfloat16"] else torch.float32).save_pretrained(target)
    for file in source.iterdir():
        # The configuration too: the evaluated model differs from the original only in its weights.
        if file.is_file() and not file.name.startswith(("model", "pytorch_model")):
            shutil.copyfile(file, target / file.name)


class Reward:
    """The `dapo` verifier as TRL calls reward functions; a truncated response is never correct."""

    __name__ = "dapo"

    def __init__(self, correct: float, incorrect: float, stop_ids: Sequence[int]) -> None:
        self._correct, self._incorrect, self._stop_ids = correct, incorrect, frozenset(stop_ids)
        self.seconds = 0.0
        self.useful_samples = 0  # samples in groups with right and wrong responses
        self.response_tokens = 0
        self.batches: list[dict[str, float]] = []  # this process's responses, but everyone's accuracy

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **unused: Any
    ) -> list[float]:
        start = time.perf_counter()
        right = [
            ids[-1] in self._stop_ids and score(completion[0]["content"], gold).outcome == "correct"
            for completion, ids, gold in zip(completions, completion_ids, answer)
        ]
        tokens = sum(map(len, completion_ids))
        self.response_tokens += tokens
        repetition = sum(map(ngram_repetition, completion_ids)) / len(completion_ids)
        self.batches.append({"response_tokens": tokens, "repetition": repetition})
        self.seconds += time.perf_counter() - start
        return [self._correct if hit else self._incorrect for hit in right]

    def count_useful(self, rewards: torch.Tensor, group_size: int) -> None:
        """`rewards` [samples] of whole groups."""
        self.batches[-1]["accuracy"] = float((rewards == self._correct).float().mean())
        groups = rewards.view(-1, group_size)
        self.useful_samples += int((groups.max(1).values != groups.min(1).values).sum()) * group_size


class Clock(TrainerCallback):
    """Training seconds by step; stops while it evaluates, and ends the training at the target or the time limit."""

    def __init__(self, specification: Specification, evaluator: Evaluator, reward: Reward) -> None:
        self._specification = specification
        self._evaluator = evaluator
        self._reward = reward
        self._running = 0.0
        self._resumed = 0.0
        self.step_ends: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.entropies: list[float] = []  # one per batch

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **unused: Any) -> None:
        if logs and "entropy" in logs:
            self.entropies.append(logs["entropy"])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
        self._evaluate(0, model)
        self._resumed = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
        self._running += time.perf_counter() - self._resumed
        self.step_ends.append(self._running)
        train_step, rest = divmod(state.global_step, self._specification["optimizer_steps_per_batch"])
        if (
            not rest
            and self._specification["evaluation_interval"]
            and train_step % self._specification["evaluation_interval"] == 0
        ):
            accuracy = self._evaluate(train_step, model)
            control.should_training_stop |= accuracy >= self._specification["target"]
        if not rest:
            # Rank 0 decides for all: ranks that disagree would wait for each other forever.
            control.should_training_stop |= self._too_long()
        self._resumed = time.perf_counter()

    def _too_long(self) -> bool:
        """The same answer on every process."""
        over = torch.tensor([float(self._running >= self._specification["max_train_seconds"])])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(over, 0)
        return bool(over)

    def _evaluate(self, train_step: int, model: Any) -> float:
        if not self._specification["evaluation_interval"]:
            return 0.0
        accuracy = self._evaluator.accuracy(model)
        self.evaluations.append({"train_step": train_step, "train_seconds": self._running, "accuracy": accuracy})
        self.write(finished=False)
        return accuracy

    def write(self, finished: bool) -> None:
        """The report so far."""
        per_batch = self._specification["optimizer_steps_per_batch"]
        batches = len(self.step_ends) // per_batch
        seconds = self.step_ends[batches * per_batch - 1] if batches else 0.0
        samples = batches * self._specification["prompts_per_step"] * self._specification["group_size"]
        processes = dist.get_world_size() if dist.is_initialized() else 1
        report = {
            "finished": finished,
            "train_steps": batches,
            "train_seconds": seconds,
            "trained_samples": samples,
            "batch_ends": self.step_ends[per_batch - 1 :: per_batch],
            "response_tokens": self._reward.response_tokens * processes,  # this process's share, scaled up
            "reward_seconds": self._reward.seconds,
            "useful_samples": self._reward.useful_samples,
            "evaluations": self.evaluations,
            "batches": [
                {**batch, "entropy": entropy, "response_tokens": batch["response_tokens"] * processes}
                for batch, entropy in zip(self._reward.batches, [*self.entropies, *[None] * len(self._reward.batches)])
            ],
        }
        if int(os.environ.get("RANK", "0")) == 0:
            Path(self._specification["report_path"]).write_text(json.dumps(report), encoding="utf-8")


class Evaluator:
    """avg@k on the held-out problems, sampled as the specification says; processes share the responses."""

    def __init__(self, specification: Specification, tokenizer: Any) -> None:
        self._settings = specification["evaluation"]
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(specification["stop_ids"])
        rows = read_rows(specification["eval_paths"])
        self._tasks = [row for row in rows for _ in range(self._settings["num_samples"])]

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """Share of right responses over all problems and samples."""
        was_training = model.training
        module = getattr(model, "module", model).eval()
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = self._tasks[rank::size]
        # Evaluation must not advance the random numbers of training.
        with torch.random.fork_rng():
            torch.manual_seed(1 + rank)
            right = sum(
                self._right(module, mine[start : start + EVALUATION_ROWS])
                for start in range(0, len(mine), EVALUATION_ROWS)
            )
        total = torch.tensor([float(right)])
        if size > 1:
            dist.all_reduce(total)
        model.train(was_training)
        return float(total) / len(self._tasks)

    def _right(self, model: Any, tasks: Sequence[Mapping[str, Any]]) -> int:
        messages = [task["prompt"] for task in tasks]
        prompts = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        width = max(map(len, prompts))
        batch = self._tokenizer.pad(
            {"input_ids": prompts}, padding="max_length", max_length=width, padding_side="left", return_tensors="pt"
        )
        output = model.generate(
            input_ids=batch["input_ids"].to(model.device),
            attention_mask=batch["attention_mask"].to(model.device),
            do_sample=True,
            temperature=self._settings["temperature"],
            top_p=self._settings["top_p"],
            top_k=self._settings["top_k"],
            max_new_tokens=self._settings["max_response_tokens"],
        )
        responses = output[:, width:].cpu()
        ended = torch.isin(responses, torch.tensor(sorted(self._stop_ids))).any(1).tolist()
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        return sum(
            end and score(text, task["answer"]).outcome == "correct" for text, task, end in zip(texts, tasks, ended)
        )


class CountingTrainer(GRPOTrainer):
    """GRPOTrainer with our warm-up of the learning rate; it also counts the samples of groups that teach something."""

    counter: Reward
    specification: Specification

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # [samples, functions], of all processes
        self.counter.count_useful(rewards[:, 0], self.args.num_generations)
        return rewards

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A constant learning rate after a linear warm-up that counts rollout batches and does not begin at zero."""
        warmup = self.specification["optimizer"]["warmup_steps"]
        per_batch = self.specification["optimizer_steps_per_batch"]

        def factor(step: int) -> float:
            return min(1.0, (step // per_batch + 1) / max(1, warmup))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler


def trainer_settings(specification: Specification) -> GRPOConfig:
    """TRL's settings: the equalized quantities, and the fastest CPU settings in specification["settings"]."""
    settings = dict(specification["settings"])
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    mini_batch = (
        specification["prompts_per_step"] * specification["group_size"] // specification["optimizer_steps_per_batch"]
    )
    rows = settings.pop("rows_per_pass")
    accumulation, rest = divmod(mini_batch, rows * processes)
    if rest or not accumulation:
        raise ValueError(
            f"rows_per_pass {rows} x {processes} processes does not divide a mini-batch of {mini_batch} samples"
        )
    optimizer = specification["optimizer"]
    return GRPOConfig(
        output_dir=specification["output_dir"],
        use_cpu=specification["device"] == "cpu",
        bf16=specification["bf16"],
        fp16=False,
        seed=specification["seed"],
        loss_type="dapo",
        epsilon=specification["clip_ratio_low"],
        epsilon_high=specification["clip_ratio_high"],
        delta=specification["dual_clip"] or None,
        beta=0.0,
        scale_rewards="group",
        num_generations=specification["group_size"],
        max_completion_length=specification["max_response_tokens"],
        temperature=specification["temperature"],
        top_p=1.0,
        top_k=0,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * specification["optimizer_steps_per_batch"],
        num_iterations=1,
        max_steps=specification["train_steps"] * specification["optimizer_steps_per_batch"],
        learning_rate=optimizer["learning_rate"],
        weight_decay=optimizer["weight_decay"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["epsilon"],
        max_grad_norm=optimizer["clip_grad"],
        gradient_checkpointing=False,
        logging_strategy="steps",  # logs the entropy once a batch
        logging_steps=specification["optimizer_steps_per_batch"],
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )


def main(specification_path: str) -> None:
    specification = json.loads(Path(specification_path).read_text(encoding="utf-8"))
    torch.set_num_threads(specification["threads"])
    set_seed(specification["seed"])
    arguments = trainer_settings(specification)
    tokenizer = AutoTokenizer.from_pretrained(specification["model"])
    model = AutoModelForCausalLM.from_pretrained(specification["model"], dtype=torch.float32)
    reward = Reward(specification["reward"]["correct"], specification["reward"]["incorrect"], specification["stop_ids"])
    functions: list[Any] = [reward]
    if overlong := specification["reward"]["overlong"]:
        functions.append(get_soft_overlong_punishment(overlong["max_length"], overlong["cache_length"]))
    trainer = CountingTrainer(
        model=model,
        args=arguments,
        reward_funcs=functions,
        train_dataset=Dataset.from_list(train_rows(specification, tokenizer)),
        processing_class=tokenizer,
    )
    trainer.counter, trainer.specification = reward, specification
    clock = Clock(specification, Evaluator(specification, tokenizer), reward)
    trainer.add_callback(clock)
    trainer.train()
    if specification.get("model_dir") and int(os.environ.get("RANK", "0")) == 0:
        write_model(specification, trainer.accelerator.unwrap_model(trainer.model))
    clock.write(finished=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
