"""Difference of trainer and engine on a mixture of experts, each by its own routing and with the engine's replayed.

    python benchmarks/routing_replay.py [--json] [--tiny] [--seeds 3] [--steps 3] [--layout dp2] [--engine-python P] [--set a.b=value]...

The same short runs with `rollout.routing_replay` off and on, from the same random weights in bfloat16: two trainer processes
(`--layout tp1`: one, as on a single GPU) and a stock SGLang server. Where the two round apart, a token goes to other experts
in one of them (`changed_share` of the choices), and its log-prob differs by far more than by rounding. `mean_ratio`,
`max_ratio` and `kl_ratio` are the mean and the largest |log-prob difference| and the k3 estimate of the KL with replay /
without, over all steps; `bytes_per_token` is what the routing of a token adds to the 8 bytes of its id and log-prob.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import options
import torch

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
SIZES = {"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}
TINY_SIZES = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
FIGURES = {
    "mean": "mismatch/abs_logprob_diff_mean",
    "max": "mismatch/abs_logprob_diff_max",
    "kl": "mismatch/kl_k3",
    "agreement": "mismatch/routing_agreement",
}
SETTINGS = (
    "model.dtype=bfloat16",
    "rollout.max_response_tokens=96",
    "reward.overlong_punishment.enabled=false",
    *options.RANDOM_WEIGHTS,
    "mismatch.step0_max_mean_abs=1.0",
    "mismatch.alarm=1.0",
    "optimizer.schedule=constant",
    *options.NO_EVALUATION,
    "checkpoint.interval=0",
    "checkpoint.export_huggingface=false",
    "telemetry.tensorboard=false",
)


def save_model(directory: Path, sizes: dict[str, int], seed: int) -> None:
    """Write a Qwen3-MoE with random weights far from uniform and the quickstart's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    base = QUICKSTART / "base_model"
    config = Qwen3MoeConfig(
        vocab_size=json.loads((base / "config.json").read_text(encoding="utf-8"))["vocab_size"],
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        **sizes,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, directory / name)


def run(model: Path, directory: Path, layout: str, replays: bool, overrides: Sequence[str]) -> dict[str, float]:
    """Train; return the figures over all steps."""
    values = [*SETTINGS, f"model.path={model}", f"rollout.routing_replay={str(replays).lower()}", *overrides]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train"]
    command += [str(QUICKSTART / "quickstart_sglang.toml"), "--layout", layout, "--output-dir", str(directory)]
    command += [part for value in values for part in ("--set", value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        name: max(row[key] for row in rows) if name == "max" else sum(row[key] for row in rows) / len(rows)
        for name, key in FIGURES.items()
    }


def parse_arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "one step of a smaller model")
    parser.add_argument("--seeds", type=int, default=3, help="of the weights and the run")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layout", default="dp2", help="of the trainer")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    return parser.parse_args()


def main() -> None:
    """Run both sides of every seed, print."""
    arguments = parse_arguments()
    sizes, seeds, steps = (TINY_SIZES, 1, 1) if arguments.tiny else (SIZES, arguments.seeds, arguments.steps)
    overrides = [f"sglang.python={arguments.engine_python}", f"run.total_steps={steps}"]
    overrides += [*(options.TINY_STEP if arguments.tiny else ()), *arguments.overrides]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="routing-replay-") as scratch:
        for seed in range(seeds):
            model, chosen = Path(scratch) / f"model_{seed}", [*overrides, f"run.seed={seed}"]
            save_model(model, sizes, seed)
            sides = {
                name: run(model, Path(scratch) / f"{name}_{seed}", arguments.layout, name == "replayed", chosen)
                for name in ("own", "replayed")
            }
            rows.append({"seed": seed, **sides})
            print(rows[-1], file=sys.stderr, flush=True)
    means = {
        side: {name: sum(row[side][name] for row in rows) / len(rows) for name in FIGURES}
        for side in ("own", "replayed")
    }
    result = {
        **{f"{name}_ratio": means["replayed"][name] / means["own"][name] for name in ("mean", "max", "kl")},
        "changed_share": 1 - means["replayed"]["agreement"],
        "bytes_per_token": sizes["num_hidden_layers"] * sizes["num_experts_per_tok"],
        "means": means,
        "steps": steps,
        "seeds": rows,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
