"""The parity probe, with a trainer and a server that are made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.algorithms.off_policy import mismatch_metrics, mismatch_sums
from megatron_dapo.trainer.parity import Parity, ParityError
from megatron_dapo.types import TrainSample

SEQUENCES = [[5, 6, 7], [1, 2], [9, 8, 7, 6]]


@pytest.fixture(scope="module", autouse=True)
def single_process_group() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trainer:
    """A learner to which token t has log-prob -t / 10."""

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
        assert temperature == 1.0
        rollout = torch.cat([sample.rollout_logprobs for sample in samples])
        own = torch.cat([-sample.tokens[1:] / 10 for sample in samples])
        return mismatch_metrics(mismatch_sums(own, rollout, torch.ones_like(own)))


def server(offset: float, tokens: Sequence[int]) -> list[float]:
    return [-token / 10 + offset for token in tokens[1:]]


def test_equal_sides_pass_and_the_gap_is_measured() -> None:
    metrics = Parity(SEQUENCES, Trainer(), gate=0.02).check("server 0", lambda tokens: server(0.01, tokens))
    assert metrics["mismatch/abs_logprob_diff_mean"] == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("offset", [0.03, float("nan")])
def test_another_model_is_refused_by_name_with_both_numbers(offset: float) -> None:
    with pytest.raises(ParityError, match="server 3 does not serve .* allows 0.02"):
        Parity(SEQUENCES, Trainer(), gate=0.02).check("server 3", lambda tokens: server(offset, tokens))


def test_missing_logprobs_are_named() -> None:
    with pytest.raises(ParityError, match="3 log-probs for 3 tokens"):
        Parity(SEQUENCES, Trainer(), gate=1.0).check("server 0", lambda tokens: [-1.0] * len(tokens))


def test_quantized_weights_are_compared_with_quantized_weights_and_the_error_is_reported(caplog) -> None:
    """The trainer is 0.05 off as trained and equal as served; the gate is on the second, and holds only there."""
    state = {"rounded": False}

    @contextmanager
    def as_served() -> Iterator[None]:
        state["rounded"] = True
        yield
        state["rounded"] = False

    class RoundingTrainer(Trainer):
        def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
            metrics = super().compare(samples, temperature)
            return metrics if state["rounded"] else {name: value + 0.05 for name, value in metrics.items()}

    probe = Parity(SEQUENCES, RoundingTrainer(), 0.02, as_served)
    with caplog.at_level("INFO"):
        metrics = probe.check("server 0", lambda tokens: server(0.01, tokens))
    assert metrics["mismatch/abs_logprob_diff_mean"] == pytest.approx(0.01, rel=1e-4) and not state["rounded"]
    assert "server 0 serves quantized weights: mean |d log-prob| 0.06, max 0.06 against the trained ones" in caplog.text
    with pytest.raises(ParityError, match="server 1 does not serve"):
        probe.check("server 1", lambda tokens: server(0.03, tokens))


def test_a_sequence_that_predicts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sequences \[1\] have fewer than 2 tokens"):
        Parity([[1, 2], [3]], Trainer(), gate=1.0)
