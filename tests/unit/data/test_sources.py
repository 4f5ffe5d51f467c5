"""Several sources with weights, data sets saved by the `datasets` library, and problems that are made."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config import config_from_dict, load_config
from megatron_dapo.config.loader import overrides_of
from megatron_dapo.config.schema import Config
from megatron_dapo.data import made_problems
from megatron_dapo.data.dataset import collect_rows, load_sources, prompt_template, shares_of
from megatron_dapo.data.files import RowFormat, count_rows, file_sha256, read_rows, sampled_rows
from megatron_dapo.data.fresh_prompts import FreshPrompts, PromptBook
from megatron_dapo.data.made_problems import MadeProblems
from megatron_dapo.data.prompt_stream import PromptStream, SourceShare
from megatron_dapo.data.sources import count_prompts, eval_sources, held_out_prompts, question_id, train_sources
from megatron_dapo.data.template import PromptTemplate

ROOT = Path(__file__).resolve().parents[3]
FORMAT = RowFormat("question", "answer")


def config_of(tmp_path: Path, **data: object) -> Config:
    return config_from_dict({"model": {"path": "m"}, "data": data}, tmp_path)


def rows(prefix: str, count: int) -> list[dict]:
    return [{"question": f"{prefix} {number}?", "answer": str(number)} for number in range(count)]


def save(directory: Path, table: list[dict], parts: int = 2) -> Path:
    """Write a data set as `save_to_disk` of datasets does."""
    directory.mkdir()
    size = -(-len(table) // parts)
    names = [f"data-{part:05d}-of-{parts:05d}.arrow" for part in range(parts)]
    for part, name in enumerate(names):
        found = pyarrow.Table.from_pylist(table[part * size : (part + 1) * size])
        with pyarrow.OSFile(str(directory / name), "wb") as file, pyarrow.ipc.new_stream(file, found.schema) as stream:
            stream.write_table(found, 100)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def test_a_saved_data_set_is_read_like_its_rows(tmp_path: Path) -> None:
    table = rows("sum", 2500)
    saved = save(tmp_path / "saved", table)
    assert [(row.messages[0]["content"], row.answer) for row in read_rows(saved, FORMAT)] == [
        (row["question"], row["answer"]) for row in table
    ]
    assert count_rows(saved) == 2500 and len(file_sha256(saved)) == 64
    sample = list(sampled_rows(saved, FORMAT, places=4, rows=50))
    assert 150 <= len(sample) <= 200 and sample[0].answer == "0"
    assert list(sampled_rows(saved, FORMAT, places=4, rows=50)) == sample  # drawn by a fixed seed
    assert len(list(sampled_rows(saved, FORMAT, places=50, rows=50))) == 2500


SHARES = st.lists(st.tuples(st.integers(1, 7), st.floats(0.1, 5)), min_size=2, max_size=4)


def stream_of(shares: list[tuple[int, float]], seed: int, max_epochs: int | None = None) -> PromptStream:
    sources = [
        SourceShare(f"s{number}", weight, tuple(f"s{number}-{index}" for index in range(size)))
        for number, (size, weight) in enumerate(shares)
    ]
    ids = [name for source in sources for name in source.prompt_ids]
    return PromptStream(ids, seed, max_epochs, sources=sources)


@given(SHARES, st.integers(0, 100), st.integers(0, 40), st.integers(0, 40))
def test_a_resumed_mixture_continues_as_the_uninterrupted_one(shares, seed, before, after) -> None:
    whole = stream_of(shares, seed)
    for _ in range(before):
        whole.next()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = stream_of(shares, seed)
    resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(after)] == [whole.next() for _ in range(after)]
    assert resumed.num_drawn == before + after


@given(SHARES, st.integers(0, 100))
def test_sources_are_drawn_by_their_weights_and_each_in_whole_epochs(shares, seed) -> None:
    stream, num = stream_of(shares, seed), 500
    drawn = [stream.next() for _ in range(num)]
    counts = Counter(name.partition("-")[0] for name in drawn)
    total = sum(weight for _, weight in shares)
    for number, (size, weight) in enumerate(shares):
        assert abs(counts[f"s{number}"] - num * weight / total) <= len(shares)
        own = [name for name in drawn if name.startswith(f"s{number}-")]
        for start in range(0, len(own) - size + 1, size):  # each epoch has each prompt once
            assert len(set(own[start : start + size])) == size


def test_a_source_at_its_end_leaves_its_share_to_the_others() -> None:
    stream = stream_of([(2, 1.0), (5, 1.0)], 0, max_epochs=1)
    drawn = [stream.next() for _ in range(7)]
    assert len(set(drawn)) == 7 and stream.next() is None and stream.epoch == 0


def test_a_state_of_other_sources_is_refused() -> None:
    state = stream_of([(2, 1.0), (2, 1.0)], 0).state_dict()
    with pytest.raises(ValueError, match="draws from the sources"):
        stream_of([(2, 1.0), (2, 3.0)], 0).load_state_dict(state)
    plain = PromptStream([name for number in range(2) for name in (f"s{number}-0", f"s{number}-1")], 0)
    with pytest.raises(ValueError, match="one file list"):
        plain.load_state_dict(state)


class NumberedEpochs:
    """Ids of epochs, which are not equally long."""

    def ids(self, epoch: int) -> list[str]:
        return [f"made@{epoch}/{number}" for number in range(2 + epoch % 3)]

    def has(self, prompt_id: str) -> bool:
        return prompt_id.startswith("made@")


def fresh_stream(seed: int, is_fresh: bool = True) -> PromptStream:
    shares = [
        SourceShare("files", 1.0, ("a", "b")),
        SourceShare("made", 2.0, ("c", "d"), NumberedEpochs() if is_fresh else None),
    ]
    return PromptStream(["a", "b", "c", "d"], seed, sources=shares)


@given(st.integers(0, 100), st.integers(0, 40), st.integers(1, 40))
def test_prompts_made_for_each_epoch_come_once_and_after_a_resume_too(seed: int, before: int, after: int) -> None:
    whole, resumed = fresh_stream(seed), fresh_stream(seed)
    drawn = [whole.next() for _ in range(before)]
    if before:
        whole.requeue(drawn[-1])
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    rest = [whole.next() for _ in range(after)]
    assert [resumed.next() for _ in range(after)] == rest
    assert resumed.num_drawn == whole.num_drawn
    made = Counter(name for name in [*drawn[:-1], *rest] if name not in ("a", "b"))
    assert max(made.values(), default=1) == 1
    if before + after > 10:
        assert abs(sum(made.values()) - 2 * (before + after) / 3) <= 3, (
            "its share is kept if epochs differ in length"
        )


def test_a_state_of_problems_that_repeat_is_not_one_of_fresh_ones() -> None:
    stream = fresh_stream(0, is_fresh=False)
    fresh_stream(0).load_state_dict(stream.state_dict())  # the first epoch is the same
    for _ in range(12):
        stream.next()
    with pytest.raises(
        ValueError, match=r"repeats its problems of source 'made' in each epoch: resume with the key fresh"
    ):
        fresh_stream(0).load_state_dict(stream.state_dict())


def test_tables_become_sources_with_formats_of_their_own(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("a", 3)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "b?", "gold": 7}) + "\n")
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[data]\nmax_prompt_tokens = 100\ncolumns = { prompt = "question", answer = "answer" }\n'
        '[[data.sources]]\npath = "a.jsonl"\nweight = 3.0\n'
        '[[data.sources]]\npath = "b.jsonl"\nname = "easy"\ncolumns = { prompt = "prompt", answer = "gold" }\n'
    )
    data = load_config(recipe).config.data
    dataset = load_sources(train_sources(data), prompt_template(data, tokenizer), data.max_prompt_tokens)
    assert [(prompt.source, prompt.answer) for prompt in dataset.prompts] == [
        *(("a", str(number)) for number in range(3)),
        ("easy", "7"),
    ]
    assert [(share.name, share.weight, len(share.prompt_ids)) for share in shares_of(data, dataset.prompts)] == [
        ("a", 3.0, 3),
        ("easy", 1.0, 1),
    ]
    # As the API hands a configuration on.
    tree = {"model": {"path": "m"}, "data": data.model_dump(mode="json", exclude_none=True)}
    assert load_config(recipe, overrides_of(tree, tmp_path)).config.data == data


def test_options_reach_the_chat_template(tmp_path: Path, make_tokenizer) -> None:
    tokenizer = make_tokenizer("{% if think is defined and think %}T {% endif %}{{ messages[0]['content'] }}")
    messages = ({"role": "user", "content": "a"},)
    lengths = []
    for options in ({}, {"think": True}):
        data = config_of(tmp_path, train_paths=["t"], chat_template_options=options).data
        template = prompt_template(data, tokenizer)
        lengths.append((len(template.render(messages)), template.hash))
    assert lengths[0][0] < lengths[1][0] and lengths[0][1] != lengths[1][1]


def test_evaluation_files_are_told_apart_by_name(tmp_path: Path) -> None:
    paths = ["x/aime.jsonl", "y/aime.jsonl", "math.jsonl"]
    data = config_of(tmp_path, train_paths=["t"], eval_paths=paths).data
    assert [source.name for source in eval_sources(data)] == ["x_aime", "y_aime", "math"]
    assert [source.name for source in eval_sources(config_of(tmp_path, train_paths=["t"], eval_paths=["a"]).data)] == [
        ""
    ]


def test_made_problems_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError(\"No module named 'reasoning_gym'\")")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(made_problems.__file__).parents[2]}")
    with pytest.raises(ValueError, match="reasoning-gym is not installed: make .venv-tasks"):
        list(MadeProblems("chain_sum", 3).rows())


@pytest.fixture
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ROOT / ".venv-tasks"
    if not tasks.exists():
        pytest.skip("reasoning-gym is not installed; make .venv-tasks installs it")
    monkeypatch.syspath_prepend(tasks)
    monkeypatch.setenv("PYTHONPATH", f"{tasks}:{ROOT}")  # The process that makes the problems reads it.


@pytest.mark.usefixtures("reasoning_gym")
def test_made_problems_repeat_and_their_verifier_scores_them() -> None:
    from megatron_dapo.rewards.result import RewardSample
    from megatron_dapo.rewards.verifiers.reasoning_gym import reward

    data = {"path": "reasoning_gym:chain_sum", "size": 20, "seed": 3, "settings": {"max_terms": 3}}
    [source] = train_sources(config_of(Path("/"), sources=[data]).data)
    made = list(source.rows())
    assert made == list(source.rows()) and len(collect_rows(made).rows) >= 18
    for row in made:
        for text, right in ((f"So.\nAnswer: {row.answer}", True), ("Answer: x", False), ("none", False)):
            sample = RewardSample(row.messages, text, row.answer, row.data_source, row.extra, "stop", 0)
            assert reward(sample).is_correct == right
    for wrong in ({"path": "reasoning_gym:chain_sums"}, {"settings": {"max_term": 3}}, {"settings": {"min_terms": -1}}):
        [source] = train_sources(config_of(Path("/"), sources=[{**data, **wrong}]).data)
        with pytest.raises(ValueError, match="reasoning_gym:chain_sum"):
            list(source.rows())


@pytest.mark.usefixtures("reasoning_gym")
def test_other_seeds_and_epochs_make_other_problems() -> None:
    """reasoning-gym makes problem i by its seed + i: problem 1 of seed 0 would be problem 0 of seed 1."""
    series = [MadeProblems("chain_sum", 20, seed, {"min_digits": 6, "max_digits": 9}, epoch) for seed, epoch in SERIES]
    questions = [row["question"] for one in series for row in one.rows()]
    assert len(set(questions)) == len(questions) == 60


SERIES = ((0, 0), (1, 0), (0, 1))


@pytest.mark.usefixtures("reasoning_gym")
def test_a_prompt_of_a_later_epoch_is_made_again_from_its_id(make_tokenizer) -> None:
    data = {"path": "reasoning_gym:chain_sum", "size": 5, "settings": {"min_digits": 6, "max_digits": 9}}
    [source] = train_sources(config_of(Path("/"), sources=[data]).data)
    template = PromptTemplate(make_tokenizer(None), "plain")
    fresh = FreshPrompts(source, template, 256)
    [first, second] = ([PromptBook({}, [fresh])[name] for name in fresh.ids(epoch)] for epoch in (1, 2))
    assert len({prompt.messages[0]["content"] for prompt in (*first, *second)}) == 10
    assert first[0].prompt_id.startswith("chain_sum@1/") and first[0].source == "chain_sum"
    book = PromptBook({}, [FreshPrompts(source, template, 256)])
    assert [book[prompt.prompt_id] for prompt in reversed(second)] == second[::-1]
    with pytest.raises(ValueError, match="not among those that reasoning_gym:chain_sum makes for epoch 1"):
        book["chain_sum@1/0"]
    assert "other@1/0" not in book and not fresh.has("0123456789abcdef")


def held_out_texts(config: Config) -> tuple[list[str], list[str]]:
    """Return the training and the held-out prompts' texts."""
    sources = (train_sources(config.data), eval_sources(config.data))
    return tuple([row.turns[-1]["content"] for one in parts for row in one.rows()] for parts in sources)  # type: ignore[return-value]


def write_rows(path: Path, table: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")


COLUMNS = {"prompt": "question", "answer": "answer"}


@pytest.mark.parametrize(("count", "share", "expected"), [(60, 0.1, 6), (30, 0.1, 4), (19, 0.1, 0), (2000, 0.1, 64), (60, 0.0, 0)])
def test_a_part_is_held_out_without_evaluation_data(count: int, share: float, expected: int, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", rows("sum", count))
    config = config_of(tmp_path, train_paths=["a.jsonl"], columns=COLUMNS, held_out_share=share)
    train, held_out = held_out_texts(config)
    assert len(held_out) == expected and len(train) == count - expected and not set(train) & set(held_out)
    counts = count_prompts(config.data)
    assert (counts.train, counts.held_out) == (count - expected, expected)


def test_the_held_out_part_depends_on_the_texts_of_the_prompts_only(tmp_path: Path) -> None:
    """Not on the order of rows, their answers and repetitions, a system prompt or a template; so a resumed run has the same."""
    table = rows("sum", 50)
    write_rows(tmp_path / "a.jsonl", table)
    write_rows(tmp_path / "b.jsonl", [*reversed(table), *({**row, "answer": "other"} for row in table)])
    config = config_of(tmp_path, train_paths=["a.jsonl"], columns=COLUMNS)
    other = config_of(
        tmp_path, train_paths=["b.jsonl"], columns=COLUMNS, system_prompt="Think.", prompt_template="Solve: {prompt}"
    )
    first, second = held_out_texts(config), held_out_texts(other)
    assert set(first[1]) == set(second[1]) and len(second[1]) == 2 * len(first[1])
    assert not set(second[0]) & set(second[1])


def test_a_part_of_each_source_with_files_is_held_out(tmp_path: Path) -> None:
    """A question of two sources is in the same part of both, and made problems are only trained."""
    sums, products = rows("sum", 60), rows("product", 40)
    write_rows(tmp_path / "sums.jsonl", sums)
    write_rows(tmp_path / "both.jsonl", [*products, *sums[:30]])
    made = {"path": "reasoning_gym:basic_arithmetic", "name": "made", "size": 5}
    sources = [{"path": "sums.jsonl", "weight": 2.0}, {"path": "both.jsonl"}, made]
    config = config_of(tmp_path, sources=sources, columns=COLUMNS)
    assert config.data.holds_out and config.data.has_held_out
    train, evaluated = train_sources(config.data), eval_sources(config.data)
    assert [(one.name, one.weight) for one in train] == [("sums", 2.0), ("both", 1.0), ("made", 1.0)]
    assert [one.name for one in evaluated] == ["sums", "both"]
    asked = [{question_id(row) for source in part for row in source.rows()} for part in (train[:2], evaluated)]
    assert not asked[0] & asked[1] and len(asked[0] | asked[1]) == 100
    own = [held_out_prompts(source)[0] for source in evaluated]
    assert (len(own[0]), len(own[1])) == (6, 7) and asked[1] == own[0] | own[1]
    assert {row.source for source in evaluated for row in source.rows()} == {"sums", "both"}
    counts = count_prompts(config_of(tmp_path, sources=sources[:2], columns=COLUMNS).data)
    assert (counts.train, counts.held_out) == (len(asked[0]), len(asked[1]))
    counts = count_prompts(config.data)
    assert (counts.train, counts.held_out) == (0, len(asked[1])), "problems that are made are not counted"


def test_given_evaluation_data_leaves_all_rows_to_training(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", rows("sum", 50))
    write_rows(tmp_path / "b.jsonl", rows("product", 3))
    config = config_of(tmp_path, train_paths=["a.jsonl"], eval_paths=["b.jsonl"], columns=COLUMNS)
    train, held_out = held_out_texts(config)
    assert (len(train), len(held_out)) == (50, 3) and config.data.has_held_out and not config.data.holds_out
