"""The entry point of a weight sync inside each rank of a stock SGLang server.

The server is started with `--custom-weight-loader megatron_dapo.bridge.protocol.weight_loader.load`. A request to
/update_weights_from_tensor with that load format ends here, with one payload [(command, tensor), ...] for each rank. A
command is a JSON `Command`; the `channel` of the first one says where the bytes are and where the reply goes. Commands
of a message are carried out in order, up to the first that fails.

An exception in here would end the scheduler's process, and the endpoint answers success in any case. So `load` never
raises: the reply is the outcome, and no reply is a failure. Parameters are written in place, so captured CUDA graphs stay
valid.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.bridge.protocol.arena import Arena, ArenaSpec, is_running
from megatron_dapo.bridge.protocol.cuda_memory import open_shared
from megatron_dapo.bridge.protocol.description import DESCRIBE, DescriptionChannel, put_description
from megatron_dapo.bridge.protocol.messages import Bucket, Command, CommandReply
from megatron_dapo.bridge.protocol.p2p_receiver import P2PReceiver
from megatron_dapo.bridge.protocol.p2p_stream import RECEIVE
from megatron_dapo.bridge.protocol.progress import NUM_SLOTS
from megatron_dapo.bridge.protocol.receiver import Channel, Receiver

logger = logging.getLogger(__name__)

# The engine's names of models.families.gemma3.VISION_TENSORS: the engine's processes have only the standard library, numpy and torch.
_VISION_TENSORS = ("vision_tower.", "multi_modal_projector.")
_LOOK_S = 1.0  # interval of the looks whether the trainer lives
_ATTRIBUTE = "megatron_dapo_weight_sync"  # The model is the only object that SGLang keeps between requests.


class MappedArena:
    """The arena that this process has mapped. It stays mapped between weight syncs.

    The trainer unlinks the file as soon as all have mapped it, and existing pages are written several times as fast as
    new ones.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._arena: Arena | None = None
        self._pinned = pinned

    def map(self, spec: ArenaSpec) -> Arena:
        if self._arena is None or self._arena.spec != spec:
            # Open the new one first: a late message names memory that is gone, and the current mapping must survive it.
            self._arena = Arena(spec, pinned=self._pinned)
        return self._arena

    def stop(self, commands: Sequence[Command]) -> None:
        """Release writers of the mapped arena that wait for these commands; without any, release all writers."""
        if self._arena is None:
            return
        number = commands[0].channel.get("number") if commands else None
        if number is None:
            self._arena.progress.stop()
        else:
            self._arena.progress.stop_sync(int(number))


class ArenaChannel(Channel):
    """Bytes in a slot of a shared arena, replies in its reply area.

    `channel`: {"arena": spec, "number": of the sync, "writers": how many fill a bucket, "wait_s": for them, per bucket}.
    A command for a bucket may come before its bytes are there.
    """

    def __init__(self, channel: Mapping[str, Any], mapped: MappedArena) -> None:
        self._number, self._writers = int(channel["number"]), int(channel["writers"])
        self._wait_s = float(channel["wait_s"])
        self._shared = channel.get("shared")
        self._arena = mapped.map(ArenaSpec.from_json(channel["arena"]))
        self._slots = self._arena.slots
        creator = self._arena.spec.creator
        # If it is not visible at first, it is in another process namespace.
        self._trainer = creator if creator and is_running(creator) else 0

    def begin(self) -> None:
        self._arena.progress.begin(self._number)
        if self._shared is not None:
            # Opened here and not in __init__: a failure must reach the trainer in a reply.
            self._slots = open_shared(self._shared).view(NUM_SLOTS, -1)

    def data(self, bucket: Bucket) -> torch.Tensor:
        end = time.monotonic() + self._wait_s
        while True:
            try:
                left = end - time.monotonic()
                self._arena.progress.wait_for_bucket(bucket.index, self._number, self._writers, min(left, _LOOK_S))
                return self._slots[bucket.index % NUM_SLOTS]
            except TimeoutError:
                # This server may be kept for another trainer, which cannot wait for the end of this one's deadline.
                if self._trainer and not is_running(self._trainer):
                    raise ValueError(f"the trainer, process {self._trainer}, has ended") from None
                if time.monotonic() >= end:
                    raise

    def loaded(self, bucket: Bucket) -> None:
        self._arena.progress.count_loaded(bucket.index + 1)

    def reply(self, reply: CommandReply) -> None:
        self._arena.write_reply(reply.encode())
        if not reply.ok:
            self._arena.progress.stop_sync(self._number)


class FileChannel(Channel):
    """No bytes; the reply in a file that appears complete. `channel`: {"path": of the reply}."""

    def __init__(self, channel: Mapping[str, Any], mapped: MappedArena) -> None:
        self._path = Path(channel["path"])

    def reply(self, reply: CommandReply) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        # O_EXCL: never write through a link that another user left there.
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(reply.encode())
        os.replace(temporary, self._path)


CHANNELS: dict[str, type[ArenaChannel] | type[FileChannel]] = {"arena": ArenaChannel, "file": FileChannel}


def _derive(model: torch.nn.Module) -> None:
    """Compute, in place, what the engine derives from its weights: matrices that latent attention absorbs into queries and
    outputs, and the fp32 copies that GLM's routers make of their weights in their first forward pass."""
    getattr(model, "post_load_weights", lambda: None)()
    for module in model.modules():
        if (copy := getattr(module, "_weight_fp32", None)) is not None:
            copy.copy_(module.weight)


class _State:
    """Everything one engine rank keeps between messages."""

    def __init__(self, model: torch.nn.Module) -> None:
        # named_parameters lists tied weights once, under their first name, as the trainer's plan does.
        named = model.named_parameters()
        own = {name: tensor for name, tensor in named if not name.startswith(_VISION_TENSORS)}
        self.receiver = Receiver(own, partial(_derive, model))
        self.device = next(model.parameters()).device
        self.p2p = P2PReceiver(self.receiver)
        self.mapped = MappedArena(pinned=self.device.type == "cuda")
        self._channel: tuple[str, Channel] | None = None  # (sync id, its channel)

    def channel(self, command: Command) -> Channel:
        """Return the channel of the command's weight sync, opened once for all its commands."""
        if self._channel is None or self._channel[0] != command.sync_id:
            kind = command.channel.get("kind")
            if kind not in CHANNELS:
                raise ValueError(f"weight sync: no channel {kind!r}; there are {', '.join(sorted(CHANNELS))}")
            self._channel = (command.sync_id, CHANNELS[kind](command.channel, self.mapped))
        return self._channel[1]

    def carry_out(self, commands: Sequence[Command], channel: Channel) -> CommandReply:
        """Carry commands out up to the first that fails; reply to the last one carried out, with the bytes of all."""
        num_bytes = 0
        for command in commands:
            with torch.no_grad():
                reply = self.receiver.handle(command, channel)
                # The trainer overwrites the slot once it counts as loaded: the copies must have run, not only started.
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            num_bytes += reply.num_bytes
            if not reply.ok:
                break
            if command.bucket is not None:
                channel.loaded(command.bucket)
        return replace(reply, num_bytes=num_bytes)

    def close_channel(self) -> None:
        """Drop the channel, and with it the opened handles of GPU memory."""
        self._channel = None


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the commands in the names. Never raises: a failure is in the reply, or in the log if none can be sent."""
    commands: list[Command] = []
    try:
        commands = [Command.decode(text) for text, _ in named_tensors]
        _serve(model, commands)
    # An exception would end the scheduler's process.
    except Exception:
        logger.exception("a message to the weight loader could not be answered")
        with contextlib.suppress(Exception):
            _state_of(model).mapped.stop(commands)


def _serve(model: torch.nn.Module, commands: Sequence[Command]) -> None:
    if len({command.sync_id for command in commands}) != 1:
        raise ValueError(f"a message has {len(commands)} commands, which do not belong to one weight sync")
    state = _state_of(model)
    if commands[0].op == RECEIVE:
        # A whole weight sync by point-to-point, which replies through its own group.
        state.p2p.handle(commands[0])
        return
    if commands[0].op == DESCRIBE:
        put_description(DescriptionChannel.from_json(commands[0].channel), state.receiver.parameters)
        return
    channel = state.channel(commands[0])
    reply = state.carry_out(commands, channel)
    channel.reply(reply)
    if not reply.ok or reply.op in ("finish", "adopt"):
        state.close_channel()


def _state_of(model: torch.nn.Module) -> _State:
    state = getattr(model, _ATTRIBUTE, None)
    if state is None:
        state = _State(model)
        setattr(model, _ATTRIBUTE, state)
    return state
