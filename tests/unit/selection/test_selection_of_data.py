"""A data set of examples from scored responses: embeddings, records, card."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dapo.algorithms.selection import KEPT
from megatron_dapo.config.rollout_schema import RejectionSamplingConfig
from megatron_dapo.selection import embed as module
from megatron_dapo.selection.card import card, pictures, statistics
from megatron_dapo.selection.choose import choose_all, examples_of, responses_of
from megatron_dapo.selection.embed import by_ngrams, hidden_states, sentence_encoder
from megatron_dapo.types import Completion, Prompt, Score, ScoredSample, VersionRange

MODEL = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "base_model"


def sample(name: str, text: str, length: int, right: bool = True) -> ScoredSample:
    tokens = np.random.default_rng(len(text) + length).integers(3, 90, length)
    completion = Completion(name, tokens, np.zeros(length), "stop", (VersionRange(0, length, 0),))
    return ScoredSample(name, completion, text, Score(float(right), 1.0, "correct" if right else "wrong"), {})


def responses(num_prompts: int = 12) -> list[tuple[Prompt, list[ScoredSample]]]:
    """Return for each prompt three copies of one text, three different texts and a wrong one."""
    made = []
    for number in range(num_prompts):
        prompt = Prompt(f"p{number}", ({"role": "user", "content": f"question {number}"},), (5, 6, 7), "1", "toy")
        texts = [
            *(f"the plain way to {number} is this one"[:] for _ in range(3)),
            "red green",
            "north south",
            "tea milk",
        ]
        row = [sample(f"{number}/{i}", text, 9 + i) for i, text in enumerate(texts)]
        made.append((prompt, [*row, sample(f"{number}/6", "wrong", 4, right=False)]))
    return made


def test_selection_is_more_diverse_than_chance_and_says_so() -> None:
    chosen = choose_all(responses(), RejectionSamplingConfig(embedding="ngrams"), 99, by_ngrams, seed=1)
    assert all(one.fates.count(KEPT) == len(one.kept) == 4 for one in chosen)
    figures = statistics(chosen, seed=1)
    assert figures["fates"] == {"wrong": 12, "near_duplicate": 24, "kept": 48} and figures["responses"] == 84
    assert (
        figures["distance_kept"]["value"] == pytest.approx(1.0, abs=0.02) and figures["distance_difference"]["low"] > 0
    )
    text = card(figures, {"seed": 1}, ["fates"])
    assert "48 examples of 12 prompts, from 84 responses to 12 prompts" in text and "are more unlike each other" in text
    rows = list(examples_of(chosen))
    assert len(rows) == 48 and {row["response"] for row in rows} >= {"red green", "tea milk"}
    assert [row["fate"] for row in responses_of(chosen)].count(KEPT) == 48
    drawn = pictures(chosen)
    for document in drawn.values():
        assert ElementTree.fromstring(document).tag.endswith("svg") and "<rect" in document
    assert drawn == pictures(chosen), "equal numbers give equal files"


def test_a_random_selection_takes_as_many() -> None:
    section = RejectionSamplingConfig(embedding="ngrams", selection="random")
    one, same, other = (choose_all(responses(), section, 99, by_ngrams, seed) for seed in (1, 1, 2))
    assert [len(each.kept) for each in one] == [4] * 12 and [e.kept for e in one] == [e.kept for e in same]
    assert [e.kept for e in one] != [e.kept for e in other]
    assert all(each.fates.count(KEPT) == 4 and each.fates[6] == "wrong" for each in one)
    figures = statistics(one, seed=9)
    assert abs(figures["distance_difference"]["value"]) < 0.2 and figures["fates"]["not_drawn"] == 24


def test_hidden_states_are_those_of_each_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and batches do not change them: against transformers, one sequence at a time."""
    monkeypatch.setattr(module, "BATCH_TOKENS", 40)
    pairs = [(prompt, one) for prompt, row in responses(2) for one in row]
    found = hidden_states(MODEL, torch.float32)(pairs)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).model.eval()
    rows = []
    for prompt, one in pairs:
        tokens = torch.tensor([[*prompt.token_ids, *one.completion.token_ids.tolist()]])
        with torch.no_grad():
            rows.append(model(tokens).last_hidden_state[0, len(prompt.token_ids) :].mean(0).numpy())
    expected = np.stack(rows) - np.mean(rows, axis=0)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    texts = sentence_encoder(MODEL)(pairs)
    assert texts.shape == found.shape and np.allclose(texts[0], texts[1], atol=1e-4), "equal texts are equal"


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: no config.json there"):
        sentence_encoder(tmp_path)


def test_records_are_what_fine_tuning_reads(tmp_path: Path) -> None:
    from megatron_dapo.data.examples import EXAMPLE_COLUMNS
    from megatron_dapo.data.files import read_table

    chosen = choose_all(responses(1), RejectionSamplingConfig(embedding="ngrams"), 99, by_ngrams, seed=1)
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in examples_of(chosen)))
    for _, values in read_table(path, EXAMPLE_COLUMNS):
        assert values["prompt"] == [{"role": "user", "content": "question 0"}] and values["response"]
