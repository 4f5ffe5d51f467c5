"""One engine rank without a server: the real weight loader in a separate process, and the floor of the transport.

    python weight_sink.py SPECIFICATION.json ENGINE_RANK

Serves one connection on a socket in the specification's directory. A request is a length and a JSON object, for a load
followed by the payload; the answer is one byte.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.bridge.protocol import weight_loader
from megatron_dapo.bridge.protocol.peer_group import Address, PeerGroup, join
from megatron_dapo.bridge.protocol.receiver import Receiver
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.models.config_json import read_architecture

DEADLINE_S = 300.0
CHECKSUMS = Receiver.checksums


def _zeros(receiver: Receiver) -> dict[str, int]:
    return dict.fromkeys(receiver.parameters, 0)


def read_all(tensors: Iterable[torch.Tensor]) -> None:
    """Read tensors once, as fast as torch does."""
    for tensor in tensors:
        tensor.detach().view(-1).view(torch.uint8)[: tensor.nbytes // 8 * 8].view(torch.int64).sum()


class Parameters(torch.nn.Module):
    """A module whose named_parameters() are those of an engine rank, filled with noise."""

    def __init__(self, specs: dict[str, Any], device: str) -> None:
        super().__init__()
        # Not registered: torch takes no parameter whose name has a dot.
        self._tensors = {
            n: torch.nn.Parameter(torch.rand(s.shape, device=device).to(s.dtype)) for n, s in specs.items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._tensors.items())

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._tensors.values())


class Sink:
    """Answers requests."""

    def __init__(self, specification: dict[str, Any], rank: int) -> None:
        self._specification = specification
        self._rank = rank
        self._model: Parameters | None = None
        self._group: PeerGroup | None = None
        self._buffers: dict[int, torch.Tensor] = {}
        self._shared = self._copied = torch.empty(0, dtype=torch.uint8)

    def handle(self, request: dict[str, Any], payload: bytes) -> None:
        getattr(self, "_" + request["op"])(request, payload)

    def _load(self, request: dict[str, Any], payload: bytes) -> None:
        if self._model is None:
            self._model = Parameters(self._specs(), self._specification.get("device", "cpu"))
        weight_loader.load(self._model, pickle.loads(payload))

    def _count(self, request: dict[str, Any], payload: bytes) -> None:
        """Read checksums back at the end of an update, or answer zeros without reading."""
        Receiver.checksums = CHECKSUMS if request["on"] else _zeros  # type: ignore[method-assign]

    def _read(self, request: dict[str, Any], payload: bytes) -> None:
        """Only read the parameters."""
        if self._model is not None:
            read_all(self._model.parameters())

    def _join(self, request: dict[str, Any], payload: bytes) -> None:
        """Join the floor's group; make what each sender's bytes go into."""
        address = Address(*request["address"])
        self._group = join(address, request["name"], request["member"], request["size"], timeout_s=DEADLINE_S)
        # Ones, not empty: pages that were never written would be made while the clock runs.
        self._buffers = {int(m): torch.ones(n, dtype=torch.uint8) for m, n in request["num_bytes"].items()}

    def _floor(self, request: dict[str, Any], payload: bytes) -> None:
        """Receive the same bytes once, in messages of a bucket, all under way at once."""
        assert self._group is not None, "floor before join"
        deadline = time.monotonic() + DEADLINE_S
        pending = [
            self._group.receive(chunk, member)
            for member, buffer in self._buffers.items()
            for chunk in buffer.split(request["bucket_bytes"])
        ]
        for message in pending:
            message.wait(deadline)

    def _map(self, request: dict[str, Any], payload: bytes) -> None:
        """Map the memory that the trainer's ranks write into."""
        size = request["num_bytes"]
        self._shared = torch.from_file(request["path"], shared=True, size=size, dtype=torch.uint8)
        self._copied = torch.ones(size, dtype=torch.uint8)

    def _shared_floor(self, request: dict[str, Any], payload: bytes) -> None:
        """Copy the same bytes out of shared memory once."""
        self._copied.copy_(self._shared)

    def _specs(self) -> dict[str, Any]:
        specification = self._specification
        architecture = read_architecture(specification["model"])
        layout = sglang_layout(
            architecture,
            specification["engine_tensor"],
            getattr(torch, specification["dtype"]),
            device=specification.get("device", "cpu"),
        )
        return dict(layout.local_specs(self._rank))


class SinkClient:
    """The other end, in the trainer."""

    def __init__(self, path: Path) -> None:
        end = time.monotonic() + DEADLINE_S
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(DEADLINE_S)
        while True:
            try:
                self._socket.connect(str(path))
                return
            except OSError:
                if time.monotonic() > end:  # the sink listens once its imports are done
                    raise
                time.sleep(0.1)

    def start(self, request: dict[str, Any], payload: bytes = b"") -> None:
        header = json.dumps({**request, "payload_bytes": len(payload)}).encode()
        self._socket.sendall(struct.pack("<q", len(header)) + header + payload)

    def wait(self) -> None:
        if self._socket.recv(1) != b"+":
            raise ConnectionError("the sink has ended")


class SinkControl:
    """`EngineControl` of an engine that is nothing but its ranks' loaders."""

    def __init__(self, sinks: Sequence[SinkClient]) -> None:
        self._sinks = sinks

    def update_weights_from_tensor(self, payloads: Sequence[bytes | str], load_format: str | None = None) -> None:
        # All are started before the first is waited for: ranks of one engine load at the same time.
        for sink, payload in zip(self._sinks, payloads):
            assert isinstance(payload, bytes)
            sink.start({"op": "load"}, payload)
        for sink in self._sinks:
            sink.wait()

    def update_weights_from_disk(self, directory: str) -> None:
        raise NotImplementedError("a sink has no loader of directories")

    def pause(self) -> None: ...

    def flush_cache(self) -> None: ...

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def update_weight_version(self, version: int) -> None: ...

    def resume(self) -> None: ...


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(1 << 20, size - len(data)))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def main() -> None:
    torch.set_num_threads(1)
    specification = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(sys.argv[2])
    sink = Sink(specification, rank)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(Path(specification["directory"]) / f"sink{rank}.sock"))
        server.listen(1)
        connection, _ = server.accept()
    while True:
        try:
            header = json.loads(_exactly(connection, struct.unpack("<q", _exactly(connection, 8))[0]))
        except EOFError:
            return
        sink.handle(header, _exactly(connection, header["payload_bytes"]))
        connection.sendall(b"+")


if __name__ == "__main__":
    main()
