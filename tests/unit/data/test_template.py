from __future__ import annotations

import json
import logging

import pytest

from megatron_dapo.data.dataset import load_prompts
from megatron_dapo.data.template import PromptTemplate, resolve_stop_token_ids

MESSAGES = ({"role": "user", "content": "1+1?"},)


def test_chat_template(tokenizer):
    template = PromptTemplate(tokenizer)
    ids = template.render(MESSAGES)
    text = "<user>1+1?<assistant>"
    assert list(ids) == tokenizer.encode(text, add_special_tokens=False)
    assert all(type(token) is int for token in ids)
    assert template.describe(MESSAGES) == {
        "template": "chat",
        "template_hash": template.hash,
        "token_ids": list(ids),
        "text": text,
    }


def test_plain_template_needs_no_chat_template(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=None)
    template = PromptTemplate(tokenizer, "plain")
    assert tokenizer.decode(list(template.render(MESSAGES))) == "1+1?\n"


def test_a_tokenizer_without_chat_template_is_refused_with_the_way_out(make_tokenizer):
    with pytest.raises(ValueError, match="choose the template 'plain'"):
        PromptTemplate(make_tokenizer(chat_template=None))


def test_unknown_templates_are_refused(tokenizer):
    with pytest.raises(ValueError, match="choose one of chat, plain"):
        PromptTemplate(tokenizer, "qwen")


def test_the_hash_tells_templates_apart(tokenizer, make_tokenizer):
    hashes = [
        PromptTemplate(tokenizer).hash,
        PromptTemplate(tokenizer, "plain").hash,
        PromptTemplate(tokenizer, options={"enable_thinking": False}).hash,
        PromptTemplate(make_tokenizer("{{ messages[0]['content'] }}")).hash,
    ]
    assert len(set(hashes)) == 4
    assert PromptTemplate(make_tokenizer()).hash == hashes[0]


def test_a_prompt_without_tokens_is_refused(make_tokenizer):
    with pytest.raises(ValueError, match="no token at all"):
        PromptTemplate(make_tokenizer("{{ '' }}"), "chat").render(MESSAGES)


@pytest.mark.parametrize(
    ("eos", "ids", "agree"),
    [
        ((7, 7, 7), (7,), True),
        ((7, [7], None), (7,), True),
        ((None, None, 7), (7,), True),
        ((7, [9, 7], 7), (7, 9), False),
        ((151643, 151645, 151643), (151643, 151645), False),
        ((0, None, 0), (0,), True),  # id 0 is a token like any other
    ],
)
def test_stop_tokens_are_the_union(eos, ids, agree, caplog):
    stop_tokens = resolve_stop_token_ids(*eos)
    assert (stop_tokens.token_ids, stop_tokens.agree) == (ids, agree)
    assert ("disagree" in caplog.text) != agree


def test_the_warning_names_both_sources(caplog):
    with caplog.at_level(logging.WARNING):
        resolve_stop_token_ids(1, [1, 2], None)
    assert "config.json: [1], generation_config.json: [1, 2], tokenizer: none" in caplog.text


def test_no_stop_token_is_an_error():
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        resolve_stop_token_ids(None, [], None)


def test_a_role_that_the_chat_template_refuses_is_named(make_tokenizer, tmp_path):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    with pytest.raises(ValueError, match="roles system, user: System role not supported; put the text"):
        PromptTemplate(make_tokenizer(template)).render(messages)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": messages, "reward_model": {"ground_truth": "2"}}) + "\n")
    with pytest.raises(ValueError, match="data.jsonl, line 1: the model's chat template refuses"):
        load_prompts([path], make_tokenizer(template), 99)
