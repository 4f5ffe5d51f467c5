"""Rows with columns of other names, in every kind of file."""

from __future__ import annotations

import csv
import json
from datetime import date
from pathlib import Path

import pytest

from megatron_dapo.data.files import RowFormat, count_rows, read_rows, sampled_rows

ROWS = [
    {"question": "2 + 2?", "gold": "4", "tests": "a, b\nc"},
    {"question": 'Say "x".', "gold": "x", "tests": ""},
]
FORMAT = RowFormat("question", "gold")


def write(path: Path) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"own.{suffix}")
    for read in (read_rows, sampled_rows):
        first, second = read(path, FORMAT)
        assert (first.messages, first.answer) == (({"role": "user", "content": "2 + 2?"},), "4")
        assert (second.messages[0]["content"], second.answer) == ('Say "x".', "x")
        assert first.extra["tests"] == "a, b\nc"
    assert count_rows(path) == 2


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_a_nested_field_may_be_flattened_or_json_text(suffix: str, tmp_path: Path) -> None:
    """As json_normalize and CSV files of nested data have it."""
    flat = [{"prompt": "2 + 2?", "reward_model.ground_truth": "4", "level": "1"}]
    text = [{"prompt": "2 + 2?", "reward_model": '{"ground_truth": "4"}', "level": "1"}]
    for number, rows in enumerate((flat, text)):
        path = tmp_path / f"own_{number}.{suffix}"
        if suffix == "csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        elif suffix == "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text(json.dumps(rows) if suffix == "json" else json.dumps(rows[0]))
        for read in (read_rows, sampled_rows):
            [row] = read(path)
            assert row.answer == "4" and row.extra == {"level": "1"}


def test_prompts_are_put_into_their_template(tmp_path: Path) -> None:
    path = write(tmp_path / "own.json")
    row, _ = read_rows(path, RowFormat("question", "gold", "Be brief.", "{prompt} End with 'Answer: {...}'."))
    system, user = row.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "2 + 2? End with 'Answer: {...}'."}


def test_rows_may_have_no_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "own.json")
    row, _ = read_rows(path, RowFormat("question", ""))
    assert row.answer == "" and row.extra["gold"] == "4"
    with pytest.raises(ValueError, match=r"missing column\(s\) answer.*found: question, gold, tests.*data.columns"):
        list(read_rows(path, RowFormat("question", "answer")))


def test_nested_fields_and_values_that_json_has_not(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "own.parquet"
    row = {
        "task": {"text": "2 + 2?", "label": {"value": 4}},
        "day": date(2026, 1, 2),
        "raw": b"x",
        "extra_info": {"index": 9},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (found,) = read_rows(path, RowFormat("task.text", "task.label.value"))
    assert (found.messages[0]["content"], found.answer) == ("2 + 2?", "4")
    assert found.extra == {"day": "2026-01-02", "raw": "b'x'", "index": 9}
    with pytest.raises(ValueError, match="row 0: task has no field question"):
        list(read_rows(path, RowFormat("task.question", "task.label.value")))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "question,gold\n1,2,3\n", "line 2: not the 2 cells"),
        ("a.csv", "question,gold\n1\n", "line 2: not the 2 cells"),
        ("a.csv", 'question,gold\n"1,2\n', "unexpected end of data"),
        ("a.csv", "question,gold\n", "has no rows"),
        ("a.csv", "", "missing column"),
        ("a.json", "[", "not valid JSON"),
        ("a.json", '{"question": 1}', "expected a list of objects, got dict"),
        ("a.json", "[1]", "row 0: expected an object"),
        ("a.json", '{"a": 1}\n{"a": 2}', "ends in .jsonl"),
        ("a.json", "[]", "has no rows"),
    ],
)
def test_damaged_files_are_refused(name: str, content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        list(read_rows(path, FORMAT))
