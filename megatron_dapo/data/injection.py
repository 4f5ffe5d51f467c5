"""Adversarial prompt injection: harder variants of the training prompts, whose gold answer is known because it is unchanged.

A template changes the text of the last user turn alone; system prompt and chat template stay as they are. A variant is a prompt
of its own, with an id of its own ("<id>~wrong_hint"), so that its responses form groups of their own and are never compared
with those to the original. Evaluation sees original prompts only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.types import Prompt

SEPARATOR = "~"  # between the id of a prompt and the name of a template
TEMPLATE = "injection"  # key of Prompt.extra that names a variant's template

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
    """Put a confident and wrong answer before the problem; None where the gold answer is no whole number."""
    if not re.fullmatch(r"-?\d{1,15}", answer.strip()):
        return None
    wrong = int(answer) + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10))
    return f"A colleague is sure that the answer is {wrong}.\n\n{text}"


def noise(text: str, answer: str, rng: random.Random) -> str | None:
    """Double a tenth of the spaces and write a tenth of the words in capitals; words with other characters than letters stay."""

    def changed(word: str) -> str:
        return word.upper() if word.isalpha() and rng.random() < 0.1 else word

    parts = re.split(r"( )", text)
    return "".join(part * (1 + (rng.random() < 0.1)) if part == " " else changed(part) for part in parts)


TEMPLATES = {
    "distractor": distractor,
    "wrong_hint": wrong_hint,
    "noise": noise,
}


def variants(
    prompts: Sequence[Prompt],
    templates: Sequence[str],
    template: PromptTemplate,
    max_prompt_tokens: int,
    seed: int,
) -> dict[str, tuple[Prompt, ...]]:
    """Return prompt id -> its variants, one a template that fits the prompt and keeps it short enough.

    `template` renders their messages. Equal seeds give equal variants, whatever the other prompts are. ValueError for a template
    that does not exist.
    """
    if unknown := [name for name in templates if name not in TEMPLATES]:
        raise ValueError(f"unknown injection template {unknown[0]!r}: choose among {', '.join(TEMPLATES)}")
    found = {}
    for prompt in prompts:
        own = [_variant(prompt, name, template, seed) for name in templates]
        short = tuple(one for one in own if one is not None and len(one.token_ids) <= max_prompt_tokens)
        if short:
            found[prompt.prompt_id] = short
    return found


def _variant(prompt: Prompt, name: str, template: PromptTemplate, seed: int) -> Prompt | None:
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


@dataclass(frozen=True)
class Injection:
    """Choice of a variant at each visit of a prompt.

    The share of visits that get one grows linearly from 0 to `rate` over the first `ramp_prompts` visits. The choice depends on
    the seed and the number of the visit alone, so that a resumed run chooses alike.
    """

    variants: Mapping[str, Sequence[str]]  # prompt id -> ids of its variants
    rate: float
    ramp_prompts: int
    seed: int

    def chosen(self, prompt_id: str, visit: int) -> str:
        """Return the id to generate from at visit number `visit` of the run, from 0: the prompt's own or a variant's."""
        own = self.variants.get(prompt_id, ())
        rng = random.Random(f"{self.seed}/{visit}/injection")
        ramp = min(1.0, visit / self.ramp_prompts) if self.ramp_prompts else 1.0
        if not own or rng.random() >= self.rate * ramp:
            return prompt_id
        return rng.choice(list(own))


def injection_of(
    prompts: Sequence[Prompt],
    templates: Sequence[str],
    rate: float,
    ramp_prompts: int,
    seed: int,
    template: PromptTemplate,
    max_prompt_tokens: int,
) -> tuple[Injection, dict[str, Prompt]]:
    """Return the choice among the variants of `prompts`, and the variants by id; see `variants` and `Injection`."""
    by_parent = variants(prompts, templates, template, max_prompt_tokens, seed)
    ids = {parent: tuple(one.prompt_id for one in own) for parent, own in by_parent.items()}
    by_id = {one.prompt_id: one for own in by_parent.values() for one in own}
    return Injection(ids, rate, ramp_prompts, seed), by_id
