"""Completions in a terminal: a small table of responses to one prompt with their rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from megatron_dapo.types import Completion, Segment
from megatron_dapo.untrusted import one_line

Record = Mapping[str, Any]  # a response, see `samples.sample_record`

NUM_SHOWN = 64  # held-out problems whose first response an evaluation keeps: the same ones at each
_MAX_TASK = 300  # characters of a prompt
_MAX_RESPONSE = 240
_MAX_BEGIN = 600  # characters of an episode's first messages
_STYLES = {"correct": "green", "wrong": "red", "unparsable": "red"}


def completions_table(
    records: Sequence[Record], labels: Sequence[str] = (), title: str = "", task: str | None = None
) -> Table:
    """Return a table of responses to one prompt: reward with its parts, outcome, and begin and end of the text.

    `labels`: one for each response, such as "best" and "worst". `task`: the text of the prompt to show, see
    `distinct_tasks`; None: all of its last turn.
    """
    first = records[0]
    shown = task_of(first) if task is None else task
    head = f"{title}: " if title else ""
    expected = f" [expected: {one_line(first['answer'], 60)}]" if first["answer"] else ""
    caption = Text(f"{head}{excerpt(shown, _MAX_TASK)}{expected}", style="bold")
    table = Table(title=caption, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    if labels:
        table.add_column("")
    for name in ("reward", "outcome", "response"):
        table.add_column(name, justify="right" if name == "reward" else "left", overflow="fold")
    for place, record in enumerate(records):
        outcome = outcome_of(record)
        label = labels[place : place + 1]
        style = _STYLES.get(outcome, "yellow")
        table.add_row(*label, reward_of(record), Text(outcome, style), Text(excerpt(record["response"])))
    return table


def conversation_table(completion: Completion, decode: Callable[[Any], str], title: str = "") -> Table:
    """Return an episode's tokens as text, stream by stream and turn by turn: what the policy sampled and what it read."""
    table = Table(
        title=Text(title, style="bold"), title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("text", overflow="fold")
    for stream in map(completion.stream, range(1 + completion.num_segments)):
        if isinstance(stream, Segment):
            table.add_row("", "", Text(excerpt(stream.reason), "italic"))
        if stream.prompt_ids is not None:
            begin = excerpt(decode(stream.prompt_ids), _MAX_BEGIN)
            table.add_row("read", str(len(stream.prompt_ids)), Text(begin, "dim"))
        for run in stream.runs:
            text = excerpt(decode(stream.token_ids[run.start : run.end]), _MAX_RESPONSE)
            who, style = ("sampled", "") if run.is_sampled else ("read", "dim")
            table.add_row(who, str(run.end - run.start), Text(text, style))
    return table


def best_and_worst(records: Sequence[Record]) -> list[Record]:
    """Return the response with the highest and the one with the lowest reward, the first of equals."""
    return [max(records, key=lambda each: each["reward"]), min(records, key=lambda each: each["reward"])]


def responses_file(evaluations: Path, train_step: int) -> Path:
    """Return the file with the responses that the evaluation after `train_step` keeps, as records."""
    return evaluations / f"step_{train_step:06d}.jsonl"


def before_and_after(evaluations: Path) -> list[tuple[Record, Record]]:
    """Return the responses to each problem at the first and the last evaluation, those first whose reward rose most.

    Empty with fewer than two evaluations. A file that is damaged counts as missing.
    """
    files = sorted(evaluations.glob("step_*.jsonl"))
    if len(files) < 2:
        return []
    try:
        first, last = (
            {record["prompt_id"]: record for record in map(json.loads, text.splitlines())}
            for text in (files[place].read_text(encoding="utf-8") for place in (0, -1))
        )
    except (OSError, ValueError, LookupError, TypeError):
        return []
    pairs = [(first[name], record) for name, record in last.items() if name in first]
    return sorted(pairs, key=lambda pair: pair[0]["reward"] - pair[1]["reward"])


def before_and_after_table(evaluations: Path) -> Table | None:
    """Return the problem whose reward rose most as a table; None if there are no two evaluations to compare."""
    pairs = before_and_after(evaluations)
    if not pairs:
        return None
    task = distinct_tasks([task_of(after) for _, after in pairs])[0]
    steps = [f"step {record['train_step']}" for record in pairs[0]]
    return completions_table(pairs[0], steps, "before and after", task)


def task_of(record: Record) -> str:
    """Return the text of the prompt's last turn."""
    return str(record["prompt"][-1]["content"]) if record["prompt"] else ""


def distinct_tasks(prompts: Sequence[str]) -> list[str]:
    """Return each prompt without the lines at its begin and its end that all prompts share: the instructions around a task."""
    rows = [prompt.splitlines() for prompt in prompts]
    shortest = min(map(len, rows), default=0)
    start = next((place for place in range(shortest) if len({row[place] for row in rows}) > 1), shortest)
    if start == shortest:  # one of them would be empty
        return list(prompts)
    end = next(
        place for place in range(1, shortest + 1) if place == shortest - start or len({row[-place] for row in rows}) > 1
    )
    return ["\n".join(row[start : len(row) - end + 1]).strip() for row in rows]


def excerpt(text: str, limit: int = _MAX_RESPONSE) -> str:
    """Return a text in one line of about `limit` characters. Of a long one, the end is longer than the begin: it has the
    answer."""
    line = one_line(text, 6 * len(text))  # an escaped character has six
    if len(line) <= limit:
        return line
    head, tail = line[: limit // 3], line[limit // 3 - limit :]
    # Whole words, unless there are none.
    head = head.rpartition(" ")[0] or head
    return f"{head} ... {tail.partition(' ')[2] or tail}"


def outcome_of(record: Record) -> str:
    """Return the verifier's outcome in words; of a response that was cut off, at which length."""
    if record.get("error"):
        return one_line(f"{record['outcome']}: {record['error']}", 120)
    if record["finish_reason"] == "length":
        return f"cut at {len(record['response_ids']):,} tokens"
    return str(record["outcome"])


def reward_of(record: Record) -> str:
    """Return a reward, and a line for each of its parts if several are not 0."""
    parts = {name: value for name, value in record["reward_parts"].items() if value}
    lines = [f"{name} {value:+.2f}" for name, value in parts.items()] if len(parts) > 1 else []
    return "\n".join([f"{record['reward']:.2f}", *lines])
