"""What a run is told of what it keeps and watches: checkpoints, evaluations, metrics, the gap to the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from megatron_dapo.config.section import (
    Bounds,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Section,
)

Resume = Literal["auto", "never", "must"]


class CheckpointConfig(Section):
    """Exact resume, and the exported model."""

    output_dir: str = ""
    """Where checkpoints are kept; relative to the current directory. "": <run.output_dir>/checkpoints."""

    interval: NonNegativeInt = 20
    """Train steps between checkpoints. 0: only at the end and on a signal."""

    keep: PositiveInt = 2
    """Newest valid checkpoints kept; an older one is deleted only after a newer one is valid."""

    resume: Resume = "auto"
    """auto: continue from the newest valid checkpoint if there is one. never: fail if the folder holds one. must: fail
    if it holds none."""

    export_huggingface: bool = True
    """Write the trained policy as a Hugging Face folder, <run.output_dir>/huggingface, when the run ends, and the critic, where
    there is one, as <run.output_dir>/critic."""


class EvaluationConfig(Section):
    """Evaluation on data.eval_paths: avg@k, pass@k, cons@k."""

    interval: NonNegativeInt = 0
    """Train steps between evaluations. 0: none in between."""

    num_samples: PositiveInt = 32
    """Responses per problem (k)."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""

    top_p: ProbabilityMass = 0.7
    """Nucleus mass."""

    top_k: NonNegativeInt = 0
    """Only the k likeliest tokens; 0: off."""

    max_response_tokens: NonNegativeInt = 0
    """Longest response in tokens. 0: rollout.max_response_tokens."""

    at_start: bool = True
    """Evaluate the initial policy."""

    at_end: bool = True
    """Evaluate the trained policy."""


class TelemetryConfig(Section):
    """What is recorded of a run."""

    tensorboard: bool = True
    """Write TensorBoard events to <run.output_dir>/tensorboard, x axis the train step. metrics.jsonl is written either
    way."""

    samples_per_step: NonNegativeInt = 64
    """Responses written to samples.jsonl per train step. 0: none."""

    progress: bool = True
    """Live progress display on a terminal (plain log lines elsewhere)."""

    dump_batches: NonNegativeInt = 0
    """Train steps between dumps of a whole rollout batch, for replay through the trainer alone. 0: none."""


class MismatchConfig(Section):
    """Gate on the gap between engine and trainer log-probs: mean |old_logprobs - rollout_logprobs| over trained tokens,
    in nats."""

    step0_max_mean_abs: PositiveFloat = 0.02
    """The run ends with an error if the gap of the first batch is larger: engine and trainer do not hold the same
    model."""

    alarm: PositiveFloat = 0.05
    """A warning names the step when the gap of a later batch is larger."""

    trend_factor: Annotated[float, Bounds(gt=1)] = 2.0
    """A warning also comes when the gap, smoothed over some steps, has grown by this factor within the last hundred."""

    trend_floor: NonNegativeFloat = 1e-3
    """Smoothed gaps up to this many nats are never a trend."""
