"""What megatron-core's description of a module says, in either of its two forms.

Up to 0.16 a module is described by a `ModuleSpec`; later versions describe some (MLP, experts) by a `functools.partial` of
what builds them, with the same submodules as a keyword.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def class_of(description: Any) -> Any:
    """The class that is built: of a ModuleSpec, a partial of a class or of its builder method, or the class itself."""
    if isinstance(description, ModuleSpec):
        return description.module
    if isinstance(description, functools.partial):
        return getattr(description.func, "__self__", description.func)
    return description


def submodules_of(description: Any) -> Any:
    """What the module is made of, which may be changed; None for one that is not described further."""
    if isinstance(description, functools.partial):
        return description.keywords.get("submodules")
    return getattr(description, "submodules", None)
