from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from tests.unit.environments import user_environments

FILE = Path(user_environments.__file__)


def check(name: str, *options: str) -> tuple[int, dict[str, dict]]:
    result = CliRunner().invoke(app, ["environment", "check", f"{FILE}:{name}", "--num-tasks", "6", "--json", *options])
    return result.exit_code, {row["name"]: row for row in json.loads(result.stdout)} if result.stdout else {}


def problems(rows: dict[str, dict]) -> dict[str, str]:
    return {name: row["text"] for name, row in rows.items() if not row["is_ok"]}


def test_a_good_environment_passes():
    code, rows = check("Calculator")
    assert code == 0 and not problems(rows)
    assert "tools: calculate, wait" in rows["environment"]["text"]
    assert " ok" in rows["calls"]["text"] and " error" in rows["calls"]["text"]  # "1 / 0" and "word" are tried, too


def test_one_that_differs_with_the_same_seed_is_refused():
    code, rows = check("Unrepeatable")
    assert code == 1 and list(problems(rows)) == ["repeatable"]
    assert "task 0 with the same seed and actions, reply 0" in rows["repeatable"]["text"]


def test_one_that_raises_is_refused_with_the_place():
    code, rows = check("RaisesInReset")
    assert code == 1 and list(problems(rows)) == ["lost"]
    assert f"12 of 12 episodes; 12 times: OSError: no data base ({FILE.name}, line" in rows["lost"]["text"]


def test_what_cannot_be_loaded_is_one_line():
    result = CliRunner().invoke(app, ["environment", "check", f"{FILE}:nothing"])
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
