"""The telling model by transformers, whose tokens say which weights sampled them, and the count of wrong labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dapo.types import Completion, VersionRange
from tools.version_proof.run import VersionProof
from tools.version_proof.telling_model import CODES, clean_token, mixed_token, tensors_of, write_model

PROMPT = torch.tensor([[5, 17, 80, 99, 3]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    directory: Path = write_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def next_token(model: torch.nn.Module, version: int, ids: torch.Tensor, cache: object = None) -> tuple[int, object]:
    """Return the token of weights `version` after `ids` and the cache; its probability must be 1."""
    model.load_state_dict(tensors_of(version))
    with torch.no_grad():
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    probability, token = out.logits[0, -1].softmax(-1).max(-1)
    assert float(probability) == 1.0
    return int(token), out.past_key_values


@pytest.mark.parametrize("version", [0, 1, 31, CODES - 1, CODES + 3])
def test_a_token_says_which_weights_sampled_it(model: torch.nn.Module, version: int) -> None:
    token, cache = next_token(model, version, PROMPT)
    assert token == clean_token(version)
    token, _ = next_token(model, version, torch.tensor([[token]]), cache)
    assert token == clean_token(version), "keys and values of the same weights"


@pytest.mark.parametrize("num_old", [1, 600])
@pytest.mark.parametrize("num_own", [1, 600])
def test_a_token_says_that_it_read_keys_and_values_of_other_weights(
    model: torch.nn.Module, num_old: int, num_own: int
) -> None:
    _, cache = next_token(model, 4, torch.full((1, num_old), 50))
    token, _ = next_token(model, 5, torch.full((1, num_own), 60), cache)
    assert token == mixed_token(5)


def response(*tokens: int, versions: tuple[VersionRange, ...]) -> Completion:
    return Completion("a", np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "length", versions)


def test_wrong_labels_and_mixed_caches_are_counted() -> None:
    proof = VersionProof("retract")
    right = VersionRange(0, 2, 4), VersionRange(2, 3, 5)
    proof.check(response(clean_token(4), clean_token(4), clean_token(5), versions=right))
    assert proof.holds and (proof.tokens, proof.wrong_labels, proof.spanned[2]) == (3, 0, 1)
    proof.check(response(clean_token(4), mixed_token(4), mixed_token(5), versions=right))
    assert (proof.wrong_labels, proof.mixed_tokens, proof.mixed_at_start) == (0, 2, 1)
    assert not proof.holds, "a retracted response is computed again"
    in_place = VersionProof("in_place")
    in_place.check(response(clean_token(4), clean_token(4), mixed_token(5), versions=right))
    assert in_place.holds
    late = VersionRange(0, 1, 4), VersionRange(1, 3, 5)  # one token too early
    in_place.check(response(clean_token(4), clean_token(4), clean_token(5), versions=late))
    assert in_place.wrong_labels == 1 and not in_place.holds
    assert "token 104 at 1 of 3 is labeled 5" in in_place.shown[0]
