"""Plays random sessions of clients and checks each token: trained once, in the conversation in which it was sampled."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dapo.engines.base import completion_from_json, completion_to_json
from megatron_dapo.proof.gateway.world import (
    SAMPLING,
    SETTINGS,
    TURNS,
    ClientPool,
    ClientSession,
    GatewayViolation,
    ScriptedEngine,
)
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.rollout.episodes.recovery import Recovery
from megatron_dapo.types import Completion, GenerationRequest

_AT_A_TIME = 32
_SHOWN = 3  # violations in text


@dataclass
class GatewayProof:
    """Counts of a proof."""

    sessions: int = 0
    requests: Counter[str] = field(default_factory=Counter)  # keyed by what the client did
    turns: int = 0
    streams: int = 0
    trained_tokens: int = 0
    lost_tokens: Counter[str] = field(default_factory=Counter)  # sampled and not trained, by the reason
    interruptions: int = 0  # weight updates while turns were sampled
    replayed: int = 0  # sessions that another process played again
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "sessions_per_second": round(self.sessions / max(self.seconds, 1e-9), 1)}

    def lines(self) -> Iterator[str]:
        """Yield the proof as text."""
        rate = self.sessions / max(self.seconds, 1e-9)
        yield f"{self.sessions:,} sessions in {self.seconds:.0f} s, {rate:.0f} a second"
        yield "requests: " + ", ".join(f"{count:,} {kind}" for kind, count in self.requests.most_common())
        yield f"{self.turns:,} turns in {self.streams:,} streams"
        yield f"{self.interruptions:,} weight updates; {self.replayed:,} sessions played again by another process"
        yield f"{self.trained_tokens:,} tokens sampled and trained, each once, in the stream in which it was sampled"
        for reason, count in self.lost_tokens.items():
            yield f"{count:,} tokens sampled and not trained: {reason}"
        yield f"{len(self.violations)} violations"
        yield from self.violations[:_SHOWN]


def prove_gateway(
    num_sessions: int, seed: int = 0, progress: Callable[[int], None] = lambda done: None
) -> GatewayProof:
    """Play `num_sessions` sessions, some of them interrupted by weight updates or played again by another process."""
    proof, begin = GatewayProof(), time.perf_counter()
    log = logging.getLogger(Recovery.__module__)
    log.addFilter(_is_error)  # sessions are lost on purpose
    while proof.sessions < num_sessions:
        numbers = range(proof.sessions, min(num_sessions, proof.sessions + _AT_A_TIME))
        try:
            _play({f"g{number}/0": seed * 1_000_003 + number for number in numbers}, proof)
        except Exception as error:  # an assertion of the code that is tested is a violation, too
            proof.violations.append(f"sessions {numbers[0]} to {numbers[-1]}: {error!r}"[:2000])
        proof.sessions += len(numbers)
        progress(proof.sessions)
    log.removeFilter(_is_error)
    proof.seconds = time.perf_counter() - begin
    return proof


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _play(seeds: dict[str, int], proof: GatewayProof) -> None:
    draw = random.Random(min(seeds.values()))
    inner = ScriptedEngine(seeds, draw)
    engine = EpisodeEngine(inner, inner.sessions, TURNS, SETTINGS)
    requests = {name: GenerationRequest(name, (), SAMPLING, seed, task={}) for name, seed in seeds.items()}
    engine.submit(list(requests.values()))
    interruption_rate = draw.choice([0.0, 0.0, 0.2])
    while engine.num_unfinished:
        finished = engine.poll()
        if draw.random() < interruption_rate:
            held = engine.abort()
            proof.interruptions += 1
            if draw.random() < 0.5:  # another process, from what was saved
                proof.replayed += len(held)
                inner.sessions = ClientPool(inner.sessions.ended)
                engine = EpisodeEngine(inner, inner.sessions, TURNS, SETTINGS)
                held = [completion_from_json(completion_to_json(one)) for one in held]
            finished += submit_again(engine, held, requests)
        for completion in finished:
            _check(inner.sessions.ended.pop(completion.request_id), completion, inner, proof)
    accounting = engine.accounting()
    if accounting.diverged or not accounting.is_balanced:
        raise GatewayViolation(f"the episodes do not add up: {accounting}")


def submit_again(
    engine: EpisodeEngine, held: list[Completion], requests: Mapping[str, GenerationRequest]
) -> list[Completion]:
    """Submit the unfinished ones of the completions that an abort returned, and return the finished ones."""
    unfinished = [one for one in held if one.finish_reason == "abort"]
    engine.submit([replace(requests[one.request_id], prefix=one if one.num_tokens else None) for one in unfinished])
    return [one for one in held if one.finish_reason != "abort"]


def _check(session: ClientSession, completion: Completion, engine: ScriptedEngine, proof: GatewayProof) -> None:
    """Compare an episode's streams with the oracle's contexts, and its tokens with those that were sampled for it."""
    episode = completion.episode
    assert episode is not None, "it was played"
    streams: dict[int, tuple[list[int], list[bool]]] = {}  # ids of a stream; was a token sampled in it
    for request in session.sampled:
        if not request.ids:
            raise GatewayViolation(f"{session.name}: turn {session.sampled.index(request)} was not sampled")
        ids, kinds = streams.setdefault(request.stream, (list(request.context), [False] * len(request.context)))
        ids += request.context[len(ids) :]
        ids += request.ids
        kinds += [False] * (len(ids) - len(request.ids) - len(kinds)) + [True] * len(request.ids)
    if max(1, len(streams)) != 1 + completion.num_segments:  # one that is lost may have no turn
        raise GatewayViolation(f"{session.name}: {1 + completion.num_segments} streams, not {len(streams)}")
    trained: list[float] = []
    for number, (ids, kinds) in streams.items():
        stream = completion.stream(number)
        prompt = list(stream.prompt_ids or ())
        if prompt + stream.token_ids.tolist() != ids:
            raise GatewayViolation(f"{session.name}: stream {number} has other tokens than were sampled and said")
        is_trained = [run.is_trained for run in stream.runs for _ in range(run.start, run.end)]
        if [False] * len(prompt) + is_trained != kinds:
            raise GatewayViolation(f"{session.name}: stream {number} trains other tokens than were sampled in it")
        trained += [number for number, kind in zip(stream.logprobs.tolist(), is_trained, strict=True) if kind]
    sampled = engine.sampled[session.name]
    if sorted(trained) != sorted(sampled) or len(set(trained)) != len(trained):
        raise GatewayViolation(f"{session.name}: {len(trained)} tokens are trained, not the {len(sampled)} sampled")
    if (episode.end == "lost") != bool(session.lost) or episode.lost != session.lost:
        raise GatewayViolation(f"{session.name}: it ended by {episode.end} ({episode.lost!r}), not {session.lost!r}")
    proof.requests += session.counts
    proof.turns += len(session.sampled)
    proof.streams += len(streams)
    if session.lost:
        proof.lost_tokens["more conversations than environment.max_branches"] += len(trained)
    else:
        proof.trained_tokens += len(trained)
