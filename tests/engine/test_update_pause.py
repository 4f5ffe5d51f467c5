"""Labels of tokens while versions arrive in flight: a small size of tools/prove_versions.py with a real server.

SGLang labels tokens from 0.5.23 on (make test-engine SGLANG=0.5.23). test_server.py shows that older servers are refused by name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config.sglang_schema import UpdatePause
from tools.version_proof.run import prove_versions

pytestmark = pytest.mark.long  # test_generation.py has the labels of responses that continue after a weight sync
NUM_TOKENS = 6000


@pytest.mark.parametrize("update_pause", ["abort", "retract", "in_place"])
def test_every_token_has_the_label_of_the_weights_that_sampled_it(
    update_pause: UpdatePause, engine_python: Path, labels_tokens: bool
) -> None:
    if update_pause != "abort" and not labels_tokens:
        pytest.skip("this SGLang labels answers only; test_server.py shows that it is refused")
    proof = prove_versions(engine_python, update_pause, NUM_TOKENS)
    assert proof.wrong_labels == 0, proof.shown
    assert proof.tokens >= NUM_TOKENS and proof.versions > 5 and sum(map(int, proof.spanned)) > 1
    assert sum(count for number, count in proof.spanned.items() if number > 1) > 20, "updates met responses"
    assert (proof.mixed_tokens > 0) == (update_pause == "in_place"), "only this mode reads keys and values of older weights"
