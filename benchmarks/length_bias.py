"""Lengths of the responses that are trained against the lengths of those that are sampled, on a simulated engine.

A collector that trains the groups that finish first prefers short responses. This project's collector trains groups in
the order in which they started, and this program measures the remaining bias: with the sampling settings of the 32B
recipe and others that oversample more, for several distributions of lengths, with correctness that depends on length.

    python benchmarks/length_bias.py [--json] [--tiny] [--steps 12] [--recipe examples/recipes/dapo_qwen2.5_32b.toml]

With rollout.order = "guarded", a batch takes groups as they end, within the age bound: its rows, of four times as many steps of an eighth of the groups,
show that nothing is dropped, that `oldest` is at most the bound, and `steady_bias`: the mean length of what was trained after the first 2 max_staleness + 1
steps against that of as many groups in order of start.

`length_bias` is the largest |mean length of trained responses / mean length of responses of all groups that were started
and pass the filter - 1|; the simulation knows how a response would have ended, so groups that were dropped or have not
ended count as well. `discarded_share` is the largest share of generated tokens that were thrown away unfinished or too
stale (not those that the filter rejects). `throughput` is trained tokens per simulated second against the same settings
without oversampling, on policy: `speed` of every row. `tail` compares the longest tenth of the responses in the same way.

A simulated token stands for 64 tokens. Running responses advance together; a step of the engine takes a fixed time plus
some for each response that runs, as in decoding on GPUs.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import options

from megatron_dapo.algorithms.dynamic_sampling import GroupFilter
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.types import Completion, GenerationRequest, Prompt, Repetition, SamplingParams, Score, VersionRange

RECIPE = Path(__file__).parent.parent / "examples/recipes/dapo_qwen2.5_32b.toml"
RIGHT, WRONG = 1, 0
SCALE = 64  # tokens that one simulated token stands for
TICKS_PER_POLL = 4
# Seconds of a step of the engine: fixed, and for each running response (shape of a 32B's decoding on 128 GPUs).
STEP_SECONDS, SECONDS_PER_RESPONSE = 0.03 * SCALE, 4e-6 * SCALE
SLOTS = 12288  # responses that run at a time


@dataclass(frozen=True)
class Population:
    """Prompts and their responses: pass rates, and lengths by difficulty and by outcome."""

    pass_rates: tuple[float, ...]
    median_tokens: float
    spread: float  # standard deviation of the logarithm of the length
    hard_factor: float  # median of a prompt with pass rate 0 / with pass rate 1
    wrong_factor: float  # median of a wrong response / of a right one
    loop_share: float = 0.0  # wrong responses that run to the limit

    def outcome(self, pass_rate: float, seed: int, limit: int) -> tuple[int, bool]:
        """Return (length, is right) of the response with this seed; a response at the limit is wrong."""
        chance = random.Random(seed)
        is_right = chance.random() < pass_rate
        median = self.median_tokens / SCALE * self.hard_factor ** (0.5 - pass_rate)
        length = median * math.exp(self.spread * chance.gauss(0, 1)) * self.wrong_factor ** (0.0 if is_right else 1.0)
        if not is_right and chance.random() < self.loop_share:
            length = limit
        length = max(1, min(limit, round(length)))
        return length, is_right and length < limit


EARLY = (0.0, 0.0, 0.0, 0.05, 0.1, 0.3, 0.6)
LATE = (0.1, 0.4, 0.7, 0.9, 0.97, 0.99, 1.0, 1.0)
UNIFORM = tuple((i + 0.5) / 10 for i in range(10))
POPULATIONS: dict[str, Population] = {
    "wrong is longer": Population(UNIFORM, 3000, 0.6, 2.0, 1.8),
    "wrong is shorter": Population(UNIFORM, 3000, 0.6, 2.0, 0.5),
    "a tenth loops": Population(EARLY, 1500, 0.7, 3.0, 1.2, 0.1),
    "long and solved": Population(LATE, 7000, 0.5, 4.0, 1.5, 0.05),
}


class SimulatedEngine:
    """Continuous batching: running responses advance together, requests beyond the slots wait their turn."""

    def __init__(self, population: Population, limit: int, slots: int) -> None:
        self.policy_version = 0
        self.seconds = 0.0
        self.num_tokens = 0  # generated
        self.outcomes: dict[str, tuple[int, bool]] = {}  # request id -> outcome; all requests ever submitted
        self._population, self._limit, self._slots = population, limit, slots
        self._tick = 0
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[tuple[int, str, GenerationRequest, int]] = []  # heap by the tick of the end

    @property
    def num_unfinished(self) -> int:
        return len(self._running) + len(self._waiting)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            rate = request.prompt_ids[1] / 1e6
            self.outcomes[request.request_id] = self._population.outcome(rate, request.seed, self._limit)
        self._waiting.extend(requests)

    def poll(self) -> list[Completion]:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            start = request.prefix.num_tokens if request.prefix else 0
            end = self._tick + self.outcomes[request.request_id][0] - start
            heapq.heappush(self._running, (end, request.request_id, request, self._tick))
        self._tick += TICKS_PER_POLL
        self.seconds += TICKS_PER_POLL * (STEP_SECONDS + SECONDS_PER_RESPONSE * len(self._running))
        finished = []
        while self._running and self._running[0][0] <= self._tick:
            end, _, request, began = heapq.heappop(self._running)
            finished.append(self._completion(request, end - began, "stop"))
        return finished

    def abort(self) -> list[Completion]:
        stopped = [self._completion(request, self._tick - began, "abort") for _, _, request, began in self._running]
        stopped += [self._completion(request, 0, "abort") for request in self._waiting]
        self._running, self._waiting = [], deque()
        return stopped

    def _completion(self, request: GenerationRequest, num_new: int, reason: str) -> Completion:
        self.num_tokens += num_new
        runs = request.prefix.versions if request.prefix else ()
        start = runs[-1].end if runs else 0
        if num_new:
            runs = (*runs, VersionRange(start, start + num_new, self.policy_version))
        tokens = np.zeros(start + num_new, np.int32)
        if reason == "stop":
            length, is_right = self.outcomes[request.request_id]
            tokens[-1], reason = is_right, "length" if length == self._limit else "stop"
        return Completion(request.request_id, tokens, np.zeros(len(tokens), np.float32), reason, runs)


class LastTokenVerifier:
    """Reads the last token, and measures no repetition."""

    def score_many(self, items: Iterable[tuple[Any, str, str, bool]]) -> Mapping[Any, Score]:
        return {key: Score(float(text), float(text), "correct" if text == "1" else "wrong") for key, text, *_ in items}

    def measure_repetition(self, token_ids: Mapping[str, np.ndarray]) -> Mapping[str, Repetition]:
        return dict.fromkeys(token_ids, Repetition())


def measure(
    population: Population,
    rollout: RolloutConfig,
    num_groups: int,
    num_steps: int,
    num_prompts: int = 17_000,
    slots: int = SLOTS,
) -> dict[str, float]:
    """Train `num_steps` batches of `num_groups` groups and compare what was trained with what was started."""
    limit = rollout.max_response_tokens // SCALE
    num_prompts = num_prompts // len(population.pass_rates) * len(population.pass_rates)
    prompts = {
        f"{index}": Prompt(
            f"{index}", (), (0, round(1e6 * population.pass_rates[index % len(population.pass_rates)])), "1"
        )
        for index in range(num_prompts)
    }
    engine, verifier = SimulatedEngine(population, limit, slots), LastTokenVerifier()
    inputs = CollectorInputs(
        stream=PromptStream(list(prompts), seed=0),
        prompts=prompts,
        engine=engine,
        scorer=SampleScorer(verifier, lambda token_ids: str(token_ids[-1]), meter=verifier),
    )
    collector = GroupCollector(inputs, rollout, SamplingParams(max_new_tokens=limit), seed=0)
    trained: list[int] = []
    lengths_by_group: dict[str, list[int]] = {}  # trained groups, in order of training
    ages: list[int] = []
    num_discarded = 0
    of_filter = dict.fromkeys(("skipped", "audited", "tokens_saved"), 0)  # each collection counts from zero
    for version in range(num_steps):
        engine.policy_version = version
        batch = collector.collect(num_groups)
        assert len(batch.groups) == num_groups, f"a batch has {len(batch.groups)} groups instead of {num_groups}"
        lengths_by_group |= {
            group.group_id: [sample.completion.num_tokens for sample in group.samples] for group in batch.groups
        }
        trained += [length for group in batch.groups for length in lengths_by_group[group.group_id]]
        ages += [version - group.policy_version for group in batch.groups]
        num_discarded += batch.statistics.num_discarded_tokens
        of_filter = {name: count + batch.statistics.prompts[name] for name, count in of_filter.items()}
    ledger = collector.accounting()
    assert ledger.is_balanced, f"prompts were lost: {ledger}"
    by_group = lengths_of_passing_groups(engine.outcomes, rollout)
    passing = [length for lengths in by_group.values() for length in lengths]
    return {
        "mean_trained": SCALE * float(np.mean(trained)),
        "mean_sampled": SCALE * float(np.mean(passing)),
        "length_bias": float(np.mean(trained) / np.mean(passing) - 1),
        "tail": float(_longest_tenth(trained) / _longest_tenth(passing) - 1),
        "steady_bias": _steady_bias(lengths_by_group, by_group, num_groups * (2 * rollout.max_staleness + 1)),
        "oldest": max(ages),
        "discarded_share": num_discarded / engine.num_tokens,
        **batch.statistics.prompts,
        **of_filter,
        "tokens_per_group": SCALE * engine.num_tokens / ledger.trained,
        "generated_per_trained": ledger.drawn / ledger.trained,
        "mean_staleness": float(np.mean(ages)),
        "trained_tokens_per_second": SCALE * sum(trained) / engine.seconds,
    }


def lengths_of_passing_groups(
    outcomes: Mapping[str, tuple[int, bool]], rollout: RolloutConfig
) -> dict[str, list[int]]:
    """Return the lengths of all responses of groups that the filter would keep, finished or not, by group id."""
    groups: dict[str, list[tuple[int, bool]]] = {}
    for name, outcome in outcomes.items():
        groups.setdefault(name.split("/")[0], []).append(outcome)
    keeps = GroupFilter(rollout.accuracy_min, rollout.accuracy_max).decide
    return {
        name: [length for length, _ in group]
        for name, group in groups.items()
        if keeps([is_right for _, is_right in group]) == "kept"
    }


def _steady_bias(trained: Mapping[str, Sequence[int]], passing: Mapping[str, Sequence[int]], num_first: int) -> float:
    """Compare groups trained after the first `num_first` with as many in order of start; `trained` in order of training."""
    of_trained = [length for lengths in list(trained.values())[num_first:] for length in lengths]
    of_started = [length for name in sorted(passing)[num_first : len(trained)] for length in passing[name]]
    return float(np.mean(of_trained) / np.mean(of_started) - 1)


def _longest_tenth(lengths: Sequence[int]) -> float:
    return float(np.mean(np.sort(lengths)[-max(1, len(lengths) // 10) :]))


def settings_of(recipe: RolloutConfig) -> dict[str, RolloutConfig]:
    """Return the settings that are compared, by name: the recipe's own and others that carry groups over."""
    change: Callable[..., RolloutConfig] = lambda **values: recipe.model_copy(update=values)  # noqa: E731
    return {
        "on policy, no oversampling": change(oversample=1.0, max_staleness=0, partial_rollout=False),
        "the recipe": recipe,
        "oversample 2, staleness 1, continued": change(oversample=2.0, max_staleness=1, partial_rollout=True),
        "oversample 2, staleness 1, finished": change(oversample=2.0, max_staleness=1, partial_rollout=False),
        "oversample 3, staleness 2, continued": change(oversample=3.0, max_staleness=2, partial_rollout=True),
        **{
            f"guarded, oversample {bound + 1}, staleness {bound}": change(
                order="guarded", oversample=bound + 1.0, max_staleness=bound, partial_rollout=True
            )
            for bound in (1, 2)
        },
    }


def main() -> None:
    parser = options.parser(
        "Lengths of what is trained against lengths of what is sampled.", "small batches and few steps"
    )
    parser.add_argument("--steps", type=int, default=12, help="train steps of each row")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipe with the sampling settings")
    arguments = parser.parse_args()
    recipe = load_config(arguments.recipe).config.rollout
    num_groups, num_steps = recipe.prompts_per_step, arguments.steps
    if arguments.tiny:
        num_groups, num_steps, recipe = 64, 10, recipe.model_copy(update={"group_size": 8})
    rows = []
    for name, population in POPULATIONS.items():
        base = 0.0
        for settings, rollout in settings_of(recipe).items():
            if rollout.order == "guarded":
                # Groups that wait before and after the counted steps matter less to more steps.
                row = measure(population, rollout, num_groups // 8, 4 * num_steps, slots=SLOTS // 8)
            else:
                row = measure(population, rollout, num_groups, num_steps)
            base = base or row["trained_tokens_per_second"]
            speed = row["trained_tokens_per_second"] / base
            rows.append(
                {
                    "lengths": name, "settings": settings, "oversample": rollout.oversample,
                    "max_staleness": rollout.max_staleness, **row, "speed": speed,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "length_bias": max(abs(row["length_bias"]) for row in rows if not row["settings"].startswith("guarded")),
        "guarded_bias": max(abs(row["steady_bias"]) for row in rows if row["settings"].startswith("guarded")),
        "oldest_over_bound": max(row["oldest"] - row["max_staleness"] for row in rows),
        "discarded_share": max(row["discarded_share"] for row in rows),
        "throughput": min(row["speed"] for row in rows if row["settings"] == "the recipe"),
        "num_groups": num_groups,
        "num_steps": num_steps,
        "rows": rows,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
