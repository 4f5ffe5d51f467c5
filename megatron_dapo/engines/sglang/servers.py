"""The SGLang servers of a run seen from all ranks: the first rank of each node starts, watches and replaces its own.

Every method but `close` is collective. A server that dies is replaced, within a number of times an hour; the error beyond it
ends with the first root cause.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatron_dapo.engines.sglang.server import AttachedServer, SglangServer
from megatron_dapo.engines.sglang.supervisor import SupervisedServer
from megatron_dapo.engines.sglang.versions import ApiVersion
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.nodes import NodeTopology

logger = logging.getLogger(__name__)

_HOUR_S = 3600.0


@dataclass(frozen=True)
class ReadyServer:
    """Address and leader of a server that is up; the same on every rank."""

    index: int
    url: str
    leader: int  # the rank that controls it in weight updates


class ServersFailed(RuntimeError):
    """A server did not come up, or one died that may not be replaced."""


class Servers:
    """The servers of a run: each rank has its own, and all ranks learn of all. Indices are the same everywhere.

    These run already (`sglang.urls`): they are never replaced and never ended. `leaders` maps a server to the rank that
    controls it in weight updates; `own`: the servers of this rank.
    """

    def __init__(
        self, leaders: Sequence[int], own: Mapping[int, AttachedServer], coordination: Coordination
    ) -> None:
        self.leaders = leaders
        self._own = own
        self._coordination = coordination
        self._api_versions: dict[int, ApiVersion] = {}
        self._cache_tokens: dict[int, int] = {}  # server index -> tokens of the first server with this index

    def ready(self) -> list[ReadyServer]:
        """Wait until all servers are up and return them by index; ServersFailed on every rank if one does not come up."""
        entries, problems = [], []
        for index, server in self._own.items():
            try:
                if not server.answers:
                    server.wait_until_joined()
                    continue
                if index not in self._api_versions:
                    info = server.wait_until_healthy()
                    self._api_versions[index] = info.api_version
                    self._cache_tokens.setdefault(index, info.max_total_tokens)
                entries.append({"index": index, "url": server.url})
            except Exception as error:  # told to every rank instead of leaving them to wait
                problems.append(f"server {index}: {error}")
        everyone = self._coordination.gather({"entries": entries, "problems": problems})
        failures = [problem for rank in everyone for problem in rank["problems"]]
        if failures:
            raise ServersFailed("; ".join(failures[1:] + failures[:1]))  # the first one is read last
        gathered = sorted((entry for rank in everyone for entry in rank["entries"]), key=lambda entry: entry["index"])
        return [ReadyServer(leader=self.leaders[entry["index"]], **entry) for entry in gathered]

    def dead(self, suspected: Mapping[int, str]) -> dict[int, str]:
        """Return the servers that have ended and their reasons, with those that rank 0 knows to be lost."""
        own = [[index, server.exit_reason()] for index, server in self._own.items() if not server.is_alive()]
        # Not one entry a rank: most have nothing to say.
        found_own, found_suspected = self._coordination.merge(
            [own, [list(entry) for entry in suspected.items()]],
            lambda views: [list(chain.from_iterable(entries)) for entries in zip(*views)],
            "the servers that have ended",
        )
        reasons: dict[int, list[str]] = {}  # server index -> reasons of all its parts
        for index, reason in found_own:
            reasons.setdefault(index, []).append(reason)
        # A server's own exit reason counts more than a suspicion: it has the end of the log.
        return dict(sorted({**dict(found_suspected), **{i: "; ".join(each) for i, each in reasons.items()}}.items()))

    def own(self, index: int) -> AttachedServer | None:
        """Return this rank's server, or its part of one; None for servers of other ranks."""
        return self._own.get(index)

    def api_version(self, index: int) -> ApiVersion | None:
        """Return the API version of this rank's server; None for servers of other ranks."""
        return self._api_versions.get(index)

    def note_served(self) -> None:
        """Note, on all ranks, that all servers serve: restarts until now no longer count once they are an hour old."""

    def replace(self, lost: Mapping[int, str]) -> None:
        """Put fresh servers, without weights, in the place of lost ones. ServersFailed if that is not possible."""
        index, reason = min(lost.items())
        raise ServersFailed(f"server {index}, given by sglang.urls, is lost; the first root cause: {reason}")

    def close(self) -> None:
        """End the servers this rank started. The only method that is not collective."""
        for server in self._own.values():
            server.stop()


@dataclass(frozen=True)
class Part:
    """A server to start, or its part on one of its nodes."""

    index: int  # server's index
    slot: int  # index among the parts of the node
    node_rank: int = 0
    meeting: str = ""  # address at which the parts on several nodes meet; "" for the first part
    num_restarts: int = 0  # 0 for the first server with this index
    cache_tokens: int | None = None  # the first server's with this index; None for itself


class StartedServers(Servers):
    """Servers this run starts: `per_node` on every node, or parts of so many, each on `nodes_per_server` nodes in a row."""

    def __init__(
        self,
        start: Callable[[Part], SglangServer | SupervisedServer],
        nodes: NodeTopology,
        rank: int,
        per_node: int,
        restarts_per_hour: int,
        coordination: Coordination,
        nodes_per_server: int = 1,
    ) -> None:
        """`start` spawns a server or its part and does not wait for it. It may find one that outlived the last attempt."""
        num_servers = nodes.num_nodes // nodes_per_server * per_node
        firsts = [index // per_node * nodes_per_server for index in range(num_servers)]  # server -> its first node
        self._started: dict[int, SglangServer | SupervisedServer] = {}
        super().__init__([nodes.ranks_of(node)[0] for node in firsts], self._started, coordination)
        self._start, self._rank = start, rank
        node = nodes.node_of(rank)
        self._places: dict[int, Part] = {}  # servers with a part here, on the rank that starts it
        if rank == nodes.ranks_of(node)[0]:
            self._places = {
                index: Part(index, index % per_node, node - first)
                for index, first in enumerate(firsts)
                if first <= node < first + nodes_per_server
            }
        self._are_spread = nodes_per_server > 1
        self._restarts_per_hour = restarts_per_hour
        self._restarts: dict[int, list[float]] = {}  # times of each server's restarts in seconds, on rank 0's clock
        self._num_restarts: Counter[int] = Counter()
        self._have_served = False  # A restart resets it.
        self._begin(range(num_servers))

    def note_served(self) -> None:
        self._have_served = True

    def replace(self, lost: Mapping[int, str]) -> None:
        self._spend(lost)
        for index in set(lost) & set(self._own):
            logger.warning("server %d is started again: %s", index, lost[index])
            self._started[index].kill()
            self._api_versions.pop(index, None)
        self._begin(sorted(lost))

    def _begin(self, indices: Sequence[int]) -> None:
        """Start these servers: their first parts, and with those the others. Collective if servers are spread over nodes."""
        for index in set(indices) & set(self._places):
            if self._places[index].node_rank == 0:
                self._started[index] = self._start(self._part(index, "", self._cache_tokens.get(index)))
        if not self._are_spread:
            return
        self._join_parts(indices)
        # A server is kept from the last attempt if all its parts are.
        broken = self._coordination.merge(
            [i for i in set(indices) & set(self._started) if not self._started[i].is_kept],
            lambda views: sorted(set(chain.from_iterable(views))),
            "the parts of servers that were not kept",
        )
        again = [index for index in broken if self._any_kept(index)]
        for index in again:
            server = self._started[index]
            assert isinstance(server, SupervisedServer), "only a supervisor keeps servers"
            server.start_anew()
        self._join_parts(broken)

    def _any_kept(self, index: int) -> bool:
        return index in self._started and self._places[index].node_rank == 0 and self._started[index].is_kept

    def _join_parts(self, indices: Sequence[int]) -> None:
        """Start the parts of these servers that meet a first part on another node. Collective."""
        leads = {
            str(index): [self._started[index].meeting, self._cache_tokens.get(index)]
            for index in indices
            if index in self._places and self._places[index].node_rank == 0
        }
        found = self._coordination.merge(
            leads, lambda views: {key: value for view in views for key, value in view.items()}, "where servers' parts meet"
        )
        for index in set(indices) & set(self._places):
            if self._places[index].node_rank > 0:
                meeting, cache_tokens = found[str(index)]
                if index not in self._started or self._started[index].meeting != meeting:
                    self._started[index] = self._start(self._part(index, meeting, cache_tokens))

    def _part(self, index: int, meeting: str, cache_tokens: int | None) -> Part:
        number = self._num_restarts[index]
        return replace(self._places[index], meeting=meeting, num_restarts=number, cache_tokens=cache_tokens)

    def _spend(self, lost: Mapping[int, str]) -> None:
        """Count the restarts; ServersFailed, on every rank, beyond a server's restarts in an hour."""
        # One clock for all: ranks that disagree about an hour would wait for each other.
        now = self._coordination.broadcast(time.monotonic() if self._rank == 0 else None)
        # Servers that fail one update after another never serve, and their restarts count however long each takes.
        oldest = now - _HOUR_S if self._have_served else -math.inf
        self._have_served = False
        for index, reason in sorted(lost.items()):
            self._num_restarts[index] += 1
            times = [at for at in self._restarts.get(index, ()) if at > oldest] + [now]
            self._restarts[index] = times
            if len(times) > self._restarts_per_hour:
                raise ServersFailed(
                    f"server {index} is lost and {len(times)} restarts of it within an hour are more than "
                    f"sglang.max_restarts {self._restarts_per_hour}; the first root cause: {reason}"
                )
