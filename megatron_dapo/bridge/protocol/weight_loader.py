"""Runs inside each rank of a stock SGLang server and writes delivered weights into the model's own parameters.

The server is started with `--custom-weight-loader megatron_dapo.bridge.protocol.weight_loader.load`; a request to
/update_weights_from_tensor with that load format ends here, with one payload [(command, tensor), ...] for each rank. A
command is JSON (`bridge.protocol.receiver.Command`); the `channel` of the first says where the bytes are and where the
report goes. The commands of a message are carried out in order, up to the first that fails.

An exception in here would end the scheduler's process, and the endpoint answers success whatever happens. So `load`
never raises; the report is the outcome, and no report is a failure. Parameters are written in place: captured CUDA
graphs stay valid. Needs torch and the standard library alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_dapo.bridge.protocol.arena import Arena, ArenaSpec
from megatron_dapo.bridge.protocol.cuda_memory import open_shared
from megatron_dapo.bridge.protocol.description import DESCRIBE, DescriptionChannel, leave_description
from megatron_dapo.bridge.protocol.p2p_receiver import P2PReceiver
from megatron_dapo.bridge.protocol.p2p_stream import RECEIVE
from megatron_dapo.bridge.protocol.progress import NUM_SLOTS
from megatron_dapo.bridge.protocol.receiver import Bucket, BucketSource, Command, Receiver, Reply

logger = logging.getLogger(__name__)

_ATTRIBUTE = "megatron_dapo_delivery"  # where the model keeps the state between requests


class Channel(BucketSource, Protocol):
    """How bytes come in and the report goes out, for all commands of one delivery."""

    def loaded(self, bucket: Bucket) -> None:
        """A bucket is where it belongs: its memory may be used again."""

    def answer(self, report: Reply) -> None:
        """Bring the report on a message back. Behind a failure nobody is to bring more."""

    def close(self) -> None: ...


class Arenas:
    """The arena that is mapped, from one delivery to the next: the trainer unlinks it as soon as all have mapped it, and
    pages that are there are written several times as fast as new ones."""

    def __init__(self) -> None:
        self._mapped: Arena | None = None

    def mapped(self, spec: ArenaSpec) -> Arena:
        if self._mapped is None or self._mapped.spec != spec:
            # First open, then give up: a late message names memory that is gone, and what is mapped stays.
            self._mapped = Arena(spec)
        return self._mapped

    def stop(self, commands: Sequence[Command]) -> None:
        """Whoever writes into the arena that is mapped need not go on, where it is for these commands (none: they cannot
        be read, so it may be)."""
        if self._mapped is None:
            return
        number = commands[0].channel.get("number") if commands else None
        if number is None:
            self._mapped.progress.stop()
        else:
            self._mapped.progress.stop_delivery(int(number))


class ArenaChannel:
    """Bytes in a slot of a shared arena, the report in its report area.

    `channel`: {"arena": spec, "number": of the delivery, "writers": how many fill a bucket, "wait_s": for them, each
    bucket}. A command for a bucket may come before its bytes are there.
    """

    def __init__(self, channel: Mapping[str, Any], arenas: Arenas) -> None:
        self._number, self._writers, self._wait_s = (
            int(channel["number"]),
            int(channel["writers"]),
            float(channel["wait_s"]),
        )
        self._arena = arenas.mapped(ArenaSpec.from_json(channel["arena"]))

    def begin(self) -> None:
        self._arena.progress.begin(self._number)

    def data(self, bucket: Bucket) -> torch.Tensor:
        self._arena.progress.wait_for_bucket(bucket.index, self._number, self._writers, self._wait_s)
        return self.slots()[bucket.index % NUM_SLOTS]

    def slots(self) -> torch.Tensor:
        return self._arena.slots

    def loaded(self, bucket: Bucket) -> None:
        self._arena.progress.count_loaded(bucket.index + 1)

    def answer(self, report: Reply) -> None:
        self._arena.write_report(report.encode())
        if not report.ok:
            self._arena.progress.stop_delivery(self._number)

    def close(self) -> None:
        """The mapping stays: the next delivery names the same arena."""


class FileChannel:
    """No bytes, the report in a file that appears complete. `channel`: {"path": of the report}."""

    def __init__(self, channel: Mapping[str, Any], arenas: Arenas) -> None:
        self._path = Path(channel["path"])

    def begin(self) -> None: ...

    def data(self, bucket: Bucket) -> torch.Tensor:
        raise ValueError(f"delivery: bucket {bucket.index} came without its bytes")

    def loaded(self, bucket: Bucket) -> None: ...

    def answer(self, report: Reply) -> None:
        # Ranks of an engine have a file each. Exclusive: never through a link that somebody left there.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(report.encode())
        os.replace(temporary, self._path)

    def close(self) -> None: ...


class CudaChannel(ArenaChannel):
    """Bytes in a slot of GPU memory shared by an IPC handle. `channel`: as of an arena, and {"shared": handle}."""

    def __init__(self, channel: Mapping[str, Any], arenas: Arenas) -> None:
        super().__init__(channel, arenas)
        self._shared = channel["shared"]
        self._slots: torch.Tensor | None = None

    def begin(self) -> None:
        """Opened here and not before: why it cannot be must reach the trainer in a report."""
        super().begin()
        self._slots = open_shared(self._shared).view(NUM_SLOTS, -1)

    def slots(self) -> torch.Tensor:
        assert self._slots is not None, "the delivery has been begun"
        return self._slots


# kind -> (channel of a command, what is mapped) -> Channel
CHANNELS: dict[str, Callable[[Mapping[str, Any], Arenas], Channel]] = {
    "arena": ArenaChannel,
    "cuda": CudaChannel,
    "file": FileChannel,
}


class _State:
    """What one engine rank keeps between commands."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Tied weights appear once, under their first name.
        self.receiver = Receiver(dict(model.named_parameters()))
        self.device = next(model.parameters()).device
        self.peer = P2PReceiver(self.receiver)
        self.arenas = Arenas()
        self._channel: tuple[str, Channel] | None = None  # delivery it belongs to

    def channel(self, command: Command) -> Channel:
        """The channel of the command's delivery; opened once for all its commands."""
        if self._channel is None or self._channel[0] != command.delivery:
            kind = command.channel.get("kind")
            if kind not in CHANNELS:
                raise ValueError(f"delivery: no channel {kind!r}; there are {', '.join(sorted(CHANNELS))}")
            # First open, then close: a late message may name what is gone, and what is open stays.
            channel = CHANNELS[kind](command.channel, self.arenas)
            self.close_channel()
            self._channel = (command.delivery, channel)
        return self._channel[1]

    def carry_out(self, commands: Sequence[Command], channel: Channel) -> Reply:
        """One command after the other, up to the first that fails. The report on the last one carried out, with the
        bytes of all."""
        num_bytes = 0
        for command in commands:
            with torch.no_grad():
                report = self.receiver.handle(command, channel)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            num_bytes += report.num_bytes
            if report.ok and command.bucket is not None:
                channel.loaded(command.bucket)
            if not report.ok:
                break
        return replace(report, num_bytes=num_bytes)

    def close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel[1].close()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carries out the commands in the names. Never raises: what goes wrong is in the report, or in the log where there
    is no way to report."""
    commands: list[Command] = []
    try:
        commands = [Command.decode(text) for text, _ in named_tensors]
        _serve(model, commands)
    # The border of a process that an exception would kill.
    except Exception:
        logger.exception("a message to the weight loader could not be answered")
        with contextlib.suppress(Exception):
            _state_of(model).arenas.stop(commands)


def _serve(model: torch.nn.Module, commands: Sequence[Command]) -> None:
    if len({command.delivery for command in commands}) != 1:
        raise ValueError(f"a message has {len(commands)} commands, which do not belong to one delivery")
    state = _state_of(model)
    if commands[0].op == RECEIVE:
        # A whole delivery, which reports through its own group.
        state.peer.handle(commands[0])
        return
    if commands[0].op == DESCRIBE:
        leave_description(DescriptionChannel.from_json(commands[0].channel), state.receiver.parameters)
        return
    channel = state.channel(commands[0])
    report = state.carry_out(commands, channel)
    channel.answer(report)
    if not report.ok or report.op in _LAST_COMMANDS:
        state.close_channel()


# Nothing of the same delivery comes behind these, nor behind a failure: handles of GPU memory are given back.
_LAST_COMMANDS = frozenset({"finish", "adopt"})


def _state_of(model: torch.nn.Module) -> _State:
    state = getattr(model, _ATTRIBUTE, None)
    if state is None:
        state = _State(model)
        setattr(model, _ATTRIBUTE, state)
    return state
