from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="session")
def make_tokenizer():
    """A byte-level tokenizer with a chat template, made here: one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(chat_template: str | None = CHAT_TEMPLATE):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {symbol: index for index, symbol in enumerate(["<eos>", "<user>", "<assistant>", *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<eos>", "<user>", "<assistant>"])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
        )
        fast.chat_template = chat_template
        return fast

    return make


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def row():
    """A row in the DAPO-Math-17k schema."""

    def make(problem: str, answer: str, index: int | str = 0):
        return {
            "data_source": "math_dapo",
            "prompt": [{"content": problem, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(index)},
        }

    return make


def _write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow alone takes the first row's
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path
    )


WRITERS = {".jsonl": _write_json_lines, ".ndjson": _write_json_lines, ".parquet": _write_parquet}


@pytest.fixture
def write(tmp_path):
    """Write rows to a file of the kind its name says; returns the path."""

    def write_rows(name, rows):
        path = tmp_path / name
        WRITERS[path.suffix](path, rows)
        return path

    return write_rows
