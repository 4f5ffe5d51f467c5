"""Given responses as they are read, and the run that learns them."""

from __future__ import annotations

import pytest

from megatron_dapo.data.examples import load_examples
from megatron_dapo.data.files import count_rows
from megatron_dapo.data.template import PromptTemplate, StopTokens

CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
PAIR = {"prompt": "3+3?", "response": "6"}
TURNED = (  # a template whose turns end with a token that is not the tokenizer's end of sequence
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def load(paths, tokenizer, template="chat", limits=(64, 64), stops=None):
    stop_tokens = StopTokens(tuple(stops or [tokenizer.eos_token_id]), {}, True)
    return load_examples(paths, PromptTemplate(tokenizer, template), stop_tokens, *limits)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_both_kinds_of_rows_are_the_policys_own_tokens(suffix: str, write, tokenizer) -> None:
    path = write(f"rows{suffix}", [PAIR, CHAT, PAIR])
    examples = load([path], tokenizer)
    assert count_rows(path) == 3, "equal rows count once below"
    for (name, example), question, answer in zip(examples.items(), ("3+3?", "2+2?"), "64", strict=True):
        prompt = tokenizer.decode(list(example.prompt.token_ids))
        assert prompt == f"<user>{question}<assistant>", "as the policy is asked"
        assert tokenizer.decode(example.token_ids[:-1].tolist()) == answer
        assert example.token_ids[-1] == tokenizer.eos_token_id and name == example.prompt.prompt_id


def test_a_response_ends_as_the_template_ends_a_turn(write, make_tokenizer) -> None:
    tokenizer = make_tokenizer(TURNED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    end = tokenizer.convert_tokens_to_ids("<end>")
    path = write("rows.jsonl", [PAIR])
    (example,) = load([path], tokenizer, stops=[tokenizer.eos_token_id, end]).values()
    assert example.token_ids[-1] == end
    (example,) = load([path], tokenizer, "plain", stops=[tokenizer.eos_token_id, end]).values()
    assert example.token_ids[-1] == tokenizer.eos_token_id, "no template puts anything after a plain text"


def test_examples_that_are_too_long_are_left_out_whole(write, tokenizer) -> None:
    path = write("rows.jsonl", [PAIR, {"prompt": "a", "response": "b" * 9}, {"prompt": "c" * 30, "response": "d"}])
    (example,) = load([path], tokenizer, limits=(20, 9)).values()  # nine characters and the stop token are ten
    assert tokenizer.decode(example.token_ids[:-1].tolist()) == "6"
    with pytest.raises(
        ValueError, match=r"all 3 examples are longer than data.max_prompt_tokens = 20 or rollout.max_resp"
    ):
        load([path], tokenizer, limits=(20, 1))


BAD_ROWS = {
    "no response": ({"prompt": "1+1?"}, "line 1: no response; a row has prompt and response, or messages"),
    "nothing": ({"text": "1+1?"}, "line 1: no prompt and no response"),
    "empty response": ({"prompt": "1+1?", "response": " "}, "response must be a text, got ' '"),
    "a number": ({"prompt": "1+1?", "response": 2}, "response must be a text, got 2"),
    "the user last": (
        {"messages": [*CHAT["messages"], {"role": "user", "content": "?"}]},
        "the last one is the user's",
    ),
    "one turn": ({"messages": CHAT["messages"][1:]}, "got 1 of which the last one is the assistant's"),
    "no messages": ({"messages": [{"role": "user"}]}, "must be a list of chat messages"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_named(name: str, write, tokenizer) -> None:
    row, words = BAD_ROWS[name]
    with pytest.raises(ValueError, match="rows.jsonl") as error:
        load([write("rows.jsonl", [row])], tokenizer)
    assert words in str(error.value)
