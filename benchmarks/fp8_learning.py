"""Does a policy learn in emulated FP8 as it does in fp32? Both train the quickstart's policy from the same weights.

    python benchmarks/fp8_learning.py [--steps 6] [--recipes fp32 fp8_blockwise] [--set a.b=value ...] [--json] [--tiny]

Blockwise FP8 needs sizes divisible by 128; the quickstart's model has a hidden size of 96 and 4 heads of 24. It is
padded with zeros: hidden size 128 (norms are scaled, as their mean then runs over more values), 16 heads of which 12
are zero. The function is the same and stays the same in training, as no gradient reaches a weight between two zeros.

The engine samples in the model's type, so an FP8 trainer's log-probs differ from the engine's from the first step on:
TIS corrects for that, and `mismatch` is its size. Steps have half of the quickstart's prompts. --save writes
results/fp8_learning_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import options
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
RESULT = ROOT / "benchmarks" / "results" / "fp8_learning_cpu.json"
HIDDEN, HEADS = 128, 16
FIGURES = {
    "accuracy": "rollout/accuracy_generated",
    "mismatch": "mismatch/abs_logprob_diff_mean",
    "mismatch_max": "mismatch/abs_logprob_diff_max",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
}
SMALLER = (
    "rollout.prompts_per_step=16",
    "training.mini_batch_prompts=8",
    "data.eval_paths=[]",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)


def widen(source: Path, target: Path, hidden: int = HIDDEN, heads: int = HEADS) -> None:
    """Write the Qwen2 model of `source` padded with zero hidden values and heads; its function is unchanged."""
    config = json.loads((source / "config.json").read_text())
    narrow, head_dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    tensors = {
        name: _widened(name, tensor.float(), narrow, hidden, heads * head_dim)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    shutil.copytree(source, target)
    changes = {
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": config["rms_norm_eps"] * narrow / hidden,
    }
    (target / "config.json").write_text(json.dumps({**config, **changes}, indent=2) + "\n")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _widened(name: str, tensor: torch.Tensor, narrow: int, hidden: int, attention: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        # The mean of squares runs over `hidden` values, of which `narrow` are not zero.
        tensor = tensor * math.sqrt(narrow / hidden)
    shape = [hidden if size == narrow else size for size in tensor.shape]
    for part, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        if part in name:
            shape[dim] = attention
    out = torch.zeros(shape)
    out[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return out


def train(recipe: str, model: Path, directory: Path, steps: int, overrides: list[str]) -> dict[str, list[float]]:
    """Run the quickstart on one process and read its figures."""
    values = [
        f"model.path={model}",
        f"precision.recipe={recipe}",
        f"run.output_dir={directory}",
        f"run.total_steps={steps}",
        "parallel.tp_size=1",
        "algorithm.off_policy.correction=tis",
        "checkpoint.interval=0",
        "checkpoint.export_huggingface=false",
        "telemetry.tensorboard=false",
        "evaluation.interval=0",
        *SMALLER,
        *overrides,
    ]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "megatron_dapo.cli.main",
        "train",
        str(QUICKSTART / "quickstart.toml"),
    ]
    for value in values:
        command += ["--set", value]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{recipe} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {name: [row[key] for row in rows if key in row] for name, key in FIGURES.items()}


def parse_arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "one step on a few short responses")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recipes", nargs="+", default=["fp32", "fp8_blockwise"])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    parser.add_argument("--output-dir", type=Path, help="keep the runs there")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.tiny:
        arguments.steps, arguments.overrides = 1, [*options.TINY_STEP, *arguments.overrides]
    with tempfile.TemporaryDirectory(prefix="fp8-learning-") as name:
        directory = arguments.output_dir or Path(name)
        widen(QUICKSTART / "base_model", directory / "model")
        runs = {
            recipe: train(recipe, directory / "model", directory / recipe, arguments.steps, arguments.overrides)
            for recipe in arguments.recipes
        }
    result = {"steps": arguments.steps, "machine": machine(), "runs": runs}
    if arguments.save:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    options.show(result, arguments)


def machine() -> dict[str, str]:
    return {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
