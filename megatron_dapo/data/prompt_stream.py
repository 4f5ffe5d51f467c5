"""The order of prompts: endless shuffled epochs with an exact state.

Every epoch is a permutation that depends only on the seed and the epoch, so the state is a position. Every epoch has
the same prompts, or prompts generated from its number (`FreshIds`). A prompt that was drawn but not trained (an abort,
a crash) is returned with `requeue` and precedes fresh prompts, like the rewrite of a prompt whose group was filtered.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dapo.data.injection import SEPARATOR, Injection
from megatron_dapo.hooks import HookError, load_hook, named
from megatron_dapo.types import FilterDecision, Prompt

STATE_VERSION = 1
# The end of errors about a checkpoint whose prompts are others.
AFRESH = (
    "or start a new run, with a new order, from its weights: `megatron-dapo export RUN/checkpoints/step_... DIR`, then "
    "model.path = DIR and another run.output_dir"
)


class FreshIds(Protocol):
    """Ids of prompts that are generated anew for each epoch."""

    def ids(self, epoch: int) -> Sequence[str]:
        """Return the ids of an epoch's prompts."""

    def has(self, prompt_id: str) -> bool:
        """Return True if an id is of a later epoch than the first one."""


@dataclass(frozen=True)
class SourceShare:
    """The prompts of one source, and its share of the draws relative to the other sources'."""

    name: str
    weight: float
    prompt_ids: tuple[str, ...]  # the first epoch's
    fresh: FreshIds | None = None  # ids of the later epochs; None: the same ones

    def ids(self, epoch: int) -> Sequence[str]:
        """Return the ids of an epoch, in their order before the shuffle."""
        return self.fresh.ids(epoch) if self.fresh and epoch else self.prompt_ids


class FunctionOrder:
    """Epochs in the order that a user's function gives them (data.order).

    Args:
        path: path of the function (prompts, epoch) -> indices of all prompts.
        prompts: the data set's prompts, in its order.
    """

    def __init__(self, path: str, prompts: Sequence[Prompt]) -> None:
        self._path = path
        self._function = load_hook(path, "data.order")
        self._prompts = tuple(prompts)

    def indices(self, epoch: int) -> list[int]:
        """Return the order of an epoch. HookError if the function fails, or leaves out or repeats a prompt."""
        with named(self._path, "data.order"):
            order = [int(index) for index in self._function(self._prompts, epoch)]
        if sorted(order) != list(range(len(self._prompts))):
            missing = len(set(range(len(self._prompts))) - set(order))
            raise HookError(
                f"hook {self._path!r} (data.order) returned {len(order)} indices for epoch {epoch} that leave out {missing} of "
                f"{len(self._prompts)} prompts; return every index from 0 to {len(self._prompts) - 1} once"
            )
        return order


class _Passes:
    """The epochs of one source, shuffled or in the user's order, and the position in them."""

    def __init__(self, share: SourceShare, seed: str, own_order: FunctionOrder | None = None) -> None:
        if not share.prompt_ids or not share.weight > 0:
            raise ValueError(
                f"source {share.name!r} has {len(share.prompt_ids)} prompts and weight {share.weight}; both must be above 0"
            )
        self.share = share
        self._seed = seed
        self._own_order = own_order
        self.move(0, 0)

    def move(self, epoch: int, position: int, num_before: int | None = None) -> None:
        """Move to the position after `position` prompts of `epoch`.

        `num_before`: prompts in earlier epochs; by default these are equally long.
        """
        self.epoch, self.position = epoch, position
        self._num_before = epoch * len(self.share.prompt_ids) if num_before is None else num_before
        self._ids = self.share.ids(epoch)
        self._order = self._ordered(epoch)

    def state(self) -> dict[str, Any]:
        """Return the position, as the arguments of `move`."""
        place = {"epoch": self.epoch, "position": self.position}
        return {**place, "num_before": self._num_before} if self.share.fresh else place

    def _ordered(self, epoch: int) -> list[int]:
        if self._own_order is not None:
            return self._own_order.indices(epoch)
        # A string seed is hashed by SHA-512: unlike hash(), the same in every process and Python version.
        order = list(range(len(self.share.ids(epoch))))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def hash_of_order(self, epoch: int) -> str | None:
        """Return a hash of the user's order of an epoch; None without one."""
        if self._own_order is None:
            return None
        return hashlib.sha256(",".join(map(str, self._ordered(epoch))).encode()).hexdigest()[:16]

    @property
    def num_drawn(self) -> int:
        return self._num_before + self.position

    def is_exhausted(self, max_epochs: int | None) -> bool:
        return self.position == len(self._order) and self.epoch + 1 == max_epochs

    def due(self) -> float:
        """Return the time of the next draw, on a clock where each source draws `weight` times per unit."""
        return (self.num_drawn + 0.5) / self.share.weight

    def next(self) -> str:
        if self.position == len(self._order):
            self.move(self.epoch + 1, 0, self.num_drawn)
        self.position += 1
        return self._ids[self._order[self.position - 1]]


class PromptStream:
    """An endless sequence of prompt ids in which every epoch has each id exactly once.

    Args:
        prompt_ids: of the data set, unique, in its order.
        seed: of the shuffles.
        max_epochs: number of epochs; None: endless.
        injection: of rewrites of prompts; None: none.
        sources: shares of the draws; None: all prompts are one source.
        order: the user's order, used instead of shuffles if all prompts are one source; None: none.

    With several sources, each has separate epochs, and every draw takes the source that is furthest behind its share.
    This uses no random numbers, and the state is the position in each source. A source that has completed `max_epochs`
    leaves its share to the others. For a source with `fresh` prompts, each epoch has different ids.
    """

    def __init__(
        self,
        prompt_ids: Sequence[str],
        seed: int,
        max_epochs: int | None = None,
        injection: Injection | None = None,
        sources: Sequence[SourceShare] | None = None,
        order: FunctionOrder | None = None,
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
        shares = sources or [SourceShare("", 1.0, self._prompt_ids)]
        if sorted(name for share in shares for name in share.prompt_ids) != sorted(self._prompt_ids):
            raise ValueError("the sources of a prompt stream must hold each of its prompts once")
        assert order is None or len(shares) == 1, "an order is of all prompts"
        self._passes = [_Passes(share, f"{seed}/{share.name}" if share.name else str(seed), order) for share in shares]

    @property
    def epoch(self) -> int:
        """Number of epochs before the current one; with several sources, the smallest of their numbers."""
        return min(source.epoch for source in self._passes)

    @property
    def num_drawn(self) -> int:
        """Fresh prompts drawn since the beginning; requeued ones are not counted again."""
        return sum(source.num_drawn for source in self._passes)

    @property
    def num_requeued(self) -> int:
        """Prompts that were returned and come before fresh ones."""
        return len(self._requeued)

    def next(self) -> str | None:
        """Return the next prompt id, requeued ones first and in their order; None after `max_epochs`."""
        if self._requeued:
            return self._requeued.popleft()
        open_sources = [source for source in self._passes if not source.is_exhausted(self._max_epochs)]
        if not open_sources:
            return None  # requeued prompts may still come later, so the end of the data is not final
        visit = self.num_drawn
        prompt_id = min(open_sources, key=_Passes.due).next()
        return prompt_id if self._injection is None else self._injection.at_visit(prompt_id, visit)

    def requeue(self, prompt_id: str) -> None:
        """Return a prompt that was drawn and not trained."""
        if not self._knows(prompt_id):
            raise ValueError(f"prompt {prompt_id!r} is not of this data set ({len(self._prompt_ids)} prompts)")
        self._requeued.append(prompt_id)

    def _knows(self, prompt_id: str) -> bool:
        fresh = (source.share.fresh for source in self._passes)
        return prompt_id in self._known or any(one is not None and one.has(prompt_id) for one in fresh)

    def judged(self, prompt_id: str, decision: FilterDecision, num_held: int) -> None:
        """Record the filter's decision on a prompt's group; if the injection has a rewrite of it, that comes next.

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
            **self._positions(),
            "requeued": list(self._requeued),
            **({} if self._injection is None else {"injection": self._injection.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state` was taken. ValueError, and no change, if it has other data or another seed."""
        self._check_state(state)
        self._requeued = deque(state["requeued"])
        for source, place in zip(self._passes, _places_of(state)):
            source.move(**place)
        if self._injection is not None and "injection" in state:
            self._injection.load_state_dict(state["injection"])

    def _positions(self) -> dict[str, Any]:
        """Return the sources' state: for one source its position, for several a list with names and weights."""
        if not self._passes[0].share.name:
            place = self._passes[0].state()
            order = self._passes[0].hash_of_order(place["epoch"])
            return place if order is None else {**place, "order": order}
        return {
            "sources": [{"name": one.share.name, "weight": one.share.weight, **one.state()} for one in self._passes]
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"prompt stream state has version {state.get('version')}, this program reads {STATE_VERSION}"
            )
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the checkpoint's prompt stream is of another data set: saved with {state['num_prompts']} prompts "
                f"(hash {state['fingerprint']}), now {len(self._prompt_ids)} prompts (hash {self._fingerprint}). "
                f"Use the same data files, template and length limit, {AFRESH}"
            )
        if state["seed"] != self._seed:
            raise ValueError(f"the checkpoint's prompt stream has seed {state['seed']}, the configuration {self._seed}")
        saved = [(one["name"], one["weight"]) for one in state.get("sources", ())]
        own = [(source.share.name, source.share.weight) for source in self._passes if source.share.name]
        if saved != own:
            raise ValueError(
                f"the checkpoint's prompt stream draws from the sources {saved or 'of one file list'}, the configuration from "
                f"{own or 'one file list'}: resume with the data.sources of the checkpoint, {AFRESH}"
            )
        if state.get("order") != (None if own else self._passes[0].hash_of_order(state["epoch"])):
            raise ValueError(
                f"the checkpoint's prompt stream had another order of epoch {state['epoch']} than data.order gives now: resume with "
                "the function that wrote it; it must depend only on prompts and epoch"
            )
        for one, source in zip(state.get("sources", ()), self._passes):
            if one["epoch"] and ("num_before" in one) != bool(source.share.fresh):
                raise ValueError(
                    f"the checkpoint's prompt stream {'has other' if 'num_before' in one else 'repeats its'} problems of source "
                    f"{one['name']!r} in each epoch: resume with the key fresh of data.sources that it was written with"
                )
        unknown = [prompt_id for prompt_id in state["requeued"] if not self._knows(prompt_id)]
        if unknown and all(name.partition(SEPARATOR)[0] in self._known for name in unknown):
            raise ValueError(
                f"the checkpoint's prompt stream holds {len(unknown)} rewrites of prompts, such as {unknown[0]!r}, that this run "
                "does not have: resume with the data.injection.templates of the checkpoint"
            )
        places = [(p["epoch"], p["position"], s.share) for p, s in zip(_places_of(state), self._passes)]
        if unknown or any(e < 0 or not 0 <= p <= len(share.ids(e)) for e, p, share in places):
            found = ", ".join(f"epoch {e}, position {p} of {len(share.ids(max(e, 0)))}" for e, p, share in places)
            raise ValueError(f"damaged prompt stream state: {found}, unknown requeued prompts {unknown[:3]}")


def _places_of(state: Mapping[str, Any]) -> list[dict[str, int]]:
    keys = ("epoch", "position", "num_before")
    return [{key: one[key] for key in keys if key in one} for one in state.get("sources", (state,))]


def fingerprint(prompt_ids: Sequence[str]) -> str:
    """Return a hash of a data set's prompts and their order."""
    return hashlib.sha256("\n".join(prompt_ids).encode()).hexdigest()[:16]
