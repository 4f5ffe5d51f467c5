"""The collector: fills one rollout batch after the other with groups worth training on.

    prompt stream -> in flight (engine) -> scored -> filter -> replay buffer -> batch for the trainer
          ^               | given up                   | all right, all wrong: gone      | too stale
          +---------------+--------------------------------------------------------------+

Groups are started one at a time, each when a group is missing and none in flight may still supply it: a rejected group
costs one replacement, not a round. With oversample = 1 the batch is therefore a function of the prompt stream, the
seeds and the weights alone: the first groups, in order of their start, that pass the filter, however fast the engine
finished which.

Every prompt drawn ends in exactly one place: trained, filtered, queued again, buffered or in flight. `accounting` shows
it, and `state_dict` saves a cut that keeps it.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from megatron_dapo.rollout.buffer import ReplayBuffer
from megatron_dapo.rollout.scoring import SampleScorer, UnscoredSample
from megatron_dapo.rollout.statistics import CollectStatistics, StatisticsBuilder
from megatron_dapo.types import Completion, GenerationRequest, Group, Prompt, SamplingParams, ScoredSample

logger = logging.getLogger(__name__)

STATE_VERSION = 1
KEPT = "kept"

Exhaustion = Literal["", "rounds", "prompts"]
OnExhausted = Literal["train_partial", "stop", "error"]


class PromptStream(Protocol):
    """Which prompt comes next."""

    def next(self) -> str | None:
        """The next prompt id, queued-again ones first; None when the data is exhausted."""

    def requeue(self, prompt_id: str) -> None:
        """Hand in again what was drawn and not trained."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RolloutEngine(Protocol):
    """What the collector needs of an engine."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    def poll(self) -> list[Completion]: ...

    def abort(self) -> list[Completion]: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def policy_version(self) -> int: ...


# Accuracies of one group (0 or 1 each, never shaped rewards) -> "kept" or the reason it is dropped.
GroupVerdict = Callable[[Sequence[float]], str]


def keep_every_group(accuracies: Sequence[float]) -> str:
    """The verdict without dynamic sampling."""
    return KEPT


@dataclass(frozen=True)
class CollectorSettings:
    """How groups are generated."""

    group_size: int  # responses a prompt
    sampling: SamplingParams
    seed: int  # of the run; with the group id and the index it makes the seed of a response
    oversample: float = (
        1.0  # groups in flight as a multiple of those missing; above 1 leaves surplus and unfinished ones
    )
    max_rounds: int = 10  # of num_groups x oversample groups started in one collection; 0: no limit
    on_exhausted: OnExhausted = "train_partial"  # when rounds or prompts run out

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"collector: group_size = {self.group_size}, must be at least 1")
        if self.oversample < 1:
            raise ValueError(f"collector: oversample = {self.oversample}, must be at least 1")
        if self.max_rounds < 0:
            raise ValueError(f"collector: max_rounds = {self.max_rounds}, must be at least 0 (0: no limit)")
        if self.on_exhausted not in _ON_EXHAUSTED:
            raise ValueError(
                f"collector: unknown on_exhausted {self.on_exhausted!r}; there are {', '.join(_ON_EXHAUSTED)}"
            )


@dataclass(frozen=True)
class RolloutBatch:
    """Groups for one train step, in the order they were started."""

    groups: tuple[Group, ...]
    statistics: CollectStatistics
    exhausted: Exhaustion = ""  # why there are fewer groups than asked for
    should_stop: bool = False  # nothing more to train on: save a checkpoint and end


@dataclass(frozen=True)
class CollectProgress:
    """Handed to the progress callback after every poll."""

    num_accepted: int  # groups ready for the batch, carried-over ones included
    num_groups: int  # groups asked for
    num_in_flight: int
    num_filtered: int
    num_responses: int  # finished since the collection began
    num_tokens: int  # of finished responses


@dataclass(frozen=True)
class Accounting:
    """Where the prompts drawn since the run began have gone (a prompt drawn twice counts twice)."""

    drawn: int
    trained: int
    filtered: int
    queued_again: int  # aborted or too stale
    buffered: int
    in_flight: int

    @property
    def is_balanced(self) -> bool:
        return self.drawn == self.trained + self.filtered + self.queued_again + self.buffered + self.in_flight


class CollectionExhausted(RuntimeError):
    """on_exhausted = "error": the batch could not be filled. Groups kept so far are in the buffer, so a checkpoint
    loses nothing.
    """


@dataclass(eq=False)
class _InFlight:
    """A group the engine works on."""

    group_id: str
    prompt: Prompt
    generation_step: int
    completions: dict[int, Completion] = field(default_factory=dict)  # by index in the group

    @property
    def was_aborted(self) -> bool:
        return any(completion.finish_reason == "abort" for completion in self.completions.values())


@dataclass
class _Counters:
    """Saved in checkpoints."""

    num_started: int = 0  # groups ever started; the next group's number
    num_trained: int = 0
    num_filtered: int = 0
    num_queued_again: int = 0
    generation_step: int = 0  # rounds of generation begun
    train_step: int = 0  # batches handed out


class Collector:
    """Collects rollout batches on the rank that drives the rollout.

    Args:
        stream: yields prompt ids and takes back those not trained. Its state is saved with the collector's.
        prompts: by prompt id.
        engine: generates.
        scorer: decodes, verifies, shapes.
        buffer: holds kept groups; its max_staleness decides what is carried over. Saved with the collector's state.
        verdict: the group filter.
        on_progress: called after every poll.
    """

    def __init__(
        self,
        stream: PromptStream,
        prompts: Mapping[str, Prompt],
        engine: RolloutEngine,
        scorer: SampleScorer,
        buffer: ReplayBuffer,
        settings: CollectorSettings,
        verdict: GroupVerdict = keep_every_group,
        on_progress: Callable[[CollectProgress], None] | None = None,
    ) -> None:
        self._stream = stream
        self._prompts = prompts
        self._engine = engine
        self._scorer = scorer
        self._buffer = buffer
        self._settings = settings
        self._verdict = verdict
        self._on_progress = on_progress
        self._in_flight: dict[str, _InFlight] = {}  # by group id, in order of their start
        self._counters = _Counters()
        self._builder = StatisticsBuilder()

    @property
    def generation_step(self) -> int:
        """Rounds of generation begun since the run began. Schedules go by train_step, never by this."""
        return self._counters.generation_step

    @property
    def train_step(self) -> int:
        """Batches handed out since the run began."""
        return self._counters.train_step

    # Collecting

    def collect(self, num_groups: int) -> RolloutBatch:
        """The next batch: exactly `num_groups` whole groups, or fewer (see `on_exhausted`) when rounds or prompts run
        out.

        Raises CollectionExhausted under on_exhausted = "error". On any error nothing is lost: what was in flight is
        queued again by the next call or by loading the state.
        """
        if num_groups < 1:
            raise ValueError(f"collect: num_groups = {num_groups}, must be at least 1")
        self._builder = StatisticsBuilder()
        self._give_up()
        self._evict()
        first_number = self._counters.num_started
        exhausted = self._fill(num_groups)
        self._give_up()
        if exhausted:
            logger.warning("%s", self._describe_shortage(num_groups, exhausted))
            return _ON_EXHAUSTED[self._settings.on_exhausted](self, num_groups, exhausted, first_number)
        return self._batch(num_groups, "", first_number)

    def give_back(self, batch: RolloutBatch) -> None:
        """Undo the last `collect` as far as its groups go, for a checkpoint before they were trained: the next call
        returns them.
        """
        self._buffer.put_back(batch.groups)
        self._counters.num_trained -= len(batch.groups)
        self._counters.train_step -= bool(batch.groups)

    def _fill(self, num_groups: int) -> Exhaustion:
        """Generate until the buffer holds `num_groups`, or say why it cannot."""
        round_size = math.ceil(num_groups * self._settings.oversample)
        exhausted: Exhaustion = ""
        while (missing := num_groups - self._num_available()) > 0:
            exhausted = self._start_groups(math.ceil(missing * self._settings.oversample), round_size)
            if not self._in_flight:
                return exhausted
            self._receive(self._engine.poll())
            self._report(num_groups)
        return ""

    def _num_available(self) -> int:
        return self._buffer.num_available(self._engine.policy_version)

    def _start_groups(self, num_wanted: int, round_size: int) -> Exhaustion:
        """Start groups until `num_wanted` are in flight or a limit is met, which is returned."""
        requests: list[GenerationRequest] = []
        exhausted: Exhaustion = ""
        while len(self._in_flight) < num_wanted:
            if self._settings.max_rounds and self._builder.num_started >= self._settings.max_rounds * round_size:
                exhausted = "rounds"
                break
            prompt_id = self._stream.next()
            if prompt_id is None:
                exhausted = "prompts"
                break
            requests.extend(self._start(prompt_id, round_size))
        if requests:
            self._engine.submit(requests)
        return exhausted

    def _start(self, prompt_id: str, round_size: int) -> list[GenerationRequest]:
        """Record a new group in flight; its requests."""
        if self._builder.num_started % round_size == 0:
            self._counters.generation_step += 1
        # Fixed width: group ids sort in order of their start.
        group_id = f"{self._counters.num_started:012d}"
        prompt = self._prompts[prompt_id]
        self._in_flight[group_id] = _InFlight(group_id, prompt, self._counters.generation_step)
        self._counters.num_started += 1
        self._builder.num_started += 1
        return [
            GenerationRequest(
                request_id=f"{group_id}/{index}",
                prompt_ids=prompt.token_ids,
                sampling=self._settings.sampling,
                seed=sample_seed(self._settings.seed, group_id, index),
            )
            for index in range(self._settings.group_size)
        ]

    def _receive(self, completions: Sequence[Completion]) -> None:
        """Sort completions into their groups and decide on the groups that are complete, in order of their start."""
        self._assign(completions)
        complete = [group for group in self._in_flight.values() if len(group.completions) == self._settings.group_size]
        # An engine may abort by itself (a restart): such a group would train on cut responses, so its prompt starts
        # over.
        for group in complete:
            if group.was_aborted:
                self._queue_again(group)
        self._decide([group for group in complete if not group.was_aborted])

    def _assign(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            group_id, index = completion.request_id.rsplit("/", 1)
            assert group_id in self._in_flight, f"the engine returned {completion.request_id}, which is not in flight"
            self._in_flight[group_id].completions[int(index)] = completion

    def _decide(self, complete: Sequence[_InFlight]) -> None:
        """Score complete groups and keep or drop each."""
        if not complete:
            return
        scored = self._scorer.score(
            [
                UnscoredSample(f"{flight.group_id}/{index}", flight.prompt, flight.completions[index])
                for flight in complete
                for index in range(self._settings.group_size)
            ]
        )
        for flight in complete:
            samples = tuple(scored[f"{flight.group_id}/{index}"] for index in range(self._settings.group_size))
            group = self._group(flight, samples)
            verdict = self._verdict([sample.score.accuracy for sample in samples])
            del self._in_flight[flight.group_id]
            self._builder.add_scored(group, verdict)
            if verdict == KEPT:
                self._buffer.put(group)
            else:
                self._counters.num_filtered += 1

    def _group(self, flight: _InFlight, samples: tuple[ScoredSample, ...]) -> Group:
        versions = [version.version for sample in samples for version in sample.completion.versions]
        return Group(
            group_id=flight.group_id,
            prompt=flight.prompt,
            samples=samples,
            policy_version=min(versions, default=self._engine.policy_version),
            generation_step=flight.generation_step,
        )

    # Queueing again

    def _give_up(self) -> None:
        """Abort what is in flight and queue its prompts again, ahead of fresh ones: long groups are not lost to short
        ones.
        """
        if not self._in_flight:
            return
        self._assign(self._engine.abort())
        for group in list(self._in_flight.values()):
            self._queue_again(group)

    def _queue_again(self, group: _InFlight) -> None:
        del self._in_flight[group.group_id]
        self._stream.requeue(group.prompt.prompt_id)
        self._counters.num_queued_again += 1
        self._builder.add_aborted(group.completions.values())

    def _evict(self) -> None:
        """Queue the prompts of buffered groups again that are too stale for the policy now served."""
        for group in self._buffer.evict(self._engine.policy_version):
            self._stream.requeue(group.prompt.prompt_id)
            self._counters.num_queued_again += 1
            self._builder.num_stale += 1

    # The batch

    def _batch(self, num_groups: int, exhausted: Exhaustion, first_number: int) -> RolloutBatch:
        """Hand out at most `num_groups` groups; `first_number` is the first group started by this collection."""
        groups = sorted(self._buffer.take(num_groups, self._engine.policy_version), key=lambda group: group.group_id)
        self._counters.num_trained += len(groups)
        self._counters.train_step += bool(groups)
        statistics = self._builder.build(
            num_carried_over=sum(int(group.group_id) < first_number for group in groups),
            num_left_over=len(self._buffer),
        )
        return RolloutBatch(tuple(groups), statistics, exhausted, should_stop=not groups)

    def _stopped(self, num_groups: int, exhausted: Exhaustion, first_number: int) -> RolloutBatch:
        """No groups: those kept stay in the buffer for a later run."""
        statistics = self._builder.build(num_carried_over=0, num_left_over=len(self._buffer))
        return RolloutBatch((), statistics, exhausted, should_stop=True)

    def _failed(self, num_groups: int, exhausted: Exhaustion, first_number: int) -> RolloutBatch:
        raise CollectionExhausted(self._describe_shortage(num_groups, exhausted))

    def _describe_shortage(self, num_groups: int, exhausted: Exhaustion) -> str:
        counts = ", ".join(f"{verdict} {count}" for verdict, count in self._builder.verdicts.items())
        remedy = {
            "rounds": f"raise max_rounds (now {self._settings.max_rounds}), choose easier or harder data, "
            "or let on_exhausted train partial batches",
            "prompts": "allow more epochs, add data, or let on_exhausted train partial batches",
        }[exhausted]
        return (
            f"only {self._num_available()} of {num_groups} groups: {exhausted} are exhausted after "
            f"{self._builder.num_started} groups ({counts}); {remedy}"
        )

    def _report(self, num_groups: int) -> None:
        if self._on_progress is None:
            return
        waiting = [completion for group in self._in_flight.values() for completion in group.completions.values()]
        self._on_progress(
            CollectProgress(
                num_accepted=min(num_groups, self._num_available()),
                num_groups=num_groups,
                num_in_flight=len(self._in_flight),
                num_filtered=sum(count for verdict, count in self._builder.verdicts.items() if verdict != KEPT),
                num_responses=self._builder.num_scored_responses + len(waiting),
                num_tokens=self._builder.num_tokens + sum(len(completion.token_ids) for completion in waiting),
            )
        )

    # State

    def accounting(self) -> Accounting:
        """The ledger of all prompts drawn. It balances at every moment, not just between steps."""
        return Accounting(
            drawn=self._counters.num_started,
            trained=self._counters.num_trained,
            filtered=self._counters.num_filtered,
            queued_again=self._counters.num_queued_again,
            buffered=len(self._buffer),
            in_flight=len(self._in_flight),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable, with the stream's and the buffer's state: one consistent cut.

        Between collections nothing is in flight. In the middle of one (a signal), groups in flight are saved as prompts
        to be queued again. Groups already handed out count as trained; `give_back` first where they were not.
        """
        return {
            "version": STATE_VERSION,
            "stream": self._stream.state_dict(),
            "buffer": self._buffer.state_dict(),
            "in_flight_prompts": [group.prompt.prompt_id for group in self._in_flight.values()],
            "counters": dict(vars(self._counters)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, in a collector that has nothing in flight."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"collector state has version {state.get('version')}, this program reads {STATE_VERSION}")
        assert not self._in_flight, f"{len(self._in_flight)} groups are in flight; load the state before collecting"
        self._stream.load_state_dict(state["stream"])
        self._buffer.load_state_dict(state["buffer"])
        self._counters = _Counters(**state["counters"])
        for prompt_id in state["in_flight_prompts"]:
            self._stream.requeue(prompt_id)
            self._counters.num_queued_again += 1


# What becomes of an incomplete batch.
_ON_EXHAUSTED: dict[str, Callable[[Collector, int, Exhaustion, int], RolloutBatch]] = {
    "train_partial": Collector._batch,
    "stop": Collector._stopped,
    "error": Collector._failed,
}


def sample_seed(run_seed: int, group_id: str, index: int) -> int:
    """The seed of one response, 63 bits: different for every (run, group, index), the same on every machine."""
    digest = hashlib.sha256(f"{run_seed}/{group_id}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
