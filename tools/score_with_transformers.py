"""Score a Hugging Face directory with transformers' own `generate`: nothing of the project takes part but the verifier and the chat template.

    python tools/score_with_transformers.py runs/quickstart/huggingface examples/quickstart/heldout.jsonl --num-samples 32

Prints one JSON object with the mean accuracy over all responses (avg@num_samples) and its standard error over problems.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dapo.rewards.verifiers import dapo


def read_problems(path: Path) -> list[tuple[list[dict[str, str]], str]]:
    """(messages, gold answer) of every row of a JSONL file in the DAPO-Math-17k schema."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["prompt"], row["reward_model"]["ground_truth"]) for row in rows]


@torch.inference_mode()
def responses(
    model: Any, tokenizer: Any, prompts: Sequence[Any], max_new_tokens: int, batch_size: int
) -> Iterator[tuple[str, bool]]:
    """(text, is truncated) of one sampled response to each prompt, in order."""
    for start in range(0, len(prompts), batch_size):
        texts = [
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            for prompt in prompts[start : start + batch_size]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        output = model.generate(
            **batch, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=max_new_tokens
        )
        for row in output[:, batch["input_ids"].shape[1] :]:
            stopped = bool((row == model.generation_config.eos_token_id).any())
            yield tokenizer.decode(row, skip_special_tokens=True), not stopped


def score(
    model_directory: Path, data: Path, num_samples: int, max_new_tokens: int, batch_size: int, seed: int
) -> dict[str, Any]:
    """Accuracy of `num_samples` responses to each problem; a truncated response is wrong."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    problems = read_problems(data)
    by_problem = [0.0] * len(problems)
    for _ in range(num_samples):
        answers = responses(model, tokenizer, [messages for messages, _ in problems], max_new_tokens, batch_size)
        for index, (text, is_truncated) in enumerate(answers):
            is_right = not is_truncated and dapo.score(text, problems[index][1]).outcome == "correct"
            by_problem[index] += is_right / num_samples
    mean = sum(by_problem) / len(by_problem)
    variance = sum((value - mean) ** 2 for value in by_problem) / max(1, len(by_problem) - 1)
    return {
        "model": str(model_directory),
        "num_problems": len(problems),
        "num_samples": num_samples,
        "accuracy": mean,
        "standard_error_over_problems": math.sqrt(variance / len(by_problem)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = score(
        arguments.model,
        arguments.data,
        arguments.num_samples,
        arguments.max_new_tokens,
        arguments.batch_size,
        arguments.seed,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
