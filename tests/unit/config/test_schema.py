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
def attributes_read() -> set[str]:
    """Every attribute name that code outside config/ reads."""
    files = [path for path in PACKAGE.rglob("*.py") if "config" not in path.relative_to(PACKAGE).parts[:1]]
    return {name for path in files for name in re.findall(r"\.([a-z_0-9]+)\b", path.read_text(encoding="utf-8"))}


# Read through a property or function of config/ that turns "0 or empty: take it from elsewhere" into a value.
THROUGH = {
    "checkpoint.folder": "checkpoint_folder",
    "evaluation.max_response_tokens": "evaluation_response_tokens",
    "algorithm.aggregation_length": "aggregation_length",
    "parallel.num_processes": "num_processes",
    "optimizer.warmup_unit": "warmup_unit",
}


@pytest.mark.parametrize("path", list(leaf_fields()))
def test_field_is_read_by_code(path: str, attributes_read: set[str]) -> None:
    name = THROUGH.get(path, path.rpartition(".")[2])
    assert name in attributes_read, f"{path} is never read: remove it or use it"


def test_every_field_is_documented() -> None:
    for section, model in section_types().items():
        assert model.__doc__, f"section {section} has no docstring"
        for name, field in model.model_fields.items():
            assert field.description and len(field.description) > 10, f"{section}.{name} has no docstring"


def test_resolved_shortcuts() -> None:
    tree = {"model": {"path": "m"}, "data": {"train_paths": ["t"]}, "run": {"folder": "runs/x"}, "rollout": {"max_response_tokens": 77}}
    config = config_from_dict(tree)
    assert config.checkpoint_folder == Path("runs/x/checkpoints")
    assert (config.evaluation_response_tokens, config.aggregation_length, config.num_processes) == (77, 77, 1)
    own = {**tree, "checkpoint": {"folder": "/ck"}, "evaluation": {"max_response_tokens": 5}, "parallel": {"tensor": 2, "context": 2}}
    config = config_from_dict({**own, "algorithm": {"aggregation_length": 9}})
    assert config.checkpoint_folder == Path("/ck")
    assert (config.evaluation_response_tokens, config.aggregation_length, config.num_processes) == (5, 9, 4)
