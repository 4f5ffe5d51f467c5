"""The base class of collectors, with their inputs, counters, and accounting of everything they draw."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.base import RolloutEngine
from megatron_dapo.rollout.batch import CollectProgress, RolloutBatch
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.types import Group, Prompt


@dataclass(frozen=True)
class PromptAccounting:
    """Counts every prompt drawn since the run began by its current place (a prompt drawn twice counts twice)."""

    drawn: int
    trained: int
    filtered: int
    queued_again: int  # aborted or too stale
    buffered: int
    unfinished: int  # kept to continue in the next collection
    in_flight: int
    lost: int = 0  # dropped because an episode was lost

    @property
    def is_balanced(self) -> bool:
        """Return True if every prompt is in exactly one place."""
        waiting = self.buffered + self.unfinished + self.in_flight
        return self.drawn == self.trained + self.filtered + self.queued_again + self.lost + waiting


@dataclass(frozen=True)
class ResponseAccounting:
    """Counts every response of the prompts drawn since the run began by its current place."""

    drawn: int  # a group drawn counts with all its responses
    trained: int  # finished and handed out
    not_chosen: int  # finished in a window that was not trained
    given_back: int  # finished, in batches that were given back
    lost: int  # episodes whose environments failed
    in_flight: int  # requests of the current collection
    unfinished: int  # waiting for their next window
    not_started: int  # waiting for their first window

    @property
    def is_balanced(self) -> bool:
        """Return True if every response is in exactly one place."""
        waiting = self.given_back + self.in_flight + self.unfinished + self.not_started
        return self.drawn == self.trained + self.not_chosen + self.lost + waiting


@dataclass
class GroupCounters:
    """Counters of a group collector, saved in checkpoints."""

    num_started: int = 0  # groups ever started; the next group's number
    num_trained: int = 0
    num_filtered: int = 0
    num_queued_again: int = 0
    num_lost: int = 0  # dropped because an episode was lost; not among those above
    generation_step: int = 0  # rounds of generation begun
    train_step: int = 0  # batches handed out
    num_recent_decided: float = 0.0  # groups the filter decided on; older collections weigh less
    num_recent_kept: float = 0.0
    lost_in_row: dict[str, int] = field(default_factory=dict)  # lost groups since the last whole one, by prompt id


@dataclass
class WindowCounters:
    """Counters of a window collector, saved in checkpoints."""

    num_groups: int = 0  # ever begun; the next group's number
    num_drawn: int = 0  # their responses
    num_trained: int = 0
    num_not_chosen: int = 0
    num_lost: int = 0
    generation_step: int = 0  # collections begun
    train_step: int = 0  # batches handed out


@dataclass(frozen=True)
class LossLimits:
    """What is done about groups with a lost episode."""

    max_in_row: int = 1  # such groups dropped (windows: such episodes), one after another, that end a collection
    max_of_prompt: int = 2  # times in a row that a prompt is queued again
    shrinks: bool = False  # groups are trained without their lost episodes


@dataclass(frozen=True)
class CollectorInputs:
    """Everything a collector works with.

    `stream` yields prompt ids and takes back those that were not trained; its state is saved with the collector's.
    `prompts` maps the ids to prompts. `on_progress` is called after every poll of the engine, `on_kept` with each group
    that a batch may train.
    """

    stream: PromptStream
    prompts: Mapping[str, Prompt]
    engine: RolloutEngine
    scorer: SampleScorer
    on_progress: Callable[[CollectProgress], None] | None = None
    losses: LossLimits = LossLimits()
    on_kept: Callable[[Group], None] | None = None


class EpisodesLost(RuntimeError):
    """Environments were lost again and again: nothing is learned about the policy."""


class Collector(ABC):
    """Fills one rollout batch after another, on the rank that drives the rollout.

    Everything drawn from the stream is in exactly one place at any moment: `accounting` shows where, and `state_dict`
    saves a consistent snapshot.
    """

    def __init__(self, inputs: CollectorInputs, counters: GroupCounters | WindowCounters) -> None:
        self._stream = inputs.stream
        self._prompts = inputs.prompts
        self._engine = inputs.engine
        self._scorer = inputs.scorer
        self._on_progress = inputs.on_progress
        self._counters = counters
        # For the current collection, see `collect`.
        self._between_polls: Callable[[], None] | None = None
        self._is_followed: Callable[[], bool] = _never

    @property
    def generation_step(self) -> int:
        """Rounds of generation, or collections of windows, begun since the run began.

        Schedules follow `train_step`, never this.
        """
        return self._counters.generation_step

    @property
    def train_step(self) -> int:
        """Batches handed out since the run began."""
        return self._counters.train_step

    def collect(
        self,
        num_groups: int,
        training_version: int | None = None,
        between_polls: Callable[[], None] | None = None,
        part_size: int = 0,
        is_followed: Callable[[], bool] | None = None,
    ) -> RolloutBatch:
        """Return the next batch, or its next part.

        Args:
            num_groups: size of the batch.
            training_version: the policy version that the batch will train; None means the one that the engine serves.
            between_polls: called after every poll, when everything is accounted for. It may call `hold` and wait; an
                error that it raises ends the collection.
            part_size: groups of a part, which is returned once they are decided; generation stands still between
                calls. A batch ends with the part that `is_last`. 0: return whole batches.
            is_followed: called at the end of a batch; returns True if the next collection follows at once, so that the
                engine need not be stopped in between. None: it is stopped.

        Raises ValueError for a version that the engine cannot sample for, and CollectionExhausted if
        rollout.on_exhausted is "error". No error loses anything: the next call, or a collector that loads the state,
        continues with what was in flight.
        """
        if num_groups < 1:
            raise ValueError(f"collect: num_groups = {num_groups}, must be at least 1")
        self._between_polls = between_polls
        self._is_followed = is_followed or _never
        return self._collect(num_groups, training_version, part_size)

    @abstractmethod
    def hold(self) -> None:
        """Stop the engine and keep unfinished responses, so that its weights can be replaced.

        Call it between polls or between collections; a running collection continues by itself.
        """

    @abstractmethod
    def give_back(self, batch: RolloutBatch) -> None:
        """Undo the last `collect`, for a checkpoint taken before its batch was trained; of parts, the newest first."""

    @abstractmethod
    def accounting(self) -> PromptAccounting | ResponseAccounting:
        """Count everything drawn by its current place. The counts balance at all times, not just between steps."""

    @abstractmethod
    def state_dict(self, untrained: Sequence[RolloutBatch] = ()) -> dict[str, Any]:
        """Return a consistent snapshot of the state, including the stream's, for `serialization.split_state`.

        Batches handed out count as trained, except those in `untrained`, which are saved as if given back.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, in a collector that has nothing in flight."""

    @abstractmethod
    def _collect(self, num_groups: int, training_version: int | None, part_size: int) -> RolloutBatch:
        """Return the next batch or part; see `collect`."""

    @staticmethod
    @abstractmethod
    def _num_trained_by(batch: RolloutBatch) -> int:
        """Return how much a batch adds to the `trained` count."""

    def _checked_version(self, training_version: int | None, max_staleness: int) -> int:
        """Return the version that the batch will train; ValueError if the engine cannot sample for it."""
        serving = self._engine.policy_version
        if training_version is None:
            return serving
        if not 0 <= training_version - serving <= max_staleness:
            raise ValueError(
                f"collect: a batch for policy version {training_version} cannot be sampled by version {serving}: "
                f"max_staleness = {max_staleness}; wait for newer weights or raise max_staleness"
            )
        return training_version

    def _after_poll(self, progress: CollectProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)
        if self._between_polls is not None:
            self._between_polls()

    def _hand_out(self, batch: RolloutBatch) -> RolloutBatch:
        self._counters.num_trained += self._num_trained_by(batch)
        self._counters.train_step += ends_step(batch)
        return batch

    def _take_back(self, batch: RolloutBatch) -> None:
        self._counters.num_trained -= self._num_trained_by(batch)
        self._counters.train_step -= ends_step(batch)

    def _counters_without(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        """Return the counters as they were before `batches` were handed out."""
        counters = asdict(self._counters)
        return {
            **counters,
            "num_trained": counters["num_trained"] - sum(map(self._num_trained_by, batches)),
            "train_step": counters["train_step"] - sum(map(ends_step, batches)),
        }


def _never() -> bool:
    return False


def sample_seed(run_seed: int, group_id: str, index: int) -> int:
    """Return the 63-bit seed of one response: different for every (run, group, index), the same on every node."""
    digest = hashlib.sha256(f"{run_seed}/{group_id}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # engines keep seeds in signed 64-bit tensors


def ends_step(batch: RolloutBatch) -> bool:
    """Return True if a batch is complete with these groups, and not empty."""
    return batch.is_last and batch.num_before + len(batch.groups) > 0
