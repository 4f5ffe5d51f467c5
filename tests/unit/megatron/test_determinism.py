"""`run.deterministic`: every switch that makes a GPU's results repeat, and a step under them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from actor_checks import TEMPERATURE, Reference, build_actor, loss_fn, ragged_batch

from megatron_dapo.megatron.model_config import ModelSettings, transformer_config
from megatron_dapo.megatron.platform import DETERMINISTIC_ENVIRONMENT, use_deterministic_kernels
from megatron_dapo.parallel.layout import ParallelLayout

LAYOUT = ParallelLayout(1)


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in DETERMINISTIC_ENVIRONMENT:
        monkeypatch.setenv(name, "")  # Then monkeypatch restores it.
        monkeypatch.delenv(name)
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    yield monkeypatch
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = before


def test_all_switches_are_set(switches: pytest.MonkeyPatch) -> None:
    torch.backends.cudnn.benchmark = True
    use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0" and os.environ["NCCL_ALGO"] == "Ring"


def test_a_choice_that_repeats_too_is_kept(switches: pytest.MonkeyPatch) -> None:
    switches.setenv("NCCL_ALGO", "Tree")
    use_deterministic_kernels()
    assert os.environ["NCCL_ALGO"] == "Tree"


def test_an_environment_that_asks_for_the_opposite_is_refused(switches: pytest.MonkeyPatch) -> None:
    switches.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    with pytest.raises(ValueError, match="run.deterministic = true, but NVTE_ALLOW_NONDETERMINISTIC_ALGO = '1'"):
        use_deterministic_kernels()


@pytest.mark.usefixtures("single_process")
def test_a_step_runs_under_them_and_repeats(references: str, switches: pytest.MonkeyPatch) -> None:
    want = Reference.read(references, "qwen3-moe")
    assert not transformer_config(want.architecture, LAYOUT, ModelSettings()).deterministic_mode
    use_deterministic_kernels()
    gradients = []
    for _ in range(2):
        actor = build_actor(want, LAYOUT)
        assert actor.config.deterministic_mode
        actor.accumulate_gradients([batch for _, batch in ragged_batch().of_rank(LAYOUT, 0)], loss_fn, TEMPERATURE)
        gradients.append({name: gradient.clone() for name, gradient in actor.gradients().items()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
