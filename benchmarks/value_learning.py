"""Does the value path learn what it should? A language whose values, advantages and optimum are known exactly.

    python benchmarks/value_learning.py [--json] [--tiny] [--part values|megatron|ablation] [--seeds 3] [--steps 40]

THE LANGUAGE. A prompt is a lock with a secret key of 6 letters out of 6. A response is letters and an end token, 64
tokens at most. The next letter of the key opens one stage, another letter does nothing, the end token ends. It is
correct (+1) if all stages are open at its end, else wrong (-1), also if it is cut. The best policy is always right.
The state after a prefix is (prompt, stages open, tokens), so under any policy the values V, the action values Q and
the probability of a correct response come out of dynamic programming, without sampling.

1. VALUES. A fixed policy; a small network learns from sampled Monte-Carlo returns with the project's value loss.
   Against V of the dynamic programme: the mean error over visits, and the largest one over the states that at least
   one response in a hundred to their prompt visits. Advantages by the project's estimators from the learned values
   against Q - V: at lambda 0 token by token, where no chance is left in them; at others their mean over tokens that
   are alike, in units of its standard error (1: only chance is left), from the learned and from the exact values.
2. MEGATRON. The same values from `MegatronCritic`, two layers that read the tokens themselves (TP1, fp32).
3. ABLATION. PPO with every part of VAPO, and with one part removed, from the same start; accuracy is exact, not
   sampled. `learning` is its mean over all steps, `final` that of the last fifth. A part counts as shown where
   without it learning is lower with every seed. All losses, weights and estimators are the project's own functions.

Where the small task differs from the paper (arXiv 2504.05118): responses have 8 to 36 tokens and not thousands, so
alpha of the length-adaptive lambda is 0.5 and not 0.05 (at 40 tokens it gives the 0.95 that the paper's gives at
400), and everything that long responses do to PPO is weak here. Without pretraining, the critic starts where a reward
model does that has learned only the ends of responses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from locks.ablation import TINY_RECIPE, check_parts
from locks.megatron_values import learn_values_with_megatron
from locks.values import LAMBDAS, check_values

VALUE_STEPS, TINY_STEPS = 500, 5  # optimizer steps of the first two parts


def measure(parts: Sequence[str], num_seeds: int, num_steps: int, *, tiny: bool = False) -> dict[str, Any]:
    """Run `parts`; `num_steps` counts the ablation's rollouts. `tiny` shortens everything and checks the program."""
    seeds = range(num_seeds)
    value_steps = TINY_STEPS if tiny else VALUE_STEPS
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "values": lambda: check_values(seeds, value_steps),
        "megatron": lambda: learn_values_with_megatron(value_steps),
        "ablation": lambda: check_parts(seeds, num_steps, TINY_RECIPE if tiny else {}),
    }
    start = time.process_time()  # CPU seconds: other programs on the machine do not lengthen them
    result: dict[str, Any] = {"benchmark": "value_learning", "seeds": num_seeds}
    for name in parts:
        result[name] = checks[name]()
    if "values" in result:
        learned = [run["errors_by_step"].values() for run in result["values"]["squared"].values()]
        result["value_error"] = max(list(errors)[-1]["mean_error"] for errors in learned)
    if "ablation" in result:
        result["parts_shown"] = [name for name, row in result["ablation"].items() if row["shown"]]
    return {**result, "cpu_seconds": time.process_time() - start, "torch": torch.__version__}


def tables(result: Mapping[str, Any]) -> str:
    """Markdown."""
    sections = {"values": value_tables, "megatron": megatron_table, "ablation": ablation_table}
    return "\n\n".join(write(result[name]) for name, write in sections.items() if name in result)


def value_tables(values: Mapping[str, Any]) -> str:
    runs = {f"{loss}, seed {seed}": run for loss in ("squared", "clipped") for seed, run in values[loss].items()}
    lines = ["| values | mean error, by step | largest | EV | EV of the exact values | advantage error, lambda 0 |"]
    lines.append("|---|---|---|---|---|---|")
    for name, run in runs.items():
        errors = run["errors_by_step"]
        by_step = ", ".join(f"{step}: {error['mean_error']:.3f}" for step, error in errors.items())
        largest = list(errors.values())[-1]["largest_error"]
        explained, exact = run["explained_variance"]["all"], run["explained_variance_of_exact_values"]["all"]
        at_zero = run["advantages"]["lambda_0"]
        lines.append(
            f"| {name} | {by_step} | {largest:.2f} | {explained:.3f} | {exact:.3f} | "
            f"{at_zero['mean_error']:.4f} of {at_zero['spread']:.3f} |"
        )
    lines += [
        "",
        "| lambda (squared, seed 0) | bias, learned values | bias, exact values | in standard errors, exact |",
    ]
    lines.append("|---|---|---|---|")
    for name in LAMBDAS:
        learned, exact = values["squared"]["0"]["advantages"][f"lambda_{name}"].values()
        lines.append(f"| {name} | {learned['bias']:.4f} | {exact['bias']:.4f} | {exact['in_standard_errors']:.1f} |")
    return "\n".join(lines)


def megatron_table(megatron: Mapping[str, Any]) -> str:
    lines = ["| MegatronCritic | mean error | largest error | EV | EV of the exact values |", "|---|---|---|---|---|"]
    for name in ("before", "after"):
        figures = (
            f"{megatron[name][key]:.3f}"
            for key in ("mean_error", "largest_error", "explained_variance", "explained_variance_of_exact_values")
        )
        lines.append(f"| {name} {megatron['steps']} steps | {' | '.join(figures)} |")
    return "\n".join(lines)


def ablation_table(ablation: Mapping[str, Any]) -> str:
    lines = ["| parts | learning | final | change of learning, by seed | value error at the start | paper | shown |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in ablation.items():
        changes = ", ".join(f"{change:+.3f}" for change in row["changes"]) if name != "VAPO" else ""
        shown = "" if name == "VAPO" else "yes" if row["shown"] else "no"
        lines.append(
            f"| {name} | {row['learning']:.3f} | {row['final']:.3f} | {changes} | "
            f"{row['value_error_at_the_start']:.3f} | {row['paper']} | {shown} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tiny", action="store_true", help="one seed, a few steps: checks the program")
    parser.add_argument("--part", choices=["values", "megatron", "ablation"], action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="rollouts of a run of the ablation")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.seeds, arguments.steps = 1, 1
    torch.set_num_threads(1)
    parts = arguments.part or ["values", "megatron", "ablation"]
    result = measure(parts, arguments.seeds, arguments.steps, tiny=arguments.tiny)
    print(json.dumps(result, indent=1) if arguments.json else tables(result))


if __name__ == "__main__":
    main()
