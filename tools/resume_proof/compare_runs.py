"""Compare everything that two finished runs left, except wall-clock time and memory.

| files | comparison |
|---|---|
| checkpoints both still have, always the last | every tensor of every rank byte by byte; counters, stream, buffer |
| metrics.jsonl, evaluations.jsonl | the same steps once each, in order, and equal values |
| samples.jsonl | the same records in the same order: which prompts, which responses, which rewards |
| huggingface/ | every file byte by byte |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS

# Values that a clock decides. Everything else a run records is a function of its configuration.
# "seconds" are those of an episode in collector.json: generating, acting and waiting.
CLOCK_KEYS = frozenset(
    {
        "train_seconds",
        "seconds",
        *(name for name, metric in {**STEP_METRICS, **EVALUATION_METRICS}.items() if metric.unit == "s"),
    }
)
CLOCK_PREFIXES = ("time/", "checkpoint/", "memory/", "throughput/", "async/", "nodes/")
COUNTED = frozenset({"throughput/generated_tokens"})  # a count among the speeds, so it is compared
EXACT_IN_ANY_LAYOUT = frozenset({"train_step", "actor/learning_rate", "critic/learning_rate"})
RECORDS = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")


def run_differences(first: Path, second: Path) -> Iterator[str]:
    """Yield one line for each difference between two run directories."""
    yield from _checkpoint_differences(first / "checkpoints", second / "checkpoints")
    for name in RECORDS:
        yield from _record_differences(first / name, second / name)
    yield from _file_differences(first / "huggingface", second / "huggingface")


def differences_until(step: int, first: Path, second: Path) -> Iterator[str]:
    """Yield one line for each difference between two runs up to a train step whose checkpoint both have."""
    yield from _one_checkpoint(*(run / "checkpoints" / f"step_{step:06d}" for run in (first, second)))
    for name in RECORDS:
        yield from _record_differences(first / name, second / name, step)


def moved_differences(step: int, first: Path, second: Path) -> Iterator[str]:
    """Yield one line for each difference of a run that went on in another layout from the checkpoint of `step`.

    Records up to that step are equal. Behind it the other order of floating-point sums may change what is sampled; each step
    is on record once, in order, with the same learning rates.
    """
    for name in RECORDS:
        yield from _record_differences(first / name, second / name, step)
    ours, theirs = (
        [{key: row[key] for key in row if key in EXACT_IN_ANY_LAYOUT} for row in _lines(run / "metrics.jsonl")]
        for run in (first, second)
    )
    yield from value_differences(ours, theirs, "metrics.jsonl")


def require_windows_once(samples: Path) -> int:
    """Return the number of windows on record; a whole response is one. Raises AssertionError if one is recorded twice or
    windows do not join."""
    ends: dict[str, int] = {}
    records = _lines(samples)
    for record in records:
        start, before = record["window"]["start"], ends.get(record["sample_id"], 0)
        assert start == before, f"{record['sample_id']}: a window from {start} after one that ended at {before}"
        ends[record["sample_id"]] = len(record["response_ids"])
    return len(records)


def checkpoint_steps(directory: Path) -> list[int]:
    """Return the train steps of the checkpoints in a directory, in order."""
    return sorted(
        int(entry.name.removeprefix("step_")) for entry in directory.glob("step_*") if entry.name[5:].isdigit()
    )


def _checkpoint_differences(first: Path, second: Path) -> Iterator[str]:
    ours, theirs = checkpoint_steps(first), checkpoint_steps(second)
    if not ours or not theirs or ours[-1] != theirs[-1]:
        yield f"checkpoints: the last one of {first} is of step {ours[-1:]}, of {second} of step {theirs[-1:]}"
    for step in sorted(set(ours) & set(theirs), reverse=True):
        yield from _one_checkpoint(first / f"step_{step:06d}", second / f"step_{step:06d}")


def _one_checkpoint(first: Path, second: Path) -> Iterator[str]:
    if problem := _names_differ(first, second):
        yield problem
        return
    for path in sorted(first.iterdir()):
        if path.suffix == ".safetensors":
            yield from _tensor_differences(path, second / path.name)
        elif path.name != "manifest.json":  # has the hashes of files with wall-clock times
            yield from value_differences(_json(path), _json(second / path.name), f"{first.name}/{path.name}")


def document_differences(first: Path, second: Path) -> Iterator[str]:
    """Yield a line for each difference between two checkpoints outside their models, whatever layouts saved them."""
    for name in ("run.json", "collector.json"):
        yield from value_differences(_json(first / name), _json(second / name), f"{first.name}/{name}")
    yield from _tensor_differences(first / "collector.safetensors", second / "collector.safetensors")


def _tensor_differences(first: Path, second: Path) -> Iterator[str]:
    ours, theirs = _raw_tensors(first), _raw_tensors(second)
    where = f"{first.parent.name}/{first.name}"
    if ours.keys() != theirs.keys():
        yield f"{where}: tensors {sorted(ours.keys() ^ theirs.keys())[:4]} are in one only"
        return
    for name, (description, content) in ours.items():
        if (description, content) != theirs[name]:
            yield f"{where}: {name} {description} has other bytes"


def _raw_tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return (type and shape, bytes) of every tensor of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    data = content[8 + size :]
    return {
        name: (f"{entry['dtype']} {entry['shape']}", data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _record_differences(first: Path, second: Path, until: float = float("inf")) -> Iterator[str]:
    ours, theirs = ([each for each in _lines(path) if each["train_step"] <= until] for path in (first, second))
    # A run that has not come to its first evaluation has no file of them.
    if first.is_file() != second.is_file() and (ours or theirs):
        yield f"{first.name}: in one run only"
        return
    steps = [[record["train_step"] for record in records] for records in (ours, theirs)]
    if steps[0] != steps[1]:
        yield f"{first.name}: records of steps {steps[0]} and {steps[1]}"
        return
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        yield from value_differences(our, their, f"{first.name} line {index + 1} (step {our['train_step']})")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _file_differences(first: Path, second: Path) -> Iterator[str]:
    if problem := _names_differ(first, second):
        yield problem
        return
    for path in sorted(first.iterdir()) if first.is_dir() else ():
        if path.read_bytes() != (second / path.name).read_bytes():
            yield f"{first.name}/{path.name}: other bytes"


def _names_differ(first: Path, second: Path) -> str:
    names = [
        sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else None
        for directory in (first, second)
    ]
    return "" if names[0] == names[1] else f"{first.name}: files {names[0]} and {names[1]}"


def value_differences(first: Any, second: Any, where: str) -> Iterator[str]:
    """Yield one line for each difference between two JSON values, except values that a clock decides."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in sorted({*first, *second}):
            if is_clocked(key):
                continue
            if key not in first or key not in second:
                yield f"{where}: {key} is in one only"
            else:
                yield from value_differences(first[key], second[key], f"{where}: {key}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, (our, their) in enumerate(zip(first, second, strict=True)):
            yield from value_differences(our, their, f"{where}[{index}]")
    elif first != second:
        yield f"{where}: {str(first)[:80]} and {str(second)[:80]}"


def is_clocked(key: str) -> bool:
    """Return True if a value under this name depends on time or memory."""
    return key in CLOCK_KEYS or (key.startswith(CLOCK_PREFIXES) and key not in COUNTED)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
