"""The protocol of a score, stored with it, and comparisons that reject different protocols."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from megatron_dapo.evaluation.estimators import (
    Estimate,
    ProblemRecord,
    bootstrap_mean,
    estimate_metrics,
    problem_values,
    response_rates,
)
from megatron_dapo.types import SamplingParams
from megatron_dapo.untrusted import printable

FORMAT = "megatron_dapo evaluation 1"

# May differ between compared results: the models, and the source of their independent draws.
FREE_FIELDS = ("model", "seed", "dataset_path")


@dataclass(frozen=True)
class EvaluationProtocol:
    """Everything that affects a score besides the model's ability."""

    model: str  # the evaluated model: directory, or run and step
    dataset_path: str
    dataset_sha256: str  # hash of the file's bytes
    num_dataset_rows: int
    num_problems: int  # distinct (prompt, answer) that were evaluated
    num_samples: int  # responses per problem: the n of avg@n
    temperature: float
    top_p: float
    top_k: int  # 0: off
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    engine: str
    engine_version: str
    chat_template_sha256: str
    verifier: str
    verifier_version: str
    environment: str = ""  # class, function or program that plays; "": none
    environment_sha256: str = ""  # hash of the files that it names
    environment_limits: str = ""
    turns: str = ""  # form of the turns; with the chat template it decides the proof of the token stream

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.num_problems < 1:
            raise ValueError(
                f"evaluation of {self.num_problems} problems with {self.num_samples} samples each: "
                "both must be at least 1"
            )
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"evaluation with temperature 0 gives {self.num_samples} equal responses; "
                "set num_samples = 1 or a temperature"
            )

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of every response."""
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.max_new_tokens, self.stop_token_ids)


@dataclass(frozen=True)
class EvaluationResult:
    """A protocol, the metrics measured by it, and the table that they come from."""

    protocol: EvaluationProtocol
    metrics: Mapping[str, Estimate]  # avg@n, pass@k, cons@k: means over problems with 95 % intervals
    rates: Mapping[str, float]  # means over responses: truncation_rate, mean_response_tokens, outcome/..., ...
    problems: tuple[ProblemRecord, ...]

    @property
    def headline(self) -> Estimate:
        """The estimate of avg@n."""
        return self.metrics[f"avg@{self.protocol.num_samples}"]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources in order of appearance; empty if there is only one source."""
        names = tuple(dict.fromkeys(problem.source for problem in self.problems if problem.source))
        return names if len(names) > 1 else ()

    def of_source(self, name: str) -> EvaluationResult:
        """Return the result for only one source's problems."""
        problems = tuple(problem for problem in self.problems if problem.source == name)
        if not problems:
            raise ValueError(f"no problem of {name!r} in this evaluation; it has {', '.join(self.sources)}")
        protocol = replace(self.protocol, num_problems=len(problems))
        return EvaluationResult(protocol, estimate_metrics(problems), response_rates(problems), problems)

    def to_json(self) -> str:
        """Return the result as a JSON document."""
        # NaN is not valid JSON, and other readers would reject the file.
        return printable(json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False))

    @staticmethod
    def from_json(text: str) -> EvaluationResult:
        """Invert `to_json`. Raises ValueError naming the missing or unknown fields, or another format."""
        document = json.loads(text)
        found = document.pop("format", None) if isinstance(document, dict) else None
        if found != FORMAT:
            raise ValueError(f"not an evaluation result: format {found!r}, expected {FORMAT!r}")
        content = _checked(EvaluationResult, document)
        return EvaluationResult(
            protocol=_make(EvaluationProtocol, content["protocol"]),
            metrics={name: _make(Estimate, estimate) for name, estimate in content["metrics"].items()},
            rates=dict(content["rates"]),
            problems=tuple(_make(ProblemRecord, record) for record in content["problems"]),
        )


def _checked(kind: type, content: Any) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    # A field with a default is newer than the format: results of earlier releases lack it.
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if not isinstance(content, dict) or not required <= set(content) <= names:
        given = set(content) if isinstance(content, dict) else set()
        raise ValueError(
            f"evaluation result, {kind.__name__}: missing {sorted(names - given)}, unknown {sorted(given - names)}; "
            "it was written by another version"
        )
    return content


def _make(kind: type, content: Any) -> Any:
    """Build the frozen dataclass `kind` from its JSON object, which has lists for tuples."""
    values = _checked(kind, content)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def differing_fields(a: EvaluationProtocol, b: EvaluationProtocol) -> dict[str, tuple[Any, Any]]:
    """Return field -> both values for the fields that must agree between comparable results and do not."""
    pairs = {field.name: (getattr(a, field.name), getattr(b, field.name)) for field in fields(EvaluationProtocol)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in FREE_FIELDS}


def compare(a: EvaluationResult, b: EvaluationResult, *, seed: int = 0) -> dict[str, Estimate]:
    """Return b minus a for every metric, with its interval, paired by problem.

    Raises ValueError naming the differing fields of unlike protocols (models, seeds and paths may differ), or if the
    problems are not the same.
    """
    unlike = differing_fields(a.protocol, b.protocol)
    if unlike:
        listing = "; ".join(f"{name}: {left!r} and {right!r}" for name, (left, right) in unlike.items())
        raise ValueError(f"the results were measured by unlike protocols ({listing}); evaluate both by one protocol")
    order = {record.problem_id: index for index, record in enumerate(b.problems)}
    only_one = {record.problem_id for record in a.problems} ^ set(order)
    if only_one:
        raise ValueError(
            f"{len(only_one)} problems are in one result only, e.g. {min(only_one)}; evaluate the same problems"
        )
    right = problem_values([b.problems[order[record.problem_id]] for record in a.problems])
    return {
        name: bootstrap_mean([y - x for x, y in zip(values, right[name])], seed=seed)
        for name, values in problem_values(a.problems).items()
    }
