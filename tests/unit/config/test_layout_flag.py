"""--layout says the whole parallel section."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config import layout_overrides, load_config


@pytest.mark.parametrize(
    ("text", "sizes", "processes"),
    [
        ("tp1pp2", {"pp_size": 2}, 2),
        ("TP2 PP2", {"tp_size": 2, "pp_size": 2}, 4),
        ("tp2dp2sp", {"tp_size": 2, "sequence_parallel": True}, 4),
        ("pp2vpp2-cp2", {"pp_size": 2, "vpp_size": 2, "cp_size": 2}, 4),
        ("dp2ep2", {"ep_size": 2}, 2),
        ("tp2ep2etp1sp", {"tp_size": 2, "ep_size": 2, "etp_size": 1, "sequence_parallel": True}, 2),
    ],
)
def test_layout(text: str, sizes: dict[str, object], processes: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "m"\n[data]\ntrain_paths = ["t"]\n[parallel]\ntp_size = 8\n')
    config = load_config(recipe, layout_overrides(text)).config
    base = {
        "tp_size": 1,
        "pp_size": 1,
        "vpp_size": 1,
        "cp_size": 1,
        "ep_size": 1,
        "etp_size": 0,
        "sequence_parallel": False,
    }
    got = {name: getattr(config.parallel, name) for name in base}
    assert got == {**base, **sizes}
    assert config.parallel.num_processes == processes


@pytest.mark.parametrize("text", ["", "tp", "2tp", "tp2tp2", "tp2xy3", "sp2", "tp2!"])
def test_invalid_layouts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layout"):
        layout_overrides(text)
