"""--layout says the whole parallel section."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config import layout_overrides, load_config


@pytest.mark.parametrize(
    ("text", "sizes", "processes"),
    [
        ("tp1pp2", {"pipeline": 2}, 2),
        ("TP2 PP2", {"tensor": 2, "pipeline": 2}, 4),
        ("tp2dp2sp", {"tensor": 2, "sequence_parallel": True}, 4),
        ("pp2vpp2-cp2", {"pipeline": 2, "virtual_pipeline": 2, "context": 2}, 4),
        ("dp2ep2", {"expert": 2}, 2),
        ("tp2ep2etp1sp", {"tensor": 2, "expert": 2, "expert_tensor": 1, "sequence_parallel": True}, 2),
    ],
)
def test_layout(text: str, sizes: dict[str, object], processes: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "m"\n[data]\ntrain_paths = ["t"]\n[parallel]\ntensor = 8\n')
    config = load_config(recipe, layout_overrides(text)).config
    base = {
        "tensor": 1,
        "pipeline": 1,
        "virtual_pipeline": 1,
        "context": 1,
        "expert": 1,
        "expert_tensor": 0,
        "sequence_parallel": False,
    }
    got = {name: getattr(config.parallel, name) for name in base}
    assert got == {**base, **sizes}
    assert config.parallel.num_processes == processes


@pytest.mark.parametrize("text", ["", "tp", "2tp", "tp2tp2", "tp2xy3", "sp2", "tp2!"])
def test_what_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match="layout"):
        layout_overrides(text)
