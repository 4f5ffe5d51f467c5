"""Output and exit code of the command."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from megatron_dapo.proof import check_loss as command
from megatron_dapo.proof.check_loss import CheckLossReport, LossCheckRow, print_report


def report(*differences: float) -> CheckLossReport:
    rows = tuple(
        LossCheckRow("TP1 PP1 CP1 DP1", size, "packed", "token_mean", 4, difference, "model.norm.weight", 1e-8)
        for size, difference in zip(("1", "2", "4"), differences, strict=False)
    )
    return CheckLossReport(
        1, "float32", 1e-5, rows, ({"layout": "TP3 PP1 CP1 DP1", "reason": "3 does not divide"},), 1.5
    )


def test_the_largest_row_decides() -> None:
    assert report(1e-7, 9e-6).max_rel_diff == 9e-6 and report(1e-7, 9e-6).passed
    assert not report(1e-7, 2e-5).passed
    assert not report().passed, "nothing compared is nothing proved"
    assert not report(float("nan")).passed


def test_json_is_one_object_with_a_row_a_comparison(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "run_check_loss", lambda *args, **kwargs: report(1e-7, 2e-5))
    assert command.check_loss(1, json_output=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (
        found["max_rel_diff"] == 2e-5
        and found["passed"] is False
        and len(found["rows"]) == found["num_comparisons"] == 2
    )
    assert set(found["rows"][0]) >= {"layout", "micro_batch", "packing", "aggregation", "rel_diff"}
    assert found["skipped"][0]["layout"] == "TP3 PP1 CP1 DP1"


def test_table_names_the_layouts_the_figures_and_what_was_not_run() -> None:
    out = io.StringIO()
    print_report(report(1e-7, 9e-6), Console(file=out, width=160))
    text = out.getvalue()
    assert "TP1 PP1 CP1 DP1" in text and "9.0e-06" in text and "within the tolerance 1e-05" in text
    assert "not run: TP3 PP1 CP1 DP1: 3 does not divide" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 0}, "0 processes"),
        ({"dtype": "float16"}, "dtype 'float16' is unknown; choose one of float32, bfloat16"),
        ({"model": "/nowhere"}, "holds no config.json"),
    ],
)
def test_settings_that_make_no_sense_end_with_code_2(arguments, message, capsys) -> None:
    assert command.check_loss(**arguments) == 2
    assert message in capsys.readouterr().err
