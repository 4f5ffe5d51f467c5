from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from megatron_dapo.ablation.grid import BEFORE_TRAINING, read_grid
from megatron_dapo.ablation.pictures import PICTURES, aligned, draw
from megatron_dapo.ablation.report import HEADER, paired_difference, rows, write_report
from megatron_dapo.ablation.runs import CURVES
from tests.unit.ablation.conftest import GRID

WriteGrid = Callable[..., Path]


def record(variant: str, seed: int, after: list[float], **changes: Any) -> dict[str, Any]:
    steps = [1, 2, 3, 4]
    values = {
        "variant": variant,
        "seed": seed,
        "commit": "abc",
        "layout": "TP1",
        "protocol": "p",
        "before": [0.0] * len(after),
        "after": after,
        "evaluated": {"train_step": [0, 4], "accuracy": [0.0, sum(after) / len(after)]},
        "train_step": steps,
        "generated_tokens": [100, 100, 100, 200],
        "train_seconds": 3.0,
        "curves": {name: [0.1 * seed * step for step in steps] for name in CURVES},
    }
    return {**values, **changes}


BASE = [record("GRPO", 1, [0.0, 0.5, 1.0]), record("GRPO", 2, [0.0, 0.0, 1.0]), record("GRPO", 3, [0.5, 0.5, 0.5])]
BETTER = [
    record("+ clip-higher", 1, [0.5, 0.5, 1.0]),
    record("+ clip-higher", 2, [0.25, 0.25, 1.0]),
    record("+ clip-higher", 3, [0.5, 1.0, 0.5]),
]


def by_seed(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {each["seed"]: each for each in records}


def test_a_difference_is_of_pairs_and_its_interval_is_students() -> None:
    found = paired_difference(by_seed(BETTER), by_seed(BASE))
    means = torch.tensor([0.5 / 3, 0.5 / 3, 0.5 / 3], dtype=torch.float64)
    assert found.num_pairs == 3
    assert found.over_seeds.value == pytest.approx(float(means.mean()))
    assert found.over_seeds.high - found.over_seeds.low < 1e-12  # every seed has the same mean difference
    # Over problems the means over seeds are 0.25, 0.25 and 0: of other problems less would be known.
    assert found.over_problems.value == pytest.approx(float(means.mean()))
    assert found.over_problems.low == pytest.approx(0.0) and found.over_problems.high == pytest.approx(0.25)
    assert found.verdict == "better"


def test_the_interval_of_seeds_by_its_formula() -> None:
    base = by_seed([record("a", seed, [0.0]) for seed in (1, 2, 3)])
    other = by_seed([record("b", seed, [value]) for seed, value in ((1, 0.1), (2, 0.4), (3, 0.1))])
    found = paired_difference(other, base)
    reach = 4.302652729911275 * math.sqrt(0.03 / 3)  # t of 0.975 with two degrees of freedom, variance 0.03
    assert (found.over_seeds.low, found.over_seeds.high) == pytest.approx((0.2 - reach, 0.2 + reach))
    assert found.verdict == "no effect shown"
    worse = paired_difference(base, by_seed([record("b", seed, [0.5 + seed / 1e3]) for seed in (1, 2, 3)]))
    assert worse.verdict == "worse"


def test_pairs_share_seed_and_protocol() -> None:
    assert paired_difference(by_seed(BETTER[:1]), by_seed(BASE[1:])) is None
    assert paired_difference(by_seed(BETTER), by_seed(BASE[1:2])).verdict == "one seed: no interval"
    unlike = [{**each, "protocol": "q"} for each in BETTER]
    with pytest.raises(ValueError, match="GRPO, seed 1: evaluated by unlike protocols"):
        paired_difference(by_seed(unlike), by_seed(BASE))


def test_rows_say_what_each_variant_comes_to(write_grid: WriteGrid) -> None:
    table = [dict(zip(HEADER, row, strict=True)) for row in rows(read_grid(write_grid()), [*BASE, *BETTER])]
    assert [row["effect"] for row in table] == ["baseline", "better"]
    assert table[1]["difference"] == "+0.167"
    assert table[0]["seeds"] == "3" and table[0]["generated tokens"] == "0 k" and table[0]["train time"] == "3 s"
    # The last quarter of four steps is the last one: 0.4, 0.8 and 1.2 with the seeds.
    assert float(table[0]["entropy"]) == pytest.approx(0.8)
    assert float(table[0]["accuracy while training"]) == pytest.approx(0.25 * (1 + 2 + 3 + 4) * 0.2)
    assert table[1]["its difference"] == "+0.000"


def test_the_policy_before_training_may_be_the_baseline(write_grid: WriteGrid) -> None:
    grid = read_grid(write_grid(GRID.replace("seeds", f'baseline = "{BEFORE_TRAINING}"\nseeds', 1)))
    table = [dict(zip(HEADER, row, strict=True)) for row in rows(grid, BASE)]
    assert [row["variant"] for row in table] == [BEFORE_TRAINING, "GRPO", "+ clip-higher"]
    assert table[0]["held-out accuracy"] == "0.000" and table[0]["entropy"] == ""
    assert table[1]["difference"] == "+0.444" and table[1]["its difference"] == ""
    assert table[2]["seeds"] == "0"


def test_documents_hold_table_method_and_what_is_missing(write_grid: WriteGrid, tmp_path: Path) -> None:
    grid = read_grid(write_grid(GRID.replace("seeds", 'question = "Is 1 < 2?"\nseeds', 1)))
    write_report(grid, [*BASE[:2], BETTER[0]], tmp_path / "report", "megatron-dapo ablate grid.toml")
    markdown, page = ((tmp_path / "report" / name).read_text() for name in ("report.md", "report.html"))
    assert "| + clip-higher | 1 |" in markdown and "one seed: no interval" in markdown
    for text in (markdown, page):
        assert "No effect is shown at this scale for: + clip-higher." in text
        assert "Not on record yet: + clip-higher, seed 2." in text
        assert "Commit: abc." in text
    assert "Is 1 &lt; 2?" in page
    assert 'src="' not in page and 'href="http' not in page  # one file


def test_points_are_means_as_far_as_every_curve_goes() -> None:
    x, columns = aligned([([1, 2, 3], [0.1, None, 0.3]), ([1, 2, 5, 6], [0.3, 0.4, 0.5, 0.6])])
    assert (x, columns) == ([1.0, 4.0], [(0.1, 0.3), (0.3, 0.5)])


def test_pictures_are_svg_with_a_line_for_each_variant() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in .venv-plots (make test runs this file with it)")
    documents = draw({"GRPO": by_seed(BASE), "+ clip-higher": by_seed(BETTER), "no run": {}})
    assert set(documents) == set(PICTURES)
    for text in documents.values():
        ElementTree.fromstring(text)
        assert "GRPO" in text and "+ clip-higher" in text and "no run" not in text
    assert documents == draw({"GRPO": by_seed(BASE), "+ clip-higher": by_seed(BETTER)})
