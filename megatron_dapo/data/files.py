"""Rows of parquet and JSON-lines files in the DAPO-Math-17k schema, streamed: no file is in memory as a whole.

data_source                   where the problem is from                     optional
prompt                        chat messages [{"role", "content"}], the same
                              as JSON text, or a plain text                 required
ability                       subject                                       optional
reward_model.ground_truth     gold answer                                   required
extra_info.index              the row's own number                          optional
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_dapo.untrusted import blamed_on

BATCH_ROWS = 8192
_SMALL_FILE_BYTES = 1 << 23  # read as a whole in a fraction of a second
_TAIL_BYTES = 1 << 16  # of a file that is read in places
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


@dataclass(frozen=True)
class Columns:
    """Columns that are read from a file; those of `required` are in it."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


DAPO_COLUMNS = Columns(("prompt", "reward_model"), ("data_source", "ability", "extra_info"))


def read_rows(path: Path) -> Iterator[Row]:
    """Yield every row of a file, in order. ValueError with the file, the row and what was expected."""
    with blamed_on(path):
        for location, values in read_table(path, DAPO_COLUMNS):
            yield _checked_row(values, location)


def sampled_rows(path: Path, places: int = 8, rows: int = 128) -> Iterator[Row]:
    """Yield checked rows from `places` >= 2 spread evenly over a file, `rows` from each; the whole of a small file.

    A file of two million rows takes no longer than a small one. Raises ValueError like `read_rows`.
    """
    with blamed_on(path):
        spread = _SPREADERS[_kind(path)]
        is_empty = True
        for location, values in spread(path, DAPO_COLUMNS, places, rows):
            is_empty = False
            yield _checked_row(values, location)
    if is_empty:
        raise ValueError(f"{path} has no rows")


def read_table(path: Path, columns: Columns) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and the values of every row of a file, in order. ValueError where it has none, or lacks a column."""
    is_empty = True
    with blamed_on(path):
        for location, values in _READERS[_kind(path)](path, columns):
            is_empty = False
            yield location, values
    if is_empty:
        raise ValueError(f"{path} has no rows")


def column_names(path: Path) -> tuple[str, ...]:
    """Return the names of a file's columns; of JSON lines those of the first."""
    with blamed_on(path):
        if _kind(path) == ".parquet":
            import pyarrow.parquet

            return tuple(pyarrow.parquet.read_schema(path).names)
        return next((tuple(values) for _, values in _read_json_lines(path, Columns(()))), ())


def count_rows(path: Path) -> int:
    """Return the number of a file's rows, which are not read."""
    with blamed_on(path):
        if _kind(path) == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)


def _kind(path: Path) -> str:
    """Return the file's kind, a key of `_READERS`. ValueError where there is no such file or kind."""
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist")
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise ValueError(
            f"{path}: unknown kind of data file {path.suffix!r}, choose one of {', '.join(sorted(_READERS))}"
        )
    return kind


def file_sha256(path: Path) -> str:
    """Hash a file without reading it as a whole."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


# ---- formats: (location, {column: value}) of every row


def _read_parquet(path: Path, columns: Columns) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_columns(names, columns, str(path))
            present = [name for name in columns.required + columns.optional if name in names]
            index = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=present):
                for values in batch.to_pylist():
                    yield f"{path}, row {index}", values
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet (truncated or damaged?): {error}") from error


def _read_json_lines(path: Path, columns: Columns) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            values = _parse_line(line, location)
            _check_columns(list(values), columns, location)
            yield location, values


def _parse_line(line: bytes, location: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or brackets without end
        raise ValueError(f"{location} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{location}: expected a JSON object with columns, got {type(values).__name__}")
    return values


def _spread_parquet(path: Path, columns: Columns, places: int, rows: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    if count_rows(path) <= places * rows:
        yield from _read_parquet(path, columns)
        return
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_columns(names, columns, str(path))
            present = [name for name in columns.required + columns.optional if name in names]
            starts = list(
                accumulate((file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)), initial=0)
            )
            last = file.num_row_groups - 1
            for group in sorted({place * last // (places - 1) for place in range(places)}):
                batch = next(file.iter_batches(batch_size=rows, row_groups=[group], columns=present), None)
                for index, values in enumerate(batch.to_pylist() if batch else (), start=starts[group]):
                    yield f"{path}, row {index}", values
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet (truncated or damaged?): {error}") from error


def _spread_json_lines(path: Path, columns: Columns, places: int, rows: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    size = path.stat().st_size
    if size <= _SMALL_FILE_BYTES:
        yield from _read_json_lines(path, columns)
        return
    with path.open("rb") as file:
        for place in range(places):
            # The last place is the end, where a copy that was cut short is damaged.
            file.seek(min(place * size // (places - 1), size - _TAIL_BYTES))
            if place:
                file.readline()  # the rest of a line
            for _ in range(rows):
                start, line = file.tell(), file.readline()
                if line.strip():
                    location = f"{path}, line at byte {start}"
                    values = _parse_line(line, location)
                    _check_columns(list(values), columns, location)
                    yield location, values


_READERS = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
_SPREADERS = {".parquet": _spread_parquet, ".jsonl": _spread_json_lines, ".ndjson": _spread_json_lines}


# ---- checks


_IMAGE_COLUMNS = ("images", "image")


def _check_columns(found: Sequence[str], columns: Columns, location: str) -> None:
    pictures = [name for name in _IMAGE_COLUMNS if name in found]
    if pictures:
        raise ValueError(f"{location}: the column {pictures[0]} is for images, and only text is trained; remove it")
    missing = [name for name in columns.required if name not in found]
    if missing:
        raise ValueError(
            f"{location}: missing column(s) {', '.join(missing)}. Required: {', '.join(columns.required)} "
            f"(optional: {', '.join(columns.optional) or 'none'}); found: {', '.join(found)}"
        )


def _checked_row(values: Mapping[str, Any], location: str) -> Row:
    reward_model = values["reward_model"]
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        found = sorted(reward_model) if isinstance(reward_model, dict) else repr(reward_model)
        raise ValueError(f"{location}: reward_model has no field ground_truth (found {found})")
    extra_info = values.get("extra_info")
    extra = {
        "ability": values.get("ability"),
        "index": extra_info.get("index") if isinstance(extra_info, dict) else None,
    }
    return Row(
        checked_messages(values["prompt"], location),
        checked_answer(reward_model["ground_truth"], location),
        str(values.get("data_source") or ""),
        {key: value for key, value in extra.items() if value is not None},
        location,
    )


def checked_messages(prompt: Any, location: str) -> tuple[Mapping[str, str], ...]:
    """Return a prompt as chat messages. ValueError where it is neither a text nor a list of them."""
    if isinstance(prompt, str) and _CHAT_AS_TEXT.match(prompt):
        prompt = _parse_chat(prompt, location)
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
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
    """Return a gold answer as text. ValueError where it is neither a text nor an integer."""
    # bool is a subclass of int; a float would be a guess at how the answer was written.
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, str) and answer.strip():
        return answer
    raise ValueError(f"{location}: unparsable gold answer: it must be a text, got {answer!r}")
