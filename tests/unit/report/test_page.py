"""The page of a report: everything inside one file below its limit, whatever the runs hold, and no text as markup."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.report.background import REPORT, start_writing, write_last
from megatron_dapo.report.page import MAX_BYTES, MAX_RUNS, build_page, write_report
from tests.made_runs import a_sample, make_run, write_json, write_lines


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_one_run(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    write_json(path / "provenance.json", {"versions": {"torch": "2.13.0"}, "commit": "abc", "machine": "TP2; host"})
    write_json(path / "plan.json", {"line": "planned / measured: step 10.0 / 11.0 s"})
    document = data_of(build_page([path]))
    (run,) = document["runs"]
    assert ["plan", "planned / measured: step 10.0 / 11.0 s"] in run["facts"]
    assert run["verdict"]["learned"].startswith("Learned: ")
    assert ["train steps", "30 of 30"] in run["facts"] and ["machine", "TP2"] in run["facts"]
    titles = [chart["title"] for chart in document["charts"]]
    assert {"Accuracy", "Entropy", "Filtered groups", "Mismatch of trainer and engine", "Learning rate"} <= set(titles)
    # The run has no critic: a metric that is 0 in every step has no curve.
    assert "Value loss" not in titles and "critic/loss" not in run["curves"]["values"]
    assert run["curves"]["x"] == list(range(1, 31)) and len(run["curves"]["values"]["actor/entropy"]) == 1
    assert {sample["kind"] for sample in document["samples"]["list"]} == {"right", "wrong", "truncated", "filtered"}
    rows = {key: (values, origins) for key, values, origins in document["config"]}
    assert rows["optimizer.learning_rate"] == (["1e-06"], ["--set"])
    assert run["provenance"]["versions"]["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
        ("uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
        ("uPlot.LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"),
    ],
)
def test_the_library_is_as_published(repository: Path, name: str, sha256: str) -> None:
    content = (repository / "megatron_dapo" / "report" / "assets" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == sha256


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    page = build_page([make_run(tmp_path / "run")])
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", page.replace('href: "#"', ""))
    assert "default-src 'none'" in page


def test_what_a_model_writes_is_never_markup(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- \u2028 \u202e"
    path = make_run(tmp_path / "run", samples=[a_sample(1, text=hostile)], run__name="</title><b>")
    page = build_page([path])
    assert "<script>alert" not in page and "<b>" not in page and "\u202e" not in page
    assert page.count("</script>") == 2
    assert any(sample["text"] == hostile for sample in data_of(page)["samples"]["list"])


def test_several_runs_show_what_differs(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, optimizer__learning_rate=rate) for name, rate in (("a", 1e-6), ("b", 2e-6))]
    document = data_of(build_page(paths))
    different = [key for key, values, _ in document["config"] if len(values) > 1]
    assert different == ["run.name", "optimizer.learning_rate"]
    assert [run["name"] for run in document["runs"]] == ["a", "b"]
    with pytest.raises(ValueError, match=f"{MAX_RUNS + 1} runs, takes 1 to {MAX_RUNS}"):
        build_page([paths[0]] * (MAX_RUNS + 1))


def test_own_parts_and_sources_have_curves(tmp_path: Path) -> None:
    own = {
        "reward/part/style": 0.5,
        "episodes/recorded/searches": 3.0,
        "rollout/source/gsm8k/accuracy_generated": 0.7,
        "rollout/source/gsm8k/groups_generated": 4.0,
    }
    path = make_run(tmp_path / "run", rows=dict.fromkeys(range(1, 31), own))
    rows = [json.loads(line) for line in (path / "evaluations.jsonl").read_text().splitlines()]
    write_lines(path / "evaluations.jsonl", [{**row, "eval/aime/avg_at_k": 0.3} for row in rows])
    document = data_of(build_page([path]))
    labels = {chart["title"]: [each["label"] for each in chart["series"]] for chart in document["charts"]}
    assert labels["Reward by part"] == ["style"]
    assert labels["Figures that the environment recorded"] == ["searches"]
    assert labels["Accuracy by source"] == ["held-out, aime", "training, gsm8k"]
    assert document["runs"][0]["curves"]["evaluated"]["eval/aime/avg_at_k"] == [0.3] * 4


def test_the_same_held_out_problems_are_shown_before_and_after(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for step, reward in ((0, -1.0), (30, 1.0)):
        write_lines(path / "evaluations" / f"step_{step:06d}.jsonl", [a_sample(step, text=f"step {step}", reward=reward, prompt_id="p")])
    (pair,) = data_of(build_page([path]))["runs"][0]["pairs"]
    assert pair["task"] == "Problem 30" and pair["steps"] == [0, 30]
    assert [(one["text"], one["reward"]) for one in pair["responses"]] == [("step 0", -1.0), ("step 30", 1.0)]


def test_a_reward_of_one_part_is_drawn_once(tmp_path: Path) -> None:
    rows = dict.fromkeys(range(1, 31), {"reward/mean": 0.5, "reward/verifier_mean": 0.5})
    titles = [chart["title"] for chart in data_of(build_page([make_run(tmp_path / "run", rows=rows)]))["charts"]]
    assert "Reward" in titles and "Reward by part" not in titles


def test_a_reference_is_drawn_on_the_runs_steps(tmp_path: Path) -> None:
    table = tmp_path / "curve.csv"
    table.write_text("step,value\n0,0.4\n10,0.9\n20,0.95\n400,1.0\n")
    (run,) = data_of(build_page([make_run(tmp_path / "run", scores=(0.4, 0.4))], [table]))["runs"]
    # Twice as far as the run has come, and no further.
    assert run["references"][0]["curves"]["eval/avg_at_k"]["x"] == [0, 10, 20]
    assert run["comparisons"][0]["verdict"].startswith("off track since train step 10: eval/avg_at_k")
    assert run["verdict"]["health"].startswith(f"not healthy: off the reference {table} since step 10")


@pytest.mark.parametrize("num_steps", [1000, pytest.param(5000, marks=pytest.mark.long)])
def test_a_long_run_with_many_samples_stays_below_the_limit(tmp_path: Path, num_steps: int) -> None:
    """Four samples a step, some of 4,000 tokens, with characters that JSON and UTF-8 make longer."""
    text = 'Let x < 7 & y > 2; \\frac{1}{2} "so" → ∑ ü\n' * 95
    samples = [
        a_sample(step, number, "correct" if number else "wrong", text[: 4000 if step % 100 == 1 else 60 + step % 60])
        for step in range(1, num_steps + 1)
        for number in range(4)
    ]
    path = make_run(tmp_path / "run", num_steps, num_steps // 10, samples=samples)
    start = time.process_time()
    size = write_report([path], [], tmp_path / "report.html")
    assert size == (tmp_path / "report.html").stat().st_size <= MAX_BYTES
    assert time.process_time() - start < 60
    document = data_of((tmp_path / "report.html").read_text())
    (run,) = document["runs"]
    assert len(run["curves"]["x"]) <= 400 and run["curves"]["x"][-1] == num_steps
    mean, low, high = run["curves"]["values"]["actor/entropy"]
    assert all(a <= b <= c for a, b, c in zip(low, mean, high, strict=True))
    steps = [sample["step"] for sample in document["samples"]["list"]]
    assert len(steps) > 100 and max(steps) > num_steps - 100 and min(steps) < 600
    assert {sample["kind"] for sample in document["samples"]["list"]} == {"right", "wrong", "filtered"}


def test_many_long_runs_stay_below_the_limit(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 200, 20)
    assert len(build_page([path] * MAX_RUNS).encode()) <= MAX_BYTES


def test_directories_that_hold_no_run_are_refused_and_torn_files_are_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config.json, so no run's directory"):
        build_page([tmp_path])
    path = make_run(tmp_path / "run")
    with open(path / "metrics.jsonl", "a") as stream:
        stream.write('{"train_step": 31, "actor/entr')
    (path / "failure.json").write_text("[")
    (path / "samples.jsonl").unlink()
    assert data_of(build_page([path]))["runs"][0]["curves"]["x"][-1] == 30


def test_a_live_report_that_comes_late_does_not_replace_the_last_one(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    report, attempts = path / REPORT, path / "attempts.jsonl"
    attempts.write_text('{"attempt": 1, "began": 1.0}\n')
    write_report([path], [], report, is_live=True)
    assert facts_of(report)["state"] == "under way"
    attempts.write_text(attempts.read_text() + '{"attempt": 1, "ended": 2.0, "reason": "finished", "exit_code": 0}\n')
    write_report([path], [], report)
    write_report([path], [], report, is_live=True)  # started before the end
    assert facts_of(report)["state"] == "finished" and data_of(report.read_text())["reload_s"] == 0
    attempts.write_text(attempts.read_text() + '{"attempt": 2, "began": 3.0}\n')
    write_report([path], [], report, is_live=True)
    assert facts_of(report)["state"] == "under way"
    assert not list(path.glob(".*.tmp"))


def facts_of(report: Path) -> dict[str, str]:
    return dict(data_of(report.read_text())["runs"][0]["facts"])


def test_a_run_writes_it_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    assert write_last(path, 100.0) == ""
    assert data_of((path / REPORT).read_text())["reload_s"] == 0
    start_writing(path)
    deadline = time.monotonic() + 100
    while data_of((path / REPORT).read_text())["reload_s"] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert data_of((path / REPORT).read_text())["reload_s"] > 0
    (path / "config.json").unlink()
    assert "no config.json" in write_last(path, 100.0)
