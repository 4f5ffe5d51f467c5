"""Given responses as they are read, and the run that learns them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.config import load_config, validate
from megatron_dapo.data.examples import load_examples, sft_config
from megatron_dapo.data.files import count_rows
from megatron_dapo.data.template import PromptTemplate, StopTokens

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPES = sorted((*(EXAMPLES / "quickstart").glob("*.toml"), *(EXAMPLES / "smollm2").glob("*.toml")))
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
    dataset = load([path], tokenizer)
    assert (dataset.num_rows, dataset.num_too_long, len(dataset.examples), count_rows(path)) == (3, 0, 2, 3)
    for example, question, answer in zip(dataset.examples, ("3+3?", "2+2?"), "64", strict=True):
        prompt = tokenizer.decode(list(example.prompt.token_ids))
        assert prompt == f"<user>{question}<assistant>", "as the policy is asked"
        assert example.text == answer
        assert tokenizer.decode(example.token_ids[:-1].tolist()) == answer
        assert example.token_ids[-1] == tokenizer.eos_token_id
    assert set(dataset.by_id) == {example.prompt.prompt_id for example in dataset.examples}


def test_a_response_ends_as_the_template_ends_a_turn(write, make_tokenizer) -> None:
    tokenizer = make_tokenizer(TURNED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    end = tokenizer.convert_tokens_to_ids("<end>")
    path = write("rows.jsonl", [PAIR])
    (example,) = load([path], tokenizer, stops=[tokenizer.eos_token_id, end]).examples
    assert example.token_ids[-1] == end
    (example,) = load([path], tokenizer, "plain", stops=[tokenizer.eos_token_id, end]).examples
    assert example.token_ids[-1] == tokenizer.eos_token_id, "no template puts anything behind a plain text"


def test_examples_that_are_too_long_are_left_out_whole(write, tokenizer) -> None:
    path = write("rows.jsonl", [PAIR, {"prompt": "a", "response": "b" * 9}, {"prompt": "c" * 30, "response": "d"}])
    dataset = load([path], tokenizer, limits=(20, 9))  # nine characters and the stop token are ten
    assert [example.text for example in dataset.examples] == ["6"] and dataset.num_too_long == 2
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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_its_fine_tuning_is_a_valid_configuration(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(PAIR)}\n" * 21)
    chosen = [f'sft.train_paths=["{data}"]', "sft.batch_size=8", "sft.epochs=2", "checkpoint.output_dir=/ck"]
    config = load_config(recipe, [*chosen, "sft.optimizer.learning_rate=2e-4"]).config
    tuned = sft_config(config)
    assert validate(tuned) == []
    assert tuned.run.total_steps == 6 and tuned.optimizer.learning_rate == 2e-4 and not tuned.has_critic
    assert tuned.mismatch_gate is None and tuned.rollout.temperature == 1.0
    assert tuned.run.output_dir == config.run.output_dir / "sft" and tuned.checkpoint_dir == Path("/ck/sft")
    assert sft_config(config, tmp_path).run.output_dir == tmp_path


SAMPLING = (
    "rollout.oversample=1.0",
    "rollout.max_staleness=0",
    "rollout.dynamic_sampling=soft",
    "rollout.budget.enabled=true",
    "rollout.budget.max_size=16",
    "rollout.budget.min_size=2",
    "rollout.prompt_order=priority",
    "rollout.prompt_filter.name=model",
)
INJECTION = ('data.injection.templates=["noise"]',)


@pytest.mark.parametrize("chosen", [SAMPLING, INJECTION])
def test_choices_of_what_to_sample_are_those_of_the_recipe_s_own_run_alone(chosen: tuple[str, ...]) -> None:
    config = load_config(EXAMPLES / "quickstart" / "quickstart.toml", chosen).config
    assert validate(config) == []
    tuned = sft_config(config)
    assert validate(tuned) == [] and not tuned.data.injection.templates


def test_given_responses_have_no_variants_of_their_prompts() -> None:
    config = load_config(EXAMPLES / "quickstart" / "quickstart.toml", INJECTION).config
    broken = validate(sft_config(config).model_copy(update={"data": config.data}))
    (found,) = [one for one in broken if one.path == "data.injection.templates"]
    assert "rollout.responses" in found.suggestion


def test_another_loss_of_given_responses_is_refused() -> None:
    config = load_config(RECIPES[0], ["rollout.responses=given"]).config
    (found,) = [one for one in validate(config) if "responses" in one.suggestion]
    assert "run `megatron-dapo sft` on this recipe" in found.suggestion
