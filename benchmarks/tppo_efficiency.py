"""Savings of windowed rollouts (T-PPO, arXiv 2506.15050) over rollouts that wait for their longest response.

    python benchmarks/tppo_efficiency.py [--json]                                 the simulation (b)
    python benchmarks/tppo_efficiency.py --measure-curve embedded|sglang          engine curve, to be stored
    python benchmarks/tppo_efficiency.py --measure-rollout embedded|sglang        only rollouts on an engine (a)
    python benchmarks/tppo_efficiency.py --train [--output DIRECTORY] [--json]       both recipes trained here (a)
    python benchmarks/tppo_efficiency.py --runs FULL WINDOWS [--target 0.7]       the same from directories that are there

(b) METHOD (`tppo/simulation.py`). A step generates 512 x 16 responses of up to 24,576 tokens, spread evenly over engines.
A decode tick gives every running response of an engine a token and lasts tau(number running), the engine curve; an
engine's step lasts until its last response is done, the step as long as its slowest engine. Full-synchronous: every
response to its end. Windows: 8,192 responses of which each gets at most 8,192 new tokens, unfinished ones first, fresh
ones for those that ended; the figures are of the steady state (6 steps to get there, 20 counted).

WHAT 2.5 MEANS. The paper's figure is training time to the same score (its abstract: training efficiency by up to 2.5;
its figure 1: 60 % less training time): seconds a step times the number of steps. A simulation of engines knows seconds
a step. `speedup` compares those of the rollout, full-synchronous / windows, both of 8,192 responses: what counts if
windows need as many steps. A window step has fewer tokens, so `speedup_tokens` compares tokens generated per second:
what counts if they need as many tokens. `speedup_step` and `speedup_step_tokens` are the same of whole steps, with
training; `speedup_step_overlapping` and `speedup_step_tokens_overlapping` those of windows that are generated while the
windows before are trained (rollout.max_staleness = 1). `steps_ratio_for_goal`: 2.5 / `speedup_step`, how many times fewer steps would be left to make 2.5.
`speedup_tokens_of_slots_never_idle`: the bound on `speedup_tokens` of any schedule. `most_responses_an_engine`: how many
responses an engine may have at most for `speedup` to reach 2.0 and 2.5. `idle_share`: of all slots over the rollout's
time, those without a response. Every assumption stands under `assumptions` in the output. `roofline` is computed, not
measured; `flat` is the limit of engines that a response more costs nothing; the others are the curves of
`results/tppo_engine_curve.json`, linear between their points and beyond them: `embedded` and `sglang` measured here,
`published` by others on two H100. `clusters`: the paper's batch, length and window on clusters of different size and
cut, as the paper does not say its own, with the room its contexts need (`tppo/clusters.py`).

(a) METHOD, rollouts (`tppo/engine_runs.py`). One engine generates the simulation's lengths divided by 32,
`--most-running` responses of which every one has a slot: whole, and in windows, each in turn. Before every step of
windows the engine is told of new weights (the server's cache is flushed), as in training; `--keep-cache` leaves that
out. The embedded engine is timed in CPU seconds, which other programs on the machine do not lengthen.

(a) METHOD, training (`tppo/training_runs.py`). The two recipes train one after the other from one pretrained critic: the
same model, task and number of responses a step, the embedded engine, VAPO on whole responses and T-PPO on windows. The
clock is that of training, without pretraining, evaluation and checkpoints; the first step, which warms up, is left out
of speeds. `idle_share` is 1 - new tokens / (responses x the longest one's new tokens), as every response has a slot.
`time_to_accuracy_ratio` is seconds to the target, whole responses / windows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import options
from tppo.clusters import cluster_table
from tppo.engine_runs import ENGINES, measure_curve, measure_rollout
from tppo.long_tail import write_task
from tppo.simulation import headline, simulation
from tppo.training_runs import ROOT, compare_runs, train

QUICKSTART = ROOT / "examples" / "quickstart"
TINY_TRAINING = (
    *options.TINY_STEP,
    "run.total_steps=2",
    "optimizer.warmup_steps=0",
    "value_pretraining.min_steps=2",
    "value_pretraining.max_steps=2",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "parallel.tp_size=1",
)


def parse_arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "the smallest sizes of what is asked")
    parser.add_argument("--curve", default="embedded", help="engine curve of the headline")
    parser.add_argument("--prefill-cost", type=float, default=0.1)
    parser.add_argument("--responses-an-engine", type=int, default=16, help="of the headline; all are in the tables")
    parser.add_argument("--measure-curve", choices=list(ENGINES))
    parser.add_argument("--measure-rollout", choices=list(ENGINES))
    parser.add_argument("--model", type=Path, default=QUICKSTART / "base_model", help="of the curve")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".venv-sglang/bin/python")
    parser.add_argument("--most-running", type=int, default=256)
    parser.add_argument("--keep-cache", action="store_true", help="windows by the same weights")
    parser.add_argument("--ticks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="train both recipes here and compare")
    parser.add_argument("--runs", type=Path, nargs=2, metavar=("FULL", "WINDOWS"), help="run directories to compare")
    parser.add_argument("--full-recipe", type=Path, default=QUICKSTART / "quickstart_vapo.toml")
    parser.add_argument("--windows-recipe", type=Path, default=QUICKSTART / "quickstart_tppo.toml")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="a.b=value", help="both recipes"
    )
    parser.add_argument(
        "--windows-set",
        dest="windows_overrides",
        action="append",
        default=[],
        metavar="a.b=value",
        help="only windows",
    )
    parser.add_argument(
        "--long-tail", action="store_true", help="train on `tppo/long_tail.py`'s task, not the recipes'"
    )
    parser.add_argument("--target", type=float, default=0.7, help="held-out avg@k to reach")
    parser.add_argument("--output", type=Path, help="directory of the runs; default: a temporary one")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.tiny:
        arguments.most_running, arguments.ticks, arguments.repeats = 4, 4, 1
        arguments.overrides = [*TINY_TRAINING, *arguments.overrides]
    if arguments.measure_curve:
        curve = measure_curve(arguments.measure_curve, arguments)
        print(json.dumps({arguments.measure_curve: curve}, indent=2))
        return
    if arguments.measure_rollout:
        rollout = measure_rollout(arguments.measure_rollout, arguments)
        print(json.dumps({"benchmark": "tppo_efficiency", **rollout}, indent=2))
        return
    if arguments.runs or arguments.train:
        with tempfile.TemporaryDirectory() as temporary:
            directory = arguments.output or Path(temporary)
            recipes = (arguments.full_recipe, arguments.windows_recipe)
            task = write_task(directory / "task") if arguments.long_tail else []
            directories = arguments.runs or train(
                *recipes, directory, [*task, *arguments.overrides], arguments.windows_overrides
            )
            result = compare_runs(*directories, arguments.target)
        print(json.dumps({"benchmark": "tppo_efficiency", **result}, indent=2))
        return
    setting = (arguments.curve, arguments.prefill_cost, arguments.responses_an_engine)
    result = {"benchmark": "tppo_efficiency", **simulation(*setting), "clusters": cluster_table(headline(*setting))}
    options.show(result, arguments)


if __name__ == "__main__":
    main()
