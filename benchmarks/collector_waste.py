"""Groups generated per trained group, against the lower bound of dynamic sampling.

A prompt with pass rate p gives a group of G responses that disagree with probability 1 - p^G - (1-p)^G (DAPO, arXiv
2503.14476, Eq 11), so at least 1 / E[1 - p^G - (1-p)^G] groups are generated per trained group, the mean over the
prompts' pass rates. The engine here is a coin: only the collector's own policy of starting, keeping and dropping groups
is measured, over many train steps. The policy version moves every step, so surplus would be stale; responses finish in
random order.

    python benchmarks/collector_waste.py [--json] [--tiny] [--steps 60] [--groups 64] [--group-size 16]

`waste_ratio` is the largest (generated / trained) / bound over the pass-rate mixtures, at the default oversample = 1.
`oversampled` is the ratio with 1.5 times as many groups in flight and nothing carried over; `partial` carries over the
groups that were started beyond a batch, at staleness bounds 0 to 2: they finish before the batch is trained
("restart" with a bound of 0 drops them) or continue after it. Its `token_waste_ratio` counts tokens:
(generated / trained) / bound.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import options

from megatron_dapo.algorithms.dynamic_sampling import wasted_fraction
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    SamplingParams,
    Score,
    VersionRange,
)

RIGHT, WRONG, FILLER = 1, 0, 2
NUM_PROMPTS = 1000
PARTIALS = ("restart", "continue")
MIXTURES: dict[str, tuple[float, ...]] = {
    "p=0.5": (0.5,),
    "p=0.1": (0.1,),
    "p=0.95": (0.95,),
    "p=0.02": (0.02,),
    "early training": (0.0, 0.0, 0.01, 0.05, 0.2),
    "late training": (0.3, 0.8, 0.95, 0.99, 1.0, 1.0),
    "uniform": tuple((i + 0.5) / 20 for i in range(20)),
}


@dataclass
class Running:
    """A response with the version of each of its tokens so far."""

    request: GenerationRequest
    versions: list[int]

    def completion(self, last: int, reason: FinishReason) -> Completion:
        num_tokens = len(self.versions)
        tokens = (*[FILLER] * (num_tokens - 1), last)[:num_tokens]
        runs = tuple(VersionRange(place, place + 1, version) for place, version in enumerate(self.versions))
        return Completion(self.request.request_id, tokens, (0.0,) * num_tokens, reason, runs)


class CoinEngine:
    """Answers right with the probability (in millionths) in the second prompt token. Every poll gives each running
    response one token and finishes a random third of them.
    """

    def __init__(self) -> None:
        self.policy_version = 0
        self.num_tokens = 0  # generated
        self._running: list[Running] = []
        self._random = random.Random(0)

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            runs = request.prefix.versions if request.prefix else ()
            self._running.append(Running(request, [run.version for run in runs for _ in range(run.start, run.end)]))

    def poll(self) -> list[Completion]:
        self.num_tokens += len(self._running)
        for running in self._running:
            running.versions.append(self.policy_version)
        # Shuffled, so that responses of a group do not finish together.
        self._random.shuffle(self._running)
        num_finished = -(-len(self._running) // 3)
        finished, self._running = self._running[:num_finished], self._running[num_finished:]
        return [running.completion(self._toss(running.request), "stop") for running in finished]

    def abort(self) -> list[Completion]:
        aborted, self._running = self._running, []
        return [running.completion(FILLER, "abort") for running in aborted]

    def _toss(self, request: GenerationRequest) -> int:
        # Seeded by the request: a response that starts again tosses the same coin.
        return RIGHT if random.Random(request.seed).random() < request.prompt_ids[1] / 1e6 else WRONG


class CoinVerifier:
    def score_many(self, items: Iterable[tuple[Any, str, str, bool]]) -> Mapping[Any, Score]:
        return {key: Score(float(text), float(text), "correct" if text == "1" else "wrong") for key, text, *_ in items}


def measure(
    pass_rates: Sequence[float],
    *,
    num_steps: int,
    num_groups: int,
    group_size: int,
    oversample: float,
    partial: str = "restart",
    max_staleness: int = 0,
) -> dict[str, float]:
    """Groups generated per trained group over `num_steps` batches of prompts that take `pass_rates` in turn."""
    rates = [pass_rates[index % len(pass_rates)] for index in range(NUM_PROMPTS // len(pass_rates) * len(pass_rates))]
    prompts = {f"{index}": Prompt(f"{index}", (), (0, round(1e6 * rate)), "1") for index, rate in enumerate(rates)}
    engine = CoinEngine()
    inputs = CollectorInputs(
        stream=PromptStream(list(prompts), seed=0),
        prompts=prompts,
        engine=engine,
        scorer=SampleScorer(CoinVerifier(), lambda token_ids: str(token_ids[-1])),
    )
    config = RolloutConfig(
        group_size=group_size,
        oversample=oversample,
        max_num_gen_batches=0,
        max_staleness=max_staleness,
        partial_rollout=partial == "continue",
    )
    collector = GroupCollector(inputs, config, SamplingParams(), seed=0)
    trained_tokens = num_continued = discarded_tokens = 0
    for _ in range(num_steps):
        batch = collector.collect(num_groups)
        trained_tokens += sum(len(sample.completion.token_ids) for group in batch.groups for sample in group.samples)
        num_continued += batch.statistics.num_continued
        discarded_tokens += batch.statistics.num_discarded_tokens
        assert len(batch.groups) == num_groups, f"a batch has {len(batch.groups)} groups instead of {num_groups}"
        # A new version every step makes every surplus group stale.
        engine.policy_version += 1
    ledger = collector.accounting()
    assert ledger.is_balanced, f"prompts were lost: {ledger}"
    bound = 1 / (1 - sum(wasted_fraction(rate, group_size) for rate in rates) / len(rates))
    generated = ledger.drawn / ledger.trained
    return {
        "trained": ledger.trained,
        "generated": ledger.drawn,
        "generated_per_trained": generated,
        "bound": bound,
        "waste_ratio": generated / bound,
        "token_waste_ratio": engine.num_tokens / trained_tokens / bound,
        "discarded_token_share": discarded_tokens / engine.num_tokens,
        "continued_responses": num_continued,
    }


def main() -> None:
    parser = options.parser(
        "Groups generated per trained group against the bound of dynamic sampling.", "4 steps of 8 groups of 4"
    )
    parser.add_argument("--steps", type=int, default=60, help="train steps a mixture")
    parser.add_argument("--groups", type=int, default=64, help="groups a train step")
    parser.add_argument("--group-size", type=int, default=16, help="responses a group")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.steps, arguments.groups, arguments.group_size = 4, 8, 4
    sizes = {"num_steps": arguments.steps, "num_groups": arguments.groups, "group_size": arguments.group_size}
    rows = [
        {"pass_rates": name, "oversample": 1.0, **measure(rates, oversample=1.0, **sizes)}
        for name, rates in MIXTURES.items()
    ]
    result = {
        "waste_ratio": max(row["waste_ratio"] for row in rows),
        **sizes,
        "rows": rows,
        # For comparison: more in flight than needed drops surplus.
        "oversampled": {
            "pass_rates": "uniform",
            "oversample": 1.5,
            **measure(MIXTURES["uniform"], oversample=1.5, **sizes),
        },
        "partial": [
            {
                "pass_rates": "uniform",
                "oversample": 1.5,
                "partial": partial,
                "max_staleness": max_staleness,
                **measure(MIXTURES["uniform"], oversample=1.5, partial=partial, max_staleness=max_staleness, **sizes),
            }
            for max_staleness in (0, 1, 2)
            for partial in PARTIALS
        ],
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
