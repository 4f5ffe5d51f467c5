"""The endpoint for Prometheus: names, help texts, the newest rows, and addresses that are refused."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_dapo.launch.environment import free_port
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS
from megatron_dapo.telemetry.prometheus import exported_name, prometheus_endpoint
from tests.made_runs import make_run


def scrape(port: int, path: str = "/metrics") -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples (labels, value) of each family, as Prometheus' own parser reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name: [(one.labels, one.value) for one in family.samples] for family in families for sample in family.samples}


def test_names_are_distinct_and_valid() -> None:
    names = [exported_name(metric) for metric in (*STEP_METRICS, *EVALUATION_METRICS)]
    assert len(set(names)) == len(names) and all(label == "" for _, label in names)
    assert all(re.fullmatch(r"megatron_dapo_[a-z][a-z0-9_]*", name) for name, _ in names)
    assert exported_name("reward/part/a b/c") == ("megatron_dapo_reward_part", "a b/c")
    assert exported_name("episodes/recorded/x") == ("megatron_dapo_episodes_recorded", "x")
    assert exported_name("distillation/teacher/qwen2.5_32b/divergence") == (
        "megatron_dapo_distillation_teacher_divergence",
        "qwen2.5_32b",
    )
    assert exported_name("rollout/source/gsm8k/accuracy_generated") == (
        "megatron_dapo_rollout_source_accuracy_generated",
        "gsm8k",
    )
    assert exported_name("eval/aime/2024/avg_at_k") == ("megatron_dapo_eval_avg_at_k", "aime/2024")


def test_a_scrape_has_the_newest_rows(tmp_path: Path) -> None:
    run, port = tmp_path / "made", free_port()
    with prometheus_endpoint("127.0.0.1", port, run, 'a "run"'):
        (labels, one), = scrape(port)["megatron_dapo_run_info"]  # The directory does not exist yet.
        assert labels["run"] == 'a "run"' and one == 1.0
        assert "megatron_dapo_train_step" not in scrape(port)
        make_run(run, num_steps=3, evaluate_every=2, scores=(0.25, 0.5))
        row, evaluated = (
            json.loads((run / name).read_text().splitlines()[-1]) for name in ("metrics.jsonl", "evaluations.jsonl")
        )
        found = scrape(port)
        assert found["megatron_dapo_train_step"] == [({}, 3.0)]
        assert {name: found[exported_name(name)[0]] for name in STEP_METRICS} == {
            name: [({}, pytest.approx(row[name]))] for name in STEP_METRICS
        }
        assert found["megatron_dapo_eval_avg_at_k"] == [({}, pytest.approx(evaluated["eval/avg_at_k"]))]
        assert found["megatron_dapo_eval_train_step"] == [({}, 2.0)]
        assert found["megatron_dapo_train_step_timestamp_seconds"][0][1] == pytest.approx(
            (run / "metrics.jsonl").stat().st_mtime, abs=1.0
        )
        # Names that users chose, a value that is not finite, and a line that is still being written.
        new = {**row, "train_step": 4, "actor/loss": None, "reward/part/é\n": 0.5, "reward/part/b": 0.25}
        new["rollout/source/s/groups_generated"] = 7
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(new) + '\n{"train_step": 5, "actor/lo')
        found = scrape(port)
        assert found["megatron_dapo_train_step"] == [({}, 4.0)] and math.isnan(found["megatron_dapo_actor_loss"][0][1])
        assert found["megatron_dapo_reward_part"] == [({"name": "é\n"}, 0.5), ({"name": "b"}, 0.25)]
        assert found["megatron_dapo_rollout_source_groups_generated"] == [({"name": "s"}, 7.0)]
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_help_has_meaning_and_unit(tmp_path: Path) -> None:
    run, port = make_run(tmp_path / "made", num_steps=1), free_port()
    with prometheus_endpoint("127.0.0.1", port, run, "made"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(port, "/other")
    metrics = (*STEP_METRICS.values(), *EVALUATION_METRICS.values())
    for metric in metrics:
        name, _ = exported_name(metric.name)
        escaped = metric.meaning.replace("\\", "\\\\")
        assert f"# HELP {name} {escaped} [{metric.unit}]" in lines and f"# TYPE {name} gauge" in lines
    described = {line.split()[2] for line in lines if line.startswith("# HELP") and len(line.split()) > 3}
    assert described == {line.split()[2] for line in lines if line.startswith("# TYPE")}, "every family has a help text"


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"telemetry.prometheus_port = {port}: Address already in use.*another port"):
            with prometheus_endpoint("127.0.0.1", port, tmp_path, "x"):
                pass
    with prometheus_endpoint("127.0.0.1", 0, tmp_path, "x"):
        pass


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"prometheus_port = 9: .*pip install 'megatron-dapo\[prometheus\]'"):
        with prometheus_endpoint("127.0.0.1", 9, tmp_path, "x"):
            pass
