"""Tokens generated per trained group with and without the filter of hopeless and trivial prompts, and how good the filter is.

    python benchmarks/prompt_filter.py [--json] [--tiny] [--steps 60] [--groups 64] [--prompts 1000]

The simulated engine and the populations are those of `length_bias.py`; prompts keep their pass rates, so a filter can learn
them. `saved` is the share of tokens per trained group that the filter saves against none, `calibration_error` the model's
mean |predicted - observed| share of groups that disagree, `precision` the share of the prompts tried as an audit whose groups
did not disagree, as the filter said; `flagged_tried` counts those prompts, `flagged_useful` those of them that the filter would
have left out wrongly, and `precision_interval` is the 95 % Wilson interval of what they show. Figures are the worst over the
populations; `precision` is that over those in which an audit has tried a prompt.
"""

from __future__ import annotations

import sys

import options
from length_bias import POPULATIONS, measure

from megatron_dapo.config.rollout_schema import PromptFilterConfig, RolloutConfig

NAMES = ("early: mostly hopeless", "late: mostly solved")
CHOSEN = dict(zip(NAMES, (POPULATIONS["a tenth loops"], POPULATIONS["long and solved"]), strict=True))
FILTERS = {
    "none": PromptFilterConfig(),
    "bounds": PromptFilterConfig(name="bounds", margin=0.15),
    "model": PromptFilterConfig(name="model", margin=0.15),
}


def main() -> None:
    parser = options.parser("Tokens that the filter of prompts saves, and its quality.", "few prompts and steps")
    parser.add_argument("--steps", type=int, default=60, help="train steps of each row")
    parser.add_argument("--groups", type=int, default=64, help="groups a train step")
    parser.add_argument("--prompts", type=int, default=1000, help="prompts of the data set")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.steps, arguments.groups, arguments.prompts = 24, 16, 100
    rows = []
    for name, population in CHOSEN.items():
        base = 0.0
        for kind, settings in FILTERS.items():
            rollout = RolloutConfig(
                group_size=16, max_response_tokens=20480, max_num_gen_batches=0, prompt_filter=settings
            )
            row = measure(population, rollout, arguments.groups, arguments.steps, arguments.prompts)
            base = base or row["tokens_per_group"]
            interval = options.wilson_interval(row["flagged_tried"] - row["flagged_useful"], row["flagged_tried"])
            saved = 1 - row["tokens_per_group"] / base
            rows.append({"population": name, "filter": kind, **row, "precision_interval": interval, "saved": saved})
            print(rows[-1], file=sys.stderr, flush=True)
    model = [row for row in rows if row["filter"] == "model"]
    tried = [row for row in model if row["flagged_tried"]] or model
    worst = min(tried, key=lambda row: (row["filter_precision"], row["precision_interval"]))
    result = {
        "saved": min(row["saved"] for row in model),
        "calibration_error": max(row["calibration_error"] for row in model),
        "precision": worst["filter_precision"],
        **{name: worst[name] for name in ("flagged_tried", "flagged_useful", "precision_interval")},
        "num_steps": arguments.steps,
        "num_groups": arguments.groups,
        "num_prompts": arguments.prompts,
        "rows": rows,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
