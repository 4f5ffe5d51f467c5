"""Embedded engines of all ranks of a group, driven in lockstep by its first rank.

    rank 0                    others
    submit: kept, assigned to ranks
    poll: command "advance" ->  submit to the local engine
            every rank advances K ticks
            completions gathered <-

Each rank's work depends on counts only, never on time: equal submissions give equal completions in equal order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, TypeVar

from megatron_dapo.engines.base import PrefixReuse, check_request_ids, completion_from_json, completion_to_json
from megatron_dapo.engines.embedded import EmbeddedEngine
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams

Result = TypeVar("Result")


class DistributedEmbeddedEngine:
    """`CollectiveEngine` over the embedded engines of all ranks. Weights are set on every rank's own engine.

    Args:
        local_engine: this rank's engine.
        coordination: the ranks that have engines; rank 0 among them is rank 0 of the run.
        commands: by which rank 0 of the run makes them take part.
    """

    def __init__(self, local_engine: EmbeddedEngine, coordination: Coordination, commands: Rank0Commands):
        self.local_engine = local_engine
        self._coordination = coordination
        self._commands = commands
        commands.handlers["advance"] = commands.handlers["abort"] = self._take_part
        self._new: list[GenerationRequest] = []  # rank 0: submitted since the last poll
        self._rank_of: dict[str, int] = {}  # rank 0: where each unfinished request runs
        self._home: dict[str, int] = {}  # rank 0: the rank of each conversation's last turn under this policy version
        self._load = [0] * coordination.size  # rank 0: unfinished requests a rank
        self._finished: list[Completion] = []  # the last command's, on all ranks
        self._prefix_reuse = PrefixReuse()  # summed over all ranks
        self.prepare: Callable[[], None] = lambda: None  # called on every rank before it generates

    # Every rank

    def parameters_by_name(self) -> dict[str, Any]:
        """This rank's destination tensors, see `EmbeddedEngine.parameters_by_name`."""
        return self.local_engine.parameters_by_name()

    @property
    def policy_version(self) -> int:
        return self.local_engine.policy_version

    def set_policy_version(self, version: int) -> None:
        """Called on every rank once its own tensors are in place."""
        self.local_engine.set_policy_version(version)
        self._home.clear()

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """See `CollectiveEngine`. Unfinished requests stay where they are for the next round."""
        self.prepare()
        return self._commands.run_on_rank0(body)

    # Rank 0

    @property
    def num_unfinished(self) -> int:
        return len(self._rank_of) + len(self._new)

    @property
    def prefix_reuse(self) -> PrefixReuse:
        """Totals over all ranks, as of the last poll."""
        return self._prefix_reuse

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        check_request_ids(requests, {request.request_id for request in self._new} | self._rank_of.keys())
        for request in requests:
            self.local_engine.check(request)
        self._new.extend(requests)

    def poll(self) -> list[Completion]:
        """Advance every rank by the engine's ticks_per_poll; return what finished, by rank and then in that order."""
        return self._all_ranks("advance") if self.num_unfinished else []

    def abort(self) -> list[Completion]:
        # Without unfinished requests, too: contexts that some ranks keep would be used or not by what ran before.
        aborted = self._all_ranks("abort") if self.num_unfinished or self._home else []
        self._home.clear()
        return aborted

    def _all_ranks(self, operation: str) -> list[Completion]:
        shares, self._new = assign(self._new, self._load, self._home), []
        for rank, share in enumerate(shares):
            self._load[rank] += len(share)
            self._home.update((request.affinity[0], rank) for request in share if request.affinity)
            self._rank_of.update((request.request_id, rank) for request in share)
        self._commands.command(operation, **_encode_requests(shares))
        for completion in self._finished:
            self._load[self._rank_of.pop(completion.request_id)] -= 1
        return self._finished

    # Every rank

    def _take_part(self, command: dict[str, Any]) -> None:
        """Do this rank's part of a command and collect the completions of all ranks."""
        rank = self._coordination.rank
        try:
            self.local_engine.submit(_decode_requests(command, rank))
            advance = self.local_engine.poll if command["op"] == "advance" else self.local_engine.abort
            report: dict[str, Any] = {
                "completions": [_to_lists(done) for done in advance()],
                "prefix_reuse": asdict(self.local_engine.prefix_reuse),
            }
        except Exception as error:  # reported to every rank instead of leaving them to wait
            report = {"error": f"{type(error).__name__}: {error}"}
        try:
            reports = self._coordination.gather(report)
        except RuntimeError as error:
            raise TimeoutError(
                f"rollout rank {rank} of {self._coordination.size} waited for the completions of all ranks: {error}"
            ) from error
        failures = [f"rank {rank}: {entry['error']}" for rank, entry in enumerate(reports) if "error" in entry]
        if failures:
            raise RuntimeError("generation failed on " + "; ".join(failures))
        self._prefix_reuse = sum((PrefixReuse(**entry["prefix_reuse"]) for entry in reports), PrefixReuse())
        self._finished = [completion_from_json(done) for entry in reports for done in entry["completions"]]


def assign(
    requests: Iterable[GenerationRequest], load: Sequence[int], home: Mapping[str, int] | None = None
) -> list[list[GenerationRequest]]:
    """Split requests over ranks that already run `load` requests each.

    The next turn of a conversation goes to its rank in `home`, which keeps its context. Neighboring requests with equal
    prompts (a group) stay on one rank, which prefills them once. Neither may put a rank more than 1/8 above the even
    share: a turn then goes elsewhere, a group is cut at the even share. Ties go to the lower rank.
    """
    requests = list(requests)
    shares: list[list[GenerationRequest]] = [[] for _ in load]
    even = -(-(sum(load) + len(requests)) // len(load))
    most = even + even // 8
    others = []
    for request in requests:
        rank = (home or {}).get(request.affinity[0]) if request.affinity else None
        if rank is None or load[rank] + len(shares[rank]) >= most:
            others.append(request)
        else:
            shares[rank].append(request)
    for _, run in groupby(others, key=lambda request: request.prompt_ids):
        group = list(run)
        while group:
            rank = min(range(len(load)), key=lambda rank: load[rank] + len(shares[rank]))
            running = load[rank] + len(shares[rank])
            whole = running + len(group) <= most
            count = len(group) if whole else max(1, min(len(group), even - running))
            shares[rank].extend(group[:count])
            group = group[count:]
    return shares


def _encode_requests(shares: Sequence[Sequence[GenerationRequest]]) -> dict[str, Any]:
    """Requests of all ranks as JSON; each prompt and each set of sampling parameters once."""
    prompts: dict[tuple[int, ...], int] = {}
    samplings: dict[SamplingParams, int] = {}
    encoded = [
        [
            [
                r.request_id,
                prompts.setdefault(r.prompt_ids, len(prompts)),
                samplings.setdefault(r.sampling, len(samplings)),
                r.seed,
                r.prefix and _to_lists(r.prefix),
                r.affinity,
            ]
            for r in share
        ]
        for share in shares
    ]
    return {"prompts": list(prompts), "samplings": [asdict(sampling) for sampling in samplings], "requests": encoded}


def _to_lists(completion: Completion) -> dict[str, Any]:
    """Return `completion` as JSON values."""
    numbers = {"token_ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist()}
    support = {} if completion.support is None else {"support": completion.support.tolist()}
    return {**completion_to_json(completion), **numbers, **support}


def _decode_requests(command: dict[str, Any], rank: int) -> list[GenerationRequest]:
    prompts = [tuple(ids) for ids in command["prompts"]]
    samplings = [
        SamplingParams(**{**entry, "stop_token_ids": tuple(entry["stop_token_ids"])}) for entry in command["samplings"]
    ]
    return [
        GenerationRequest(
            request_id,
            prompts[prompt],
            samplings[sampling],
            seed,
            prefix and completion_from_json(prefix),
            affinity=tuple(affinity),
        )
        for request_id, prompt, sampling, seed, prefix, affinity in command["requests"][rank]
    ]
