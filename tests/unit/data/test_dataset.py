from __future__ import annotations

import hashlib
import json
import logging

import pytest

from megatron_dapo.data.dataset import count_trained, load_eval_sources, load_prompts, load_sources
from megatron_dapo.data.files import BATCH_ROWS, DAPO_FORMAT, prompt_id_of, read_rows
from megatron_dapo.data.sources import Source
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.rewards.verifiers.dapo import gold_problem

KINDS = ["jsonl", "parquet"]


def validate_answers(answers):
    problems = {answer: gold_problem(answer) for answer in answers}
    return {answer: problem for answer, problem in problems.items() if problem}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_become_prompts(kind, write, row, tokenizer):
    path = write(f"data.{kind}", [row("What is 1+1?", "2", "a"), row("What is 2+2?", "4", "b")])
    dataset = load_prompts([path], tokenizer, max_prompt_tokens=100)
    first = dataset.prompts[0]
    assert first.messages == ({"role": "user", "content": "What is 1+1?"},)
    assert tokenizer.decode(list(first.token_ids)) == "<user>What is 1+1?<assistant>"
    assert (first.answer, first.data_source) == ("2", "math_dapo")
    assert first.extra == {"ability": "MATH", "index": "a"}
    assert first.prompt_id == prompt_id_of(first.messages, "2")
    assert dataset.by_id[dataset.prompt_ids[1]].answer == "4"
    assert dataset.report.files == ((str(path), hashlib.sha256(path.read_bytes()).hexdigest()),)
    json.dumps(dataset.report.record())


def test_both_kinds_of_file_give_the_same_prompts(write, row, tokenizer):
    rows = [row(f"Problem {i % 7} \u00fc", str(i % 3), i) for i in range(50)]
    parquet, lines = write("a.parquet", rows), write("a.jsonl", rows)
    assert load_prompts([parquet], tokenizer, 100).prompts == load_prompts([lines], tokenizer, 100).prompts


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_removed_and_the_report_says_so(kind, write, row, tokenizer, caplog):
    rows = [row(f"Problem {i % 17}", str(i % 17), i) for i in range(17 * 103)]
    with caplog.at_level(logging.INFO):
        dataset = load_prompts([write(f"data.{kind}", rows)], tokenizer, max_prompt_tokens=100)
    assert [prompt.answer for prompt in dataset.prompts] == [str(i) for i in range(17)]
    assert (dataset.report.num_rows, dataset.report.num_unique, dataset.report.num_prompts) == (1751, 17, 17)
    assert "1,751 rows -> 17 unique" in caplog.text
    assert set(dataset.multiplicity.values()) == {103}


def test_copies_may_be_kept(write, row, tokenizer):
    path = write("data.jsonl", [row("Problem", "1", i) for i in range(3)])
    assert len(load_prompts([path], tokenizer, 100, deduplicate=False)) == 3


def test_copies_are_found_across_files_and_batches(write, row, tokenizer):
    rows = [row(f"P{i}", "1", i) for i in range(BATCH_ROWS + 5)]
    paths = [write("a.parquet", rows), write("b.jsonl", rows[::-1])]
    dataset = load_prompts(paths, tokenizer, 100)
    assert [prompt.messages[0]["content"] for prompt in dataset.prompts] == [f"P{i}" for i in range(len(rows))]
    assert len(dataset.report.files) == 2


def test_an_evaluation_file_is_grouped_by_problem(write, row, tokenizer):
    rows = [row(f"AIME {i}", str(i), 32 * i + k) for i in range(30) for k in range(32)]
    dataset = load_eval_sources([Source((write("aime.parquet", rows),), DAPO_FORMAT)], PromptTemplate(tokenizer), 100)
    assert len(dataset) == 30
    assert (dataset.report.multiplicity_min, dataset.report.multiplicity_max) == (32, 32)
    assert "32 rows each" in dataset.report.summary()


def test_long_prompts_are_left_out_and_counted(write, row, tokenizer):
    rows = [row("x" * length, "1") for length in (10, 20, 30)]
    path = write("data.jsonl", rows)
    dataset = load_prompts([path], tokenizer, max_prompt_tokens=22)
    assert [len(prompt.token_ids) for prompt in dataset.prompts] == [12, 22]
    assert (dataset.report.num_too_long, dataset.report.longest_prompt_tokens) == (1, 32)
    with pytest.raises(ValueError, match="all 3 prompts are longer than max_prompt_tokens = 11: the shortest has 12"):
        load_prompts([path], tokenizer, max_prompt_tokens=11)
    with pytest.raises(ValueError, match="1 of 3 evaluation prompts .* at least 32"):
        load_eval_sources([Source((path,), DAPO_FORMAT)], PromptTemplate(tokenizer), 22)


def test_one_prompt_with_two_answers_is_warned_about(write, row, tokenizer, caplog):
    path = write("data.jsonl", [row("P", "1"), row("Q", "1"), row("P", "2"), row("P", "1")])
    dataset = load_prompts([path], tokenizer, 100)
    assert len(dataset) == 3
    (conflict,) = dataset.report.conflicts
    assert conflict.answers == ("1", "2")
    assert [location.rpartition(", ")[2] for location in conflict.locations] == ["line 1", "line 3"]
    assert "1 prompts have several different gold answers" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_gold_answers_the_verifier_cannot_use_are_listed(kind, write, row, tokenizer):
    rows = [row("P", "1"), row("Q", "degrees"), row("R", "$$"), row("Q", "degrees")]
    with pytest.raises(ValueError, match="2 gold answers") as caught:
        load_prompts([write(f"data.{kind}", rows)], tokenizer, 100, validate_answers=validate_answers)
    place = "row 1" if kind == "parquet" else "line 2"
    assert place in str(caught.value) and "'degrees'" in str(caught.value) and "'$$'" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_columns_are_named(kind, write, tokenizer):
    path = write(f"data.{kind}", [{"question": "1+1", "answer": "2"}])
    with pytest.raises(ValueError) as caught:
        load_prompts([path], tokenizer, 100)
    message = str(caught.value)
    assert str(path) in message
    assert "missing column(s) prompt, reward_model" in message
    assert "found: question, answer" in message


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_refused(kind, write, row):
    path = write(f"data.{kind}", [{**row("<image> How many?", "1"), "images": ["a.png"]}])
    with pytest.raises(ValueError, match="the column images is for images, and only text is trained"):
        list(read_rows(path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty", [None, []])
def test_a_column_of_images_without_any_is_left_out(kind, empty, write, row):
    found = list(read_rows(write(f"data.{kind}", [{**row("How many?", "1"), "images": empty}] * 2)))
    assert len(found) == 2 and "images" not in found[0].extra


def test_half_of_a_surrogate_pair_is_named_with_its_row(tmp_path, row):
    for name, bad in (("prompt", row("How \ud83d many?", "1")), ("gold answer", row("How many?", "1\ude00"))):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, [row("1 + 1?", "2"), bad])))
        with pytest.raises(ValueError, match=f"{path}, line 2: {name} has half of a surrogate pair"):
            list(read_rows(path))


def test_a_prompt_with_a_token_that_the_embedding_lacks_is_named(write, row, tokenizer):
    path = write("data.jsonl", [row("How many?", "1")])
    (longest,) = load_prompts([path], tokenizer, 100).prompts
    template = PromptTemplate(tokenizer, "chat", vocab_size=max(longest.token_ids))
    with pytest.raises(ValueError, match=f"{path}, line 1: the tokenizer gives token {max(longest.token_ids)} "):
        load_sources([Source((path,), DAPO_FORMAT)], template, 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_model": {"style": "rule"}}, r"no field ground_truth \(found \['style'\]\)"),
        ({"reward_model": {"ground_truth": None, "x": 1}}, "unparsable gold answer"),
        ({"reward_model": {"ground_truth": "  "}}, "unparsable gold answer"),
        ({"reward_model": {"ground_truth": 1.5}}, "unparsable gold answer"),
        ({"prompt": []}, "prompt must be a list of chat messages"),
        ({"prompt": "  "}, "prompt must be"),
        ({"prompt": [{"role": "user"}]}, "prompt must be"),
        ({"prompt": 7}, "prompt must be"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text"}]}]},
            "content of parts, as prompts with images have; only text is trained",
        ),
        ({"prompt": '[{"role": "user"}]'}, "prompt must be"),
        ({"prompt": '{"role": "user", "content": "P"}'}, "prompt must be a list"),
        ({"prompt": '[{"role": "user", "content": "P'}, "not valid JSON .*by json.dumps, got .*content"),
        ({"prompt": "[{'role': 'user', 'content': 'P'}]"}, "not valid JSON .*write the column as a list"),
    ],
)
def test_bad_rows_are_named(kind, change, message, write, row):
    good = {**row("P", "1"), **change}
    path = write(f"data.{kind}", [good])
    with pytest.raises(ValueError, match=message) as caught:
        list(read_rows(path))
    assert f"{path}, {'row 0' if kind == 'parquet' else 'line 1'}" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_chat_turns_as_json_text_are_chat_turns(kind, write, row):
    messages = [{"role": "system", "content": "Be brief."}, {"content": 'Say "1+1".', "role": "user"}]
    (found,) = read_rows(write(f"data.{kind}", [{**row("P", "1"), "prompt": json.dumps(messages, indent=1)}]))
    assert [dict(message) for message in found.messages] == messages


@pytest.mark.parametrize("text", ["[1, 2] has which sum?", "{1, 2}", '{"x": 1}, what is x?', '"role": what is it?'])
def test_a_problem_in_brackets_stays_one_user_turn(text, write, row):
    (found,) = read_rows(write("data.parquet", [{**row("P", "1"), "prompt": text}]))
    assert found.messages == ({"role": "user", "content": text},)


def test_integers_and_plain_texts_are_accepted(write):
    path = write("data.jsonl", [{"prompt": "1+1?", "reward_model": {"ground_truth": 2}}])
    (row,) = read_rows(path)
    assert (row.answer, row.messages, row.extra) == ("2", ({"role": "user", "content": "1+1?"},), {})


def test_an_empty_parquet_file(tmp_path, row):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row("P", "1")]).slice(0, 0), path)
    with pytest.raises(ValueError, match="has no rows"):
        list(read_rows(path))


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.95])
def test_truncated_parquet_files(keep, write, row):
    path = write("data.parquet", [row(f"P{i}", "1") for i in range(1000)])
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(ValueError, match=f"{path} cannot be read as parquet"):
        list(read_rows(path))


def test_damaged_parquet_pages(write, row):
    path = write("data.parquet", [row(f"P{i}", "1") for i in range(1000)])
    content = bytearray(path.read_bytes())
    content[10:400] = bytes(390)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        list(read_rows(path))


def test_prompt_ids_depend_on_messages_and_answer_only():
    one = ({"role": "user", "content": "P"},)
    assert prompt_id_of(one, "1") == prompt_id_of(({"content": "P", "role": "user"},), "1")
    different = {
        prompt_id_of(one, "1"),
        prompt_id_of(one, "2"),
        prompt_id_of(({"role": "system", "content": "P"},), "1"),
    }
    assert len(different) == 3
    assert len(prompt_id_of(one, "1")) == 16


def test_held_out_problems_that_are_trained_on_are_counted_by_their_question(write, row, tokenizer, caplog):
    def prompts(name, *problems):
        return load_prompts([write(name, [row(*one) for one in problems])], tokenizer, 100).prompts

    trained = prompts("train.jsonl", ("What is 1+1?", "2"), ("What is 2+2?", "4"))
    held_out = prompts("held.jsonl", ("What is  2+2?\n", "5"), ("What is 3+3?", "6"))
    assert count_trained(held_out, trained) == 1
    assert f"1 of 2 held-out problems are also trained on, which makes accuracy look better: {held_out[0].prompt_id}" in caplog.text
    assert count_trained(held_out[1:], trained) == count_trained((), trained) == 0
    with pytest.raises(ValueError, match="all 1 held-out problems of data.eval_paths are also trained on"):
        count_trained(held_out[:1], trained)
