"""DAPO, VAPO and T-PPO on Megatron-core: exact losses under any layout, verified weight sync, exact resume.

The Python interface is imported on first use, so that `import megatron_dapo` costs nothing: docs/python.md describes it.
"""

from typing import TYPE_CHECKING, Any

from megatron_dapo._version import __version__ as __version__

if TYPE_CHECKING:
    from megatron_dapo.algorithms.advantages import AdvantageInputs as AdvantageInputs
    from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs as PolicyLossInputs
    from megatron_dapo.api.recipe import Recipe as Recipe
    from megatron_dapo.api.runs import Response as Response
    from megatron_dapo.api.runs import RunResult as RunResult
    from megatron_dapo.api.runs import TrainingError as TrainingError
    from megatron_dapo.api.runs import evaluate as evaluate
    from megatron_dapo.api.runs import generate as generate
    from megatron_dapo.api.runs import train as train
    from megatron_dapo.config.rules import ConfigError as ConfigError
    from megatron_dapo.hooks import Callback as Callback
    from megatron_dapo.hooks import HookError as HookError
    from megatron_dapo.models.family import Family as Family
    from megatron_dapo.rewards.result import RewardResult as RewardResult
    from megatron_dapo.rewards.result import RewardSample as RewardSample
    from megatron_dapo.types import Group as Group
    from megatron_dapo.types import Prompt as Prompt

# Public name -> the module that defines it.
_PUBLIC = {
    "AdvantageInputs": "algorithms.advantages",
    "Callback": "hooks",
    "ConfigError": "config.rules",
    "Family": "models.family",
    "Group": "types",
    "HookError": "hooks",
    "PolicyLossInputs": "algorithms.policy_loss_inputs",
    "Prompt": "types",
    "Recipe": "api.recipe",
    "Response": "api.runs",
    "RewardResult": "rewards.result",
    "RewardSample": "rewards.result",
    "RunResult": "api.runs",
    "TrainingError": "api.runs",
    "evaluate": "api.runs",
    "generate": "api.runs",
    "train": "api.runs",
}
__all__ = [
    "__version__",
    "AdvantageInputs",
    "Callback",
    "ConfigError",
    "Family",
    "Group",
    "HookError",
    "PolicyLossInputs",
    "Prompt",
    "Recipe",
    "Response",
    "RewardResult",
    "RewardSample",
    "RunResult",
    "TrainingError",
    "evaluate",
    "generate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megatron_dapo' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"megatron_dapo.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
