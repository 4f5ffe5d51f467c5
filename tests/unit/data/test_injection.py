from __future__ import annotations

import random
import re

import pytest

from megatron_dapo.config.data_schema import InjectionConfig
from megatron_dapo.data.injection import HARDER, TEMPLATE, TEMPLATES, Injection, injection_of, rewrites
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.types import Prompt

TEXT = "Tom has 81 stamps. Tom sells 2. How many stamps does Tom have? Answer: $Answer"


def prompt(name: str = "a", answer: str = "79", role: str = "user") -> Prompt:
    messages = ({"role": "system", "content": "Be brief."}, {"role": role, "content": TEXT})
    return Prompt(name, messages, (1,), answer, extra={"index": 3})


class Letters:
    """A tokenizer with one token a letter."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


PLAIN = PromptTemplate(Letters(), "plain")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_rewrite_changes_the_users_turn_and_keeps_answer_and_problem(template: str) -> None:
    [one] = rewrites([prompt()], [template], PLAIN, 500, seed=0)["a"]
    assert one.prompt_id == f"a~{template}" and one.answer == "79"
    assert one.messages[0] == prompt().messages[0] and one.messages[1]["role"] == "user"
    text = one.messages[1]["content"]
    assert text != TEXT and one.token_ids == PLAIN.render(one.messages)
    # Every word of the problem is there, in its order, numbers unchanged.
    assert " ".join(text.lower().split()).endswith(" ".join(TEXT.lower().split()))
    assert one.extra == {"index": 3, TEMPLATE: template}


def test_a_hint_is_never_right_and_needs_a_whole_number() -> None:
    for seed in range(200):
        [one] = rewrites([prompt(answer="-7")], ["wrong_hint"], PLAIN, 500, seed)["a"]
        hint = re.match(r"A colleague is sure that the answer is (-?\d+)\.", one.messages[-1]["content"])
        assert int(hint[1]) != -7
    for template in ("wrong_hint", "answer_range"):
        assert rewrites([prompt(answer="1/2"), prompt("b", answer="x")], [template], PLAIN, 500, 0) == {}


def test_a_range_holds_the_answer_at_every_place() -> None:
    places = set()
    for seed in range(200):
        [one] = rewrites([prompt(answer="-7")], ["answer_range"], PLAIN, 500, seed)["a"]
        found = re.match(r"The answer is one of the numbers from (-?\d+) to (-?\d+)\.", one.messages[-1]["content"])
        assert int(found[2]) - int(found[1]) == 9
        places.add(-7 - int(found[1]))
    assert places == set(range(10))


def test_long_rewrites_and_prompts_without_a_users_turn_are_left_out() -> None:
    assert rewrites([prompt()], ["distractor"], PLAIN, len(TEXT), 0) == {}
    assert rewrites([prompt(role="assistant")], list(TEMPLATES), PLAIN, 500, 0) == {}
    known = "distractor, wrong_hint, noise, answer_range"
    with pytest.raises(ValueError, match=f"unknown injection template 'hint': choose among {known}"):
        rewrites([prompt()], ["hint"], PLAIN, 500, 0)


def test_equal_seeds_give_equal_rewrites_whatever_the_other_prompts_are() -> None:
    alone = rewrites([prompt("b")], list(TEMPLATES), PLAIN, 500, 7)["b"]
    assert rewrites([prompt("a"), prompt("b")], list(TEMPLATES), PLAIN, 500, 7)["b"] == alone
    assert rewrites([prompt("b")], list(TEMPLATES), PLAIN, 500, 8)["b"] != alone


def test_the_share_of_rewrites_follows_rate_and_ramp() -> None:
    ids = {"a": {"x": "a~x", "y": "a~y"}}
    config = InjectionConfig(when="visit", rate=0.25, ramp_prompts=1000)
    injection = Injection(ids, config, seed=1, batch_groups=8)
    chosen = [injection.at_visit("a", visit) for visit in range(5000)]
    shares = [
        sum(name != "a" for name in chosen[start:end]) / (end - start)
        for start, end in ((0, 500), (500, 1000), (1000, 5000))
    ]
    assert shares == pytest.approx([0.0625, 0.1875, 0.25], abs=0.035)
    assert chosen.count("a~x") == pytest.approx(chosen.count("a~y"), rel=0.2)
    assert {injection.at_visit("b", visit) for visit in range(100)} == {"b"}


def test_a_resumed_stream_chooses_the_same_rewrites_and_takes_them_back() -> None:
    prompts = [prompt(name) for name in "abcdefgh"]
    config = InjectionConfig(templates=tuple(HARDER), when="visit", rate=0.5)
    injection, by_id = injection_of(prompts, config, PLAIN, 500, 3, 8)

    def stream() -> PromptStream:
        return PromptStream([one.prompt_id for one in prompts], 3, injection=injection)

    whole, first = stream(), stream()
    expected = [whole.next() for _ in range(40)]
    assert 8 < sum("~" in name for name in expected) < 32
    assert {name for name in expected if "~" in name} <= by_id.keys()
    assert [name.split("~")[0] for name in expected] == [
        plain.next() for plain in [PromptStream([one.prompt_id for one in prompts], 3)] for _ in range(40)
    ]
    seen = [first.next() for _ in range(13)]
    injected = next(name for name in seen if "~" in name)
    first.requeue(injected)
    second = stream()
    second.load_state_dict(first.state_dict())
    assert [second.next() for _ in range(28)] == [injected, *expected[13:]]
    without = PromptStream([one.prompt_id for one in prompts], 3)
    with pytest.raises(
        ValueError, match="holds 1 rewrites of prompts, such as .*resume with the data.injection.templates"
    ):
        without.load_state_dict(first.state_dict())


def test_templates_are_those_of_the_configuration() -> None:
    from typing import get_args

    from megatron_dapo.config.data_schema import InjectionTemplate

    assert set(get_args(InjectionTemplate)) == set(TEMPLATES)
    assert TEMPLATES["noise"]("", "1", random.Random(0)) == ""
