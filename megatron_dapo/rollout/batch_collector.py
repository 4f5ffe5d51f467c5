"""What every collector is: prompts, an engine and a scorer, driven by the rank that collects, and counters of what it did."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from megatron_dapo.engines.base import RolloutEngine
from megatron_dapo.rollout.batch import CollectProgress, RolloutBatch
from megatron_dapo.rollout.ledger import Accounting, GroupCounters, WindowAccounting, WindowCounters
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.types import Prompt


class PromptStream(Protocol):
    """Which prompt comes next."""

    def next(self) -> str | None:
        """The next prompt id, queued-again ones first; None when the data is exhausted."""

    def requeue(self, prompt_id: str) -> None:
        """Hand in again what was drawn and not trained."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BatchCollector(ABC):
    """Fills one rollout batch after the other. What is drawn from the stream is in exactly one place at any moment:
    `accounting` shows it, and `state_dict` saves a cut that keeps it.

    Args:
        stream: yields prompt ids and takes back those not trained. Its state is saved with the collector's.
        prompts: by prompt id.
        engine: generates.
        scorer: decodes, verifies, shapes.
        counters: from zero.
        on_progress: called after every poll.
    """

    def __init__(
        self,
        stream: PromptStream,
        prompts: Mapping[str, Prompt],
        engine: RolloutEngine,
        scorer: SampleScorer,
        counters: GroupCounters | WindowCounters,
        on_progress: Callable[[CollectProgress], None] | None,
    ) -> None:
        self._stream = stream
        self._prompts = prompts
        self._engine = engine
        self._scorer = scorer
        self._on_progress = on_progress
        self._counters = counters

    @property
    def generation_step(self) -> int:
        """Rounds of generation, or collections of windows, begun since the run began. Schedules go by train_step, never
        by this.
        """
        return self._counters.generation_step

    @property
    def train_step(self) -> int:
        """Batches handed out since the run began."""
        return self._counters.train_step

    @abstractmethod
    def collect(
        self, num_groups: int, training_version: int | None = None, between_polls: Callable[[], None] = lambda: None
    ) -> RolloutBatch:
        """The next batch.

        training_version: the policy version the batch will train; None: the one the engine serves.
        between_polls: called after every poll, with everything accounted for. It may call `hold` and wait; an error it
        raises ends the collection.

        Raises CollectionExhausted under on_exhausted = "error". On any error nothing is lost: what was in flight is
        taken up by the next call or by loading the state.
        """

    @abstractmethod
    def hold(self) -> None:
        """Stop the engine and keep what is unfinished: its weights can be replaced. For `between_polls` or between
        collections; a collection goes on by itself.
        """

    @abstractmethod
    def give_back(self, batch: RolloutBatch) -> None:
        """Undo the last `collect`, for a checkpoint before its batch was trained."""

    @abstractmethod
    def accounting(self) -> Accounting | WindowAccounting:
        """The ledger of everything drawn. It balances at every moment, not just between steps."""

    @abstractmethod
    def state_dict(self, untrained: Sequence[RolloutBatch] = ()) -> dict[str, Any]:
        """JSON-serializable, with the stream's state: one consistent cut. Batches handed out count as trained, save
        those `untrained`: the state is as if they had been given back.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, in a collector that has nothing in flight."""

    @staticmethod
    @abstractmethod
    def _num_trained_by(batch: RolloutBatch) -> int:
        """What a batch adds to the ledger's `trained`."""

    def _hand_out(self, batch: RolloutBatch) -> RolloutBatch:
        self._counters.num_trained += self._num_trained_by(batch)
        self._counters.train_step += bool(batch.groups)
        return batch

    def _take_back(self, batch: RolloutBatch) -> None:
        self._counters.num_trained -= self._num_trained_by(batch)
        self._counters.train_step -= bool(batch.groups)

    def _counters_without(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        """As if these had not been handed out."""
        counters = vars(self._counters)
        return {
            **counters,
            "num_trained": counters["num_trained"] - sum(map(self._num_trained_by, batches)),
            "train_step": counters["train_step"] - sum(bool(batch.groups) for batch in batches),
        }

    def _tell(self, progress: Callable[[], CollectProgress]) -> None:
        if self._on_progress is not None:
            self._on_progress(progress())


def check_num_groups(num_groups: int) -> None:
    """ValueError where a batch could hold nothing."""
    if num_groups < 1:
        raise ValueError(f"collect: num_groups = {num_groups}, must be at least 1")


def sample_seed(run_seed: int, group_id: str, index: int) -> int:
    """The seed of one response, 63 bits: different for every (run, group, index), the same on every machine."""
    digest = hashlib.sha256(f"{run_seed}/{group_id}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
