"""The engine rank's side of a delivery by point-to-point: one command, all buckets, two reports through the group.

    join the group (or use it again) -> begin -> buckets -> report "received" -> finish -> report "finish"

The reports go to the leader, which acknowledges the last one. Whatever fails here closes the group, so that no sender
waits for this engine rank longer than it has to. Runs inside SGLang's scheduler: torch and the standard library alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_dapo.bridge.protocol.p2p_stream import (
    READY,
    RECEIVE,
    STAGED_BUCKETS,
    P2PChannel,
    Staging,
    ready_key,
    receive_acknowledgement,
    receive_buckets,
    send_report,
)
from megatron_dapo.bridge.protocol.peer_group import PeerError, PeerGroup, RendezvousClient, join
from megatron_dapo.bridge.protocol.receiver import Bucket, Chunk, Command, Receiver, Reply

logger = logging.getLogger(__name__)


class P2PReceiver:
    """Carries out "receive" commands on one engine rank; keeps its group between deliveries."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._group: PeerGroup | None = None

    def handle(self, command: Command) -> None:
        """Never raises: what cannot be reported through the group is logged, and the leader hears nothing."""
        try:
            channel = P2PChannel.from_json(command.channel)
            deadline = time.monotonic() + channel.seconds
            group = self._join(channel)
        # The border of a process that an exception would kill.
        except Exception as error:
            logger.error("weight delivery %s: no group: %s", command.delivery, error)
            self._close()
            return
        try:
            self._receive(command, channel, group, deadline)
        except Exception as error:
            logger.error("weight delivery %s: %s", command.delivery, error)
            self._close()

    def _join(self, channel: P2PChannel) -> PeerGroup:
        if not channel.fresh:
            if self._group is None or self._group.name != channel.group:
                raise PeerError("the trainer means a group that this process has not joined; it was restarted since")
            return self._group
        self._close()
        RendezvousClient(channel.address, channel.connect_s).put(ready_key(channel.group, channel.member), READY)
        self._group = join(
            channel.address,
            channel.group,
            channel.member,
            channel.size,
            timeout_s=min(channel.connect_s, channel.seconds),
            backend=channel.backend,
        )
        return self._group

    def _receive(self, command: Command, channel: P2PChannel, group: PeerGroup, deadline: float) -> None:
        """PeerError where the leader cannot be told."""
        report = self._fill(command, channel, group, deadline)
        send_report(group, channel.leader, report, deadline)
        if report.ok:
            finish = replace(command, op="finish", manifest=None, channel={})
            report = self._receiver.handle(finish, _Elsewhere())
            send_report(group, channel.leader, report, deadline)
        receive_acknowledgement(group, channel.leader, deadline)
        if not report.ok:
            self._close()

    def _fill(self, command: Command, channel: P2PChannel, group: PeerGroup, deadline: float) -> Reply:
        """Everything but the end: the report "receive"."""
        start = time.perf_counter()
        begun = self._receiver.handle(replace(command, op="begin", channel={}), _Elsewhere())
        if not begun.ok:
            return replace(begun, op=RECEIVE)
        message, num_bytes = "", 0
        try:
            parameters = self._receiver.parameters
            budget = STAGED_BUCKETS * max((routed.bucket.num_bytes for routed in channel.buckets), default=0)
            staging = Staging(next(iter(parameters.values())).device, budget)

            def places(bucket: Bucket) -> Mapping[Chunk, torch.Tensor]:
                return self._receiver.places(bucket)

            def filled(bucket: Bucket) -> None:
                self._receiver.filled(command.delivery, bucket)

            with torch.no_grad():
                num_bytes = receive_buckets(group, channel.buckets, places, filled, staging, deadline)
        # Whatever went wrong must reach the trainer as a report.
        except Exception as error:
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._receiver.fail(command.delivery, message)
        return replace(
            begun,
            op=RECEIVE,
            ok=not message,
            message=message,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - start,
        )

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class _Elsewhere:
    """A `BucketSource` of commands whose buckets come by other messages."""

    def begin(self) -> None: ...

    def data(self, bucket: Bucket) -> torch.Tensor:
        raise ValueError(f"delivery: bucket {bucket.index} came without its bytes")
