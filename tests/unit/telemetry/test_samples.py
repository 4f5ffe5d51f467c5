"""Samples: what is recorded, how many, and that nothing of it can stop training."""

from __future__ import annotations

import json
import threading
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from megatron_dapo.files.durable import HERE
from megatron_dapo.telemetry import samples as module
from megatron_dapo.telemetry.samples import SampleWriter, TokenTexts, branch_texts, choose, sample_record
from megatron_dapo.types import Episode, Group, Segment, Turn, TurnCall, VersionRange


def test_record_holds_all_a_reader_asks_for(groups: list[Group]) -> None:
    record = sample_record(12, groups[1], 2, advantage=-0.5)
    assert json.loads(json.dumps(record)) == {
        "train_step": 12,
        "sample_id": "g1/2",
        "prompt_id": "g1",
        "data_source": "unit",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "answer": "2",
        "response": "Answer: 2 \u2264 \n",
        "response_ids": [5, 8],
        "finish_reason": "stop",
        "extracted": "2",
        "outcome": "correct",
        "accuracy": 1.0,
        "reward": 0.75,
        "reward_parts": {"verifier": 1.0, "overlong": -0.25},
        "advantage": -0.5,
        "versions": [{"start": 0, "end": 1, "version": 3}, {"start": 1, "end": 2, "version": 4}],
        "generation_step": 9,
        "window": {"start": 0, "is_finished": True},
    }


def test_the_record_of_an_episode_has_its_turns_in_order(groups: list[Group]) -> None:
    sample = groups[1].samples[2]
    turns = (Turn(0, 1, 1, reward=0.5, order=0), Turn(1, 2, 2, calls=(TurnCall("look", "ok"),), order=2))
    segment = Segment((3,), (5, 8), (-1.0, -1.0), (VersionRange(0, 2, 4),), (Turn(0, 1, 2, order=1),))
    played = replace(sample.completion, episode=Episode("done", turns, (segment,), figures={"searches": 2.0}))
    record = sample_record(12, replace(groups[1], samples=(replace(sample, completion=played),)), 0, advantage=None)
    assert json.loads(json.dumps(record["episode"])) == {
        "end": "done",
        "figures": {"searches": 2.0},
        "turns": [
            {"segment": 0, "tokens": [0, 1, 1], "reward": 0.5, "calls": []},
            {"segment": 1, "tokens": [0, 1, 2], "reward": 0.0, "calls": []},
            {"segment": 0, "tokens": [1, 2, 2], "reward": 0.0, "calls": ["look: ok"]},
        ],
    }


def test_branches_have_their_texts(groups: list[Group]) -> None:
    sample, texts = groups[1].samples[2], TokenTexts(SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids))))
    assert branch_texts(sample, texts) == {}
    segment = Segment(map(ord, "go"), [*map(ord, "yes?")], [-1.0] * 4, (VersionRange(0, 4, 4),), (Turn(0, 3, 4),), reason="a search")
    played = replace(sample.completion, episode=Episode("done", (Turn(0, 2, 2),), (segment,)))
    assert branch_texts(replace(sample, completion=played), texts) == {
        "branches": [{"reason": "a search", "prompt": "go", "turns": [["yes", "?"]]}]
    }


def test_a_part_named_like_a_built_in_one_does_not_hide_it(groups: list[Group]) -> None:
    sample = groups[1].samples[2]
    own = replace(sample, score=replace(sample.score, detail={"parts": {"overlong": 0.5, "style": 0.5}}))
    record = sample_record(12, replace(groups[1], samples=(own,)), 0, advantage=None)
    assert record["reward_parts"] == {"verifier": 1.0, "overlong": -0.25, "verifier/overlong": 0.5, "style": 0.5}


def test_nothing_of_a_response_acts_on_the_readers_terminal(tmp_path: Path) -> None:
    """A clear-screen sequence by C1, a line that is read right to left, a line separator, half of a surrogate pair."""
    hostile = "\x9b2J\x1b[2J \u202egnirts\u202c \u2028{} \u0085 \u200b \ud83d \U000e0041 \ufeff"
    writer = SampleWriter(tmp_path / "samples.jsonl", first_step=1, files=HERE)
    writer.write([{"train_step": 1, "response": hostile}, {"train_step": 1, "response": "≤ 中文 ü 🙂"}])
    writer.close()
    text = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text.replace("\n", ""))
    assert [json.loads(line)["response"] for line in text.splitlines()] == [hostile, "≤ 中文 ü 🙂"]
    assert "≤ 中文 ü 🙂" in text and writer.num_lost == 0


@pytest.mark.parametrize(
    ("limit", "picked"), [(0, []), (3, [(0, 0), (0, 1), (0, 2)]), (8, [(g, i) for g in (0, 5) for i in range(4)])]
)
def test_choice_is_whole_groups_spread_over_the_batch(
    groups: list[Group], limit: int, picked: list[tuple[int, int]]
) -> None:
    assert choose(groups, limit) == picked


def test_choice_never_exceeds_what_there_is(groups: list[Group]) -> None:
    assert len(choose(groups, 1000)) == len(set(choose(groups, 1000))) == 40
    assert choose([], 5) == []


def test_written_in_order_and_resumed(tmp_path: Path, groups: list[Group]) -> None:
    path = tmp_path / "samples.jsonl"
    for first, steps in ((1, (1, 2, 3)), (3, (3,))):
        writer = SampleWriter(path, first_step=first, files=HERE)
        for step in steps:
            writer.write([sample_record(step, groups[0], index, float(first)) for index in range(2)])
        writer.close()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["train_step"], row["advantage"]) for row in rows] == [(1, 1.0)] * 2 + [(2, 1.0)] * 2 + [(3, 3.0)] * 2


def test_lines_that_cannot_be_written_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = SampleWriter(tmp_path / "s.jsonl", first_step=1, files=HERE)
    writer.write([{"train_step": 1, "bad": {1, 2}}, {"train_step": 1, "bad": object()}, {"train_step": 1}])
    writer.close()
    assert writer.num_lost == 2 and caplog.text.count("was not written") == 1
    assert (tmp_path / "s.jsonl").read_text() == '{"train_step": 1}\n'


def test_a_slow_disk_never_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()

    class SlowJson:
        @staticmethod
        def dumps(record: object, **options: object) -> str:
            assert is_free.wait(60.0), "the caller waits for the disk"
            return json.dumps(record)

    monkeypatch.setattr(module, "json", SlowJson)
    writer = SampleWriter(tmp_path / "s.jsonl", first_step=1, files=HERE, queue_size=2)
    writer.write([{"train_step": 1}] * 50)
    assert writer.num_lost >= 46
    is_free.set()
    writer.close()


def test_after_a_flush_every_record_so_far_is_in_the_file(tmp_path: Path, groups: list[Group]) -> None:
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path, first_step=1, files=HERE)
    for step in range(1, 51):
        writer.write([sample_record(step, groups[0], 0, 0.0)])
        assert writer.flush()
        assert len(path.read_text(encoding="utf-8").splitlines()) == step
    writer.close()


def test_flush_gives_up_where_nothing_is_written(tmp_path: Path, groups: list[Group]) -> None:
    writer = SampleWriter(tmp_path / "samples.jsonl", first_step=1, files=HERE)
    writer.close()
    assert not writer.flush(seconds=0.05)


class SentencePieces:
    """Decodes as SentencePiece does: the space before a first token is dropped."""

    WORDS = ("▁Hello", "▁there", "!", "</s>")

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.WORDS[token] for token in tokens if token != 3).replace("▁", " ").removeprefix(" ")


@pytest.mark.parametrize("text", ["Answer: 7", "x → ∑ü 漢字 🙂!", "", "\n\n  a"])
def test_counts_cover_the_text(repository: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(repository / "examples/quickstart/base_model")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    counts = TokenTexts(tokenizer).character_counts(ids, decoded)
    assert len(counts) == len(ids) and sum(counts) == len(decoded) and counts[-1] == 0


def test_a_space_that_is_dropped_alone_is_counted() -> None:
    texts = TokenTexts(SentencePieces())
    assert texts.character_counts([0, 1, 2, 3], "Hello there!") == [5, 6, 1, 0]
    assert texts.character_counts([0, 1], "Goodbye there") == []
    assert texts.character_counts([0], "Hello there") == []
