"""Prepares published data sets for training: one row per problem, in one schema, with counts checked as published.

    published file(s), by path or from the Hub -> rows -> equal ones once -> checks -> parquet + a data card

Each entry of `PUBLISHED` says where its counts come from. A file with other counts is rejected as different or cut.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.data.dataset import CollectedRows, collect_rows, find_conflicts
from megatron_dapo.data.files import (
    DAPO_COLUMNS,
    Columns,
    Row,
    checked_answer,
    column_names,
    file_sha256,
    prompt_id_of,
    read_rows,
    read_table,
)

# The prompt of DAPO-Math-17k and of its AIME file.
PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_BEFORE, _AFTER = PROMPT.split("{problem}")
# Names that published tables give to the columns of a bare problem and its answer.
_PROBLEM_COLUMNS = ("problem", "Problem", "question", "Question")
_ANSWER_COLUMNS = ("answer", "Answer")
_INTEGER = re.compile(r"[+-]?\d+")
# AIME tables have answers such as 070, 336^\circ and $12$; the answer itself is an integer from 0 to 999.
_AIME_DRESS = re.compile(r"\\circ|[\s$^{}°]|\.0+$")

Answers = Literal["aime", "integer", "text"]
CARD_FORMAT = "megatron_dapo data card 1"
MAX_LISTED = 10


@dataclass(frozen=True)
class PublishedDataset:
    """A published data set: its place on the Hub, and its published counts."""

    repository: str
    files: tuple[str, ...]
    num_rows: int
    num_prompts: int  # different prompts
    num_problems: int  # different (prompt, answer)
    answers: Answers  # aime: 0 to 999; integer: any; text: verbatim
    is_benchmark: bool  # evaluation data: no problem may be left out
    counts_from: str


PUBLISHED: Mapping[str, PublishedDataset] = {
    "dapo-math-17k": PublishedDataset(
        repository="BytedTsinghua-SIA/DAPO-Math-17k",
        files=("data/dapo-math-17k.parquet",),
        num_rows=1_791_700,
        num_prompts=17_398,
        num_problems=17_405,
        answers="integer",
        is_benchmark=False,
        counts_from="rows: its Hub page; prompts: the card of open-r1/DAPO-Math-17k-Processed; problems: its Hub discussion 3",
    ),
    "aime2024": PublishedDataset(
        repository="BytedTsinghua-SIA/AIME-2024",
        files=("data/aime-2024.parquet",),
        num_rows=960,
        num_prompts=30,
        num_problems=30,
        answers="aime",
        is_benchmark=True,
        counts_from="its Hub page: the 30 problems of AIME I and II, 32 times each",
    ),
    "aime2025": PublishedDataset(
        repository="math-ai/aime25",
        files=("test.jsonl",),
        num_rows=30,
        num_prompts=30,
        num_problems=30,
        answers="aime",
        is_benchmark=True,
        counts_from="its Hub page: the 30 problems of AIME I and II",
    ),
    "math500": PublishedDataset(
        repository="HuggingFaceH4/MATH-500",
        files=("test.jsonl",),
        num_rows=500,
        num_prompts=500,
        num_problems=500,
        answers="text",  # LaTeX: for the lenient verifier
        is_benchmark=True,
        counts_from="its Hub page",
    ),
}


@dataclass(frozen=True)
class DataCard:
    """Counts of a preparation and the origin of its rows. Written next to the data."""

    dataset: str
    repository: str
    files: tuple[tuple[str, str], ...]  # (path, sha256)
    num_rows: int
    num_prompts: int  # different prompts
    num_problems: int  # different (prompt, answer)
    copies_min: int  # rows of one problem
    copies_max: int
    num_conflicting: int  # prompts with several answers: left out
    num_overlapping: int  # problems that are also in a file of `against`: left out
    num_written: int
    num_wrapped: int  # bare problems that got the prompt's text
    num_not_integer: int  # written non-integer answers, if integers are published
    published: Mapping[str, Any]
    differences: tuple[str, ...]  # mismatches with the published counts
    against: tuple[str, ...]
    conflicts: tuple[str, ...]  # the first of them, for a reader
    output_sha256: str = ""

    def summary(self) -> str:
        """Return the counts in one line."""
        copies = (
            f"{self.copies_min}" if self.copies_min == self.copies_max else f"{self.copies_min} to {self.copies_max}"
        )
        left_out = (
            f", {self.num_conflicting} prompts with several answers left out" if self.num_conflicting else ""
        ) + (f", {self.num_overlapping} problems of the benchmarks left out" if self.num_overlapping else "")
        return (
            f"{self.num_rows:,} rows -> {self.num_problems:,} problems ({copies} rows each), "
            f"{self.num_prompts:,} prompts{left_out} -> {self.num_written:,} rows written"
        )


def prepare(
    name: str,
    paths: Sequence[Path],
    output: Path,
    *,
    against: Sequence[Path] = (),
    keep_conflicts: bool = False,
    allow_other_counts: bool = False,
) -> DataCard:
    """Write the problems of published files to `output` (.parquet or .jsonl) with a data card, and return the card.

    `against`: prepared benchmarks whose problems are left out of a training set. ValueError, in one line, if the files
    do not have the published counts, an answer is invalid, or a benchmark would lose a problem.
    """
    published = find_published(name)
    if output.suffix not in _WRITERS:
        raise ValueError(f"{output}: unknown kind of data file {output.suffix!r}, choose one of {', '.join(_WRITERS)}")
    if published.is_benchmark and against:
        raise ValueError(f"{name} is a benchmark, no problem of it is left out: prepare it without --against")
    collected = collect_rows(_with_prompt(row, published) for path in paths for row in _read(path))
    num_prompts = len({prompt_id_of(row.messages, "") for _, row in collected.rows})
    differences = _differences(published, collected, num_prompts)
    if differences and not allow_other_counts:
        raise ValueError(
            f"{name}, {', '.join(map(str, paths))}: {'; '.join(differences)}: this is another file, or a part of it; "
            "--allow-other-counts prepares it as it is"
        )
    rows, conflicting, examples = _without_conflicts(name, published, collected, keep_conflicts)
    rows, num_overlapping = _without_benchmarks(rows, against)
    if not rows:
        raise ValueError(f"{name}: no problem is left of {len(collected.rows)}: {num_overlapping} are in --against")
    _write(output, [_record(name, row) for row in rows])
    card = DataCard(
        dataset=name,
        repository=published.repository,
        files=tuple((str(path), file_sha256(path)) for path in paths),
        num_rows=collected.num_rows,
        num_prompts=num_prompts,
        num_problems=len(collected.rows),
        copies_min=min(collected.multiplicity.values()),
        copies_max=max(collected.multiplicity.values()),
        num_conflicting=conflicting,
        num_overlapping=num_overlapping,
        num_written=len(rows),
        num_wrapped=sum(bool(row.extra.get("wrapped")) for row in rows),
        num_not_integer=sum(not _INTEGER.fullmatch(row.answer) for row in rows) if published.answers != "text" else 0,
        published=asdict(published),
        differences=tuple(differences),
        against=tuple(map(str, against)),
        conflicts=examples,
        output_sha256=file_sha256(output),
    )
    document = json.dumps({"format": CARD_FORMAT, **asdict(card)}, indent=1, ensure_ascii=False) + "\n"
    card_path(output).write_text(document, encoding="utf-8")
    return card


def find_published(name: str) -> PublishedDataset:
    """Return the entry of a data set. If there is none, ValueError lists all entries."""
    if name not in PUBLISHED:
        raise ValueError(f"data set {name!r}: choose one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def card_path(output: Path) -> Path:
    """Return the path of the data card that belongs to a prepared file."""
    return output.with_name(output.stem + ".card.json")


def download(name: str, revision: str = "main") -> list[Path]:
    """Return the published files, from the Hub or its cache. ValueError, in one line, if they are not available."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    published = find_published(name)
    try:
        return [
            Path(hf_hub_download(published.repository, file, repo_type="dataset", revision=revision))
            for file in published.files
        ]
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name}: {published.repository} ({', '.join(published.files)}) cannot be taken from the Hub: {reason}; fetch it "
            f"on another machine and name it: megatron-dapo data prepare {name} FILE"
        ) from error


# ---- rows


def _read(path: Path) -> Iterator[Row]:
    """Yield rows in the schema of DAPO-Math-17k, or bare problems with their answers."""
    names = column_names(path)
    if not DAPO_COLUMNS.missing(names):
        yield from read_rows(path)
        return
    problem = next((name for name in _PROBLEM_COLUMNS if name in names), None)
    answer = next((name for name in _ANSWER_COLUMNS if name in names), None)
    if problem is None or answer is None:
        raise ValueError(
            f"{path}: neither the columns {' and '.join(DAPO_COLUMNS.required)} nor a problem "
            f"({', '.join(_PROBLEM_COLUMNS)}) with an answer ({', '.join(_ANSWER_COLUMNS)}); found: {', '.join(names)}"
        )
    for location, values in read_table(path, Columns((problem, answer))):
        if not isinstance(values[problem], str) or not values[problem].strip():
            raise ValueError(f"{location}: {problem} must be a text, got {values[problem]!r}")
        message = {"role": "user", "content": values[problem].strip()}
        yield Row((message,), checked_answer(values[answer], location), "", {}, location)


def _with_prompt(row: Row, published: PublishedDataset) -> Row:
    """Return the row with the published prompt around a bare problem, and with its answer in the plain form."""
    answer = row.answer.strip()
    if published.answers == "aime":
        answer = _aime_answer(answer, row.location)
    content = row.messages[-1]["content"]
    if len(row.messages) > 1 or (content.startswith(_BEFORE) and content.endswith(_AFTER)):
        return Row(row.messages, answer, row.data_source, row.extra, row.location)
    message = {"role": "user", "content": PROMPT.format(problem=content)}
    return Row((message,), answer, row.data_source, {**row.extra, "wrapped": True}, row.location)


def _aime_answer(text: str, location: str) -> str:
    digits = _AIME_DRESS.sub("", text)
    if not digits.isascii() or not digits.isdigit() or int(digits) > 999:
        raise ValueError(f"{location}: AIME's answers are integers from 0 to 999, got {text!r}")
    return str(int(digits))


def _differences(published: PublishedDataset, collected: CollectedRows, num_prompts: int) -> list[str]:
    differences = []
    # A file that somebody else has de-duplicated by prompt has lost the copies and any second answers.
    is_unique = collected.num_rows == num_prompts == published.num_prompts
    if collected.num_rows != published.num_rows and not is_unique:
        differences.append(f"{collected.num_rows:,} rows, published {published.num_rows:,}")
    if num_prompts != published.num_prompts:
        differences.append(f"{num_prompts:,} different prompts, published {published.num_prompts:,}")
    if len(collected.rows) != published.num_problems and not is_unique:
        differences.append(
            f"{len(collected.rows):,} different pairs of prompt and answer, published {published.num_problems:,}"
        )
    return differences


def _without_conflicts(
    name: str, published: PublishedDataset, collected: CollectedRows, keep: bool
) -> tuple[list[Row], int, tuple[str, ...]]:
    """Return the rows, the number of prompts left out because they have several answers, and the first of them as text."""
    rows = [row for _, row in collected.rows]
    conflicts = find_conflicts(collected.rows)
    listed = tuple(f"{' and '.join(one.answers)} at {', '.join(one.locations)}" for one in conflicts[:MAX_LISTED])
    if conflicts and published.is_benchmark:
        raise ValueError(f"{name}: {len(conflicts)} problems have several answers: {listed[0]}")
    if keep or not conflicts:
        return rows, 0, listed
    # At most one of the answers is right, but nothing says which.
    several = {location for one in conflicts for location in one.locations}
    dropped = {prompt_id_of(row.messages, "") for row in rows if row.location in several}
    return [row for row in rows if prompt_id_of(row.messages, "") not in dropped], len(conflicts), listed


def _without_benchmarks(rows: list[Row], against: Sequence[Path]) -> tuple[list[Row], int]:
    held_out = {_bare_text(row) for path in against for row in _read(path)}
    kept = [row for row in rows if _bare_text(row) not in held_out]
    return kept, len(rows) - len(kept)


def _bare_text(row: Row) -> str:
    """Return the problem without its prompt, spaces and case: copies differ in those."""
    content = row.messages[-1]["content"]
    return "".join(content.removeprefix(_BEFORE).removesuffix(_AFTER).split()).lower()


# ---- output


def _record(name: str, row: Row) -> dict[str, Any]:
    return {
        "data_source": row.data_source or name,
        "prompt": [dict(message) for message in row.messages],
        "ability": str(row.extra.get("ability") or "MATH"),
        "reward_model": {"ground_truth": row.answer, "style": "rule"},
        "extra_info": {"index": str(row.extra.get("index") or prompt_id_of(row.messages, row.answer))},
    }


def _write(output: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the file atomically, so that a reader never sees half of it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.tmp")
    _WRITERS[output.suffix](partial, records)
    os.replace(partial, output)


def _write_parquet(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)


def _write_json_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


_WRITERS = {".parquet": _write_parquet, ".jsonl": _write_json_lines}
