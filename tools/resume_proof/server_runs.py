"""Resume with SGLang servers: after kill -9 each window or episode is trained once, and no token is sampled again that a
checkpoint has.

Answers of servers come when they come, so two runs differ, and a killed and resumed run is compared with itself:

- each train step is on record once, with all samples of its batch, no window of a response twice, and no token older than
  rollout.max_staleness;
- every unfinished response of the checkpoint from which it went on is trained or still open at the end, and begins with the
  tokens that the checkpoint has of it; no episode began anew or was lost.

The servers are those of the default, SGLang's deterministic mode, which a CPU has as well.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megatron_dapo.rollout.serialization import join_state
from tools.resume_proof.compare_runs import checkpoint_steps, require_windows_once
from tools.resume_proof.kill_points import (
    MAX_LATE,
    Killed,
    ResumeProofSettings,
    RunProcess,
    RunWasOver,
    Say,
    after_seconds,
    kill_at,
    resumed_from,
)

MAX_STALENESS = 1  # all recipes with servers have it
FIRST_SPAN_S = 60.0  # start-up excluded; a run that is over earlier makes it shorter


@dataclass(frozen=True)
class ServerPoint:
    """One kill and its outcome."""

    phase: str
    resumed_from: str  # the checkpoint; "": it began anew
    responses_held: int  # unfinished responses with tokens in that checkpoint
    tokens_held: int  # sampled in them
    tokens_again: int  # those sampled again
    tokens_sampled: int  # the resumed run's, in what it trained
    mean_age: float  # mean age of the tokens that it trained, in policy versions
    begun_anew: int
    problem: str  # the first one, "" for none
    wall_seconds: float


@dataclass(frozen=True)
class ServerProofReport:
    """Report of `tools/prove_resume.py --engine-python PATH --json`."""

    layout: str
    points: int
    exact: int  # points without a problem
    first_problem: str | None
    phases: Mapping[str, int]
    responses_held: int
    tokens_held: int
    tokens_again: int
    tokens_again_share: float  # share of the tokens that the resumed runs sampled
    begun_anew: int
    seconds: float
    kills: Sequence[ServerPoint]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable object."""
        return asdict(self)


def server_overrides(python: Path) -> tuple[str, ...]:
    """Return what makes a recipe of the proof a run with servers, all of whose samples are on record."""
    return (
        'rollout.engine="sglang"',
        f'sglang.python="{python.absolute()}"',
        "sglang.weight_sync_bucket_mb=1",
        "rollout.filter_groups=false",
        "checkpoint.keep=1000",
        "evaluation.interval=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    )


def prove_with_servers(settings: ResumeProofSettings, say: Say = lambda line: None) -> ServerProofReport:
    """Run the proof. RuntimeError if a run fails, TimeoutError if one hangs."""
    start, draw, span_s = time.monotonic(), random.Random(settings.seed), FIRST_SPAN_S
    settings.directory.mkdir(parents=True, exist_ok=True)
    points: list[ServerPoint] = []
    for index in range(settings.num_points):
        directory = settings.directory / f"point_{index:02d}"
        began = time.monotonic()
        killed, span_s = _kill(settings, directory, draw, span_s)
        run = RunProcess(settings, directory)
        if code := run.wait():
            raise RuntimeError(f"{directory}: the restarted run ended with exit code {code}: {run.exit_reason()}")
        resumed = resumed_from(run.log.read_text(encoding="utf-8", errors="replace"))
        point = _point(directory, killed, resumed)
        points.append(replace(point, wall_seconds=round(time.monotonic() - began, 1)))
        say(f"point {index + 1}: {points[-1]}")
    problems = [point.problem for point in points if point.problem]
    again, sampled = sum(point.tokens_again for point in points), sum(point.tokens_sampled for point in points)
    return ServerProofReport(
        layout=settings.layout,
        points=len(points),
        exact=len(points) - len(problems),
        first_problem=problems[0] if problems else None,
        phases=dict(Counter(point.phase for point in points).most_common()),
        responses_held=sum(point.responses_held for point in points),
        tokens_held=sum(point.tokens_held for point in points),
        tokens_again=again,
        tokens_again_share=again / max(1, sampled),
        begun_anew=sum(point.begun_anew for point in points),
        seconds=round(time.monotonic() - start, 1),
        kills=points,
    )


def _kill(
    settings: ResumeProofSettings, directory: Path, draw: random.Random, span_s: float
) -> tuple[Killed, float]:
    """Kill a run at a random moment after its first step; return its state, and the seconds from which moments are drawn."""
    for attempt in range(MAX_LATE):
        try:
            return kill_at(settings, directory, after_seconds(draw.uniform(0.0, span_s))[1]), span_s
        except RunWasOver as over:
            span_s = over.seconds
            shutil.rmtree(directory)
            if attempt == MAX_LATE - 1:
                raise
    raise AssertionError("unreachable")


def _point(directory: Path, killed: Killed, resumed: str) -> ServerPoint:
    first_step = int(resumed.removeprefix("step_") or 0)
    rows, records = (_lines(directory / name) for name in ("metrics.jsonl", "samples.jsonl"))
    kept = {record["sample_id"]: record["response_ids"] for record in records}
    last = checkpoint_steps(directory / "checkpoints")[-1]
    for name, token_ids in _responses(_state(directory / "checkpoints" / f"step_{last:06d}")):
        kept[name] = max(kept.get(name, []), token_ids, key=len)
    held = _held(_state(directory / "checkpoints" / resumed)) if resumed else {}
    problems = list(_problems(directory, rows, records))
    again = 0
    for name, (token_ids, is_sampled) in held.items():
        if name not in kept:
            problems.append(f"{name}: the checkpoint has {len(token_ids)} tokens of it, and it is neither trained nor open")
        equal = sum(1 for _ in _equal_begin(token_ids, kept.get(name, ())))
        again += sum(is_sampled[equal:])
    newer = [record for record in records if record["train_step"] > first_step]
    return ServerPoint(
        phase=killed.phase,
        resumed_from=resumed,
        responses_held=len(held),
        tokens_held=sum(sum(is_sampled) for _, is_sampled in held.values()),
        tokens_again=again,
        tokens_sampled=sum(map(_num_sampled, newer)),
        mean_age=sum(row["rollout/token_staleness_mean"] for row in rows) / len(rows),
        begun_anew=int(sum(row["episodes/begun_anew"] for row in rows if row["train_step"] > first_step)),
        problem=next(iter(problems), "") or (f"processes outlived the kill: {killed.left}" if killed.left else ""),
        wall_seconds=0.0,
    )


def _num_sampled(record: Mapping[str, Any]) -> int:
    """Return the sampled tokens of a window or of an episode."""
    if "episode" in record:
        return sum(turn["tokens"][1] - turn["tokens"][0] for turn in record["episode"]["turns"])
    return len(record["response_ids"]) - record["window"]["start"]


def _problems(
    directory: Path, rows: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    steps = [row["train_step"] for row in rows]
    if steps != list(range(1, len(steps) + 1)):
        yield f"the steps on record are {steps}"
    try:
        require_windows_once(directory / "samples.jsonl")
    except AssertionError as error:
        yield str(error)
    if (oldest := max(row["rollout/token_staleness_max"] for row in rows)) > MAX_STALENESS:
        yield f"a token was {oldest} versions old"
    sizes = Counter(record["train_step"] for record in records)
    if len(set(sizes.values())) > 1 or sorted(sizes) != steps:
        yield f"samples of each step: {dict(sizes)}"
    for row in rows:
        for key in ("episodes/begun_anew", "episodes/groups_lost", "episodes/retries"):
            if row[key]:
                yield f"step {row['train_step']}: {key} is {row[key]}"


def _held(state: Mapping[str, Any]) -> dict[str, tuple[list[int], list[bool]]]:
    """Return the ids of unfinished responses' tokens, and which were sampled."""
    held = {}
    for group in state.get("open_groups", state.get("pool", ())):
        for one in group["completions"].values():
            token_ids = list(one["token_ids"])
            if one["finish_reason"] != "abort" or not token_ids:
                continue
            episode = one.get("episode")
            sampled = [True] * len(token_ids)
            if episode:
                sampled = [any(turn["start"] <= at < turn["end"] for turn in episode["turns"]) for at in range(len(token_ids))]
            held[one["request_id"]] = token_ids, sampled
    return held


def _responses(state: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield the responses anywhere in a collector's state, by their ids."""
    if isinstance(state, Mapping):
        if "request_id" in state and "token_ids" in state:
            yield state["request_id"], list(state["token_ids"])
        state = state.values()
    elif not isinstance(state, list):
        return
    for part in state:
        yield from _responses(part)


def _equal_begin(first: Sequence[int], second: Sequence[int]) -> Iterator[int]:
    for ours, theirs in zip(first, second):
        if ours != theirs:
            return
        yield ours


def _state(checkpoint: Path) -> dict[str, Any]:
    document = json.loads((checkpoint / "collector.json").read_text(encoding="utf-8"))
    return join_state(document, load_file(checkpoint / "collector.safetensors"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
