"""Preparation of published data sets, from made files in the schemas that they are published in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.data import published
from megatron_dapo.data.dataset import load_eval_sources, load_prompts
from megatron_dapo.data.files import DAPO_FORMAT, file_sha256, read_rows
from megatron_dapo.data.published import PROMPT, PUBLISHED, card_path, prepare
from megatron_dapo.data.sources import Source
from megatron_dapo.data.template import PromptTemplate


def problem(number: int) -> str:
    return f"Find the sum of the first {number + 1} integers.\nLet $x = {{{number}}}$."


@pytest.fixture
def dapo_rows(row):
    """Rows of DAPO-Math-17k: `copies` of each problem, then others."""

    def make(answers, copies):
        rows = [row(PROMPT.format(problem=problem(i)), answer, i) for i, answer in enumerate(answers)]
        return rows * copies

    return make


@pytest.fixture
def small(monkeypatch):
    """Give an entry other published counts: a made file cannot have 1.8 million rows in every test."""

    def change(name, **counts):
        monkeypatch.setitem(published.PUBLISHED, name, replace(PUBLISHED[name], **counts))

    return change


def answers_of(path: Path) -> list[str]:
    return [row.answer for row in read_rows(path)]


def test_copies_and_conflicts_leave_the_training_set(dapo_rows, row, write, tmp_path, small, tokenizer):
    rows = dapo_rows([str(i) for i in range(20)], 100)
    rows[150] = row(PROMPT.format(problem=problem(3)), "999", 3)  # a second answer for one of them
    source = write("dapo-math-17k.parquet", rows)
    small("dapo-math-17k", num_rows=2000, num_prompts=20, num_problems=21)
    output = tmp_path / "deep" / "train.parquet"
    card = prepare("dapo-math-17k", [source], output)
    assert answers_of(output) == [str(i) for i in range(20) if i != 3]
    assert (card.num_rows, card.num_prompts, card.num_problems, card.num_conflicting) == (2000, 20, 21, 1)
    assert (card.copies_min, card.copies_max, card.num_written, card.differences) == (1, 100, 19, ())
    assert "3 and 999" in card.conflicts[0] and card.files == ((str(source), file_sha256(source)),)
    written = json.loads(card_path(output).read_text())
    assert written["output_sha256"] == file_sha256(output) and written["published"]["num_rows"] == 2000
    assert len(load_prompts([output], tokenizer, 1000).prompts) == 19
    assert prepare("dapo-math-17k", [source], output, keep_conflicts=True).num_written == 21


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_aime_file_of_32_copies_becomes_30_problems(kind, dapo_rows, write, tmp_path, tokenizer):
    answers = [f"{7 * i:03d}" for i in range(30)]  # AIME writes them so; the verifier compares texts
    source = write("aime-2024.parquet", dapo_rows(answers, 32))
    card = prepare("aime2024", [source], tmp_path / f"aime2024.{kind}")
    assert (card.num_rows, card.num_written, card.copies_min, card.copies_max) == (960, 30, 32, 32)
    assert answers_of(tmp_path / f"aime2024.{kind}") == [str(7 * i) for i in range(30)]
    dataset = load_eval_sources(
        [Source((tmp_path / f"aime2024.{kind}",), DAPO_FORMAT)], PromptTemplate(tokenizer), 1000
    )
    assert len(dataset.prompts) == 30 and dataset.report.multiplicity_max == 1


@pytest.mark.parametrize(("question", "answer"), [("problem", "answer"), ("question", "answer"), ("Problem", "Answer")])
def test_bare_problems_get_the_prompt_of_training(question, answer, write, tmp_path):
    written = ["070", r"336^\circ", "$12$", 5, *(str(i) for i in range(100, 126))]
    source = write("test.jsonl", [{question: problem(i), answer: written[i], "id": i} for i in range(30)])
    card = prepare("aime2025", [source], tmp_path / "aime2025.parquet")
    rows = list(read_rows(tmp_path / "aime2025.parquet"))
    assert [row.answer for row in rows][:4] == ["70", "336", "12", "5"] and card.num_wrapped == 30
    assert rows[0].messages == ({"role": "user", "content": PROMPT.format(problem=problem(0))},)
    assert rows[0].messages[0]["content"].endswith('own line after "Answer:".') and rows[0].data_source == "aime2025"


def test_two_files_are_one_benchmark(write, tmp_path):
    parts = [
        write(f"aime2025-{part}.jsonl", [{"question": problem(15 * part + i), "answer": str(i)} for i in range(15)])
        for part in (0, 1)
    ]
    assert prepare("aime2025", parts, tmp_path / "out.jsonl").num_written == 30


def test_a_file_that_was_deduplicated_elsewhere_is_as_good(dapo_rows, write, tmp_path, small):
    small("dapo-math-17k", num_rows=2000, num_prompts=20, num_problems=21)
    source = write("processed.parquet", dapo_rows([str(i) for i in range(20)], 1))
    card = prepare("dapo-math-17k", [source], tmp_path / "train.parquet")
    assert (card.num_written, card.differences) == (20, ())


def test_problems_of_a_benchmark_leave_the_training_set(dapo_rows, write, tmp_path, small):
    small("dapo-math-17k", num_rows=200, num_prompts=100, num_problems=100)
    train = write("train.parquet", dapo_rows([str(i) for i in range(100)], 2))
    # The same problems, spaced and written otherwise.
    held_out = [{"problem": problem(i).replace(" ", "  ").upper(), "answer": str(i)} for i in range(90, 120)]
    benchmark = tmp_path / "benchmark.parquet"
    prepare("aime2025", [write("test.jsonl", held_out)], benchmark)
    card = prepare("dapo-math-17k", [train], tmp_path / "out.parquet", against=[benchmark])
    assert (card.num_overlapping, card.num_written) == (10, 90)
    assert answers_of(tmp_path / "out.parquet") == [str(i) for i in range(90)]


def test_a_cut_file_is_refused_with_both_numbers(dapo_rows, write, tmp_path):
    source = write("dapo-math-17k.parquet", dapo_rows(["1", "2"], 100))
    with pytest.raises(ValueError, match=r"200 rows, published 1,791,700; 2 different prompts, published 17,398"):
        prepare("dapo-math-17k", [source], tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    card = prepare("dapo-math-17k", [source], tmp_path / "out.parquet", allow_other_counts=True)
    assert card.num_written == 2 and len(card.differences) == 3


def aime(answer="1", count=30):
    return [{"problem": problem(i), "answer": answer} for i in range(count)]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("aime2025", aime(count=29), "29 rows, published 30"),
        ("aime2025", aime("1000"), "integers from 0 to 999, got '1000'"),
        ("aime2025", aime("x"), "integers from 0 to 999, got 'x'"),
        ("aime2025", [*aime(), {"problem": problem(0), "answer": "2"}], "31 rows, published 30"),
        ("aime2025", [{"text": "?", "answer": "1"}], "neither the columns prompt and reward_model.ground_truth nor a problem"),
        ("aime2025", [{"problem": " ", "answer": "1"}], "problem must be a text"),
        ("aime2025", [{"problem": "?", "answer": None}], "unparsable gold answer"),
        ("aime2026", aime(), "choose one of dapo-math-17k, aime2024, aime2025, math500"),
    ],
)
def test_bad_input_is_one_line(name, rows, message, write, tmp_path):
    source = write("data.jsonl", rows)
    result = CliRunner().invoke(app, ["data", "prepare", name, str(source), "--output", str(tmp_path / "out.jsonl")])
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_benchmark_loses_no_problem(write, tmp_path):
    several = [*aime(), {"problem": problem(0), "answer": "2"}]
    with pytest.raises(ValueError, match="1 problems have several answers: 1 and 2"):
        prepare("aime2025", [write("a.jsonl", several)], tmp_path / "out.jsonl", allow_other_counts=True)
    with pytest.raises(ValueError, match="without --against"):
        prepare("aime2025", [write("a.jsonl", aime())], tmp_path / "out.jsonl", against=[tmp_path / "a.jsonl"])


def test_command(write, tmp_path):
    output = tmp_path / "aime2025.parquet"
    arguments = ["data", "prepare", "aime2025", str(write("test.jsonl", aime())), "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "30 rows -> 30 problems (1 rows each), 30 prompts -> 30 rows written" in result.output
    listed = CliRunner().invoke(app, ["data", "list"])
    assert "dapo-math-17k: 1,791,700 rows, 17,398 prompts (BytedTsinghua-SIA/DAPO-Math-17k" in listed.output


def prepare_from_hub(tmp_path: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    # The client reads its endpoint when it is imported.
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    # The client waits for 23 s between its tries.
    program = "import time; time.sleep = lambda seconds: None; from megatron_dapo.cli.main import app; app()"
    command = [sys.executable, "-c", program, "data", "prepare", "aime2025"]
    output = ["--output", str(tmp_path / "out.parquet")]
    return subprocess.run(
        [*command, *output], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_files_come_from_the_hub(tmp_path, endpoint):
    result = prepare_from_hub(tmp_path, endpoint)
    assert result.returncode == 0, result.stderr
    assert answers_of(tmp_path / "out.parquet") == ["7"] * 30


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    result = prepare_from_hub(tmp_path, "http://127.0.0.1:9")
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert last.startswith("error: aime2025: math-ai/aime25 (test.jsonl) cannot be taken from the Hub")
    assert last.endswith("megatron-dapo data prepare aime2025 FILE")
