"""How many examples a property test draws."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """Return `number` in `make test-all`, which sets MEGATRON_DAPO_EXAMPLES=all, else a fifth of it and at least 10.

    A mistake that a property test can find, it mostly finds within the first examples; the rest finds rare ones.
    """
    return number if os.environ.get("MEGATRON_DAPO_EXAMPLES") == "all" else max(10, number // 5)
