from __future__ import annotations

import hashlib
import json
import random
import time
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.data.template_proof import prove_template
from megatron_dapo.data.turns import PROBE, TurnTemplate
from tests.examples import examples
from tests.unit.data.published_templates import DIRECTORY, NAMES, ORIGINS, any_ids, content, turn_template

TEXT_TEMPLATES = [name for name in NAMES if name != "idefics3"]  # idefics3 renders no plain text


proof_of = cache(lambda name: prove_template(turn_template(name)))


def text_of(turns: TurnTemplate, ids) -> str:
    return turns.template.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def appended(draw: random.Random, roles: tuple[str, ...]) -> list[dict[str, str]]:
    """Messages that follow a turn: a user's, or answers of tools, one or several in a row."""
    if "tool" not in roles or draw.random() < 0.4:
        return [{"role": "user", "content": content(draw)}]
    return [
        {"role": "tool", "content": content(draw), "name": f"tool{number}", "tool_call_id": f"call{number:05}"}
        for number in range(draw.randint(1, 3))
    ]


def test_the_pinned_templates_are_those_that_were_published():
    assert len(TEXT_TEMPLATES) >= 23
    assert {path.stem for path in DIRECTORY.glob("*.jinja")} == set(NAMES)
    for name, origin in ORIGINS.items():
        assert hashlib.sha256((DIRECTORY / f"{name}.jinja").read_bytes()).hexdigest() == origin["sha256"], name
        assert origin["model"] and "Apache-2.0" in origin["file"]


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_a_stream_only_grows_whatever_was_sampled(name):
    """The engine's input of every turn begins with the stream so far, for ids that no text has and for cut turns."""
    turns, draw = proof_of(name).turns, random.Random(name)
    for _ in range(examples(50)):
        stream = list(turns.template.render([{"role": "user", "content": content(draw)}]))
        texts: list[str] = []
        for _ in range(draw.randint(1, 4)):
            is_cut = draw.random() < 0.3
            sampled = any_ids(draw, turns) + ([] if is_cut else [draw.choice(turns.stop_token_ids)])
            new = appended(draw, turns.roles)
            before = [*stream, *sampled]
            delta = turns.follow(before, [], new)
            assert not delta.begins_segment
            stream = [*before, *delta.token_ids]
            assert stream[: len(before)] == before
            texts.append(text_of(turns, delta.token_ids))
            position = 0
            for message in new:  # each once, in order
                position = max(
                    texts[-1].find(form, position)
                    for form in (message["content"], json.dumps(message["content"], ensure_ascii=False)[1:-1])
                )
                assert position >= 0, (name, message, texts[-1])
        # The end of a turn comes from the template if it was cut, from the model if it was not; never from both.
        last = sampled[-1] if sampled else None
        if is_cut and turns.template.encode(turns.delta_text(new))[0] in turns.stop_token_ids:
            assert delta.token_ids[0] in turns.stop_token_ids
        if last in turns.stop_token_ids:
            assert delta.token_ids[0] != last


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_deltas_are_what_the_template_renders(name):
    """A stream of canonical turns is the template's own rendering of its messages, or the template is known to rewrite."""
    proof = proof_of(name)
    turns, draw, num_equal, num_conversations = proof.turns, random.Random(name), 0, examples(50)
    opens_thought = turns.template.text(PROBE).endswith("<think>\n")
    for _ in range(num_conversations):
        messages = [{"role": "user", "content": content(draw)}]
        stream = turns.template.text(messages)
        for _ in range(3):
            answer = {"role": "assistant", "content": content(draw)}
            if opens_thought:
                answer |= dict.fromkeys(("reasoning_content", "reasoning"), content(draw))
            sampled = turns.template.text([*messages, answer], add_generation_prompt=False)
            turn = sampled[len(stream) :] if sampled.startswith(stream) else answer["content"]
            new = [{"role": "user", "content": content(draw)}]
            # The turn as the model ends it: with its content, then the template's end token is sampled or observed.
            turn = turn[: turn.rfind(answer["content"]) + len(answer["content"])]
            stream += turn + turns.delta_text(new)
            messages += [answer, *new]
        num_equal += stream == turns.template.text(messages)
    drops = [rewrite.rule for rewrite in proof.rewrites if rewrite.role == "user"]
    is_stable = not (drops if opens_thought else [rule for rule in drops if "thinking" not in rule])
    assert num_equal == (num_conversations if is_stable else 0)


def test_templates_that_rewrite_history_are_these():
    rewrites = {name: proof_of(name).rewrites for name in TEXT_TEMPLATES}
    empty = r"drops '<think>\n\n</think>\n\n' of an earlier answer"
    prompt = r"drops '<think>\n' of its generation prompt from an earlier turn"
    thinking = {"deepseek_r1_distill": prompt, "deepseekv3": prompt} | dict.fromkeys(
        ("gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5_v2", "nemotron_3_nano", "nemotron_3_5_lightning"),
        "drops earlier thinking",
    )
    thinking |= dict.fromkeys(("qwen3", "qwen3_5_think", "qwen3_6"), "drops earlier thinking")
    answer = dict.fromkeys(("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), empty)
    for name in TEXT_TEMPLATES:
        user = {rewrite.rule for rewrite in rewrites[name] if rewrite.role == "user"}
        assert user == {rules[name] for rules in (thinking, answer) if name in rules}, name
    # After a call without thinking, Qwen3 drops the empty thought when the tool answers.
    tool = {name: {rewrite.rule for rewrite in rewrites[name] if rewrite.role == "tool"} for name in TEXT_TEMPLATES}
    assert {name: rules for name, rules in tool.items() if rules} == {"deepseekv3": {prompt}, "qwen3": {empty}}


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "deepseek_r1_distill"])
def test_an_unstable_template_is_refused_in_one_line_that_names_the_rule(name):
    with pytest.raises(
        ValueError, match=r"drops .* when a user message follows.*turns\.history = \"keep\".*\"rewrite\""
    ) as refusal:
        prove_template(turn_template(name, "refuse"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gemma4_v5"])
def test_rewritten_history_begins_a_segment_with_the_template_s_ids(name):
    turns = turn_template(name, "rewrite")
    history = [{"role": "user", "content": "1+1?"}]
    stream = list(turns.template.render(history))
    answer = {"role": "assistant", "content": "2", "reasoning_content": "easy", "reasoning": "easy"}
    whole = turns.template.text([*history, answer], add_generation_prompt=False)
    sampled = turns.template.encode(whole[len(turns.template.text(history)) :].rstrip("\n"))
    user = [{"role": "user", "content": "2+2?"}]
    continuation = turns.follow([*stream, *sampled], [*history, answer], user)
    assert continuation.begins_segment
    assert continuation.token_ids == turns.template.render([*history, answer, *user])
    # A tool's answer rewrites nothing here: the stream goes on.
    tool = [{"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00000"}]
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"value": "1"}}}
    turn = answer | {"content": "", "tool_calls": [call]}
    text = turns.template.text([*history, turn, *tool])
    sampled = turns.template.encode(text[len(turns.template.text(history)) : len(text) - len(turns.delta_text(tool))])
    continuation = turns.follow(
        [*stream, *sampled, turns.template.encode(turns.delta_text(tool))[0]], [*history, turn], tool
    )
    assert not continuation.begins_segment


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_the_proof_takes_less_than_two_seconds(name):
    turns = turn_template(name)
    begin = time.process_time()
    proof = prove_template(turns)
    assert time.process_time() - begin < 2
    assert proof.num_conversations >= 18
    json.dumps(proof.describe())


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_a_message_cannot_write_tokens(name):
    """An environment that repeats what the model wrote must not end turns or speak for others."""
    turns = proof_of(name).turns
    added = turns.template.tokenizer.get_added_vocab()
    said = f"ok {''.join(added)} <{ORIGINS[name]['stops'][0]}> end"
    for role in turns.roles:
        harmless, written = ([{"role": role, "content": text, "name": "tool"}] for text in ("ok", said))
        special = [[token for token in turns.delta(5, each) if token in added.values()] for each in (harmless, written)]
        assert special[0] == special[1]
        assert text_of(turns, turns.delta(5, written)) == turns.delta_text(written)


def test_a_turn_ends_once():
    turns = turn_template("qwen2_5")
    end, other = turns.stop_token_ids
    user = [{"role": "user", "content": "more"}]
    whole = turns.template.encode("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert turns.delta(end, user) == whole[1:]  # sampled
    assert turns.delta(5, user) == whole  # cut
    assert turns.delta(other, user) == whole  # ended by a token that the template does not write
    # GLM ends a turn with the marker of the next role, cohere2 with two tokens, gpt-oss with one that history replaces.
    glm = turn_template("glm4moe")
    assert text_of(glm, glm.delta(glm.stop_token_ids[0], user)) == "\nmore<|assistant|>"
    cohere = turn_template("cohere2")
    assert text_of(cohere, cohere.delta(cohere.stop_token_ids[0], user)).startswith("<|START_OF_TURN_TOKEN|>")
    assert text_of(cohere, cohere.delta(5, user)).startswith(
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    )
    gptoss = turn_template("gptoss")
    assert text_of(gptoss, gptoss.delta(gptoss.stop_token_ids[0], user)).startswith("<|end|><|start|>user")


def test_short_messages_are_rendered_once(monkeypatch):
    turns = turn_template("qwen2_5")
    end, rendered = turns.stop_token_ids[0], []
    text = PromptTemplate.text
    monkeypatch.setattr(PromptTemplate, "text", lambda self, *given: rendered.append(given) or text(self, *given))
    ids = {}
    for word in ("higher", "lower", "higher", "long " * 1000, "long " * 1000):
        messages = [{"role": "user", "content": word}]
        of_word = turns.delta(end, messages)
        assert ids.setdefault(word, of_word) == of_word == turns.template.encode(turns.delta_text(messages))[1:]
    assert len(rendered) == 4 + 5  # one for each of the two short ones, two for the long one, five by the assertion


def test_the_name_of_a_tool_is_in_the_delta():
    turns = turn_template("gptoss")
    delta = turns.delta(turns.stop_token_ids[1], [{"role": "tool", "content": "4", "name": "add"}])
    assert (
        text_of(turns, delta)
        == '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
    )


def test_messages_without_a_place_are_refused():
    turns = prove_template(turn_template("gemma3")).turns
    assert turns.roles == ("user",)
    for messages in ([{"role": "tool", "content": "4"}], [{"role": "assistant", "content": "4"}], []):
        with pytest.raises(ValueError, match="has no place for .* after an answer, only for user"):
            turns.delta(None, messages)
    with pytest.raises(ValueError, match="no message can follow a turn.*leaves out the content of an answer"):
        prove_template(turn_template("idefics3"))


def test_the_plain_template_ends_a_turn_with_the_stop_token(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=None)
    turns = prove_template(TurnTemplate(PromptTemplate(tokenizer, "plain"), (0,))).turns
    messages = [{"role": "user", "content": "higher"}]
    assert text_of(turns, turns.delta(0, messages)) == "\nhigher\n"
    assert text_of(turns, turns.delta(7, messages)) == "<eos>\nhigher\n"


TEMPLATE = (
    "{%% for m in messages %%}{%% if m.role == 'assistant' %%}%s{%% else %%}<user>{{ m.content }}{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}<assistant>{%% endif %%}"
)


def proven(make_tokenizer, answer: str, stops=(0,)):
    return prove_template(TurnTemplate(PromptTemplate(make_tokenizer(TEMPLATE % answer)), stops))


def test_the_proof_finds_a_broken_template(make_tokenizer):
    assert proven(make_tokenizer, "<assistant>{{ m.content }}<eos>").rewrites == ()
    with pytest.raises(ValueError, match="by what precedes it, '.*' in one conversation and"):
        proven(make_tokenizer, "<assistant>{{ m.content }}<eos>{{ loop.index }}")
    with pytest.raises(ValueError, match="ends an answer with ';'.*none of the stop tokens .<eos>. is there"):
        proven(make_tokenizer, "<assistant>{{ m.content }};")
    with pytest.raises(ValueError, match="ends an answer with two stop tokens: '<eos><eos>"):
        proven(make_tokenizer, "<assistant>{{ m.content }}<eos><eos>")
    with pytest.raises(ValueError, match="leaves out the content of an answer"):
        proven(make_tokenizer, "<assistant><eos>")
    with pytest.raises(ValueError, match="renders '!' of an earlier answer as '\\?'|drops '!' of an earlier answer"):
        proven(make_tokenizer, "<assistant>{{ '!' if loop.last }}{{ m.content }}<eos>")


def test_the_proof_finds_a_boundary_that_is_none():
    """A stop token that is part of a longer one: the ids of a whole text are not those of its parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "7;"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("7", ";")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE % "<assistant>{{ m.content }}7;"
    with pytest.raises(ValueError, match="ends an answer with '7;'"):
        prove_template(TurnTemplate(PromptTemplate(fast), (vocabulary[";"],)))
    fast.chat_template = TEMPLATE % "<assistant>{{ m.content }};"
    with pytest.raises(ValueError, match="joins the end of an answer with ';<user>"):
        prove_template(TurnTemplate(PromptTemplate(fast), (vocabulary[";"],)))
