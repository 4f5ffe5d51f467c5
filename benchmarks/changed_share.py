"""How many elements of a policy in bf16 change between two versions of its weights? What a delta update would send.

    python benchmarks/changed_share.py [--models smollm2 quickstart] [--rates 1e-6 1e-5] [--steps 1 4 16] [--only-most]
                                       [--json] [--tiny] [--save]

Each recipe is trained by DAPO from its shipped weights (AdamW, float32 main params, one optimizer step a train step, no
warm-up, constant learning rate) on one process, stopped after each number of steps and continued. Compared are the
exported weights, in bf16, with those that the run started from.

    share     elements whose 16 bits differ / all elements
    expected  mean of min(1, |change of the main param| / distance of two bf16 numbers there): the share if main params
              lay anywhere between two bf16 numbers. A run starts with all of them exactly on one, where a small change
              rounds away, so `share` rises with the run's age and `expected` is what it tends to. Only for models
              trained in float32, whose export is the main params.
    most      mean of min(1, steps x learning rate / that distance): `expected` if AdamW moved every element by the whole
              learning rate, always in one direction; needs no training (--only-most)

Where the share is below a quarter, an index of 4 bytes and a value of 2 are less than the tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import options
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "changed_share_cpu.json"
RECIPES = {"smollm2": "examples/smollm2/smollm2.toml", "quickstart": "examples/quickstart/quickstart.toml"}
MODELS = {"smollm2": "runs/models/smollm2", "quickstart": "examples/quickstart/base_model"}
# A step of a few hundred trained tokens; Adam's step depends on signs more than on the size of the batch.
SMALLER = {
    "smollm2": ("rollout.prompts_per_step=4", "training.mini_batch_prompts=4"),
    "quickstart": ("rollout.prompts_per_step=8", "training.mini_batch_prompts=8"),
}
SETTINGS = (
    "optimizer.warmup_steps=0",
    "parallel.tp_size=1",
    "parallel.num_processes=1",
    "checkpoint.interval=0",
    "checkpoint.keep=1",
    "telemetry.tensorboard=false",
    *options.NO_EVALUATION,
)
MANTISSA_BITS = 7


def train(name: str, rate: float, steps: int, directory: Path, overrides: Sequence[str]) -> None:
    """Train the recipe up to `steps` steps; a run in `directory` is continued."""
    values = [
        *SETTINGS,
        *SMALLER[name],
        f"optimizer.learning_rate={rate}",
        f"run.total_steps={steps}",
        f"run.output_dir={directory}",
        *overrides,
    ]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(ROOT / RECIPES[name])]
    for value in values:
        command += ["--set", value]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def compare(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Count what changed from one version to another."""
    if before.keys() != after.keys():
        raise ValueError(f"two versions have different tensors: {sorted(before.keys() ^ after.keys())[:3]}")
    elements = changed = 0
    expected, is_main = 0.0, True
    for name, old in before.items():
        new, elements = after[name], elements + old.numel()
        bits = [tensor.to(torch.bfloat16).view(torch.int16) for tensor in (old, new)]
        changed += int((bits[0] != bits[1]).sum())
        expected += float(((new - old).abs() / spacing(old)).clamp(max=1).double().sum())
        is_main = is_main and new.dtype == torch.float32
    return {"elements": elements, "share": changed / elements, "expected": expected / elements if is_main else None}


def most(before: Mapping[str, torch.Tensor], distance: float) -> float:
    """Return the expected share if every main param moves by `distance`."""
    moved = sum(float((distance / spacing(tensor)).clamp(max=1).double().sum()) for tensor in before.values())
    return moved / sum(tensor.numel() for tensor in before.values())


def spacing(values: torch.Tensor) -> torch.Tensor:
    """Return the distance of two neighboring bf16 numbers at each value."""
    exponent = torch.frexp(values.float()).exponent - 1
    return torch.ldexp(torch.ones(values.shape), exponent.clamp(min=-126) - MANTISSA_BITS)


def measure(name: str, rate: float, arguments: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    base, rows = weights(ROOT / MODELS[name]), []
    overrides = [*arguments.overrides, *(options.TINY_STEP if arguments.tiny else ())]
    for steps in arguments.steps:
        start = time.perf_counter()
        row = {"model": name, "learning_rate": rate, "steps": steps, "most": most(base, steps * rate)}
        if not arguments.only_most:
            train(name, rate, steps, directory, overrides)
            row |= compare(base, weights(directory / "huggingface"))
        rows.append({**row, "seconds": time.perf_counter() - start})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "the quickstart's model, one learning rate, one and two steps")
    parser.add_argument("--models", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5])
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--only-most", action="store_true", help="do not train")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    parser.add_argument("--save", action="store_true", help=f"add the rows to {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.models, arguments.rates, arguments.steps = ["quickstart"], [1e-5], [1, 2]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    rows = []
    for name in arguments.models:
        for rate in arguments.rates:
            with tempfile.TemporaryDirectory(prefix="changed-share-") as directory:
                rows += measure(name, rate, arguments, Path(directory) / "run")
    result = {
        "benchmark": "changed_share",
        "rows": rows,
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores",
    }
    if arguments.save:
        save(result)
    options.show(result, arguments)


def save(result: dict[str, Any]) -> None:
    """Write the result; rows of other models and learning rates in the file stay."""
    measured = {(row["model"], row["learning_rate"]) for row in result["rows"]}
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rest = [row for row in known if (row["model"], row["learning_rate"]) not in measured]
    order = list(RECIPES)
    rows = sorted(rest + result["rows"], key=lambda row: (order.index(row["model"]), row["learning_rate"], row["steps"]))
    RESULT.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
