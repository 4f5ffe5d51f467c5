"""One optimizer step of the Megatron actor at TP1 against transformers on the same tokens, in one process and one thread.

    python benchmarks/train_step.py [--json] [--tiny] [--rounds 7]

Both sides run forward, the token-mean policy loss, backward and AdamW on the same packed sequences. transformers gets them packed,
with position ids that restart (its own block-diagonal attention), and as a right-padded batch; sides take turns, and the minimum over
rounds counts, so that other load on the machine hits both. `step_ratio` is ours / transformers packed, the same layout of the same
tokens; `step_ratio_padded` is ours / transformers padded.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import options
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor, TokenOutputs
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import pack
from megatron_dapo.types import MicroBatch, TrainSample

LEARNING_RATE = 1e-5
SHAPES = {
    "quickstart": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512},
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096},
}


def make_model(directory: Path, shape: dict[str, int]) -> Qwen2ForCausalLM:
    """A random Qwen2 of that shape, saved to `directory`."""
    torch.manual_seed(0)
    config = Qwen2Config(
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, **shape
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa").float()
    model.save_pretrained(directory)
    return model


def make_sequences(num_sequences: int, vocab_size: int) -> list[torch.Tensor]:
    """Ragged sequences of 30 to 210 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(30, 211, (num_sequences,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def megatron_step(directory: Path, sequences: Sequence[torch.Tensor]) -> Callable[[], float]:
    """A function that makes one optimizer step of the actor and returns the loss."""
    layout = ParallelLayout(1)
    actor = MegatronActor.build(
        directory, layout, ActorSettings(optimizer=OptimizerConfig(weight_decay=0.01, clip_grad=1.0))
    )
    num_trained = sum(len(tokens) - 1 for tokens in sequences)
    samples = [
        TrainSample(
            str(i), i, tokens, 1, torch.ones(len(tokens) - 1), torch.ones(len(tokens) - 1), torch.zeros(len(tokens) - 1)
        )
        for i, tokens in enumerate(sequences)
    ]
    micro_batch = pack(samples, [1.0 / num_trained] * len(samples), layout)

    def loss_fn(part: MicroBatch, outputs: TokenOutputs, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(outputs.logprobs * part.loss_weights).sum()
        return loss, {"loss": loss.detach()}

    return lambda: actor.train_step([micro_batch], loss_fn, 1.0, LEARNING_RATE).metrics["loss"]


def transformers_step(
    model: Qwen2ForCausalLM, inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> Callable[[], float]:
    """A function that makes one AdamW step of transformers' model and returns the loss; labels are -100 where nothing is predicted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)

    def step() -> float:
        logits = model(**inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # The actor clips too.
        optimizer.step()
        return float(loss.detach())

    return step


def next_tokens(tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens[1:], torch.tensor([-100])])  # the last token has nothing to predict


def packed_inputs(sequences: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
    inputs = {"input_ids": torch.cat(list(sequences))[None], "position_ids": positions[None]}
    return inputs, torch.cat([next_tokens(tokens) for tokens in sequences])[None]


def padded_inputs(sequences: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    def pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    mask = pad([torch.ones_like(tokens) for tokens in sequences], 0)
    inputs = {"input_ids": pad(list(sequences), 0), "attention_mask": mask}
    return inputs, pad([next_tokens(tokens) for tokens in sequences], -100)


def best_seconds(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The least seconds of each step over `rounds` rounds in which they take turns; one warm-up each."""
    losses = {name: step() for name, step in steps.items()}
    spread = max(losses.values()) - min(losses.values())
    # Sides that compute something else must not be compared.
    assert spread < 1e-4, f"the sides do not compute the same loss: {losses}"
    # The least counts: other programs only add to a time.
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(name: str, num_sequences: int, rounds: int) -> dict[str, Any]:
    """Seconds a step and ratios for one shape."""
    shape = SHAPES[name]
    sequences = make_sequences(num_sequences, shape["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        packed = make_model(Path(directory), shape)
        # A separate model, as the packed one trains during the comparison.
        padded = make_model(Path(directory), shape)
        steps = {
            "megatron": megatron_step(Path(directory), sequences),
            "transformers_packed": transformers_step(packed, *packed_inputs(sequences)),
            "transformers_padded": transformers_step(padded, *padded_inputs(sequences)),
        }
        seconds = best_seconds(steps, rounds)
    return {
        "shape": name,
        "num_sequences": num_sequences,
        "num_tokens": sum(len(tokens) for tokens in sequences),
        "seconds": seconds,
        "step_ratio": seconds["megatron"] / seconds["transformers_packed"],
        "step_ratio_padded": seconds["megatron"] / seconds["transformers_padded"],
    }


def main() -> None:
    parser = options.parser(__doc__, "one round on 4 sequences of one shape")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds, arguments.sequences = 1, 4
    shapes = list(SHAPES)[:1] if arguments.tiny else list(SHAPES)
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        rows = [measure(name, arguments.sequences, arguments.rounds) for name in shapes]
        dist.destroy_process_group()
    result = {
        "benchmark": "train_step",
        "step_ratio": max(row["step_ratio"] for row in rows),
        "step_ratio_padded": max(row["step_ratio_padded"] for row in rows),
        "rows": rows,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
