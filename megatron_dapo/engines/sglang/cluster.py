"""SGLang servers as the engines of a run: rank 0 generates with them over HTTP, all ranks bring the weights.

    publish(version)    replace dead servers; pause, flush, weight sync, verify, serve; servers that fail are replaced and
                        synced again, within the budget
    run_on_rank0(body)  rank 0 collects; if no server is left, all ranks restart them with the version they served

Between its first failure and the next verified weight sync a server generates nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.client import ColocatedClient, SglangClient
from megatron_dapo.engines.sglang.engine import AllEnginesGone, SglangEngine
from megatron_dapo.engines.sglang.servers import ReadyServer, Servers
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from megatron_dapo.bridge.weight_sync import WeightSync

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_RESTART = "restart"
_MEMORY_POLL_S = 0.05
_WORKSPACE_BYTES = 2 << 30  # SGLang's allocator may release these when it falls asleep, and they need not come back
_LOOK_AGAIN_S = 1.0  # longest wait of a collecting thread for servers before it may be paused


@dataclass
class SharedDevice:
    """This rank's GPU, which it shares with a server.

    `expected_bytes`: of the server's weights, which it must release to sleep. Weights and cache come back one after the other;
    if memory is short then, SGLang's memory saver ends the server without a reason. `server`: its index; None if none
    runs on this GPU.
    """

    expected_bytes: int
    timeout_s: float
    server: int | None = None
    weights_asleep: int = 0  # bytes to come back at the next wake-up
    cache_asleep: int = 0  # likewise, at least

    def free_bytes(self) -> int:
        """Return how many bytes of the GPU no process holds."""
        return torch.cuda.mem_get_info()[0]

    def wait_for_memory(self, before: int) -> int:
        """Wait until `expected_bytes` more are free than `before` and return how many are.

        A server answers before the device has its memory back. MemoryError, with both numbers, after `timeout_s`.
        """
        deadline = time.monotonic() + self.timeout_s
        while (freed := self.free_bytes() - before) < self.expected_bytes:
            if time.monotonic() >= deadline:
                raise MemoryError(
                    f"the servers on this device released {freed} bytes within {self.timeout_s:g} s, their weights alone "
                    f"are {self.expected_bytes}: they run without the memory saver, or another process took the memory"
                )
            time.sleep(_MEMORY_POLL_S)
        self.weights_asleep = self.expected_bytes
        self.cache_asleep = max(0, freed - self.expected_bytes - _WORKSPACE_BYTES)
        return freed

    def make_room_for_weights(self) -> None:
        """Return the allocator's unused blocks to the GPU. MemoryError if the sleeping server's weights do not fit then."""
        needed, self.weights_asleep = self.weights_asleep, 0
        self._make_room(needed, "weights")

    def make_room_for_cache(self) -> None:
        """Likewise, for the cache of the server whose weights are back."""
        needed, self.cache_asleep = self.cache_asleep, 0
        self._make_room(needed, "cache")

    def _make_room(self, num_bytes: int, what: str) -> None:
        torch.cuda.empty_cache()
        deadline = time.monotonic() + self.timeout_s
        while num_bytes and (free := self.free_bytes()) < num_bytes:
            if time.monotonic() >= deadline:
                raise MemoryError(
                    f"{free} bytes of this device are free, the server that wakes up needs {num_bytes} for its {what}: "
                    "lower sglang.mem_fraction_static, offload more (model.offload), or end another process on the device"
                )
            time.sleep(_MEMORY_POLL_S)


class SglangEngines:
    """`CollectiveEngine` and `Publisher` over the servers of a run. Every rank has one.

    Args:
        connect: a client of a ready server, for this rank.
        coordination: the ranks that hold the policy.
        commands: by which rank 0 makes all ranks restart servers; None: those of `coordination`.
        device: this rank's GPU if servers share it with the trainer.

    Attributes:
        offload_models: moves the trainer's models off the device, set once they exist. Their weights come back when the weight
            sync reads them.
    """

    def __init__(
        self,
        servers: Servers,
        rank: int,
        connect: Callable[[ReadyServer], SglangClient],
        coordination: Coordination,
        commands: Rank0Commands | None = None,
        device: SharedDevice | None = None,
    ) -> None:
        self._servers = servers
        self._rank = rank
        self._connect = connect
        self._coordination = coordination
        self._device = device
        self.offload_models: Callable[[], None] = lambda: None
        self._is_attached = False
        self._commands = commands or Rank0Commands(coordination)
        self._commands.handlers[_RESTART] = self._restart_all
        self._has_progressed = False  # reset once the main thread has told the other ranks
        self._controls: dict[int, SglangClient] = {}  # one per server that this rank leads
        self._clients: dict[int, SglangClient] = {}  # rank 0: of all servers
        self._update: WeightSync | None = None
        self._engine: SglangEngine | None = None  # rank 0, once the first version is published
        self._is_connected = False
        self._version = -1
        self._all_gone = threading.Event()  # set by the collecting thread when no server is left
        self._back = threading.Event()

    def attach(
        self,
        build_update: Callable[[dict[int, SglangClient]], WeightSync],
        build_engine: Callable[[Sequence[SglangClient]], SglangEngine] | None,
        weights: Callable[[], Buffers],
    ) -> None:
        """Connect the engines to the actor, before the first `publish`.

        Args:
            build_update: the update machinery, given the clients of the servers this rank leads.
            build_engine: rank 0's engine over all servers, given their clients by index; None on other ranks.
            weights: this rank's current weights as the servers want them. Collective.
        """
        self._build_update, self._build_engine, self._weights = build_update, build_engine, weights
        self._is_attached = True

    # CollectiveEngine

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def server_version(self) -> str:
        """SGLang's version, of the first server: that one is rank 0's. Only there."""
        version = self._servers.api_version(0)
        assert version is not None, "rank 0 asks, once its servers are up"
        return version.version

    @property
    def num_unfinished(self) -> int:
        return self._rollout.num_unfinished

    @property
    def prefix_reuse(self) -> PrefixReuse:
        return self._rollout.prefix_reuse

    @property
    def busy_s(self) -> float:
        """Seconds in which a server had a request, the mean of the servers. On rank 0."""
        return self._rollout.busy_s

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """See `CollectiveEngine`."""
        return self._commands.run_on_rank0(body)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `RolloutEngine`."""
        self._rollout.submit(requests)

    def poll(self) -> list[Completion]:
        """See `RolloutEngine`. If no server is left, nothing finishes until they are back."""
        try:
            finished = self._rollout.poll()
            self._has_progressed |= bool(finished)
            self._report_progress()
            return finished
        except AllEnginesGone as error:
            logger.warning("%s", error)
            self._wait_for_servers()
            return []

    def wake(self) -> None:
        """End the wait of a poll. Any thread may call it."""
        if self._engine is not None:
            self._engine.wake()

    def abort(self) -> list[Completion]:
        """See `RolloutEngine`."""
        return self._rollout.abort()

    def _wait_for_servers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._commands.command(_RESTART)
            return
        # A collecting thread must not communicate with other ranks: the main thread does, in `recover` or at the next update.
        self._back.clear()  # first: the main thread may answer as soon as it sees that all are gone
        self._all_gone.set()
        self._back.wait(_LOOK_AGAIN_S)

    def recover(self) -> bool:
        """Restart the servers if all are gone, and return whether a response has finished since the last call.

        Rank 0 calls it inside `run_on_rank0`, in the main thread while it waits for a collecting one.
        """
        if self._all_gone.is_set():
            self._commands.command(_RESTART)
        return self._report_progress()

    def _report_progress(self) -> bool:
        """Postpone all ranks' deadlines if a response has finished. A collecting thread leaves that to the main thread."""
        has_progressed = self._has_progressed
        if has_progressed and threading.current_thread() is threading.main_thread():
            self._has_progressed = False
            self._commands.report_progress()
        return has_progressed

    # Publisher

    def publish(self, version: int) -> None:
        """See `Publisher`. ServersFailed if more servers are lost than may be restarted."""
        self.wait_until_healthy()
        if self._update is None:
            assert self._is_attached, "attach comes before publish"
            self._update = self._build_update(self._controls)
        lost = self._servers.dead(self._engine.failed_servers if self._engine is not None else {})
        if lost:
            self._replace(lost)
        weights = self._weights()
        self._make_room()
        failed = self._update.update(version, weights).failures
        while failed:  # ends: replacing spends the budget of restarts
            del weights  # quantized copies would stay on the device
            lost = self._servers.dead(failed)  # a server that has ended says why: its client saw a broken connection
            self._replace(lost)
            weights = self._weights()
            self._make_room()
            failed = self._update.update_engines(sorted(lost), version, weights).failures
        self._serve(version)

    def _make_room(self) -> None:
        """Give sleeping servers the memory for their weights that this process's allocator only caches."""
        if self._device is not None:
            self._device.make_room_for_weights()
            # A server spans the devices of several ranks, and its leader wakes it on all of them at once.
            self._coordination.barrier("all ranks to empty their caches")

    def wait_until_healthy(self) -> None:
        """Wait for the servers and connect to them, once. Collective. ServersFailed if one does not come up."""
        if not self._is_connected:
            for server in self._servers.ready():
                self._join(server)
            self._is_connected = True

    def sleep(self) -> None:
        """Release the memory of servers on the trainer's GPUs until the next weight sync. Collective.

        Servers on separate devices stay awake. MemoryError if this rank's GPU lacks the memory of its
        server's weights afterwards.
        """
        self._put_to_sleep(range(self.num_servers))

    def _put_to_sleep(self, servers: Collection[int]) -> None:
        if self._device is None:
            return
        before = self._device.free_bytes()
        # A late rank must not read its free memory after another rank's server has already released some of it.
        self._coordination.barrier("all ranks to read their free memory")
        for index, control in self._controls.items():
            assert isinstance(control, ColocatedClient), "servers that sleep need a ColocatedClient"
            if index in servers:
                control.sleep()
        # Another rank may be the one that controls the server on this device.
        self._coordination.barrier("all servers to release their memory")
        if self._device.server in servers:
            self._device.wait_for_memory(before)

    def close(self) -> None:
        """End rank 0's engine and this rank's servers."""
        self._back.set()
        if self._engine is not None:
            self._engine.close()
        if self._update is not None:
            self._update.transport.close()
        self._servers.close()

    def prompt_logprobs(self, server: int) -> Callable[[Sequence[int]], list[float]] | None:
        """Return the server's log-probs of prompts, on rank 0; None on other ranks."""
        return self._clients[server].prompt_logprobs if self._rank == 0 else None

    @property
    def num_servers(self) -> int:
        return len(self._servers.leaders)

    @property
    def _rollout(self) -> SglangEngine:
        assert self._engine is not None, "rank 0 drives, once the first version is published"
        return self._engine

    def _join(self, server: ReadyServer) -> None:
        if server.leader == self._rank:
            self._controls[server.index] = self._connect(server)
        if self._rank == 0:
            self._clients[server.index] = self._connect(server)

    def _replace(self, lost: Mapping[int, str]) -> None:
        """Start and connect fresh servers, without weights, in place of lost ones.

        As at the start of a run, those on the trainer's GPUs come up while none of its models is there, since they size
        their caches by the free memory they find, and then sleep until the weight sync wakes them.
        """
        if self._engine is not None:
            for index, reason in lost.items():
                self._engine.mark_failed(index, reason)
        if self._device is not None:
            self.offload_models()
            torch.cuda.empty_cache()
            # A server starts on the devices of several ranks.
            self._coordination.barrier("all ranks to offload their models")
        self._servers.replace(lost)
        for server in self._servers.ready():
            if server.index in lost:
                self._join(server)
        self._put_to_sleep(lost)

    def _restart_all(self, command: dict[str, Any]) -> None:
        """Restart all servers with the version they served. Collective."""
        logger.warning("no SGLang server is left: restarting them at version %d", self._version)
        self.publish(self._version)
        self.offload_models()  # generation continues, and the servers have the whole device then

    def _serve(self, version: int) -> None:
        """Let all servers, replaced ones included, generate with the version."""
        self._version = version
        self._servers.note_served()
        if self._build_engine is not None and self._engine is None:
            self._engine = self._build_engine([self._clients[index] for index in sorted(self._clients)])
        if self._engine is not None:
            self._engine.set_policy_version(version)
            for index in self._engine.failed_servers:
                self._engine.restore(index, self._clients[index])
        self._all_gone.clear()
        self._back.set()
