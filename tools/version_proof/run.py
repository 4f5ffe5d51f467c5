"""Generates while versions are published, and compares every token's label with what the token says of itself.

Requests with few prompts, so that the server's cache is always in use, are kept in flight; versions are published at random
moments through the weight sync of a run. With update_pause "abort" unfinished responses come back before a weight sync and
continue after it, as a run's collector does it; otherwise they stay in the server.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_dapo.bridge.protocol.messages import Bucket
from megatron_dapo.bridge.protocol.progress import NUM_SLOTS
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.config.sglang_schema import UpdatePause
from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams
from tools.version_proof.one_trainer import OneTrainer
from tools.version_proof.telling_model import (
    CODES,
    FIRST_PROMPT_TOKEN,
    LAST_PROMPT_TOKEN,
    clean_token,
    mixed_token,
    tensors_of,
    write_model,
)

IN_FLIGHT = 64
NUM_PROMPTS = 8
LONGEST_PROMPT, LONGEST_RESPONSE = 60, 400
PAUSES = 0.2, 2.0  # shortest and longest time between two versions, in durations of the last weight sync
LONGEST_PAUSE_S = 1.0
_SHOWN = 3  # wrong labels in text
FAULTS = ("kill", "kill in update", "corrupt")


@dataclass
class VersionProof:
    """Counts of a proof."""

    update_pause: UpdatePause
    engine: str = ""  # SGLang's version
    overlap: bool = False  # SGLang's overlap scheduler is on
    tokens: int = 0  # tokens whose labels were compared
    responses: int = 0
    versions: int = 0  # published
    wrong_labels: int = 0  # tokens that weights of another version sampled than their label says
    mixed_tokens: int = 0  # tokens that read keys or values of other weights than their label's
    mixed_at_start: int = 0  # those in the first range of a response: a prompt that other weights had read
    spanned: Counter[int] = field(default_factory=Counter)  # responses by the number of their versions
    in_flight: int = 0  # responses under way at a weight sync, over all
    faults: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)  # the first wrong labels
    seconds: float = 0.0
    update_seconds: list[float] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if every label is right, and no cache of other weights was read unless the mode keeps it."""
        keeps_cache = self.update_pause == "in_place"
        return not self.wrong_labels and (keeps_cache or not self.mixed_tokens)

    def check(self, done: Completion) -> None:
        """Compare the labels of a response with its tokens."""
        self.responses += 1
        self.spanned[len(done.versions)] += 1
        assert sum(part.end - part.start for part in done.versions) == done.num_tokens, "ranges cover the response"
        for number, part in enumerate(done.versions):
            tokens = done.token_ids[part.start : part.end]
            is_mixed = tokens == mixed_token(part.version)
            is_wrong = (tokens != clean_token(part.version)) & ~is_mixed
            self.tokens += len(tokens)
            self.mixed_tokens += int(is_mixed.sum())
            self.mixed_at_start += int(is_mixed.sum()) * (number == 0)
            self.wrong_labels += int(is_wrong.sum())
            if is_wrong.any() and len(self.shown) < _SHOWN:
                first = int(is_wrong.argmax())
                said = f"token {int(tokens[first])} at {part.start + first} of {done.num_tokens}"
                self.shown.append(f"{done.request_id}: {said} is labeled {part.version}; versions {done.versions}")

    def as_json(self) -> dict[str, Any]:
        median = statistics.median(self.update_seconds) if self.update_seconds else None
        return {**vars(self), "spanned": dict(sorted(self.spanned.items())), "update_seconds": median, "holds": self.holds}

    def lines(self) -> Iterator[str]:
        """Yield the proof as text."""
        yield (
            f"update_pause = {self.update_pause}, SGLang {self.engine}, overlap scheduler {'on' if self.overlap else 'off'}: "
            f"{self.tokens:,} tokens of {self.responses:,} responses, {self.versions} versions in {self.seconds:.0f} s"
        )
        spans = ", ".join(f"{count:,} with {number}" for number, count in sorted(self.spanned.items()))
        yield f"responses by their number of versions: {spans}; under way at a weight sync: {self.in_flight:,}"
        if self.faults:
            yield "faults: " + ", ".join(f"{count} x {fault}" for fault, count in self.faults.items())
        yield f"{self.wrong_labels:,} wrong labels"
        yield f"{self.mixed_tokens:,} tokens over keys or values of other versions, {self.mixed_at_start:,} of them at a start"
        yield from self.shown


class FaultyTransport(SharedMemoryTransport):
    """Strikes the next weight sync with what `fault` names: the server dies, or a bit of a bucket changes."""

    fault = ""
    kill: Callable[[], None]

    def send(self, sources: Buffers) -> None:
        if self.fault == "kill in update":
            self.fault = ""
            self.kill()
        super().send(sources)

    def _announce(self, state: Any, bucket: Bucket) -> None:
        own = self.plan.writes(bucket, self.rank)
        if self.fault == "corrupt" and own:
            self.fault = ""
            state.memory.slots[0][bucket.index % NUM_SLOTS][own[0].chunk.byte_offset] ^= 1
        super()._announce(state, bucket)


class Prover:
    """One proof: a server, requests, and versions."""

    def __init__(
        self, python: Path, update_pause: UpdatePause, directory: Path, stack: ExitStack, *, seed: int, overlap: bool
    ) -> None:
        settings = ServerSettings(
            python=python,
            model_path=write_model(directory / "model"),
            key_file=create_key(directory),
            log_dir=directory,
            max_running_requests=IN_FLIGHT,
            max_total_tokens=IN_FLIGHT * (LONGEST_PROMPT + LONGEST_RESPONSE + 8),
            random_weights=True,
            # in_place with the overlap scheduler is refused, and measured here.
            update_pause="retract" if overlap and update_pause == "in_place" else update_pause,
            cpu_overlap=overlap,
            start_timeout_s=600.0,
        )
        self._transport = FaultyTransport
        self._trainer = OneTrainer(settings, update_pause, stack, self._make_transport)
        self._engines = self._trainer.engines
        self._result = VersionProof(update_pause, overlap=overlap)
        self._random = random.Random(seed)
        self._names = itertools.count()
        sizes = [self._random.randint(4, LONGEST_PROMPT) for _ in range(NUM_PROMPTS)]
        self._prompts = [
            tuple(self._random.randint(FIRST_PROMPT_TOKEN, LAST_PROMPT_TOKEN) for _ in range(size)) for size in sizes
        ]
        self._requests: dict[str, GenerationRequest] = {}  # requests under way
        self._fault = ""
        self._sync_s = 0.0

    def run(self, num_tokens: int, faults: Sequence[str], say: Callable[[str], None]) -> VersionProof:
        """Generate until `num_tokens` tokens were compared; `faults` strike one after the other, evenly spread."""
        result, began = self._result, time.monotonic()
        moments = deque((num_tokens * (1 + place) // (1 + len(faults)), fault) for place, fault in enumerate(faults))
        self._publish()
        result.engine = self._engines.server_version
        next_at = 0.0
        while result.tokens < num_tokens:
            self._submit()
            for done in self._engines.poll():
                del self._requests[done.request_id]
                result.check(done)
            if moments and result.tokens >= moments[0][0]:
                self._strike(moments.popleft()[1])
            if time.monotonic() >= next_at:
                self._publish()
                say(f"{result.tokens:,} of {num_tokens:,} tokens, {result.versions} versions, {result.wrong_labels} wrong labels")
                pause = self._random.uniform(*PAUSES) * self._sync_s
                next_at = time.monotonic() + min(pause, LONGEST_PAUSE_S)
        for done in self._engines.abort():
            result.check(done)
        result.seconds = time.monotonic() - began
        return result

    def _submit(self) -> None:
        """Send requests until `IN_FLIGHT` are under way."""
        new = []
        while len(self._requests) < IN_FLIGHT:
            name, length = f"{next(self._names):06d}", self._random.randint(1, LONGEST_RESPONSE)
            new.append(GenerationRequest(name, self._random.choice(self._prompts), SamplingParams(max_new_tokens=length), 0))
            self._requests[name] = new[-1]
        if new:
            self._engines.submit(new)

    def _strike(self, fault: str) -> None:
        """Kill the server now, or leave the fault to the next weight sync."""
        self._result.faults[fault] += 1
        if fault == "kill":
            self._kill()
        else:
            self._fault = fault

    def _publish(self) -> None:
        """Publish the next version, with requests under way unless update_pause says otherwise."""
        result, held, fault = self._result, [], self._fault
        version, self._fault = result.versions, ""
        if version:
            result.in_flight += len(self._requests)
            self._transport.fault = fault
        if version and result.update_pause == "abort":
            held = self._engines.abort()
        # Tokens of weights that arrive corrupted, and are sent once, would have a wrong label.
        sent = (tensors_of(version + CODES // 2), tensors_of(version)) if fault == "corrupt" else (tensors_of(version),)
        self._trainer.hold(*sent)
        start = time.perf_counter()
        self._engines.publish(version)
        self._sync_s = time.perf_counter() - start
        if version and not fault:
            result.update_seconds.append(self._sync_s)
        result.versions += 1
        for done in held:
            if done.finish_reason == "abort":
                self._engines.submit([replace(self._requests[done.request_id], prefix=done if done.num_tokens else None)])
            else:
                del self._requests[done.request_id]
                result.check(done)

    def _make_transport(self, *arguments: Any, **named: Any) -> FaultyTransport:
        self._transport = transport = FaultyTransport(*arguments, **named)
        transport.kill = self._kill
        return transport

    def _kill(self) -> None:
        """Kill a scheduler of the server."""
        server = self._trainer.server
        assert server is not None, "a server was started"
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.pids()}
        os.kill(max(pid for pid, command in commands.items() if b"scheduler" in command), signal.SIGKILL)


def prove_versions(
    python: Path,
    update_pause: UpdatePause,
    num_tokens: int,
    *,
    seed: int = 0,
    overlap: bool = False,
    faults: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> VersionProof:
    """Return the counts of `num_tokens` tokens of a server of the interpreter `python`."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return Prover(python, update_pause, directory, stack, seed=seed, overlap=overlap).run(num_tokens, faults, say)
