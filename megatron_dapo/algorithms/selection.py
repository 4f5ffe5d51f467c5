"""Selection of correct responses for supervised fine-tuning (rejection sampling): length, near-duplicates, diversity, caps.

    verified responses of one prompt
      -> within the length bounds, and the quantiles of their prompt
      -> none nearly equal to a shorter one        Jaccard similarity of word n-grams
      -> leader clusters of their embeddings       cosine similarity to the cluster's first member
      -> the shortest of each cluster, clusters in order of their leaders, up to the prompt's cap

Every step goes from short to long responses, so the shorter of two similar ones stays; ties go to the lower index. The
result therefore depends only on the responses. For comparison, `choose_at_random` picks as many by a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dapo.config.rollout_schema import RejectionSamplingConfig

# Reasons for leaving a response out, in the order of the checks.
WRONG, LENGTH, DUPLICATE, SIMILAR, CAPPED = "wrong", "length", "near_duplicate", "same_cluster", "prompt_cap"
KEPT = "kept"


@dataclass(frozen=True)
class Candidates:
    """All responses to one prompt."""

    texts: Sequence[str]  # n
    lengths: Sequence[int]  # n, tokens
    is_correct: Sequence[bool]  # n

    @property
    def pass_rate(self) -> float:
        """Share of correct responses; 0 if there are none."""
        return sum(self.is_correct) / len(self.is_correct) if self.is_correct else 0.0


@dataclass
class Selection:
    """Fate of each response to one prompt, and the responses that are kept, in order of choice."""

    fates: list[str]  # n, KEPT or a reason
    kept: list[int] = field(default_factory=list)
    clusters: dict[int, int] = field(default_factory=dict)  # only for responses that were clustered


def shortlist(candidates: Candidates, section: RejectionSamplingConfig, max_tokens: int) -> Selection:
    """Return the fates that need no embedding; responses still KEPT go on to clustering, short ones first."""
    fates = [KEPT if correct else WRONG for correct in candidates.is_correct]
    correct = [index for index, fate in enumerate(fates) if fate == KEPT]
    low, high = length_bounds([candidates.lengths[index] for index in correct], section, max_tokens)
    for index in correct:
        if not low <= candidates.lengths[index] <= high:
            fates[index] = LENGTH
    order = by_length([index for index in correct if fates[index] == KEPT], candidates.lengths)
    unique = without_near_duplicates([candidates.texts[index] for index in order], section.near_duplicate_similarity)
    for place, index in enumerate(order):
        if place not in unique:
            fates[index] = DUPLICATE
    return Selection(fates, [order[place] for place in unique])


def choose(
    selection: Selection, embeddings: np.ndarray, pass_rate: float, section: RejectionSamplingConfig
) -> Selection:
    """Return the fates of a shortlist after clustering; `embeddings` [m, d] are those of its `kept`, in order."""
    fates, order = list(selection.fates), selection.kept
    clusters = leader_clusters(embeddings, section.cluster_similarity)
    # A hard prompt has few correct responses, so keep one of each kind.
    cap = len(order) if pass_rate < section.hard_pass_rate else section.max_per_prompt
    kept: list[int] = []
    sizes: dict[int, int] = {}
    for index, cluster in zip(order, clusters, strict=True):
        sizes[cluster] = sizes.get(cluster, 0) + 1
        if sizes[cluster] > section.max_per_cluster:
            fates[index] = SIMILAR
        elif len(kept) >= cap:
            fates[index] = CAPPED
        else:
            kept.append(index)
    return Selection(fates, kept, dict(zip(order, clusters, strict=True)))


def choose_at_random(candidates: Candidates, size: int, seed: str) -> list[int]:
    """Return `size` correct responses to a prompt, drawn by `seed` regardless of length or similarity."""
    correct = [index for index, is_correct in enumerate(candidates.is_correct) if is_correct]
    return sorted(random.Random(seed).sample(correct, min(size, len(correct))))


def length_bounds(lengths: Sequence[int], section: RejectionSamplingConfig, max_tokens: int) -> tuple[float, float]:
    """Return the bounds on tokens: the section's own, and quantiles of the correct responses' `lengths`.

    The quantiles are lengths that occur, the lower rounded down and the upper rounded up: of few responses none is cut.
    """
    low, high = section.min_tokens, section.max_tokens or max_tokens
    if not lengths:
        return low, high
    low_quantile, high_quantile = section.length_quantiles
    first = float(np.quantile(lengths, low_quantile, method="lower"))
    last = float(np.quantile(lengths, high_quantile, method="higher"))
    return max(low, first), min(high, last)


def by_length(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return `indices` sorted by length, then by index."""
    return sorted(indices, key=lambda index: (lengths[index], index))


def without_near_duplicates(texts: Sequence[str], similarity: float, n: int = 5) -> list[int]:
    """Return the indices of texts whose Jaccard similarity to every kept earlier text is below `similarity`.

    The similarity compares sets of lower-case word n-grams; a text of fewer words is a single element (Broder, "On the
    resemblance and containment of documents", 1997). It is computed exactly, because a prompt has few responses.
    """
    kept: list[int] = []
    shingles = [_word_ngrams(text, n) for text in texts]
    for place, own in enumerate(shingles):
        if all(len(own & shingles[other]) < similarity * len(own | shingles[other]) for other in kept):
            kept.append(place)
    return kept


def _word_ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[start : start + n]) for start in range(max(1, len(words) - n + 1))}


def leader_clusters(embeddings: np.ndarray, similarity: float) -> list[int]:
    """Return the cluster of each row of `embeddings` [m, d]: the first whose leader has cosine >= `similarity` with it.

    A row without such a leader starts a new cluster (leader algorithm, Hartigan, "Clustering Algorithms", 1975), so no
    cluster is empty. A row of zeros is similar to no other.
    """
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(norms > 0, norms, 1.0)
    leaders: list[int] = []
    clusters: list[int] = []
    for row in unit:
        cosines = unit[leaders] @ row if leaders else np.zeros(0)
        alike = np.flatnonzero(cosines >= similarity)
        if not len(alike):
            leaders.append(len(clusters))
        clusters.append(int(alike[0]) if len(alike) else len(leaders) - 1)
    return clusters


def ngram_embedding(text: str, dimensions: int = 1024, n: int = 3) -> np.ndarray:
    """Return counts of hashed word n-grams, [dimensions] float32: an embedding without a model (feature hashing)."""
    vector = np.zeros(dimensions, np.float32)
    for size in range(1, n + 1):
        for gram in _word_ngrams(text, size):
            vector[_stable_hash(" ".join(gram)) % dimensions] += 1.0
    return vector


def _stable_hash(text: str) -> int:
    # Python's built-in hash of a string differs between processes.
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def mean_distance(embeddings: np.ndarray) -> float:
    """Return the mean of 1 - cosine over all pairs of rows [m, d]; 0 for fewer than two."""
    m = len(embeddings)
    if m < 2:
        return 0.0
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    total = (embeddings / np.where(norms > 0, norms, 1.0)).sum(axis=0)
    own = int((norms > 0).sum())  # a row's cosine with itself
    return 1.0 - (math.fsum(total * total) - own) / (m * (m - 1))
