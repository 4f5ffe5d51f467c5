"""The report in a headless Chromium: it draws, filters, compares, and says nothing in the console."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from browser import WAIT_S, Browser

from tests.made_runs import a_sample, make_run, some_samples

pytestmark = pytest.mark.slow


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs: one learns, the other collapses and answers with markup."""
    root = tmp_path_factory.mktemp("runs")
    hostile = "<img src=x onerror=\"document.title='broken'\"></script><script>document.title='broken'</script> → 🙂"
    rows = {step: {"actor/entropy": 0.001} for step in range(20, 31)}
    turn = {"segment": 0, "tokens": [0, 11, 11], "reward": 0.0, "calls": []}
    episode = {"end": "done", "figures": {"searches": 2.0}, "turns": [turn, {**turn, "segment": 1, "tokens": [0, 3, 4], "cut": True}]}
    branches = [{"reason": "a search", "prompt": "Find it.", "turns": [["<b>found", "it"]]}]
    played = a_sample(30, 8, text="main stream", episode=episode, branches=branches)
    samples = [*some_samples(30), a_sample(30, 9, "wrong", hostile), played]
    good = make_run(root / "good")
    bad = make_run(root / "bad", scores=(0.4, 0.7, 0.4, 0.2), rows=rows, samples=samples, optimizer__learning_rate=1e-3)
    return [good, bad]


def written(arguments: list[str | Path], repository: Path) -> str:
    """Run `megatron-dapo report` and return what it prints."""
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "report", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


TEXTS = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
COUNT = "return document.querySelectorAll(arguments[0]).length"
CHOOSE = """const box = document.querySelector(arguments[0]);
box.value = arguments[1];
box.dispatchEvent(new Event(box.tagName === "SELECT" ? "change" : "input", {bubbles: true}));"""
# A canvas that was drawn on has pixels that are not transparent.
INKED = """return [...document.querySelectorAll("canvas")].map(canvas =>
  canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value, at) => at % 4 === 3 && value > 0))"""


def test_one_run_in_the_browser(page: Browser, runs: list[Path], repository: Path) -> None:
    assert str(runs[1] / "report.html") in written([runs[1]], repository)
    page.open((runs[1] / "report.html").as_uri())
    assert page.run("return document.documentElement.dataset.ready") == "true"
    assert page.run("return document.title") == "bad: report"
    assert page.run(TEXTS, "#verdicts .health")[0].startswith("✕ not healthy: ")
    titles = page.run(TEXTS, "#anomaly-table .what")
    assert "entropy collapse" in titles and "held-out accuracy falls" in titles
    inked = page.run(INKED)
    assert len(inked) > 12 and all(inked)
    # Every request that a page makes, the file itself apart, would be listed here.
    assert (
        page.run("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0
    )
    assert page.console() == []


def test_samples_are_filtered_and_read_token_by_token(page: Browser, runs: list[Path], repository: Path) -> None:
    written([runs[1]], repository)
    page.open((runs[1] / "report.html").as_uri())
    everything = page.run(COUNT, "#sample-list .sample")
    for kind in ("right", "wrong", "truncated", "filtered"):
        page.run("document.querySelector(`[data-kind=${arguments[0]}]`).click()", kind)
        badges = page.run(TEXTS, "#sample-list .badge")
        assert 0 < len(badges) < everything and len(set(badges)) == 1
    page.run("document.querySelector('[data-kind=all]').click()")
    page.run(CHOOSE, "#search", "onerror")
    assert page.run(COUNT, "#sample-list .sample") == 1
    response = page.run("return document.querySelector('#sample .response').textContent")
    assert response.startswith('<img src=x onerror="document.title') and response.endswith("→ 🙂")
    assert page.run(COUNT, "#sample .response img") == 0 and page.run("return document.title") == "bad: report"
    # One token a character, also of characters that are two in JavaScript's strings; the rare ones have a color.
    assert page.run(COUNT, "#sample .token") == len(response) == len(list(response))
    assert page.run("return document.querySelectorAll('#sample .token')[49].style.background").startswith("color-mix")
    # Its log-prob is -0.49, in a digit of base 64.
    assert "log-prob -0.511" in page.run("return document.querySelectorAll('#sample .token')[49].title")
    page.run(CHOOSE, "#search", "main stream")
    assert page.run("return document.querySelector('#sample .branch').open") is False
    assert page.run(TEXTS, "#sample .branch summary") == ["branch 1: a search · 1 turn · 3 tokens sampled"]
    assert page.run(TEXTS, "#sample .branch .response") == ["Find it.turn 2, cut<b>foundit"]
    assert "recorded: searches2" in page.run("return document.querySelector('#sample .facts').textContent")
    page.run(CHOOSE, "#search", "")
    page.run(CHOOSE, "#from", "25")
    steps = page.run(
        "return [...document.querySelectorAll('#sample-list .meta')].map(e => Number(e.textContent.split(' ')[1]))"
    )
    assert steps and min(steps) >= 25
    page.run("document.querySelector('#sample-list .sample').focus()")
    page.run("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}))")
    assert page.run("return document.activeElement.dataset.at") == "1"
    page.run(CHOOSE, "#config-search", "learning_rate")
    assert page.run(TEXTS, "#config-table .value") == ["0.001"]
    assert page.console() == []


def test_runs_are_compared_with_each_other_and_with_a_reference(
    page: Browser, runs: list[Path], repository: Path, tmp_path: Path
) -> None:
    table, output = tmp_path / "curve.csv", tmp_path / "both.html"
    table.write_text("step,value\n0,0.4\n10,0.6\n20,0.7\n30,0.8\n")
    written([*runs, "--reference", table, "--output", output], repository)
    page.open(output.as_uri())
    assert len(page.run(TEXTS, "#verdicts .line")) == 2
    tracks = page.run(TEXTS, ".track")
    assert "on track" in tracks[0] and "off track since train step 20" in tracks[1]
    legend = page.run(TEXTS, "[data-title=Accuracy] .u-label")
    assert {"good: held-out, avg@k", "bad: held-out, avg@k", f"reference: {table}"} <= set(legend)
    assert page.run(TEXTS, "#config-table tbody th") == ["run.name", "optimizer.learning_rate"]
    page.run(CHOOSE, "#config-which", "all")
    assert page.run(COUNT, "#config-table tbody tr") > 8
    before = page.run("return getComputedStyle(document.body).backgroundColor")
    page.run("document.querySelector('#theme').click()")
    assert page.run("return getComputedStyle(document.body).backgroundColor") != before
    page.run(CHOOSE, "#smoothing", "0.5")
    assert all(page.run(INKED))
    assert page.console() == []


def test_a_run_under_way_reloads_by_itself(page: Browser, runs: list[Path], repository: Path) -> None:
    command = [sys.executable, "-m", "megatron_dapo.report", str(runs[0]), "--live"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(repository)}, check=True, timeout=300)
    file = runs[0] / "report.html"
    # The same page at a pace that a test can wait for, and a busy machine load it at.
    file.write_text(file.read_text().replace('"reload_s":30', '"reload_s":15'))
    page.open(file.as_uri())
    assert page.run("return document.querySelector('#live').checked")
    facts = json.loads(page.run("return document.getElementById('data').textContent"))["runs"][0]["facts"]
    assert ["state", "under way"] in facts
    page.run("window.isOld = true")
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        time.sleep(0.5)
        with suppress(AssertionError):  # a script may be cut by the reload that it waits for
            if page.run("return window.isOld === undefined && document.documentElement.dataset.ready === 'true'"):
                break
    else:
        raise AssertionError(f"no reload within {WAIT_S:g} s")
    assert page.console() == []
