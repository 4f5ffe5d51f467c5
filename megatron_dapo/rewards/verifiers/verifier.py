"""Verifiers by name: the presets, or a user's own reward function as "package.module:function" or "path/to/file.py:function".

A user's function is called with (response, answer), with one `RewardSample` if it has a single parameter, or with a list of them
if that parameter is called `samples`; then it returns a list of results. A result is one of

- `bool`: right or wrong, rewarded by the pool's reward map;
- `float`, `int` or a scalar of numpy or torch: its own reward; right from 0.5 on (return a `RewardResult` to say otherwise);
- a `RewardResult`: score, named parts, extracted answer, is_correct;
- `dict` with `accuracy` (0 or 1) and optionally `reward`, `extracted`, `detail`, or with the fields of a `RewardResult`;
- a `Score` (its outcome decides: only "correct" is right).

Functions written for TRL and for verl are called as those call them, see `rewards.verifiers.adapters`.

With `async def`, many answers are awaited at the same time; see `reward.concurrency`.

Nothing here imports torch: this module is loaded by every verifier process.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from megatron_dapo.hooks import import_place
from megatron_dapo.rewards.result import RewardResult, VerifierResult
from megatron_dapo.rewards.verifiers.adapters import adapted

USER_CORRECT_THRESHOLD = 0.5
BATCH_PARAMETER = "samples"  # name of the only parameter of a function that takes a list of samples
MAX_DETAIL_CHARACTERS = 65536
_RESULT_FIELDS = {field.name for field in fields(RewardResult)}


@dataclass(frozen=True)
class Verifier:
    """A loaded verifier. `version` is stored with every result: scores of two versions are not comparable."""

    name: str
    version: str
    score: Callable[..., Any]  # (response, answer) or RewardSample -> VerifierResult; a list for batches
    gold_problem: Callable[[str], str | None]
    takes_sample: bool = False
    score_later: Callable[..., Awaitable[Any]] | None = None  # instead of `score`, of an `async def`
    is_batched: bool = False  # both take a list of samples and return as many results, see `results_of`


# Trailing characters of a response that each preset reads (None: all). Said here too because a pool cuts responses
# without loading the module, which may import sympy.
PRESETS: Mapping[str, int | None] = {"dapo": 300, "dapo_boxed": 300, "lenient": None}
# Presets with settings: a module each, whose `load(own settings, pool's settings)` returns its Verifier.
SET_PRESETS = ("code", "format", "judge", "remote", "reward_model")


def load_verifier(name: str, settings: Mapping[str, Any] | None = None) -> Verifier:
    """Return the verifier called `name`; `settings`, which presets with settings need, are those of a pool.

    Raises ValueError for an unknown name or a function that cannot be imported.
    """
    if name in PRESETS:
        return _load_preset(name)
    if name in SET_PRESETS:
        # Imported here, so that a worker of one preset starts without another's libraries.
        module = importlib.import_module(f"megatron_dapo.rewards.verifiers.{name}")
        assert settings is not None
        return module.load(settings["preset"], settings)
    if ":" in name:
        return _load_user_function(name)
    raise ValueError(
        f"unknown verifier {name!r}: choose one of {', '.join(sorted([*PRESETS, *SET_PRESETS]))}, or name your own function as "
        "'package.module:function' or 'path/to/file.py:function'"
    )


def _load_preset(name: str) -> Verifier:
    module = importlib.import_module(f"megatron_dapo.rewards.verifiers.{name}")
    assert module.TAIL_CHARACTERS == PRESETS[name], f"{name}: reads {module.TAIL_CHARACTERS}, not {PRESETS[name]}"
    return Verifier(name, f"{name}-{module.REVISION}", module.score, module.gold_problem)


def _load_user_function(path: str) -> Verifier:
    module_name, _, function_name = path.rpartition(":")
    try:
        module = import_place(module_name)
    except Exception as error:  # importing runs arbitrary code
        fix = f"; {fix_of(error)}" if fix_of(error) else ""
        words = f"cannot import module {module_name!r} ({type(error).__name__}: {error}){fix}"
        raise ValueError(f"verifier {path!r}: {words}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"verifier {path!r}: {module_name} has no function {function_name!r}; it has {functions}")
    try:
        function = adapted(function)
    except ValueError as error:
        raise ValueError(f"verifier {path!r}: {error}") from error
    takes_sample = _number_of_arguments(path, function) == 1
    is_batched = takes_sample and next(iter(inspect.signature(function).parameters)) == BATCH_PARAMETER
    convert = list if is_batched else result_of

    def score(*arguments: Any) -> Any:
        return convert(function(*arguments))

    async def score_later(*arguments: Any) -> Any:
        return convert(await function(*arguments))

    def gold_problem(gold: str) -> str | None:
        # The function defines the form of an answer. Only an empty one is rejected, if the function gets nothing else.
        return None if takes_sample or gold.strip() else "it is empty"

    version, is_async = f"{path}@{_source_hash(module)}", inspect.iscoroutinefunction(function)
    return Verifier(path, version, score, gold_problem, takes_sample, score_later if is_async else None, is_batched)


def fix_of(error: BaseException) -> str:
    """Return what mends the usual errors in a verifier process, which sees few variables of the environment; "" for others."""
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name}, or write path/to/file.py:function for a file"
    name = error.args[0] if isinstance(error, KeyError) and error.args else ""
    if isinstance(name, str) and re.fullmatch("[A-Z][A-Z0-9_]*", name):
        return f'verifier processes get the variables that are named: reward.environment = ["{name}"]'
    return ""


def _number_of_arguments(path: str, function: Any) -> int:
    """Return the number of parameters of a user's function, 1 or 2. ValueError for any other number."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in
        return 2
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    required = sum(one.default is one.empty for one in positional)
    has_star = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if required <= 2 and (has_star or len(positional) >= 2):
        return 2
    if required <= 1 == len(positional):
        return 1
    names = ", ".join(one.name for one in positional) or "nothing"
    raise ValueError(f"verifier {path!r}: it takes {names}; write it as (sample), (samples) or as (response, answer)")


def _source_hash(module: Any) -> str:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # compiled code has no source to tell versions apart
        return "unknown"
    return hashlib.sha256(source.encode()).hexdigest()[:12]


# ---- what a user's function may return


def result_of(result: Any) -> VerifierResult:
    """Convert a user's return value. Raises ValueError for any other type or value."""
    if is_dataclass(result) and not isinstance(result, type):
        result = asdict(result)
    result = _plain(result)
    if isinstance(result, bool):  # Tested before numbers: True is an int.
        return VerifierResult("correct" if result else "wrong")
    if isinstance(result, (int, float)):
        reward = _finite(result)
        return VerifierResult("correct" if reward >= USER_CORRECT_THRESHOLD else "wrong", reward=reward)
    if isinstance(result, Mapping):
        return _result_of_mapping(result)
    raise ValueError(
        f"a reward function returns bool, int, float, RewardResult, dict or Score, not {_type_name(result)}; "
        "return float(x) of a number"
    )


def _plain(value: Any) -> Any:
    """Return a numpy or torch scalar, or an array of no dimension, as Python's number; anything else as it is."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def results_of(results: Any, expected: int) -> list[VerifierResult]:
    """Convert the return value of a function of `samples`: one result per sample. A bad result is its sample's error.

    Raises ValueError if the number of results differs.
    """
    if hasattr(results, "tolist") and getattr(results, "ndim", 0) == 1:  # numpy or torch
        results = results.tolist()
    if not isinstance(results, (list, tuple)) or len(results) != expected:
        found = len(results) if isinstance(results, (list, tuple)) else type(results).__name__
        raise ValueError(f"a reward function of {expected} samples returns a list of {expected} results; got {found}")
    return [one if isinstance(one, VerifierResult) else _own_result(one) for one in results]


def _own_result(result: Any) -> VerifierResult:
    try:
        return result_of(result)
    except Exception as error:  # whatever the conversion raises, for example on non-numbers
        return VerifierResult("error", detail={"error": f"{type(error).__name__}: {error}"[:500]})


def _result_of_fields(result: RewardResult) -> VerifierResult:
    parts = {str(name): _finite(value) for name, value in result.parts.items()}
    reward = sum(parts.values()) if result.score is None and parts else result.score
    if reward is not None and parts and abs(_finite(reward) - sum(parts.values())) > 1e-6:
        raise ValueError(f"the parts of a reward add up to {sum(parts.values()):g}, its score is {reward:g}")
    if reward is None and result.is_correct is None:
        raise ValueError("a reward has a score, parts or is_correct")
    is_correct = _finite(reward) >= USER_CORRECT_THRESHOLD if result.is_correct is None else bool(result.is_correct)
    return VerifierResult(
        "correct" if is_correct else "wrong",
        None if result.extracted is None else str(result.extracted),
        None if reward is None else _finite(reward),
        _json_detail({"parts": parts} if parts else {}),
    )


def _result_of_mapping(result: Mapping[str, Any]) -> VerifierResult:
    if not result.keys() - _RESULT_FIELDS and result.keys() & {"score", "parts", "is_correct"}:
        return _result_of_fields(RewardResult(**result))
    unknown = set(result) - {"accuracy", "reward", "outcome", "extracted", "detail"}
    if unknown or "accuracy" not in result:
        raise ValueError(
            "a reward dict has `accuracy` and optionally reward, outcome, extracted, detail, or it has the fields of a "
            f"RewardResult; got {sorted(result)}"
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
