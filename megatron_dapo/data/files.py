"""Reads rows of data files and of data sets saved by the `datasets` library. Parquet, JSON lines and Arrow are
streamed, so no such file is in memory as a whole.

The columns of DAPO-Math-17k, which `RowFormat` replaces by others:

data_source                   where the problem comes from                  optional
prompt                        chat messages [{"role", "content"}], the same
                              as JSON text, or a plain text                 required
reward_model.ground_truth     gold answer                                   required

Every other column goes to reward functions; the fields of `extra_info` go by their own names.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_dapo.data import saved_dataset
from megatron_dapo.data.made_problems import ENTRY, MadeProblems
from megatron_dapo.untrusted import blamed_on

BATCH_ROWS = 8192
_SMALL_FILE_BYTES = 1 << 23  # read as a whole in a fraction of a second
_EXAMPLE = '{"prompt": "1 + 1 = ?", "answer": "2"}'
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
_AS_UTF_8 = "save the file as UTF-8, e.g. by `iconv -f {} -t UTF-8`"
_TAIL_BYTES = 1 << 16  # tail of a file that is read in places
# Tables made by pandas or CSV tools often hold the chat as JSON text (or as Python's repr, which is refused). Taken as the
# content of one user turn it would train on braces. A problem that begins with "[1, 2]" or "{1, 2}" stays a plain text.
_CHAT_AS_TEXT = re.compile(r"""\s*\[?\s*\{\s*["'](?:role|content)["']\s*:""")


@dataclass(frozen=True)
class Row:
    """One checked row. `location`: file and row, for errors."""

    messages: tuple[Mapping[str, str], ...]
    answer: str
    data_source: str
    extra: Mapping[str, Any]
    location: str
    source: str = ""  # the name of its source in metrics
    turns: tuple[Mapping[str, str], ...] = ()  # turns in the file, without system prompt and template


@dataclass(frozen=True)
class Columns:
    """Columns that are read from a file; those of `required` are in it. A name with dots is a nested field, or a column."""

    required: tuple[str, ...]
    optional: tuple[str, ...] | None = ()  # None: all there are

    def among(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are read."""
        read = [*(_column_of(name, names) for name in self.required), *(self.optional or ())]
        return [name for name in names if self.optional is None or name in read]

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the required columns that are not among `names`."""
        columns = dict.fromkeys(_column_of(name, names) for name in self.required)
        return [column for column in columns if column not in names]


def _column_of(name: str, columns: Collection[str]) -> str:
    """Return the column that holds a field. CSV files and json_normalize flatten a.b into a column of that name."""
    return name if name in columns else name.partition(".")[0]


@dataclass(frozen=True)
class RowSample:
    """How many rows to read from how many places of a file."""

    places: int
    rows: int  # rows per place


@dataclass(frozen=True)
class RowFormat:
    """Where rows have what a run needs, and how prompts are made of it."""

    prompt: str = "prompt"
    answer: str = "reward_model.ground_truth"  # dots lead into nested fields; "": rows have no gold answer
    system_prompt: str = ""  # put in front of prompts that have none
    prompt_template: str = "{prompt}"  # the last turn's

    @property
    def columns(self) -> Columns:
        """Columns that have to be there, and the others: all of them are read."""
        return Columns(tuple(name for name in (self.prompt, self.answer) if name), optional=None)


DAPO_FORMAT = RowFormat()
DAPO_COLUMNS = DAPO_FORMAT.columns


def read_rows(path: Path, row_format: RowFormat = DAPO_FORMAT) -> Iterator[Row]:
    """Yield every row of a file, in order. ValueError with the file, the row and what was expected."""
    with blamed_on(path):
        for location, values in read_table(path, row_format.columns):
            yield _checked_row(values, location, row_format)


def sampled_rows(path: Path, row_format: RowFormat = DAPO_FORMAT, places: int = 16, rows: int = 64) -> Iterator[Row]:
    """Yield checked rows from `places` >= 2 of a file, `rows` from each; for a small file, all rows.

    The places are the beginning, the end, and others drawn with a fixed seed, so the same file gives the same rows. A
    file of two million rows takes no longer than a small one. Raises ValueError like `read_rows`.
    """
    with blamed_on(path):
        for location, values in read_table(path, row_format.columns, RowSample(places, rows)):
            yield _checked_row(values, location, row_format)


def prompt_id_of(
    messages: Sequence[Mapping[str, str]], answer: str, extra: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return 16 hex digits of a SHA-256; equal (messages, answer, extra) have equal ids on every machine."""
    # A message's keys may be in any order in the file, so take role and content by name.
    parts = [[[m["role"], m["content"]] for m in messages], answer, *([dict(extra)] if extra else [])]
    canonical = json.dumps(parts, ensure_ascii=True, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def question_of(messages: Sequence[Mapping[str, str]]) -> str:
    """Return what a prompt asks, without its system prompt, and however its white space is."""
    return "\n".join(" ".join(m["content"].split()) for m in messages if m["role"] != "system")


def made_rows(problems: MadeProblems, row_format: RowFormat, count: int | None = None) -> Iterator[Row]:
    """Yield the first `count` problems from reasoning-gym, by default all, in their system prompt and template."""
    for number, made in enumerate(problems.rows(count)):
        messages = _formatted(({"role": "user", "content": made["question"]},), row_format)
        location, task = f"{problems}, problem {number}", problems.task
        yield Row(messages, made["answer"], task, {ENTRY: made[ENTRY]}, location)


def read_table(
    path: Path, columns: Columns, sample: RowSample | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location and values of every row of a file, in order, or of a sample. ValueError if there is no row or a
    column is missing."""
    is_empty = True
    with blamed_on(path):
        for location, values in _READERS[_kind(path)](path, columns, sample):
            is_empty = False
            yield location, values
    if is_empty:
        raise ValueError(f"{path} has no rows; write some, such as {_EXAMPLE}, or name another file")


def column_names(path: Path) -> tuple[str, ...]:
    """Return the names of a file's columns; for JSON lines, those of the first line."""
    with blamed_on(path):
        if _kind(path) == ".parquet":
            import pyarrow.parquet

            return tuple(pyarrow.parquet.read_schema(path).names)
        if _kind(path) == SAVED:
            return saved_dataset.column_names(path)
        return next((tuple(values) for _, values in _READERS[_kind(path)](path, Columns(()), None)), ())


def count_rows(path: Path) -> int:
    """Return a file's number of rows, if possible without parsing them."""
    with blamed_on(path):
        kind = _kind(path)
        if kind == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
        if kind == SAVED:
            return saved_dataset.count_rows(path)
        if kind in (".json", ".csv"):
            return sum(1 for _ in _READERS[kind](path, Columns(()), None))
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)


def _kind(path: Path) -> str:
    """Return the file's kind, a key of `_READERS`. ValueError if there is no such file or kind."""
    if path.is_dir():
        return SAVED
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist")
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise ValueError(
            f"{path}: unknown kind of data file {path.suffix!r}, choose one of {', '.join(sorted(_READERS.keys() - {SAVED}))}"
        )
    return kind


def file_sha256(path: Path) -> str:
    """Hash a file, or the files of a saved data set in their order, without reading it as a whole."""
    digest = hashlib.sha256()
    for part in saved_dataset.data_files(path) if path.is_dir() else (path,):
        with part.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


# ---- formats: (location, {column: value}) of every row


def _read_parquet(path: Path, columns: Columns, sample: RowSample | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names, metadata = file.schema_arrow.names, file.metadata
            _check_columns(names, columns, str(path))
            present = columns.among(names)
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            starts = list(accumulate(sizes, initial=0))
            if sample and metadata.num_rows <= sample.places * sample.rows:
                sample = None
            for group in _places(len(sizes), sample.places) if sample else range(len(sizes)):
                index = starts[group]
                size = sample.rows if sample else BATCH_ROWS
                for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=present):
                    for values in batch.to_pylist():
                        yield f"{path}, row {index}", values
                        index += 1
                    if sample:
                        break
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet (truncated or damaged?): {error}") from error


def _read_json_lines(path: Path, columns: Columns, sample: RowSample | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for location, line in _lines(path) if sample is None else _sampled_lines(path, sample):
        if line.strip():
            values = _parse_line(line, location)
            _check_columns(list(values), columns, location)
            yield location, values


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield f"{path}, line {number}", line


def _sampled_lines(path: Path, sample: RowSample) -> Iterator[tuple[str, bytes]]:
    size = path.stat().st_size
    if size <= _SMALL_FILE_BYTES:
        yield from _lines(path)
        return
    with path.open("rb") as file:
        for place in _places(size, sample.places):
            # The last place is the end of the file: a truncated copy is damaged there.
            file.seek(min(place, size - _TAIL_BYTES))
            if place:
                file.readline()  # the rest of a line
            for _ in range(sample.rows):
                yield f"{path}, line at byte {file.tell()}", file.readline()


def _parse_line(line: bytes, location: str) -> Mapping[str, Any]:
    if line.startswith(_UTF_16):
        raise ValueError(f"{location} is not valid JSON: it is UTF-16; {_AS_UTF_8.format('UTF-16')}")
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{location} is not valid JSON: {error}; {_AS_UTF_8.format('LATIN1')}") from error
    except (ValueError, RecursionError) as error:  # bad JSON, or brackets without end
        is_list = line.lstrip()[:1] == b"["
        form = "a file with one list of objects ends in .json" if is_list else f"a line is one object, such as {_EXAMPLE}"
        raise ValueError(f"{location} is not valid JSON: {error}; {form}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{location}: expected a JSON object with columns, got {type(values).__name__}")
    return values


def _read_json(path: Path, columns: Columns, _: RowSample | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; a file with an object a line ends in .jsonl") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of objects, got {type(rows).__name__}")
    for number, values in enumerate(rows):
        if not isinstance(values, dict):
            raise ValueError(f"{path}, row {number}: expected an object with columns, got {type(values).__name__}")
        _check_columns(list(values), columns, f"{path}, row {number}")
        yield f"{path}, row {number}", values


def _read_csv(path: Path, columns: Columns, _: RowSample | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(2**24)  # A problem can be long.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _check_separator(reader.fieldnames or (), str(path))
            _check_columns(reader.fieldnames or (), columns, str(path))
            for values in reader:
                location = f"{path}, line {reader.line_num}"
                if None in values or None in values.values():
                    count = len(reader.fieldnames or ())
                    raise ValueError(
                        f"{location}: not the {count} cells of the first line; quote cells that hold commas"
                    )
                yield location, values
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            encoding = "UTF-16" if error.object.startswith(_UTF_16) else "LATIN1"
            # Text is decoded in blocks of several lines.
            place = next(place for place, line in _lines(path) if not _is_utf_8(line))
            raise ValueError(f"{place}: {error}; {_AS_UTF_8.format(encoding)}") from error


def _is_utf_8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _places(size: int, count: int) -> list[int]:
    """Return at most `count` places in `size`, ascending: the beginning, the end, and random ones in between."""
    draw = random.Random(size)  # the same file gives the same places
    between = draw.sample(range(1, size - 1), min(count - 2, size - 2)) if size > 2 else []
    return sorted({0, *between, size - 1})


def _read_saved(path: Path, columns: Columns, sample: RowSample | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    names = saved_dataset.column_names(path)
    _check_columns(names, columns, str(path))
    ranges, count = None, saved_dataset.count_rows(path) if sample else 0
    if sample and count > sample.places * sample.rows:
        ranges = [range(start, start + sample.rows) for start in _places(count, sample.places)]
    yield from saved_dataset.read_rows(path, columns.among(names), ranges)


SAVED = "saved data set"  # the kind of a directory
_READERS = {
    SAVED: _read_saved,
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
}

# ---- checks

_IMAGE_COLUMNS = ("images", "image")

def _check_separator(found: Sequence[str], location: str) -> None:
    """Raise ValueError if the first line of a CSV file is one cell with separators of another kind."""
    for separator, name in ((";", "';'"), ("\t", "a tab")):
        if len(found) == 1 and separator in found[0]:
            raise ValueError(f"{location}: the separator seems to be {name}, {found[0]!r}; save the file with commas")


def _check_columns(found: Sequence[str], columns: Columns, location: str) -> None:
    if missing := columns.missing(found):
        raise ValueError(
            f"{location}: missing column(s) {', '.join(missing)}. Required: {', '.join(columns.required)} "
            f"(optional: {', '.join(columns.optional or ()) or 'any other'}); found: {', '.join(found)}. Columns of other "
            "names are named in data.columns"
        )


def _checked_row(values: Mapping[str, Any], location: str, row_format: RowFormat) -> Row:
    # Text subsets of published files have the column, with nothing in it.
    if pictures := [name for name in _IMAGE_COLUMNS if not _is_empty(values.get(name))]:
        raise ValueError(f"{location}: the column {pictures[0]} is for images, and only text is trained; remove it")
    answer = checked_answer(_field(values, row_format.answer, location), location) if row_format.answer else ""
    messages = checked_messages(_field(values, row_format.prompt, location), location)
    own = {*(_column_of(name, values) for name in (row_format.prompt, row_format.answer)), "data_source", "extra_info"}
    extra_info = values.get("extra_info")
    extra = {name: value for name, value in values.items() if name not in own and name not in _IMAGE_COLUMNS}
    extra |= extra_info if isinstance(extra_info, dict) else {"extra_info": extra_info}
    return Row(
        _formatted(messages, row_format),
        answer,
        str(values.get("data_source") or ""),
        {str(name): _plain(value) for name, value in extra.items() if value is not None},
        location,
        turns=messages,
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple)) and not value)


def _field(values: Mapping[str, Any], name: str, location: str) -> Any:
    """Return a column or, for a dotted name, a column's nested field; a column may hold it as JSON text."""
    if name in values:
        return values[name]
    value: Any = values
    path = name.split(".")
    for depth, part in enumerate(path):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = _parse_line(value.encode(), f"{location}: {'.'.join(path[:depth])}")
        if not isinstance(value, dict) or part not in value:
            found = sorted(value) if isinstance(value, dict) else repr(value)[:200]
            raise ValueError(f"{location}: {'.'.join(path[:depth])} has no field {part} (found {found})")
        value = value[part]
    return value


def _formatted(messages: tuple[Mapping[str, str], ...], row_format: RowFormat) -> tuple[Mapping[str, str], ...]:
    """Add the system prompt, and put the last turn into its template."""
    if row_format.prompt_template != "{prompt}":
        content = row_format.prompt_template.replace("{prompt}", messages[-1]["content"])
        messages = *messages[:-1], {**messages[-1], "content": content}
    if row_format.system_prompt and messages[0]["role"] != "system":
        messages = {"role": "system", "content": row_format.system_prompt}, *messages
    return messages


def _plain(value: Any) -> Any:
    """Convert a value to JSON; dates, bytes and the like become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def checked_messages(prompt: Any, location: str) -> tuple[Mapping[str, str], ...]:
    """Return a prompt as chat messages. ValueError if it is neither text nor a list of messages."""
    if isinstance(prompt, str) and _CHAT_AS_TEXT.match(prompt):
        prompt = _parse_chat(prompt, location)
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        for message in prompt:
            _check_unicode(message["content"], "prompt", location)
        return tuple({"role": message["role"], "content": message["content"]} for message in prompt)
    if isinstance(prompt, list) and any(map(_has_parts, prompt)):
        raise ValueError(
            f"{location}: prompt has a content of parts, as prompts with images have; only text is trained: write each "
            f"content as one text, got {repr(prompt)[:200]}"
        )
    raise ValueError(
        f"{location}: prompt must be a list of chat messages {{'role': text, 'content': text}} or a text, got "
        f"{repr(prompt)[:200]}"
    )


def _parse_chat(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{location}: prompt holds chat messages as text that is not valid JSON ({error}): write the column as a list "
            f"of messages or by json.dumps, got {text[:200]!r}"
        ) from error


def _has_parts(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), list)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def checked_answer(answer: Any, location: str) -> str:
    """Return a gold answer as text. ValueError if it is neither text nor an integer."""
    # bool is a subclass of int; a float would be a guess at how the answer was written.
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, str) and answer.strip():
        _check_unicode(answer, "gold answer", location)
        return answer
    if isinstance(answer, float):
        fix = f'write it as a text, e.g. "{answer:g}"'
    elif answer is None or isinstance(answer, str):
        fix = 'remove the row, or set data.columns.answer = "" if the reward needs no gold answers'
    else:
        fix = "write one text"
    raise ValueError(f"{location}: unparsable gold answer: it must be a text or a whole number, got {answer!r}; {fix}")


def _check_unicode(text: str, name: str, location: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON can hold, and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{location}: {name} has half of a surrogate pair, {text[error.start]!r} at character {error.start}: write the whole "
            "character, or remove it"
        ) from error
