"""An order of prompts: short ones first in the first epoch, then shuffled. data.order = "prompt_order.py:easy_first"."""

import random
from collections.abc import Sequence

from megatron_dapo import Prompt


def easy_first(prompts: Sequence[Prompt], epoch: int) -> list[int]:
    """Return every index once. It depends only on its arguments: a resumed run asks again."""
    order = list(range(len(prompts)))
    if epoch == 0:
        return sorted(order, key=lambda index: len(prompts[index].token_ids))
    random.Random(epoch).shuffle(order)
    return order
