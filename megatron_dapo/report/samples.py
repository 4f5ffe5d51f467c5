"""Samples of runs for the page: a bounded choice of every kind from all over the run, small enough to carry.

A token takes two or three characters besides its text: how many characters it covers, its log-prob, and its advantage
if tokens differ in it, each as a digit of base 64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_dapo.report.run_files import Row, RunFiles
from megatron_dapo.telemetry.completions import distinct_tasks, excerpt

KINDS = ("right", "wrong", "truncated", "filtered", "other")
MAX_SAMPLES = 600
_MAX_TASK = 160  # characters of a prompt in the list
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_MAX_LOGPROB = 12.0  # end of the scale; all tokens below it count as equally surprising
_HEAD, _TAIL = 2000, 1000  # tokens of a long response that are kept
_CHARACTERS_A_TOKEN = 4
_MAX_BEGIN, _MAX_BRANCH = 600, 1000  # characters of a branch's prompt, and of each of its texts
_MAX_MISSED = 50  # samples in a row that are too large for what is left: the page is full


def kind_of(sample: Row, is_filtered: bool) -> str:
    """Return the kind of a sample: one of KINDS."""
    if is_filtered:
        return "filtered"
    if sample.get("outcome") == "truncated" or sample.get("finish_reason") == "length":
        return "truncated"
    return {"correct": "right", "wrong": "wrong", "unparsable": "wrong"}.get(str(sample.get("outcome")), "other")


def samples_for_page(runs: Sequence[RunFiles], max_bytes: int) -> dict[str, Any]:
    """Return prompts and samples, at most MAX_SAMPLES and `max_bytes` as JSON: whole groups with every kind of each run in turn, the
    newest first and the others spread over the run."""
    prompts: dict[str, int] = {}
    chosen: list[dict[str, Any]] = []
    left, num_missed = max_bytes, 0
    for run_index, kind, record in _in_turn(runs):
        prompt = json.dumps([[each.get("role"), each.get("content")] for each in record.get("prompt") or []])
        is_new = prompt not in prompts
        sample = _encoded(record, kind, run_index, prompts.get(prompt, len(prompts)))
        # Escaped characters take more; the page as a whole is measured again.
        size = len(json.dumps(sample)) + (len(prompt) if is_new else 0)
        if size <= left:
            left -= size
            prompts.setdefault(prompt, len(prompts))
            chosen.append(sample)
            num_missed = 0
        else:
            num_missed += 1
        if len(chosen) == MAX_SAMPLES or num_missed > _MAX_MISSED:
            break
    chosen.sort(key=lambda each: (-each["step"], each["id"]))
    totals = [dict.fromkeys(KINDS, 0) for _ in runs]
    for index, kind, _ in _all(runs):
        totals[index][kind] += 1
    texts = [json.loads(prompt) for prompt in prompts]
    tasks = [excerpt(task, _MAX_TASK) for task in distinct_tasks([str(turns[-1][1]) if turns else "" for turns in texts])]
    return {"prompts": texts, "tasks": tasks, "list": chosen, "read": totals}


def _all(runs: Sequence[RunFiles]) -> Iterator[tuple[int, str, Row]]:
    for index, run in enumerate(runs):
        for is_filtered, records in ((False, run.samples), (True, run.filtered)):
            yield from ((index, kind_of(record, is_filtered), record) for record in records if "response" in record)


def _in_turn(runs: Sequence[RunFiles]) -> Iterator[tuple[int, str, Row]]:
    """Yield the samples of whole groups: those with a sample of each kind, of every run in turn, as long as there are any."""
    groups: dict[tuple[int, bool, Any, Any], list[tuple[int, str, Row]]] = {}
    for index, kind, record in _all(runs):
        key = index, kind == "filtered", record.get("train_step"), record.get("prompt_id")
        groups.setdefault(key, []).append((index, kind, record))
    queues: dict[tuple[int, str], list[Any]] = {(index, kind): [] for index in range(len(runs)) for kind in KINDS}
    for key, members in groups.items():
        for kind in {kind for _, kind, _ in members}:
            queues[key[0], kind].append(key)
    orders = {name: [keys[place] for place in _spread(len(keys))] for name, keys in queues.items()}
    for turn in range(max(map(len, orders.values()), default=0)):
        for keys in orders.values():
            if turn < len(keys):
                yield from groups.pop(keys[turn], ())


def _spread(size: int) -> list[int]:
    """Return all indices below `size`: the last one first, then those that halve the gaps, and again (van der Corput)."""
    if size <= 0:
        return []
    bits = max(1, (size - 1).bit_length())
    order = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    places = [size - 1 - place for place in order if place < size]
    return places


def _encoded(record: Row, kind: str, run_index: int, prompt: int) -> dict[str, Any]:
    text, ids = str(record.get("response", "")), record.get("response_ids") or []
    counts = record.get("token_chars") or []
    columns = [counts, record.get("logprobs") or [], record.get("token_advantages") or []]
    is_long = len(ids) > _HEAD + _TAIL or len(text) > _CHARACTERS_A_TOKEN * (_HEAD + _TAIL)
    cut: list[int] = []
    if is_long and counts:
        start, end = sum(counts[:_HEAD]), len(text) - sum(counts[-_TAIL:])
        text, cut = text[:start] + text[end:], [_HEAD, len(ids) - _HEAD - _TAIL]
        columns = [[*column[:_HEAD], *column[-_TAIL:]] for column in columns]
    elif is_long:
        head, tail = _CHARACTERS_A_TOKEN * _HEAD, _CHARACTERS_A_TOKEN * _TAIL
        text, cut = text[:head] + "\n[...]\n" + text[-tail:], [0, max(0, len(ids) - _HEAD - _TAIL)]
    advantages = columns[2]
    largest = max(map(abs, advantages), default=0.0) or 1.0
    versions = [part.get("version") for part in record.get("versions") or [] if isinstance(part, dict)]
    document = {
        "run": run_index,
        "kind": kind,
        "step": record.get("train_step", 0),
        "id": record.get("sample_id", ""),
        "prompt": prompt,
        "source": record.get("data_source", ""),
        "answer": record.get("answer"),
        "extracted": record.get("extracted"),
        "outcome": record.get("outcome"),
        "error": record.get("error"),
        "finish": record.get("finish_reason"),
        "reward": record.get("reward"),
        "parts": record.get("reward_parts") or {},
        "advantage": record.get("advantage"),
        "versions": sorted({version for version in versions if version is not None}),
        "num_tokens": len(ids),
        "text": text,
    }
    if columns[0]:
        document |= {"chars": "".join(map(_count, columns[0])), "logprobs": "".join(map(_surprise, columns[1]))}
    episode = record.get("episode") or {}
    if turns := episode.get("turns"):
        document |= {"end": episode.get("end"), "turns": _turns(turns, cut), "figures": episode.get("figures") or {}}
        if branches := record.get("branches"):
            document["branches"] = [_branch(one, turns, segment) for segment, one in enumerate(branches, 1)]
    if advantages:
        document |= {"advantages": "".join(_signed(value / largest) for value in advantages), "scale": largest}
    return document | ({"cut": cut} if cut else {})


def _turns(turns: Sequence[Row], cut: Sequence[int]) -> list[dict[str, Any]]:
    """Return the turns of the main stream by the tokens that are shown of it: [start, end, observed_end], and facts.

    `cut`: the number of tokens shown at the head, and of those left out after it.
    """

    def shown(place: int) -> int:
        return place if not cut or place <= cut[0] else max(cut[0], place - cut[1])

    return [
        {"tokens": [shown(place) for place in turn["tokens"]], **_turn_facts(number, turn)}
        for number, turn in enumerate(turns, 1)
        if not turn.get("segment")
    ]


def _branch(branch: Row, turns: Sequence[Row], segment: int) -> dict[str, Any]:
    """Return another stream of an episode: why it began, the end of its prompt, and its turns with their texts."""
    facts = [(number, turn) for number, turn in enumerate(turns, 1) if turn.get("segment") == segment]
    texts = [[excerpt(text, _MAX_BRANCH) for text in pair] for pair in branch.get("turns") or []]
    return {
        "reason": branch.get("reason", ""),
        "prompt": excerpt(branch.get("prompt", ""), _MAX_BEGIN),
        "num_tokens": sum(turn["tokens"][1] - turn["tokens"][0] for _, turn in facts),
        "turns": [{"texts": pair, **_turn_facts(number, turn)} for (number, turn), pair in zip(facts, texts, strict=False)],
    }


def _turn_facts(number: int, turn: Row) -> dict[str, Any]:
    """Return what is shown at the begin of a turn; `number` is its place among the episode's turns, from 1."""
    return {
        "number": number,
        "reward": turn.get("reward") or 0,
        "calls": turn.get("calls") or [],
        **({"cut": True} if turn.get("cut") else {}),
    }


def _count(count: int) -> str:
    """Return a number of characters in digits below 63; each "/" before stands for 63 more."""
    return "/" * (count // 63) + _DIGITS[count % 63]


def _surprise(logprob: float) -> str:
    """Return a log-prob as a digit, finest near 0: logprob = -12 (digit / 63)^2."""
    share = min(1.0, max(0.0, -logprob / _MAX_LOGPROB)) if math.isfinite(logprob) else 1.0
    return _DIGITS[round(63 * math.sqrt(share))]


def _signed(share: float) -> str:
    """Return a number in [-1, 1] as a digit: (digit - 31) / 31."""
    return _DIGITS[round(31 + 31 * share)] if math.isfinite(share) else _DIGITS[31]


def size_of(samples: Mapping[str, Any]) -> int:
    """Return the bytes of samples in a page."""
    return len(json.dumps(samples, ensure_ascii=False).encode())
