"""Verifiers by name: the presets, or a user's own reward function as "pkg.module:function".

A user's function is called with (response, answer) and returns one of

- `bool`: right or wrong, rewarded by the pool's reward map;
- `float`: its own reward; right from 0.5 on (return a dict to say otherwise);
- `dict` with `accuracy` (0 or 1) and optionally `reward`, `extracted`, `detail`;
- a `Score` (its outcome decides: only "correct" is right).

Nothing here imports torch: this module is loaded by every verifier process.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from megatron_dapo.rewards.result import VerifierResult

USER_CORRECT_THRESHOLD = 0.5
MAX_DETAIL_CHARACTERS = 65536


@dataclass(frozen=True)
class Verifier:
    """A loaded verifier. `version` is stored with every result: scores of two versions are not comparable."""

    name: str
    version: str
    score: Callable[[str, str], VerifierResult]  # (response, answer)
    gold_problem: Callable[[str], str | None]


# Trailing characters of a response that each preset reads (None: all). Said here too because a pool cuts responses
# without loading the module, which may import sympy.
PRESETS: Mapping[str, int | None] = {"dapo": 300, "lenient": None}


def load_verifier(name: str) -> Verifier:
    """Return the verifier called `name`. Raises ValueError for an unknown name or a function that cannot be imported."""
    if name in PRESETS:
        return _load_preset(name)
    if ":" in name:
        return _load_user_function(name)
    raise ValueError(
        f"unknown verifier {name!r}: choose one of {', '.join(sorted(PRESETS))}, or name your own function as "
        "'package.module:function'"
    )


def _load_preset(name: str) -> Verifier:
    module = importlib.import_module(f"megatron_dapo.rewards.{name}")
    assert module.TAIL_CHARACTERS == PRESETS[name], f"{name}: reads {module.TAIL_CHARACTERS}, not {PRESETS[name]}"
    return Verifier(name, f"{name}-{module.REVISION}", module.score, module.gold_problem)


def _load_user_function(path: str) -> Verifier:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"verifier {path!r}: cannot import module {module_name!r} ({error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"verifier {path!r}: {module_name} has no function {function_name!r}; it has {functions}")

    def score(response: str, answer: str) -> VerifierResult:
        return result_of(function(response, answer))

    # The form of an answer is the function's own: only an empty one is refused.
    return Verifier(path, f"{path}@{_source_hash(module)}", score, lambda gold: None if gold.strip() else "it is empty")


def _source_hash(module: Any) -> str:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # compiled: there is no source to tell versions apart by
        return "unknown"
    return hashlib.sha256(source.encode()).hexdigest()[:12]


# ---- what a user's function may return


def result_of(result: Any) -> VerifierResult:
    """Convert a user's return value. Raises ValueError for any other type or value."""
    if is_dataclass(result) and not isinstance(result, type):
        result = asdict(result)
    if isinstance(result, bool):  # before numbers: True is an int
        return VerifierResult("correct" if result else "wrong")
    if isinstance(result, (int, float)):
        reward = _finite(result)
        return VerifierResult("correct" if reward >= USER_CORRECT_THRESHOLD else "wrong", reward=reward)
    if isinstance(result, Mapping):
        return _result_of_mapping(result)
    raise ValueError(f"a reward function returns bool, float, dict or Score, not {type(result).__name__}")


def _result_of_mapping(result: Mapping[str, Any]) -> VerifierResult:
    unknown = set(result) - {"accuracy", "reward", "outcome", "extracted", "detail"}
    if unknown or "accuracy" not in result:
        raise ValueError(
            f"a reward dict has `accuracy` and optionally reward, outcome, extracted, detail; got {sorted(result)}"
        )
    if result["accuracy"] not in (0, 1):
        raise ValueError(f"accuracy is 0 or 1, got {result['accuracy']!r}; a graded value belongs into `reward`")
    outcome = result.get("outcome", "correct" if result["accuracy"] else "wrong")
    if (outcome == "correct") != bool(result["accuracy"]):
        raise ValueError(f"outcome {outcome!r} contradicts accuracy {result['accuracy']}")
    reward = result.get("reward")
    extracted = result.get("extracted")
    return VerifierResult(
        outcome,
        None if extracted is None else str(extracted),
        None if reward is None else _finite(reward),
        _json_detail(result.get("detail") or {}),
    )


def _finite(reward: Any) -> float:
    reward = float(reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}: it must be finite")
    return reward


def _json_detail(detail: Any) -> Mapping[str, Any]:
    if not isinstance(detail, Mapping):
        raise ValueError(f"detail is a dict, got {type(detail).__name__}")
    try:
        size = len(json.dumps(detail, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"detail is not JSON-serializable: {error}") from error
    if size > MAX_DETAIL_CHARACTERS:
        raise ValueError(f"detail has {size} characters of JSON, at most {MAX_DETAIL_CHARACTERS} are kept")
    return dict(detail)
