"""Responses as JSONL for people to read: capped per step, written by a thread so that training never waits."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.telemetry.writers import drop_steps_from
from megatron_dapo.types import Group, ScoredSample
from megatron_dapo.untrusted import printable

if TYPE_CHECKING:
    from megatron_dapo.files.durable import Files

logger = logging.getLogger(__name__)

_INCOMPLETE = "\ufffd"  # a token of a byte-level vocabulary may end within a character
TOKENS_PER_STEP = 1 << 16  # budget per step for records with details of each token, about 10 bytes per token


def sample_record(
    train_step: int, group: Group, index: int, advantage: float | None, tokens: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the record of response `index` of `group`. `advantage` is the mean over its tokens; None: not trained.

    `tokens`: see `token_details`.
    """
    sample = group.samples[index]
    return {
        "train_step": train_step,
        "sample_id": sample.sample_id,
        "prompt_id": group.prompt.prompt_id,
        "data_source": group.prompt.data_source,
        "prompt": [dict(message) for message in group.prompt.messages],
        "answer": group.prompt.answer,
        "response": sample.text,
        "response_ids": sample.completion.token_ids.tolist(),
        "finish_reason": sample.completion.finish_reason,
        "extracted": sample.score.extracted,
        "outcome": sample.score.outcome,
        **({"error": sample.score.failure} if sample.score.failure else {}),
        "accuracy": sample.score.accuracy,
        "reward": sample.reward,
        "reward_parts": _parts(sample),
        "advantage": advantage,
        "versions": [asdict(part) for part in sample.completion.versions],
        "generation_step": group.generation_step,
        "window": {"start": sample.window.start, "is_finished": sample.window.is_finished},
        **_episode_record(sample),
        **(tokens or {}),
    }


def json_lines(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as JSONL in printable text."""
    return "".join(printable(json.dumps(record, ensure_ascii=False)) + "\n" for record in records)


def _parts(sample: ScoredSample) -> dict[str, float]:
    """Return the parts of a reward; one from a user's function with a built-in name becomes verifier/NAME."""
    built_in, own = sample.reward_parts, sample.score.detail.get("parts", {})
    return {**built_in, **{f"verifier/{name}" if name in built_in else name: value for name, value in own.items()}}


def _episode_record(sample: ScoredSample) -> dict[str, Any]:
    """Return how an episode ended, its turns and what its environment recorded, {} for a response of one turn.

    A turn has its tokens [start, end) of its stream's response, sampled, and [end, observed_end), its environment's answer.
    """
    if sample.completion.episode is None:
        return {}
    turns = [
        {
            "segment": segment,
            "tokens": [turn.start, turn.end, turn.observed_end],
            "reward": turn.reward,
            "calls": [f"{call.name}: {call.status}" for call in turn.calls],
            **({"cut": True} if turn.finish_reason == "length" else {}),
        }
        for segment, turn in sample.completion.ordered_turns
    ]
    episode = sample.completion.episode
    recorded = {"figures": dict(episode.figures)} if episode.figures else {}
    return {"episode": {"end": episode.end, **recorded, "turns": turns}}


def token_details(sample: ScoredSample, texts: TokenTexts, advantages: Sequence[float] | None) -> dict[str, Any]:
    """Return a record's per-token lists: characters of the text, log-probs when sampled, and advantages.

    `advantages`: one per token, or None if they are equal or unknown. Returns {} if the text does not split into
    tokens.
    """
    counts = texts.character_counts(sample.completion.token_ids.tolist(), sample.text)
    if not counts:
        return {}
    found = {"token_chars": counts, "logprobs": [round(float(value), 3) for value in sample.completion.logprobs]}
    if advantages is not None and len(set(advantages)) > 1:
        found["token_advantages"] = [round(float(value), 3) for value in advantages]
    return found


def branch_texts(sample: ScoredSample, texts: TokenTexts) -> dict[str, Any]:
    """Return a record's other streams of an episode, in order from segment 1; {} if it has none.

    A branch has the reason why it began, the text of its prompt, and of each turn what was sampled and what was read.
    """
    if sample.completion.episode is None or not sample.completion.num_segments:
        return {}
    branches = [
        {
            "reason": branch.reason,
            "prompt": texts.decode(list(branch.prompt_ids)),
            "turns": [
                [texts.decode(ids[turn.start : turn.end]), texts.decode(ids[turn.end : turn.observed_end])]
                for turn in branch.turns
            ],
        }
        for branch in sample.completion.episode.segments
        for ids in (branch.token_ids.tolist(),)
    ]
    return {"branches": branches}


class TokenTexts:
    """Texts of single tokens, each decoded once: a batch has millions of tokens and a vocabulary some hundred thousand."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def character_counts(self, token_ids: list[int], text: str) -> list[int]:
        """Return the number of characters of `text` that each token covers; their sum is its length.

        `text` is the response decoded without special tokens, which cover nothing. Of the tokens that share a
        character, the last one covers it. [] if the tokenizer decodes tokens differently in context than one at a time.
        """
        counts, place, pending = [], 0, []
        for token in token_ids:
            pending.append(token)
            piece = self._known_text(token) if len(pending) == 1 else self.decode(pending)
            if _INCOMPLETE in piece and not text.startswith(piece, place):
                counts.append(0)
                continue
            # SentencePiece drops the space before a token that is decoded by itself.
            length = next((n for n in (len(piece), len(piece) + 1) if text[place : place + n].endswith(piece)), -1)
            if length < 0 or (length > len(piece) and text[place] != " "):
                return []
            counts.append(length)
            place, pending = place + length, []
        return counts if place == len(text) else []

    def _known_text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self.decode([token])
        return self._known[token]

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def choose(groups: Sequence[Group], limit: int) -> list[tuple[int, int]]:
    """Return at most `limit` (group, response) indices: whole groups, spread evenly over the batch."""
    if limit <= 0 or not groups:
        return []
    num_groups = min(len(groups), max(1, limit // max(len(groups[0].samples), 1)))
    picked = [position * len(groups) // num_groups for position in range(num_groups)]
    return [(group, index) for group in picked for index in range(len(groups[group].samples))][:limit]


class SampleWriter:
    """Appends records in a thread, so that training never waits for the disk.

    A full queue or a failed write loses records and counts them; no error is raised.
    """

    def __init__(self, path: Path, first_step: int, files: Files, queue_size: int = 4096) -> None:
        self.num_lost = 0
        self._path, self._files = path, files
        self._queue: queue.Queue[Mapping[str, Any] | threading.Event | None] = queue.Queue(queue_size)
        files.run(drop_steps_from, path, first_step)
        self._thread = threading.Thread(target=self._run, name="sample writer", daemon=True)
        self._thread.start()

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Queue records for writing and return at once."""
        for record in records:
            try:
                self._queue.put_nowait(record)
            except queue.Full:
                self._lose("the disk is slower than the samples come")

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait at most `seconds` until everything queued so far is in the file; return True if it is."""
        written = threading.Event()
        try:
            self._queue.put(written, timeout=seconds)
        except queue.Full:
            return False
        return written.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Write the queued records, for at most `seconds`, and end the thread."""
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            self._lose("the disk does not take them")
        self._thread.join(timeout=seconds)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            # An event in the queue marks a flush: all records before it have been written.
            if isinstance(record, threading.Event):
                record.set()
                continue
            try:
                self._files.append(self._path, json_lines([record]))
            except Exception as error:  # a lost sample must not end a training run
                self._lose(repr(error))

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            logger.warning("a sample was not written (further losses are only counted): %s", why)
