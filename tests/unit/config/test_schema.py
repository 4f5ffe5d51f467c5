"""Properties of the schema as a whole: every field is documented and read by code."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import megatron_dapo
from megatron_dapo.cli.main import app
from megatron_dapo.cli.recipes import shipped_files
from megatron_dapo.config import config_from_dict
from megatron_dapo.config.loader import read_toml
from megatron_dapo.config.schema import leaf_fields, section_types
from megatron_dapo.rewards.verifiers.verifier import SET_PRESETS
from megatron_dapo.telemetry.alarms import RUN_ALARMS

if sys.version_info >= (3, 11):  # tomllib is in the standard library from here on
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(megatron_dapo.__file__).parent


SECTIONS = {path.rpartition(".")[2] for path in section_types() if path}
CLASSES = {
    model.__name__: path.rpartition(".")[2] for path, models in section_types().items() if path for model in models
}


def section_of(node: ast.expr | None, aliases: dict[str, str]) -> str | None:
    """The section an expression is: `config.rollout`, `self._rollout`, a name bound to one, or one spelled like it."""
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_") if node.attr.lstrip("_") in SECTIONS else None
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id if node.id in SECTIONS else None)
    return None


def aliases_in(function: ast.AST) -> dict[str, str]:
    """Names bound to a section in a function: annotated parameters, and assignments of one or several sections."""
    aliases = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) in CLASSES:
            aliases[node.arg] = CLASSES[ast.unparse(node.annotation)]
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            both = (
                isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
            )
            pairs = zip(target.elts, value.elts, strict=True) if both else [(target, value)]
            for name, expression in pairs:
                section = section_of(expression, {})
                if isinstance(name, ast.Name) and section and isinstance(expression, ast.Attribute):
                    aliases[name.id] = section
    return aliases


def fields_read_in(tree: ast.AST) -> set[str]:
    """section.field for every attribute of a section that is read, and the plain names of all attributes and names."""
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            aliases = aliases_in(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and (section := section_of(node.value, aliases)):
                    read.add(f"{section}.{node.attr}")
    return read


@pytest.fixture(scope="module")
def read() -> set[str]:
    """Collect the fields that the package reads, without config/ (which states them) and cli/ (which shows them)."""
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("config", "cli")]
    found = set().union(*(fields_read_in(ast.parse(path.read_text(encoding="utf-8"))) for path in files))
    return found | settings_of_presets()


def settings_of_presets() -> set[str]:
    """section.field for every setting of a verifier's preset: its process gets them as plain values."""
    found = set()
    for preset in SET_PRESETS:
        files = [preset, "service"] if preset in ("judge", "remote", "reward_model") else [preset]
        texts = [(PACKAGE / "rewards" / "verifiers" / f"{name}.py").read_text(encoding="utf-8") for name in files]
        found |= {f"{preset}.{name}" for text in texts for name in re.findall(r'\bown(?:\.get\(|\[)"(\w+)"', text)}
    return found


# Read through a property of Config, or a function of config/, that turns "0 or empty: derived" into a value.
THROUGH = {
    "checkpoint.output_dir": "checkpoint_dir",
    "evaluation.max_response_tokens": "evaluation_response_tokens",
    "algorithm.loss.aggregation_length": "aggregation_length",
    "parallel.num_processes": "require_valid",  # the number of processes must be the requested one
    "critic.parallel.num_processes": "num_critic_processes",
    "critic.megatron": "critic_megatron",
    "optimizer.warmup_unit": "schedule_steps",
    "critic.warmup_train_steps": "policy_starts_at",
    "sglang.fp8_step0_max_mean_abs": "mismatch_gate",
    "model.family": "load_config",  # it adds the family
    "model.lora.sync": "serves_adapters",
    "value_pretraining.train_paths": "pretraining_config",
    "value_pretraining.max_steps": "pretraining_config",
}
THROUGH |= {one.limit: "RUN_ALARMS" for one in RUN_ALARMS if isinstance(one.limit, str)}  # Its table names these keys.
# Their whole purpose is to let the validator accept something.
CONFIRMATIONS = (
    "sglang.allow_quantization_bias",
    "reward.allow_overlong_filter_and_punishment",
)


def test_fields_are_read_by_code(read: set[str]) -> None:
    names = {path: ".".join(path.split(".")[-2:]) for path in leaf_fields() if path not in CONFIRMATIONS}
    unread = [path for path, name in names.items() if name not in read and THROUGH.get(path) not in read]
    assert not unread, "they are never read: remove them or use them"


def test_reading_is_found_through_names() -> None:
    tree = ast.parse(
        "def f(settings: RewardConfig, config):\n"
        "    p, q = config.parallel, config.rollout.top_k\n"
        "    other = config.data\n"
        "    return settings.timeout_seconds, p.tp_size, other.template, config.run.seed, q.group_size, x.clip_grad\n"
    )
    found = {name for name in fields_read_in(tree) if "." in name}
    assert found == {"reward.timeout_seconds", "rollout.top_k", "parallel.tp_size", "data.template", "run.seed"}


@pytest.mark.parametrize("path", CONFIRMATIONS)
def test_confirmation_is_read_by_the_validator(path: str) -> None:
    """By a rule of its section, or by one between sections."""
    texts = [file.read_text(encoding="utf-8") for file in (PACKAGE / "config").glob("*.py")]
    assert any(f"not self.{path.rpartition('.')[2]}" in text or f" or {path}" in text for text in texts)


def test_every_field_is_documented() -> None:
    for section, model in [(path, model) for path, models in section_types().items() for model in models]:
        assert model.__doc__, f"section {section} has no docstring"
        for name, field in model.model_fields.items():
            assert field.description and len(field.description) > 10, f"{section}.{name} has no docstring"


def test_resolved_shortcuts() -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"train_paths": ["t"]},
        "run": {"output_dir": "runs/x"},
        "rollout": {"max_response_tokens": 77},
    }
    config = config_from_dict(tree)
    assert config.checkpoint_dir == Path("runs/x/checkpoints")
    assert (config.evaluation_response_tokens, config.aggregation_length, config.num_processes) == (77, 77, 1)
    own = {
        **tree,
        "checkpoint": {"output_dir": "/ck"},
        "evaluation": {"max_response_tokens": 5},
        "parallel": {"tp_size": 2, "cp_size": 2},
    }
    config = config_from_dict({**own, "algorithm": {"loss": {"aggregation_length": 9}}})
    assert config.checkpoint_dir == Path("/ck")
    assert (config.evaluation_response_tokens, config.aggregation_length, config.num_processes) == (5, 9, 4)


def accepted(schema: dict, node: Any, value: Any) -> bool:
    """Whether a value fits the parts of JSON schema that pydantic writes."""
    if "$ref" in node:
        return accepted(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], value)
    if "anyOf" in node and not any(accepted(schema, one, value) for one in node["anyOf"]):
        return False
    if value not in node.get("enum", [value]) or value != node.get("const", value):
        return False
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "null": value is None,
    }
    if not kinds[node["type"]] if "type" in node else False:
        return False
    if isinstance(value, dict) and "properties" in node:
        known = node["properties"]
        return all(
            accepted(schema, known[key], each) if key in known else node.get("additionalProperties", True) is not False
            for key, each in value.items()
        )
    return not isinstance(value, list) or all(accepted(schema, node.get("items", {}), each) for each in value)


def test_the_schema_for_editors_fits_every_shipped_recipe_and_explains_its_keys() -> None:
    schema = json.loads(CliRunner().invoke(app, ["recipes", "schema"]).stdout)
    recipes = [path for name, path in shipped_files().items() if path.suffix == ".toml" and "grids/" not in name]
    assert len(recipes) > 20
    for path in recipes:
        assert accepted(schema, schema, read_toml(path)), path
    for text in ('[algorithm]\nloss = "gspo"\n', "[algorithm.loss]\nclip_ratio_high = 0.3\n"):
        assert accepted(schema, schema, tomllib.loads(text))
    for text in ("[rollout]\ngroup_sise = 8\n", '[rollout]\ngroup_size = "8"\n', "[algorithm.loss]\nclip = 1.0\n"):
        assert not accepted(schema, schema, tomllib.loads(text))
    keys = [key for section in schema["$defs"].values() for key in section["properties"].values()]
    assert len(keys) > 300 and all(key["description"] for key in keys)
