"""The engine rank's side of a weight sync by point-to-point: one command, all buckets, two replies through the group.

    join the group (or reuse it) -> begin -> buckets -> reply "receive" -> finish -> reply "finish"

The replies go to the leader, which acknowledges the last one. Any failure here closes the group, so that no sender waits
for this engine rank longer than it has to.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from megatron_dapo.bridge.protocol.messages import Command, CommandReply
from megatron_dapo.bridge.protocol.p2p_stream import (
    READY,
    RECEIVE,
    STAGED_BUCKETS,
    P2PChannel,
    Staging,
    ready_key,
    receive_acknowledgement,
    receive_buckets,
    receive_segments,
    send_reply,
)
from megatron_dapo.bridge.protocol.peer_group import PeerError, PeerGroup, RendezvousClient, join
from megatron_dapo.bridge.protocol.receiver import Channel, Receiver

logger = logging.getLogger(__name__)


class P2PReceiver:
    """Carries out "receive" commands on one engine rank; keeps its group between weight syncs."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._group: PeerGroup | None = None

    def handle(self, command: Command) -> None:
        """Carry a command out. Never raises: a failure that no reply can carry is logged, and the group is closed."""
        try:
            channel = P2PChannel.from_json(command.channel)
            deadline = time.monotonic() + channel.seconds
            self._receive(command, channel, self._join(channel), deadline)
        # An exception would end the scheduler's process.
        except Exception as error:
            logger.error("weight sync %s: %s", command.sync_id, error)
            self._close()

    def _join(self, channel: P2PChannel) -> PeerGroup:
        if not channel.fresh:
            if self._group is None or self._group.name != channel.group:
                raise PeerError("the trainer names a group that this process has not joined; it was restarted since")
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
            peers=channel.peers,
        )
        return self._group

    def _receive(self, command: Command, channel: P2PChannel, group: PeerGroup, deadline: float) -> None:
        """Receive, reply, finish, reply. Raise PeerError if the leader cannot be reached."""
        reply = self._fill(command, channel, group, deadline)
        send_reply(group, channel.leader, reply, deadline)
        if reply.ok:
            finish = replace(command, op="finish", manifest=None, channel={})
            reply = self._receiver.handle(finish, Channel())
            send_reply(group, channel.leader, reply, deadline)
        receive_acknowledgement(group, channel.leader, deadline)
        if not reply.ok:
            self._close()

    def _fill(self, command: Command, channel: P2PChannel, group: PeerGroup, deadline: float) -> CommandReply:
        """Receive everything; return the reply "receive"."""
        start = time.perf_counter()
        begun = self._receiver.handle(replace(command, op="begin", channel={}), Channel())
        if not begun.ok:
            return replace(begun, op=RECEIVE)
        message, is_lost, num_bytes = "", False, 0
        try:
            device = next(iter(self._receiver.parameters.values())).device
            staging = Staging(device, STAGED_BUCKETS * max((b.num_bytes for b in channel.buckets), default=0))
            with torch.no_grad():
                if command.manifest is not None and command.manifest.base is not None:
                    num_bytes = receive_segments(group, channel, self._receiver, command.sync_id, deadline)
                else:
                    num_bytes = receive_buckets(group, channel, self._receiver, command.sync_id, staging, deadline)
        # Every failure must reach the trainer as a reply.
        except Exception as error:
            is_lost = isinstance(error, PeerError)
            message = str(error) if isinstance(error, (ValueError, PeerError)) else f"{type(error).__name__}: {error}"
            self._receiver.fail(command.sync_id, message)
        seconds = time.perf_counter() - start
        return replace(
            begun, op=RECEIVE, ok=not message, message=message, is_lost=is_lost, num_bytes=num_bytes, seconds=seconds
        )

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
