"""A run of two train steps whose metrics are scraped while it trains."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from whole_runs import RUN_TIMEOUT_S, lines_of

from megatron_dapo.launch.environment import free_port
from megatron_dapo.telemetry.metrics import STEP_METRICS
from megatron_dapo.telemetry.prometheus import exported_name
from tools.resume_proof.kill_points import ResumeProofSettings, RunProcess

TWO_STEPS = ("run.total_steps=2", "optimizer.warmup_steps=1", "checkpoint.interval=0", "evaluation.interval=1")


def scraped(port: int) -> dict[str, float] | None:
    """Return the unlabelled samples that Prometheus would read; None while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return {one.name: one.value for family in families for one in family.samples if not one.labels}
    except (urllib.error.URLError, ConnectionError):
        return None


@pytest.mark.long  # The endpoint is in tests/unit/telemetry/test_prometheus.py.
def test_a_run_is_scraped_while_it_trains(recipe: Path, tmp_path: Path) -> None:
    port = free_port()
    settings = ResumeProofSettings(recipe, "tp1", tmp_path, TWO_STEPS, run_timeout_s=RUN_TIMEOUT_S)
    run = RunProcess(settings, tmp_path / "run", (f"telemetry.prometheus_port={port}",))
    scrapes: dict[float, dict[str, float]] = {}

    def sees_the_last_step() -> bool:
        found = scraped(port)
        if found is not None:
            scrapes[found.get("megatron_dapo_train_step", 0.0)] = found
        return 2.0 in scrapes and "megatron_dapo_eval_train_step" in scrapes[2.0]

    try:
        # An evaluation and the export follow the last step.
        assert run.wait_until(sees_the_last_step), run.exit_reason()
        assert run.wait() == 0, run.exit_reason()
    finally:
        run.kill()
    assert scraped(port) is None, "the endpoint ends with the run"
    rows = {row["train_step"]: row for row in lines_of(run.directory / "metrics.jsonl")}
    assert min(scrapes) == 0.0, "the endpoint is there before the first step"
    for step, scrape in scrapes.items():
        if step:
            assert {name: scrape[exported_name(name)[0]] for name in STEP_METRICS} == {
                name: rows[step][name] for name in STEP_METRICS
            }
    evaluations = {row["train_step"]: row["eval/avg_at_k"] for row in lines_of(run.directory / "evaluations.jsonl")}
    last = scrapes[2.0]
    assert last["megatron_dapo_eval_avg_at_k"] == evaluations[last["megatron_dapo_eval_train_step"]]
