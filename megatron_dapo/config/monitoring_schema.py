"""What a run watches: held-out problems, metrics, the gap between trainer and engine, quality of responses, nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from megatron_dapo.config.section import (
    AtLeastOne,
    Bounds,
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Rule,
    Section,
)

NodeAction = Literal["warn", "exclude"]
Tracker = Literal["wandb", "mlflow"]


class EvaluationConfig(Section):
    """Evaluation on data.eval_paths, or on what is held out of data.train_paths: avg@k, pass@k, cons@k."""

    interval: NonNegativeInt = 0
    """Train steps between evaluations. 0: none during training."""

    num_samples: PositiveInt = 32  # DAPO's paper reports avg@32 on AIME 2024
    """Responses per problem (k)."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""

    top_p: ProbabilityMass = 0.7  # DAPO's paper evaluates with it
    """Nucleus mass."""

    top_k: NonNegativeInt = 0
    """Sample only from the k likeliest tokens; 0: off."""

    max_response_tokens: NonNegativeInt = 0
    """Longest response in tokens. 0: rollout.max_response_tokens."""

    background: bool = False
    """Evaluate while the run trains on, with servers on separate devices: the servers generate for both, and the next weight
    sync waits for the evaluation's end. False: training waits for the whole evaluation. The last one is never in the
    background."""

    at_start: bool = True
    """Evaluate the initial policy."""

    at_end: bool = True
    """Evaluate the trained policy."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.temperature == 0 and self.num_samples > 1:
            yield Rule(
                "evaluation.temperature > 0 or evaluation.num_samples == 1",
                "set evaluation.num_samples = 1, or evaluation.temperature = 1.0",
                reason="greedy responses are all equal",
            )


class TelemetryConfig(Section):
    """Records of a run: metrics, samples, dumps."""

    tensorboard: bool = True
    """Write TensorBoard events to <run.output_dir>/tensorboard, x axis the train step. metrics.jsonl is written either
    way."""

    trackers: tuple[Tracker, ...] = ()
    """"wandb" and "mlflow", in addition to TensorBoard: metrics and the values set by recipe and options. A resumed run
    continues its run there. Each reads its usual variables (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, ...);
    MLflow without one writes to <run.output_dir>/mlruns. Extras of the same names install them."""

    prometheus_port: Annotated[int, Bounds(ge=0, le=65535)] = 0
    """Port at which a process of rank 0's node serves the newest metrics to Prometheus, at /metrics. 0: none. A run is
    refused if the port is in use. The extra of the same name installs what it needs."""

    prometheus_host: str = "127.0.0.1"
    """Address of that port. "0.0.0.0" lets other machines scrape it, without a password."""

    samples_per_step: NonNegativeInt = 64
    """Responses written to samples.jsonl per train step. 0: none."""

    progress: bool = True
    """Live progress display on a terminal (otherwise plain log lines)."""

    show_completions: NonNegativeInt = 5
    """Train steps between groups of completions on the terminal: best and worst response with their rewards, of the group whose
    rewards differ most. 0: none."""

    report: bool = True
    """Write <run.output_dir>/report.html at every evaluation and at the end, in a separate process: one HTML file with
    verdict, curves, samples and configuration, which reloads in a browser while the run is under way."""

    references: tuple[InputPath, ...] = ()
    """Curves that the run is compared with after every evaluation, as `megatron-dapo compare` does: published ones
    (examples/references) or directories of other runs. The log and the progress display say whether it is on track.
    Relative: from the recipe's directory."""

    dump_batches: NonNegativeInt = 0
    """Train steps between dumps of a whole rollout batch, for replay through the trainer without an engine. 0: none."""


class MismatchConfig(Section):
    """Gate on the gap between engine and trainer log-probs: mean |old_logprobs - rollout_logprobs| over trained tokens,
    in nats."""

    step0_max_mean_abs: PositiveFloat = 0.05
    """The run ends with an error if the gap of the first batch is larger: engine and trainer do not hold the same
    model. bfloat16 on both sides gives about 0.01 to 0.04, so less than 0.05 is refused for it; float32 allows 1e-3."""

    alarm: NonNegativeFloat = 0.0
    """Warn, once a run, when the gap of a batch is larger; the report marks every such step. 0: what rounding explains, by
    number format and device: 0.001 to 0.2 (docs/tuning.md)."""

    trend_factor: Annotated[float, Bounds(gt=1)] = 2.0
    """Also warn when the gap, smoothed over some steps, has grown by this factor within the last hundred steps."""

    trend_floor: NonNegativeFloat = 1e-3
    """Smoothed gaps up to this many nats never count as a trend."""


class QualityConfig(Section):
    """Alarms on trained responses, their text and their rewards: a warning names the step, the value and the threshold. The metrics
    are quality/* and reward/failed_share."""

    repetition_alarm: Fraction = 0.2
    """Warn when the mean share of repeated 20-grams is above this. 1: never."""

    tail_loop_alarm: Fraction = 0.2
    """Warn when the share of responses that end in a loop is above this. 1: never."""

    compression_alarm: Fraction = 0.0
    """Warn when the mean compressed / raw size of a response's token ids is below this. 0: never. Off by default,
    because the ratio depends more on length and tokenizer than on repetition: sums of six tokens are at 1.1, chains of
    eighty at 0.4. Half of the first step's value is a good start; repetition_alarm and tail_loop_alarm are on."""

    probability_alarm: Fraction = 1.0
    """Warn when the mean probability of sampled tokens is above this, before entropy has collapsed. 1: never. Off by
    default, because the level depends on model and task: the quickstart starts at 0.97 and learns, SmolLM2-135M goes
    from 0.63 to 0.94. Halfway from the first step's value to 1 is a good start; the report names a collapse of entropy
    relative to the run's first steps."""

    reward_failure_alarm: Fraction = 0.02
    """Warn when the share of responses whose reward timed out or failed, wholly or in part, is above this. 1: never."""


class NodesConfig(Section):
    """Slow ranks and faulty nodes of a run on several nodes, from metrics that every node samples once a second into
    <run.output_dir>/nodes (docs/nodes.md). Nothing is sampled if stragglers and detector are both off, or on one node."""

    stragglers: bool = True
    """Report the rank that worked longest in each phase, as the metrics nodes/PHASE_slowest_rank and
    nodes/PHASE_over_median."""

    detector: bool = True
    """Name a node whose metrics differ from those of the others for continuity_seconds (Minder, arXiv 2411.01791). With
    fewer than four nodes there is no detector. On simulated faults no alert was false and one in ten faults was
    missed."""

    period_seconds: AtLeastOne = 480.0  # interval of the published system
    """Seconds between two reports of stragglers and two searches for faulty nodes. A search covers 15/8 of this period, at
    least twice continuity_seconds."""

    continuity_seconds: AtLeastOne = 120.0
    """Seconds for which the same node must be a metric's outlier without a break before there is an alert."""

    similarity_threshold: Annotated[float, Bounds(gt=0)] = 2.0
    """z-score of a node's distance to the others from which on it is an outlier in a window; higher is less sensitive.
    Among few nodes it is at most half of the largest z-score that one outlier can have, sqrt(n - 1)."""

    action: NodeAction = "warn"
    """Action after an alert. warn: a log line and a record. exclude: also save and end with exit code 75; slurm.sh
    requeues the job without that node, which needs a spare node in the partition."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.action == "exclude" and not self.detector:
            yield Rule(
                "nodes.detector or nodes.action == 'warn'",
                "set nodes.detector = true, or nodes.action = 'warn'",
                reason="only the detector names nodes to be left out",
            )
