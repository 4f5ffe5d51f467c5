"""docs/new_family.md: a family that the package does not know, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.models.families import FAMILIES
from tests.families.made_up import FAMILY, MODEL_TYPE

ROPE = {"rope_type": "default", "rope_theta": 1000.0}
FIELDS = {
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
    "sliding_window": 7,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LAYOUTS = ({"tensor": 2, "pipeline": 2}, {"context": 2, "tensor": 2, "sequence_parallel": True})


def test_a_family_next_to_the_package_trains_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' Qwen2 has such windows, under its own model_type."""
    import actor_checks
    from launcher import require_parity, target_in

    monkeypatch.setitem(actor_checks.MODELS, "made-up", ("Qwen2", FIELDS))
    actor_checks.write_reference(tmp_path, "made-up")
    config = json.loads((tmp_path / "made-up.json").read_text())
    config |= {"model_type": MODEL_TYPE, "architectures": ["MadeUpForCausalLM"]}
    (tmp_path / "made-up.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type 'made_up' is not supported"):
        parse_architecture(config)
    monkeypatch.setitem(FAMILIES, MODEL_TYPE, FAMILY)
    assert parse_architecture(config).local.layers == {0, 2}
    cases = [{"model": "made-up", "layout": layout} for layout in LAYOUTS]
    close, equal = ("logprob", "gradient", "loss", "norm"), ("targets", "not_applied")
    worker = target_in(str(Path(__file__).with_name("made_up.py")), "parity")
    require_parity(worker, cases, str(tmp_path), close, equal)
