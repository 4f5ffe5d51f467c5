"""What teachers read: the policy's last turn in another text, with other columns of the row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.data.teacher_prompts import TeacherPrompts, split_prompts
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.types import Prompt

# Tokens are the characters' numbers.
LETTERS: Any = SimpleNamespace(chat_template=None, encode=lambda text, **options: list(map(ord, text)))


def prompts_of(*texts: str, **fields: Any) -> TeacherPrompts:
    teachers = tuple({"name": f"t{index}", "prompt": text, **fields} for index, text in enumerate(texts))
    section = DistillationConfig.model_validate({"teachers": teachers})
    return TeacherPrompts(section, PromptTemplate(LETTERS, "plain"))


def prompt(**extra: Any) -> Prompt:
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2 {a} + 2?"})
    return Prompt("id", messages, tuple(map(ord, "policy")), "4", extra=extra, source="sums")


def read_by(prompts: TeacherPrompts, one: Prompt) -> list[str]:
    return ["".join(map(chr, prompts.of(teacher, one))) for teacher in prompts.section.teachers]


def test_columns_take_their_places_and_braces_of_the_prompt_stay() -> None:
    texts = "{prompt} It is {answer}, by {steps.first}, {steps.count} times. {}", ""
    told, plain = read_by(prompts_of(*texts), prompt(steps={"first": "{answer}", "count": 2}, a="no"))
    assert told.rstrip().endswith("2 {a} + 2? It is 4, by {answer}, 2 times. {}") and "be brief" in told
    assert plain == "policy"


def test_numbers_hold_the_prompts_of_models_that_read_others() -> None:
    prompts = prompts_of("{prompt}", "", "{answer}{prompt}")
    numbers = prompts.numbers(prompt())
    assert numbers is not None and numbers.dtype == np.int32
    first, second = split_prompts(torch.from_numpy(numbers))
    assert tuple(first.tolist()) == prompts.of(prompts.section.teachers[0], prompt())
    assert tuple(second.tolist()) == prompts.of(prompts.section.teachers[2], prompt())
    assert prompts_of("").numbers(prompt()) is None
    assert prompts_of("{prompt}", sources=("words",)).numbers(prompt()) is None
    assert prompts_of("{prompt}", url="http://host:1").numbers(prompt()) is None, "rank 0 asks servers itself"


@pytest.mark.parametrize("text", ["{prompt} {solution}", "{prompt} {steps.last}", "{prompt} {answer.first}"])
def test_a_column_that_a_row_does_not_have_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="the prompt of t0 names .*a row has only answer, prompt, steps") as error:
        prompts_of(text).require([prompt(steps={"first": 1})], 100)
    assert "\n" not in str(error.value)


def test_the_longest_prompt_is_named() -> None:
    prompts = prompts_of("{prompt} {hint}")
    short, long = prompt(hint="x"), prompt(hint="x" * 50)
    longest = len(prompts.of(prompts.section.teachers[0], long))
    prompts.require([short, long], longest)
    with pytest.raises(ValueError, match=f"has {longest} tokens, data.max_prompt_tokens is {longest - 1}.*at least {longest}"):
        prompts.require([short, long], longest - 1)
