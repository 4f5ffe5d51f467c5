"""The order of prompts: endless shuffled epochs with an exact state.

Every epoch is a permutation that depends on the seed and the epoch alone, so the state is a position. A prompt that was
drawn and not trained (an abort, a crash) is returned with `requeue` and precedes fresh prompts, as does the rewrite of a prompt
whose group was filtered.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.data.injection import SEPARATOR, Injection
from megatron_dapo.types import FilterDecision

STATE_VERSION = 1


class PromptStream:
    """An endless sequence of prompt ids in which every epoch has each id exactly once.

    Args:
        prompt_ids: of the data set, unique, in its order.
        seed: of the shuffles.
        max_epochs: number of epochs; None: endless.
        injection: of rewrites of prompts; None: none.
    """

    def __init__(
        self,
        prompt_ids: Sequence[str],
        seed: int,
        max_epochs: int | None = None,
        injection: Injection | None = None,
    ) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self._known = frozenset(self._prompt_ids)
        if not self._prompt_ids:
            raise ValueError("a prompt stream needs at least one prompt")
        if len(self._known) != len(self._prompt_ids):
            num_repeated = len(self._prompt_ids) - len(self._known)
            raise ValueError(
                f"{num_repeated} of {len(self._prompt_ids)} prompt ids are repeated: de-duplicate the data"
            )
        if max_epochs is not None and max_epochs < 1:
            raise ValueError(f"max_epochs must be at least 1 or None, got {max_epochs}")
        self._injection = injection
        if injection is not None:
            self._known |= injection.rewrite_ids
        self._seed = seed
        self._max_epochs = max_epochs
        self._fingerprint = fingerprint(self._prompt_ids)
        self._requeued: deque[str] = deque()
        self._epoch = 0
        self._position = 0  # prompts of this epoch drawn so far
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> int:
        """Number of epochs before the current one."""
        return self._epoch

    @property
    def num_drawn(self) -> int:
        """Fresh prompts drawn since the beginning; requeued ones are not counted again."""
        return self._epoch * len(self._prompt_ids) + self._position

    @property
    def num_requeued(self) -> int:
        """Prompts that were returned and come before fresh ones."""
        return len(self._requeued)

    def next(self) -> str | None:
        """Return the next prompt id, requeued ones first and in their order; None after `max_epochs`."""
        if self._requeued:
            return self._requeued.popleft()
        if self._position == len(self._order):
            # Requeued prompts may still come later, so the end of the data is not final.
            if self._epoch + 1 == self._max_epochs:
                return None
            self._epoch += 1
            self._position = 0
            self._order = self._shuffled(self._epoch)
        visit = self.num_drawn
        self._position += 1
        prompt_id = self._prompt_ids[self._order[self._position - 1]]
        return prompt_id if self._injection is None else self._injection.at_visit(prompt_id, visit)

    def requeue(self, prompt_id: str) -> None:
        """Return a prompt that was drawn and not trained."""
        if prompt_id not in self._known:
            raise ValueError(f"prompt {prompt_id!r} is not of this data set ({len(self._prompt_ids)} prompts)")
        self._requeued.append(prompt_id)

    def judged(self, prompt_id: str, decision: FilterDecision, num_held: int) -> None:
        """Learn how the filter decided on a prompt's group; its rewrite comes next where the injection has one.

        `num_held` is the number of rewrites drawn that still may be trained.
        """
        if self._injection is None:
            return
        num_waiting = sum(name in self._injection.rewrite_ids for name in self._requeued)
        rewrite = self._injection.in_place_of(prompt_id, decision, num_held + num_waiting, self.num_drawn)
        if rewrite is not None:
            self._requeued.append(rewrite)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state; its size does not depend on the data set."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self._fingerprint,
            "num_prompts": len(self._prompt_ids),
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "requeued": list(self._requeued),
            **({} if self._injection is None else {"injection": self._injection.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. ValueError, and no change, if it is of other data or another seed."""
        self._check_state(state)
        self._requeued = deque(state["requeued"])
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._shuffled(self._epoch)
        if self._injection is not None and "injection" in state:
            self._injection.load_state_dict(state["injection"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"prompt stream state has version {state.get('version')}, this program reads {STATE_VERSION}"
            )
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the checkpoint's prompt stream is of another data set: saved with {state['num_prompts']} prompts "
                f"(hash {state['fingerprint']}), now {len(self._prompt_ids)} prompts (hash {self._fingerprint}). "
                "Use the same data files, template and length limit, or start the data order afresh"
            )
        if state["seed"] != self._seed:
            raise ValueError(f"the checkpoint's prompt stream has seed {state['seed']}, the configuration {self._seed}")
        unknown = [prompt_id for prompt_id in state["requeued"] if prompt_id not in self._known]
        if unknown and all(name.partition(SEPARATOR)[0] in self._known for name in unknown):
            raise ValueError(
                f"the checkpoint's prompt stream holds {len(unknown)} rewrites of prompts, such as {unknown[0]!r}, that this run "
                "does not have: resume with the data.injection.templates of the checkpoint"
            )
        is_in_range = 0 <= state["position"] <= len(self._prompt_ids) and state["epoch"] >= 0
        if unknown or not is_in_range:
            raise ValueError(
                f"damaged prompt stream state: epoch {state['epoch']}, position {state['position']} of "
                f"{len(self._prompt_ids)}, unknown requeued prompts {unknown[:3]}"
            )

    def _shuffled(self, epoch: int) -> list[int]:
        # A string seed is hashed by SHA-512: unlike hash(), the same in every process and Python version.
        order = list(range(len(self._prompt_ids)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def fingerprint(prompt_ids: Sequence[str]) -> str:
    """Return a hash of a data set's prompts and their order."""
    return hashlib.sha256("\n".join(prompt_ids).encode()).hexdigest()[:16]
