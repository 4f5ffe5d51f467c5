"""Selection of responses for supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.algorithms.selection import (
    CAPPED,
    DUPLICATE,
    KEPT,
    LENGTH,
    SIMILAR,
    WRONG,
    Candidates,
    choose,
    choose_at_random,
    leader_clusters,
    mean_distance,
    ngram_embedding,
    shortlist,
    without_near_duplicates,
)
from megatron_dapo.config.rollout_schema import RejectionSamplingConfig

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["seeds"]["rejection_sampling"]
UNALIKE = ["one two three", "red green blue", "north south east", "dog cat mouse", "up down left", "tea milk juice"]


def test_golden_picks() -> None:
    section = RejectionSamplingConfig(min_tokens=64, max_tokens=4096, max_per_prompt=4)
    candidates = Candidates(UNALIKE, GOLDEN["len"], [bool(right) for right in GOLDEN["correct"]])
    listed = shortlist(candidates, section, 8192)
    assert sorted(listed.kept) == GOLDEN["after_verify_and_length[64,4096]"]
    assert listed.kept == GOLDEN["order_by_length"]
    found = choose(listed, np.array([GOLDEN["emb"][index] for index in listed.kept]), candidates.pass_rate, section)
    assert found.kept == GOLDEN["picked(leaders, shortest first)"]
    members = {tuple(sorted(i for i in found.clusters if found.clusters[i] == c)) for c in found.clusters.values()}
    expected = GOLDEN["cluster_of"]
    assert members == {
        tuple(sorted(int(i) for i in expected if expected[i] == cluster)) for cluster in set(expected.values())
    }
    assert found.fates == [SIMILAR, KEPT, KEPT, WRONG, LENGTH, KEPT]


def test_every_fate_has_its_reason() -> None:
    texts = ["a b c d e f g", "A  B c d e f g", "h i j", "k l m", "n o p", "q r s"]
    candidates = Candidates(texts, [7, 8, 3, 3, 30, 3], [True, True, True, True, True, False])
    section = RejectionSamplingConfig(max_tokens=20, max_per_prompt=2, cluster_similarity=0.9)
    listed = shortlist(candidates, section, 99)
    assert listed.fates == [KEPT, DUPLICATE, KEPT, KEPT, LENGTH, WRONG] and listed.kept == [2, 3, 0]
    apart = np.eye(3)
    assert choose(listed, apart, 5 / 6, section).fates == [CAPPED, DUPLICATE, KEPT, KEPT, LENGTH, WRONG]
    hard = choose(listed, apart, 0.2, section)
    assert hard.kept == [2, 3, 0], "a hard prompt keeps every cluster"
    alike = choose(listed, np.ones((3, 2)), 5 / 6, section)
    assert alike.kept == [2] and alike.fates[:4] == [SIMILAR, DUPLICATE, KEPT, SIMILAR]
    two = section.model_copy(update={"max_per_cluster": 2})
    assert choose(listed, np.ones((3, 2)), 5 / 6, two).kept == [2, 3]


def test_quantiles_cut_only_where_there_are_many() -> None:
    section = RejectionSamplingConfig()
    few = Candidates(UNALIKE, [1, 50, 60, 70, 80, 900], [True] * 6)
    assert shortlist(few, section, 1000).fates == [KEPT] * 6
    lengths = [1, *range(100, 158), 900]
    many = Candidates([f"word{i} is not word{i + 99}" for i in range(60)], lengths, [True] * 60)
    fates = shortlist(many, section, 1000).fates
    assert fates[0] == fates[-1] == LENGTH and fates.count(KEPT) >= 54


def test_without_a_correct_response_nothing_is_kept() -> None:
    listed = shortlist(Candidates(["a", "b"], [1, 2], [False, False]), RejectionSamplingConfig(), 9)
    found = choose(listed, np.zeros((0, 1)), 0.0, RejectionSamplingConfig())
    assert found.kept == [] and found.fates == [WRONG, WRONG] and found.clusters == {}


def test_near_duplicates_by_brute_force() -> None:
    """Jaccard similarity over word 5-grams; of two alike the earlier one stays."""
    words = [f"w{i}" for i in range(24)]
    changed = [*words[:-1], "x"]  # 19 of 21 distinct 5-grams are common
    texts = [" ".join(words), " ".join(changed), " ".join(words[::-1]), "w1 w2", "w1 w3"]
    assert without_near_duplicates(texts, 19 / 21) == [0, 2, 3, 4]
    assert without_near_duplicates(texts, 19 / 21 + 1e-9) == [0, 1, 2, 3, 4]


def test_leaders_have_no_empty_cluster_and_ignore_scale() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(40, 3))
    clusters = leader_clusters(rows, 0.8)
    assert sorted(set(clusters)) == list(range(max(clusters) + 1))
    assert clusters == leader_clusters(rows * generator.uniform(0.1, 9, (40, 1)), 0.8)
    leaders = [clusters.index(cluster) for cluster in range(max(clusters) + 1)]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for place, cluster in enumerate(clusters):
        alike = [c for c, leader in enumerate(leaders) if leader <= place and unit[leader] @ unit[place] >= 0.8]
        assert cluster == alike[0]
    assert leader_clusters(np.zeros((2, 4)), 0.5) == [0, 1], "texts without an embedding are not alike"


def test_random_choice_depends_on_the_seed_alone() -> None:
    candidates = Candidates(["x"] * 12, [1] * 12, [index % 3 > 0 for index in range(12)])
    drawn = choose_at_random(candidates, 4, "1/p")
    assert drawn == choose_at_random(candidates, 4, "1/p") and len(set(drawn)) == 4
    assert all(candidates.is_correct[index] for index in drawn)
    assert {tuple(choose_at_random(candidates, 4, f"{seed}/p")) for seed in range(9)} != {tuple(drawn)}
    assert len(choose_at_random(candidates, 99, "1/p")) == 8


def test_distances_are_means_over_pairs() -> None:
    rows = np.array([ngram_embedding(text) for text in ("a b", "a b", "c d")])
    assert mean_distance(rows) == pytest.approx(2 / 3)  # 0, 1 and 1
    pairs = np.random.default_rng(1).normal(size=(5, 4))
    unit = pairs / np.linalg.norm(pairs, axis=1, keepdims=True)
    expected = np.mean([1 - unit[i] @ unit[j] for i in range(5) for j in range(i)])
    assert mean_distance(pairs) == pytest.approx(expected)
    assert mean_distance(pairs[:1]) == 0.0
