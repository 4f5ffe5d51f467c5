"""Old log-probs: the first mini-batch's come from its training forward, all others are computed before any step; and the host
reads nothing of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from value_path import FakePolicy, Outputs, make_config, make_policy_learner

from megatron_dapo.config.algorithm_schema import OffPolicyConfig
from megatron_dapo.trainer import actor_learner
from megatron_dapo.trainer.actor_learner import PolicyLearner
from megatron_dapo.types import TrainSample


class FakeActor(FakePolicy):
    """Each step lowers the log-probs by 0.1."""

    def __init__(self) -> None:
        super().__init__(pull=0.1)


def make_learner(
    actor: FakeActor, epochs: int, correction: OffPolicyConfig | None = None, **training: int | str
) -> PolicyLearner:
    off_policy = (correction or OffPolicyConfig()).model_dump()
    config = make_config(
        training={"mini_batch_prompts": 2, "epochs": epochs, **training}, algorithm={"off_policy": off_policy}
    )
    return make_policy_learner(actor, config)


def make_samples(num_groups: int) -> list[TrainSample]:
    return [
        TrainSample(f"{group}/{index}", group, torch.arange(7), 3, torch.ones(4), torch.ones(4), torch.full((4,), -1.5))
        for group in range(num_groups)
        for index in range(2)
    ]


@pytest.mark.parametrize(
    ("num_groups", "epochs", "calls"),
    [
        (2, 1, ["train"]),
        (4, 1, ["logprobs", "train", "train"]),
        (6, 1, ["logprobs", "logprobs", "train", "train", "train"]),
        (2, 2, ["train", "train"]),
        (4, 2, ["logprobs", "train", "train", "train", "train"]),
    ],
)
def test_ratios_are_against_the_policy_before_the_first_step(num_groups: int, epochs: int, calls: list[str]) -> None:
    actor = FakeActor()
    result = make_learner(actor, epochs).learn(make_samples(num_groups), train_step=1)
    assert actor.calls == calls
    expected = [torch.tensor(-step / 10).exp().item() for step in range(num_groups // 2 * epochs)]
    assert actor.ratios == pytest.approx(expected)
    # all tokens once, against the engine's log-probs
    assert result.metrics["mismatch/abs_logprob_diff_mean"] == pytest.approx(0.5)


@pytest.mark.parametrize("loss", ["dis", "dppo_tv", "dppo_kl"])
def test_a_ratio_to_the_policy_that_sampled_needs_no_old_logprobs(loss: str) -> None:
    actor = FakeActor()
    config = make_config(training={"mini_batch_prompts": 2, "epochs": 2}, algorithm={"loss": {"name": loss}})
    result = make_policy_learner(actor, config).learn(make_samples(6), train_step=1)
    assert actor.calls == ["train"] * 6
    assert actor.ratios == pytest.approx([torch.tensor(0.5 - step / 10).exp().item() for step in range(6)])
    # The engine is compared only with the weights by which it sampled.
    assert result.metrics["mismatch/abs_logprob_diff_mean"] == pytest.approx(0.5)


def test_a_gate_looks_at_everything_before_anything_is_trained() -> None:
    actor = FakeActor()
    make_learner(actor, epochs=1).learn(make_samples(4), train_step=0, mismatch_gate=0.6)
    assert actor.calls == ["logprobs", "logprobs", "train", "train"]
    refused = FakeActor()
    with pytest.raises(RuntimeError, match="nats on the first batch"):
        make_learner(refused, epochs=1).learn(make_samples(4), train_step=0, mismatch_gate=0.4)
    assert "train" not in refused.calls


def in_parts(samples: list[TrainSample], trained: FakeActor) -> Iterator[list[TrainSample]]:
    """Yield two groups at a time, numbered anew; each part exists only after the one before was trained."""
    for start in range(0, samples[-1].group_index + 1, 2):
        assert trained.num_steps == start // 2
        part = [one for one in samples if one.group_index in (start, start + 1)]
        yield [replace(one, group_index=one.group_index - start) for one in part]


@pytest.mark.parametrize("gate", [None, 0.6])
@pytest.mark.parametrize("correction", [None, OffPolicyConfig(correction="tis", high=1.5)])
def test_parts_are_trained_as_the_whole_batch(gate: float | None, correction: OffPolicyConfig | None) -> None:
    whole, streamed = FakeActor(), FakeActor()
    expected = make_learner(whole, 1, correction).learn(make_samples(6), 1, gate)
    found = make_learner(streamed, 1, correction).learn_parts(in_parts(make_samples(6), streamed), 1, gate)
    assert found == expected and streamed.ratios == whole.ratios
    assert sorted(streamed.calls) == sorted(whole.calls) and streamed.calls[-1] == "train"
    refused = FakeActor()
    with pytest.raises(RuntimeError, match="nats on the first batch"):
        make_learner(refused, 1).learn_parts(in_parts(make_samples(6), refused), 0, mismatch_gate=0.4)
    assert refused.calls == ["logprobs"], "the gate looks at the first part"


def test_ratios_can_be_against_the_engine_s_log_probs() -> None:
    whole, streamed = FakeActor(), FakeActor()
    expected = make_learner(whole, 1, old_logprobs="rollout").learn(make_samples(6), 1)
    found = make_learner(streamed, 1, old_logprobs="rollout").learn_parts(in_parts(make_samples(6), streamed), 1)
    assert found == expected and streamed.calls == whole.calls == ["train"] * 3, "no pass ahead"
    assert whole.ratios == pytest.approx([torch.tensor(0.5 - step / 10).exp().item() for step in range(3)])
    assert found.metrics["mismatch/abs_logprob_diff_mean"] == pytest.approx(0.5), "of the first step's policy"


@pytest.mark.parametrize(
    ("correction", "bounded", "masked", "weight"),
    [
        (None, 0.0, 0.0, 1.0),
        (OffPolicyConfig(correction="tis", high=1.5), 1.0, 0.0, 1.5),
        (OffPolicyConfig(correction="mis", high=1.5), 1.0, 1.0, 0.0),
        (OffPolicyConfig(correction="mis", high=2.0), 0.0, 0.0, torch.tensor(0.5).exp().item()),
    ],
)
def test_the_correction_says_what_it_did(
    correction: OffPolicyConfig | None, bounded: float, masked: float, weight: float
) -> None:
    metrics = make_learner(FakeActor(), 1, correction).learn(make_samples(4), train_step=1).metrics
    assert metrics["mismatch/bounded_share"] == bounded and metrics["mismatch/masked_share"] == masked
    assert metrics["mismatch/weight_mean"] == pytest.approx(weight)


def test_the_gap_is_told_apart_by_the_age_of_tokens() -> None:
    """Through packing, micro-batches and both ways of getting old log-probs."""
    ages = torch.tensor([3.0, 1.0, 1.0, 0.0])
    samples = [replace(sample, staleness=ages, rollout_logprobs=-1.0 - ages / 10) for sample in make_samples(6)]
    metrics = make_learner(FakeActor(), 1).learn(samples, train_step=1).metrics
    for lag, share, gap in (("lag0", 0.25, 0.0), ("lag1", 0.5, 0.1), ("lag2plus", 0.25, 0.3)):
        assert metrics[f"mismatch/{lag}_token_share"] == pytest.approx(share)
        assert metrics[f"mismatch/{lag}_abs_logprob_diff_mean"] == pytest.approx(gap, abs=1e-6)


def test_a_mini_batch_without_a_trained_token_makes_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """AdamW would move the weights by momentum and decay."""
    samples = [replace(one, loss_mask=one.loss_mask * (one.group_index >= 2)) for one in make_samples(6)]
    actor = FakeActor()
    result = make_learner(actor, epochs=2).learn(samples, train_step=4)
    assert (actor.num_steps, result.num_optimizer_steps) == (4, 4), "two mini-batches of three, twice"
    assert "train step 5: 1 of 3 mini-batches have no trained token" in caplog.text
    nothing = [replace(one, loss_mask=torch.zeros(4)) for one in make_samples(2)]
    result = make_learner(FakeActor(), epochs=1).learn(nothing, train_step=0, mismatch_gate=0.1)
    assert result.num_optimizer_steps == 0 and result.metrics["actor/trained_tokens"] == 0


class OnDevice(torch.Tensor):
    """A tensor of a device: counts what makes the host wait for a value of it or of what is computed from it."""

    reads: ClassVar[list[str]] = []
    WAITS = ("item", "__float__", "__int__", "__bool__", "tolist", "cpu", "numpy", "nonzero", "masked_select", "equal")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        index = args[1] if name == "__getitem__" else None
        if name in cls.WAITS or (isinstance(index, torch.Tensor) and index.dtype == torch.bool):
            cls.reads.append(name)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def of(cls, value: Any, device: Any = None) -> Any:
        """Return a dataclass with its tensors on the device."""
        tensors = {name: each.as_subclass(cls) for name, each in vars(value).items() if isinstance(each, torch.Tensor)}
        return replace(value, **tensors)


class DeviceActor(FakeActor):
    def _outputs(self, num_tokens: int) -> Outputs:
        return OnDevice.of(super()._outputs(num_tokens))

    def train_step(self, micro_batches, loss_fn, temperature, learning_rate):
        return super().train_step([OnDevice.of(one) for one in micro_batches], loss_fn, temperature, learning_rate)


@pytest.mark.parametrize(
    "correction",
    [
        OffPolicyConfig(),
        OffPolicyConfig(correction="tis", high=1.5),
        OffPolicyConfig(correction="mis", high=1.5, level="geometric"),
    ],
)
@pytest.mark.parametrize("gate", [None, 0.6])
def test_the_host_waits_as_often_for_many_micro_batches_as_for_one(
    correction: OffPolicyConfig, gate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_learner, "to_device", OnDevice.of)
    reads = []
    for tokens in (1024, 8):  # all samples of a mini-batch in one micro-batch, or one in each
        OnDevice.reads.clear()
        learner = make_learner(DeviceActor(), 1, correction, micro_batch_tokens=tokens)
        learner.learn(make_samples(4), train_step=1, mismatch_gate=gate)
        reads.append(OnDevice.reads.copy())
    assert reads[0] == reads[1] and reads[0], "the metrics are read once"


class DivergentHead:
    """Record of what the head saw; its divergence from the reference is the reference's number of calls at every token."""

    def __init__(self, num_tokens: int, number: float = 0.0) -> None:
        self.num_tokens, self.number = num_tokens, number

    def divergence_from(self, reference: DivergentHead, gamma: float, weigh_by: str) -> SimpleNamespace:
        assert (gamma, weigh_by, reference.num_tokens) == (0.25, "actor", self.num_tokens)
        return SimpleNamespace(
            weighted_mse=torch.full((self.num_tokens,), reference.number), cross_entropy=torch.ones(self.num_tokens)
        )


class GklActor(FakeActor):
    def _outputs(self, num_tokens: int) -> Outputs:
        found = super()._outputs(num_tokens)
        found.head = DivergentHead(num_tokens)
        return found

    def forward_head_inputs(self, micro_batches, temperature):
        self.calls.append("heads")
        number = float(self.calls.count("heads"))
        return [DivergentHead(one.num_tokens, number) for one in micro_batches]


def test_the_reference_runs_before_each_step_where_the_generalized_kl_has_a_coefficient() -> None:
    actor, reference = GklActor(), GklActor()
    gkl = {"coefficient": 0.1, "gamma": 0.25, "weigh_by": "actor"}
    config = make_config(training={"mini_batch_prompts": 2, "epochs": 2}, algorithm={"gkl": gkl})
    learner = make_policy_learner(actor, config, reference)
    metrics = learner.learn(make_samples(4), train_step=1).metrics
    assert reference.calls.count("heads") == 4 and actor.calls.count("heads") == 0  # two mini-batches, two passes
    assert metrics["actor/gkl_weighted_mse"] == pytest.approx(2.5)  # the mean of 1, 2, 3 and 4
    assert metrics["actor/gkl_cross_entropy"] == pytest.approx(1.0)
    assert make_learner(FakeActor(), 1).learn(make_samples(2), 1).metrics["actor/gkl_weighted_mse"] == 0.0
