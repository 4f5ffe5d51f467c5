"""Steps that others published, with what is known of their runs.

Source: verl, docs/advance/fully_async.md (tables of 10/2025 and later) and docs/advance/one_step_off.md (07/2025). H20 GPUs,
vLLM with four GPUs a server for the 7B model (recipe/fully_async_policy/shell), 512 prompts x 16 responses a step unless a
row says otherwise. Seconds: step, generation (the trainer's wait for samples if trainer and engines are apart), old
log-probs, update. A row's update and log-prob seconds are inputs of the simulation, the step and the generation are
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twin import theirs
from twin.simulation import Cost, Lengths

from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.memory import num_parameters
from megatron_dapo.plan.rollout import EngineRates, active_parameters, expert_parameters

Schedule = Literal["colocated", "stream", "one step off"]


@dataclass(frozen=True)
class Row:
    """A published step."""

    name: str
    schedule: Schedule
    engines: int  # GPUs that generate
    step: float
    generation: float  # s; the trainer's wait if the engines are separate
    update: float
    log_probs: float = 0.0
    trainers: int = 0  # GPUs that train; 0: the same
    staleness: float = 0.0  # verl's staleness_threshold
    parts: int = 4  # trainings between two updates of the engines (trigger_parameter_sync_step)
    is_partial: bool = True
    is_fitted: bool = False
    model: str = "Qwen2.5-7B"
    longest: int = 28672
    prompts: int = 512
    group_size: int = 16
    tensor_parallel: int = 4
    sync: float = 4.0  # step - generation - update of every published row of the 7B model

    @property
    def other(self) -> float:
        """Seconds of a step that are neither generation nor the trainer's phases."""
        return self.step - self.generation - self.log_probs - self.update


def _stream(name: str, *seconds: float, **changes: object) -> Row:
    settings = {"engines": 64, "trainers": 64, "staleness": 0.5, **changes}
    return Row(name, "stream", step=seconds[0], generation=seconds[1], update=seconds[2], **settings)  # type: ignore[arg-type]


def _colocated(name: str, gpus: int, *seconds: float, **changes: object) -> Row:
    step, generation, log_probs, update = seconds
    return Row(name, "colocated", gpus, step, generation, update, log_probs, **changes)  # type: ignore[arg-type]


FITTED = (
    _colocated("colocated, 128", 128, 356.30, 177.85, 53.92, 113.81, is_fitted=True),
    _stream("stream, 0", 231.34, 128.47, 98.77, staleness=0.0, is_partial=False, is_fitted=True),
    _stream("stream, 0.1", 171.30, 58.17, 109.12, staleness=0.1, is_fitted=True),
    _stream("stream, 0.3", 146.11, 38.88, 103.22, staleness=0.3, is_fitted=True),
    _stream("stream, 0.5", 150.63, 33.14, 113.16, is_fitted=True),
)
_30B = {"model": "Qwen3-30B-A3B-Base", "longest": 8192}
_AGENTS = {"prompts": 64, "longest": 16384}
_OFF = {"longest": 20480}
OTHERS = (
    _colocated("colocated, 32", 32, 790.10, 357.41, 107.71, 313.81),
    _stream("stream 0.5, 16:16", 294.77, 21.26, 269.80, engines=16, trainers=16),
    _colocated("colocated, 64", 64, 365.28, 150.72, 70.26, 133.41),
    _stream("stream 0.5, 32:32", 189.26, 28.46, 156.98, engines=32, trainers=32),
    _stream("require_batches 1", 203.47, 30.88, 181.08, parts=16),
    _stream("require_batches 2", 158.72, 26.32, 128.08, parts=8),
    _stream("require_batches 4", 124.64, 25.62, 95.06, parts=4),
    _colocated("30B-A3B, colocated, 128", 128, 497.89, 348.05, 28.73 + 20.86, 86.27, **_30B),
    _stream("30B-A3B, stream 0.5, 96:32", 282.75, 22.06, 50.05 + 206.63, engines=96, trainers=32, **_30B),
    _colocated("one step off: colocated, 16", 16, 749.0, 321.0, 88.0, 286.0, **_OFF),
    Row("one step off, 4:12", "one step off", 4, 520.0, 45.0, 337.0, 108.0, trainers=12, **_OFF),
    _colocated("tools: colocated, 32", 32, 375.47, 228.03, 35.19, 111.84, **_AGENTS),
    _stream("tools: stream 1, 16:16", 221.36, 40.59, 179.58, engines=16, trainers=16, staleness=1.0, **_AGENTS),
)


@dataclass(frozen=True)
class Fit:
    """The three numbers that were fitted to `FITTED`, for all rows the same."""

    median: float = 2000.0  # tokens of a response
    sigma: float = 0.8  # standard deviation of the logarithm of the length
    fixed: float = 3.0e-3  # seconds of a decoding step besides reads, products and sampling


FIT = Fit()
PROMPT_PART = 0.5  # assumed: a prompt's responses share half of `sigma`
PROMPT_TOKENS = 200  # assumed
# The lengths of verl's runs differ ("affects the response length during training, which in turn affects training time"). Tokens
# are taken to be proportional to the GPU seconds of the update; these are the mean of the four fitted rows of the trainer.
REFERENCE_UPDATE = 64 * 106.0


def cost_of(row: Row, fit: Fit = FIT) -> Cost:
    """Return the costs of the row's servers, by the data sheet of an H20 and the rates that plans use."""
    architecture = read_architecture(planned_directory(Path("absent", row.model)))
    experts = expert_parameters(architecture)
    parameters = num_parameters(architecture)
    per_token = 2 * 2 * architecture.num_layers * architecture.num_key_value_heads * architecture.head_dim
    rates = EngineRates(
        weight_bytes=2 * parameters / row.tensor_parallel,
        bytes_per_token=per_token / row.tensor_parallel,
        active_parameters=active_parameters(architecture),
        ranks=row.tensor_parallel,
        gpu=GPUS["H20"],
        expert_share=experts / parameters,
        chosen_share=architecture.num_experts_per_token / architecture.num_experts if experts else 1.0,
    )
    return Cost.of(rates, fit.fixed)


def settings_of(row: Row, fit: Fit = FIT, num_steps: int = 10, divide: int = 1) -> theirs.Settings:
    """Return the row's run, with its batch and its engines divided by `divide`."""
    is_of_trainer = row.schedule == "stream" and row.model == "Qwen2.5-7B" and row.prompts == 512
    scale = row.trainers * row.update / REFERENCE_UPDATE if is_of_trainer else 1.0
    lengths = Lengths(scale * fit.median, fit.sigma, row.longest, PROMPT_PART * fit.sigma, PROMPT_TOKENS)
    return theirs.Settings(
        engines=max(1, row.engines // row.tensor_parallel // divide),
        cost=cost_of(row, fit),
        lengths=lengths,
        prompts=row.prompts // divide,
        group_size=row.group_size,
        update=row.update + row.log_probs,
        sync=row.sync,
        staleness=row.staleness,
        parts=row.parts,
        is_partial=row.is_partial,
        num_steps=num_steps,
    )


@dataclass(frozen=True)
class Compared:
    """A published step and the simulated one."""

    row: Row
    step: float
    generation: float

    @property
    def error(self) -> float:
        return self.step / self.row.step - 1

    @property
    def generation_error(self) -> float:
        return self.generation / self.row.generation - 1


def compare(row: Row, settings: theirs.Settings) -> Compared:
    """Simulate a row."""
    if row.schedule == "colocated":
        number = max(1, settings.num_steps // 3)
        seconds = sum(theirs.generation(settings, index * settings.prompts) for index in range(number)) / number
        return Compared(row, seconds + row.step - row.generation, seconds)
    outcome = theirs.stream(settings) if row.schedule == "stream" else theirs.one_step_off(settings)
    return Compared(row, outcome.step, outcome.wait)
