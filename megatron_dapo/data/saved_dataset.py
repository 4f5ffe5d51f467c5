"""Data sets saved by `save_to_disk` of the `datasets` library, read with only pyarrow.

DIRECTORY/state.json        names the Arrow files, in order
DIRECTORY/data-*.arrow      streams of record batches, memory-mapped here
DIRECTORY/dataset_dict.json with several splits instead: each is such a directory below this one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.untrusted import read_json


def data_files(directory: Path) -> list[Path]:
    """Return the Arrow files of a saved data set. ValueError if the directory is not one, or has splits."""
    if (directory / "dataset_dict.json").is_file():
        splits = read_json(directory / "dataset_dict.json")
        names = splits.get("splits", []) if isinstance(splits, dict) else []
        raise ValueError(
            f"{directory} has the splits {', '.join(map(str, names))}: name one, e.g. {directory / 'train'}"
        )
    state = directory / "state.json"
    if not state.is_file():
        raise ValueError(
            f"{directory} is a directory without state.json, so no data set saved by save_to_disk: name a file"
        )
    document = read_json(state)
    entries: Any = document.get("_data_files") if isinstance(document, dict) else None
    try:
        names = [str(entry["filename"]) for entry in entries]
    except (TypeError, KeyError):
        raise ValueError(f"{state} names no data files: save the data set again") from None
    if document.get("_indices_data_files"):
        raise ValueError(
            f"{directory} is a selection of another data set's rows: save it again after flatten_indices()"
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{directory}: {len(missing)} of its {len(names)} files are missing, e.g. {missing[0]}")
    return [directory / name for name in names]


def column_names(directory: Path) -> tuple[str, ...]:
    """Return the names of the columns."""
    import pyarrow

    for path in data_files(directory):
        try:
            with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
                return tuple(stream.schema.names)
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error
    return ()


def count_rows(directory: Path) -> int:
    """Return the number of rows without reading them."""
    return sum(batch.num_rows for _, batch in _batches(directory))


def read_rows(
    directory: Path, columns: Sequence[str], ranges: Sequence[range] | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location and values of every row, or of the rows whose numbers are in `ranges`."""
    start = 0
    for _, batch in _batches(directory):
        stop = start + batch.num_rows
        chosen = batch.select(list(columns))
        rows = range(start, stop) if ranges is None else _within(ranges, start, stop)
        if ranges is not None and rows:
            chosen = chosen.take([row - start for row in rows])
        for row, found in zip(rows, chosen.to_pylist() if rows else ()):
            yield f"{directory}, row {row}", found
        start = stop


def _within(ranges: Sequence[range], start: int, stop: int) -> list[int]:
    return sorted({row for one in ranges for row in range(max(one.start, start), min(one.stop, stop))})


def _batches(directory: Path) -> Iterator[tuple[Path, Any]]:
    import pyarrow

    for path in data_files(directory):
        try:
            with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    yield path, batch
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as an Arrow stream (truncated or damaged?): {error}")
