"""How many examples a property test draws, and how many cases of many run outside `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def examples(number: int) -> int:
    """Return `number` in `make test-all`, which sets MEGATRON_DAPO_EXAMPLES=all, else a fifth of it and at least 10.

    A mistake that a property test can find, it mostly finds within the first examples; the rest finds rare ones.
    """
    return number if os.environ.get("MEGATRON_DAPO_EXAMPLES") == "all" else max(10, number // 5)


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: the first cases for every run of the tests, the others marked long."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=() if index < number else pytest.mark.long) for index, each in enumerate(values)]
