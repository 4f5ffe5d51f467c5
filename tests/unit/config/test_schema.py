"""Properties of the schema as a whole: every field is documented and read by code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatron_dapo
from megatron_dapo.config import config_from_dict
from megatron_dapo.config.schema import leaf_fields, section_types

PACKAGE = Path(megatron_dapo.__file__).parent


@pytest.fixture(scope="module")
def code() -> str:
    """The package without config/ (which states the fields) and cli/ (which shows them)."""
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("config", "cli")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


# Read through a property of Config, or a function of config/, that turns "0 or empty: from elsewhere" into a value.
THROUGH = {
    "checkpoint.folder": "checkpoint_folder",
    "evaluation.max_response_tokens": "evaluation_response_tokens",
    "algorithm.aggregation_length": "aggregation_length",
    "parallel.num_processes": "validate|require_valid",  # the launcher's count is checked against it
    "optimizer.warmup_unit": "warmup_unit|schedule_steps",
}
# Their whole purpose is to let the validator accept something.
CONFIRMATIONS = ("rollout.accept_bias", "reward.confirm_both_overlong")


@pytest.mark.parametrize("path", [path for path in leaf_fields() if path not in CONFIRMATIONS])
def test_field_is_read_by_code(path: str, code: str) -> None:
    *_, section, field = path.split(".")
    pattern = THROUGH.get(path, rf"{section}\.{field}")
    assert re.search(rf"\b({pattern})\b", code), f"{path} is never read as {section}.{field}: remove it or use it"


@pytest.mark.parametrize("path", CONFIRMATIONS)
def test_confirmation_is_read_by_the_validator(path: str) -> None:
    assert path.rpartition(".")[2] in (PACKAGE / "config" / "validator.py").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    for section, model in section_types().items():
        assert model.__doc__, f"section {section} has no docstring"
        for name, field in model.model_fields.items():
            assert field.description and len(field.description) > 10, f"{section}.{name} has no docstring"


def test_resolved_shortcuts() -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"train_paths": ["t"]},
        "run": {"folder": "runs/x"},
        "rollout": {"max_response_tokens": 77},
    }
    config = config_from_dict(tree)
    assert config.checkpoint_folder == Path("runs/x/checkpoints")
    assert (config.evaluation_response_tokens, config.aggregation_length, config.num_processes) == (77, 77, 1)
    own = {
        **tree,
        "checkpoint": {"folder": "/ck"},
        "evaluation": {"max_response_tokens": 5},
        "parallel": {"tensor": 2, "context": 2},
    }
    config = config_from_dict({**own, "algorithm": {"aggregation_length": 9}})
    assert config.checkpoint_folder == Path("/ck")
    assert (config.evaluation_response_tokens, config.aggregation_length, config.num_processes) == (5, 9, 4)
