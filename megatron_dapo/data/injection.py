"""Adversarial prompt injection: harder and easier rewrites of the training prompts that keep the gold answer.

If dynamic sampling drops a group, a rewrite of its prompt comes next: a harder one if all responses were right, an
easier one if all were wrong. Alternatively, a harder rewrite replaces the prompt itself at some visits.

A template only changes the text of the last user turn; system prompt and chat template stay the same. A rewrite is a
separate prompt with its own id ("<id>~wrong_hint"), so its responses form separate groups and are never compared with
those to the original. Evaluation only uses original prompts.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from megatron_dapo.config.data_schema import InjectionConfig
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.types import FilterDecision, Prompt

SEPARATOR = "~"  # separates the id of a prompt and the name of a template
TEMPLATE = "injection"  # key of Prompt.extra that names a rewrite's template
_FADING = 0.98  # decay of templates' counts per rewrite group: the policy changes, so no template is given up for good

_ASIDES = (
    "Note that the shop next door is closed on Sundays.",
    "By the way, a train leaves the station every 15 minutes.",
    "For your information, the room has 3 windows and 2 doors.",
    "Last year the weather was colder than it is now.",
)


def distractor(text: str, answer: str, rng: random.Random) -> str | None:
    """Put a true and irrelevant statement before the problem."""
    return f"{rng.choice(_ASIDES)}\n\n{text}"


def wrong_hint(text: str, answer: str, rng: random.Random) -> str | None:
    """Put a confident but wrong answer before the problem; None if the gold answer is not a whole number."""
    number = _whole_number(answer)
    if number is None:
        return None
    wrong = number + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10))
    return f"A colleague is sure that the answer is {wrong}.\n\n{text}"


def noise(text: str, answer: str, rng: random.Random) -> str | None:
    """Double a tenth of the spaces and capitalize a tenth of the words; words with non-letters stay unchanged."""

    def changed(word: str) -> str:
        return word.upper() if word.isalpha() and rng.random() < 0.1 else word

    parts = re.split(r"( )", text)
    return "".join(part * (1 + (rng.random() < 0.1)) if part == " " else changed(part) for part in parts)


def answer_range(text: str, answer: str, rng: random.Random) -> str | None:
    """Put ten consecutive numbers that include the answer before the problem; None if it is not a whole number."""
    number = _whole_number(answer)
    if number is None:
        return None
    first = number - rng.randrange(10)
    return f"The answer is one of the numbers from {first} to {first + 9}.\n\n{text}"


def _whole_number(answer: str) -> int | None:
    return int(answer) if re.fullmatch(r"-?\d{1,15}", answer.strip()) else None


HARDER = {"distractor": distractor, "wrong_hint": wrong_hint, "noise": noise}
EASIER = {"answer_range": answer_range}
TEMPLATES = {**HARDER, **EASIER}


def rewrites(
    prompts: Sequence[Prompt],
    templates: Sequence[str],
    template: PromptTemplate,
    max_prompt_tokens: int,
    seed: int,
) -> dict[str, tuple[Prompt, ...]]:
    """Return prompt id -> its rewrites, one per template that fits the prompt and keeps it short enough.

    `template` renders their messages. Equal seeds give equal rewrites, whatever the other prompts are. ValueError for a
    template that does not exist.
    """
    if unknown := [name for name in templates if name not in TEMPLATES]:
        raise ValueError(f"unknown injection template {unknown[0]!r}: choose among {', '.join(TEMPLATES)}")
    shortened = {}
    for prompt in prompts:
        own = [_rewrite(prompt, name, template, seed) for name in templates]
        short = tuple(one for one in own if one is not None and len(one.token_ids) <= max_prompt_tokens)
        if short:
            shortened[prompt.prompt_id] = short
    return shortened


def _rewrite(prompt: Prompt, name: str, template: PromptTemplate, seed: int) -> Prompt | None:
    *before, last = prompt.messages
    rng = random.Random(f"{seed}/{prompt.prompt_id}/{name}")
    text = TEMPLATES[name](last["content"], prompt.answer, rng)
    if last["role"] != "user" or text is None:
        return None
    messages = (*before, {**last, "content": text})
    return replace(
        prompt,
        prompt_id=f"{prompt.prompt_id}{SEPARATOR}{name}",
        messages=messages,
        token_ids=template.render(messages),
        extra={**prompt.extra, TEMPLATE: name},
    )


class Injection:
    """Chooses rewrites; see `data.injection` in the configuration.

    Every choice depends only on the seed, the visits so far and the state, so a resumed run makes the same choices.

    Args:
        rewrites: prompt id -> template -> id of its rewrite.
        config: when a rewrite comes, and at which rate: of the visits, or of a batch's `batch_groups` groups.
        seed: seed of the choices.
        batch_groups: number of groups in a batch.
    """

    def __init__(
        self, rewrites: Mapping[str, Mapping[str, str]], config: InjectionConfig, seed: int, batch_groups: int
    ) -> None:
        self._rewrites = rewrites
        self._template_of = {name: template for own in rewrites.values() for template, name in own.items()}
        self._at_visits = config.when == "visit"
        self._rate, self._ramp_prompts = config.rate, config.ramp_prompts
        self._seed = seed
        self._batch_groups = batch_groups
        self._num_replaced = 0  # groups replaced by a rewrite
        self._outcomes: dict[str, list[float]] = {}  # template -> groups kept and groups filtered, faded

    @property
    def rewrite_ids(self) -> Set[str]:
        """Ids of all rewrites."""
        return self._template_of.keys()

    def at_visit(self, prompt_id: str, visit: int) -> str:
        """Return the id to generate from at visit number `visit` of the run, from 0: the prompt's own or a rewrite's."""
        own = self._rewrites.get(prompt_id, {})
        rng = random.Random(f"{self._seed}/{visit}/injection")
        if not own or not self._at_visits or rng.random() >= self._rate_at(visit):
            return prompt_id
        return rng.choice(list(own.values()))

    def in_place_of(self, prompt_id: str, decision: FilterDecision, num_held: int, visit: int) -> str | None:
        """Record the filter's decision on a group; return the id of the rewrite to sample in its place, or None.

        Args:
            prompt_id: the group's prompt.
            decision: dynamic sampling's decision, see `FilterDecision`.
            num_held: rewrites waiting for their responses or their batch; never more than a batch may have.
            visit: number of visits so far.
        """
        if template := self._template_of.get(prompt_id):
            self._outcomes.setdefault(template, [0.0, 0.0])
            self._outcomes = {name: [_FADING * count for count in two] for name, two in self._outcomes.items()}
            self._outcomes[template][0 if decision == "kept" else 1] += 1
        wanted = {"all_right": HARDER, "all_wrong": EASIER}.get(decision, {})
        own = {template: name for template, name in self._rewrites.get(prompt_id, {}).items() if template in wanted}
        has_room = num_held < math.floor(self._rate_at(visit) * self._batch_groups)
        if not own or self._at_visits or not has_room:
            return None
        self._num_replaced += 1
        # Thompson sampling: a template is chosen with the probability that its groups are the ones that are kept.
        rng = random.Random(f"{self._seed}/{self._num_replaced}/template")
        share = {}
        for template in sorted(own):
            kept, filtered = self._outcomes.get(template, (0.0, 0.0))
            share[template] = rng.betavariate(1 + kept, 1 + filtered)
        return own[max(share, key=share.__getitem__)]

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state."""
        return {"num_replaced": self._num_replaced, "outcomes": {name: [*two] for name, two in self._outcomes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._num_replaced = state["num_replaced"]
        self._outcomes = {name: [*two] for name, two in state["outcomes"].items()}

    def _rate_at(self, visit: int) -> float:
        return self._rate * (min(1.0, visit / self._ramp_prompts) if self._ramp_prompts else 1.0)


def injection_of(
    prompts: Sequence[Prompt],
    config: InjectionConfig,
    template: PromptTemplate,
    max_prompt_tokens: int,
    seed: int,
    batch_groups: int,
) -> tuple[Injection, dict[str, Prompt]]:
    """Return the choice among the rewrites of `prompts`, and the rewrites by id; see `rewrites` and `Injection`."""
    by_parent = rewrites(prompts, config.templates, template, max_prompt_tokens, seed)
    ids = {parent: {one.extra[TEMPLATE]: one.prompt_id for one in own} for parent, own in by_parent.items()}
    by_id = {one.prompt_id: one for own in by_parent.values() for one in own}
    return Injection(ids, config, seed, batch_groups), by_id
