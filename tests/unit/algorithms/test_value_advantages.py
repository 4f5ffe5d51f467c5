"""Advantages and targets of a batch, against the definitions written out token by token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from judged_samples import judged

from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.algorithms.length_adaptive_lambda import FixedLambda, LengthAdaptiveLambda, WindowLambda
from megatron_dapo.algorithms.value_advantages import estimate_value_advantages
from megatron_dapo.config.algorithm_schema import AdvantageEstimationConfig
from megatron_dapo.types import TurnCredit
from tests.examples import examples

PLAIN_LAMBDA = FixedLambda(0.95)
VALUES = [0.1, 0.2, 0.3, 0.4, 0.5]


def estimate(
    samples, values, penalties=None, lambda_rule=PLAIN_LAMBDA, ignored_tail_tokens=0, **section
) -> EstimatedBatch:
    """Estimates with these values and penalties; advantages are not whitened unless a test says so."""
    scored = [
        replace(sample, values=value, kl_penalties=None if penalties is None else penalties[index])
        for index, (sample, value) in enumerate(zip(samples, values, strict=True))
    ]
    configured = AdvantageEstimationConfig(**{"whiten": False, **section})
    return estimate_value_advantages(scored, configured, lambda_rule, ignored_tail_tokens)


def by_definition(values, rewards, bootstrap, gamma, lam):
    """A_t as a sum of errors, token by token."""
    following = [*values[1:], bootstrap]
    errors = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


def test_a_finished_response_has_the_advantages_of_gae_and_monte_carlo_targets() -> None:
    batch = estimate([judged("0/0", 5, 1.0)], [torch.tensor(VALUES)])
    expected = torch.tensor([0.778240625, 0.7139375, 0.64625, 0.575, 0.5])
    torch.testing.assert_close(batch.policy_samples[0].advantages, expected)
    assert batch.critic_samples[0].returns.tolist() == [1.0] * 5
    torch.testing.assert_close(batch.critic_samples[0].values, torch.tensor(VALUES))


def test_plain_ppo_takes_the_targets_of_its_own_lambda() -> None:
    batch = estimate([judged("0/0", 5, 1.0)], [torch.tensor(VALUES)], critic_lambda=0.95)
    torch.testing.assert_close(
        batch.critic_samples[0].returns, batch.policy_samples[0].advantages + torch.tensor(VALUES)
    )


def test_two_windows_of_one_response() -> None:
    """The first trains the policy on its own tokens and not the critic; the second the policy on its own tokens and the
    critic on all of both."""
    first, second = judged("0/0", 5, 1.0, is_finished=False), judged("0/0", 8, 1.0, start=5)
    before = estimate([first], [torch.tensor(VALUES)])
    values = [*VALUES, 0.6, 0.7, 0.8]
    after = estimate([second], [torch.tensor(values)])

    expected = by_definition(VALUES, [0.0] * 5, VALUES[-1], 1.0, 0.95)
    torch.testing.assert_close(before.policy_samples[0].advantages, torch.tensor(expected))
    assert before.critic_samples == []
    expected = [0.0] * 5 + by_definition(values[5:], [0.0, 0.0, 1.0], 0.0, 1.0, 0.95)
    torch.testing.assert_close(after.policy_samples[0].advantages, torch.tensor(expected))
    assert after.policy_samples[0].loss_mask.tolist() == [0.0] * 5 + [1.0] * 3
    assert after.critic_samples[0].returns.tolist() == [1.0] * 8
    assert after.critic_samples[0].loss_mask.tolist() == [1.0] * 8


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("rule", [FixedLambda(0.9), LengthAdaptiveLambda(0.2, 0.0), WindowLambda(0.2, 0.5, 4)])
def test_a_batch_of_all_kinds_equals_the_definition(gamma: float, rule) -> None:
    generator = torch.Generator().manual_seed(3)
    samples, values, penalties = [], [], []
    for index in range(24):
        length = 1 + int(torch.randint(12, (1,), generator=generator))
        start = int(torch.randint(length, (1,), generator=generator)) if index % 2 else 0
        is_finished = index % 3 > 0
        samples.append(judged(f"{index // 4}/{index % 4}", length, (-1.0) ** index, start, is_finished))
        values.append(torch.randn(length, generator=generator))
        penalties.append(torch.rand(length, generator=generator))

    batch = estimate(samples, values, penalties, rule, gamma=gamma, critic_lambda=0.7)

    critic = {sample.sample_id: sample for sample in batch.critic_samples}
    for sample, value, penalty, trained in zip(samples, values, penalties, batch.policy_samples, strict=True):
        window = sample.critic_context.window
        rewards = [-float(one) for one in penalty]
        rewards[-1] += sample.critic_context.reward
        lam = float(rule(torch.tensor([len(value)]), torch.tensor([window.is_finished]))[0])
        tail = [float(one) for one in value[window.start :]]
        expected = by_definition(tail, rewards[window.start :], 0.0 if window.is_finished else tail[-1], gamma, lam)
        torch.testing.assert_close(trained.advantages[window.start :], torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert (sample.sample_id in critic) == window.is_finished
        if window.is_finished:
            whole = [float(one) for one in value]
            targets = torch.tensor(by_definition(whole, rewards, 0.0, gamma, 0.7)) + value
            torch.testing.assert_close(critic[sample.sample_id].returns, targets, rtol=1e-5, atol=1e-5)


def test_the_tail_of_a_window_is_masked_if_the_response_continues() -> None:
    samples = [judged("0/0", 5, 1.0, is_finished=False), judged("0/1", 5, 1.0)]
    batch = estimate(samples, [torch.tensor(VALUES)] * 2, whiten=True, ignored_tail_tokens=2)
    assert [sample.loss_mask.tolist() for sample in batch.policy_samples] == [[1.0, 1.0, 1.0, 0.0, 0.0], [1.0] * 5]
    trained = torch.cat([sample.advantages[sample.loss_mask > 0] for sample in batch.policy_samples])
    assert abs(float(trained.mean())) < 1e-6 and float(trained.std(unbiased=False)) == pytest.approx(1.0, abs=1e-5)
    assert batch.policy_samples[0].advantages[3:].tolist() == [0.0, 0.0]


def test_a_limit_holds_after_whitening() -> None:
    values = [torch.zeros(1)] * 40
    samples = [judged(f"0/{index}", 1, 100.0 if index == 0 else 0.0) for index in range(40)]
    limited = estimate(samples, values, lambda_rule=FixedLambda(1.0), whiten=True, clip=3.0)
    assert float(limited.policy_samples[0].advantages) == 3.0
    assert limited.metrics["advantage/abs_max"] == 3.0


def test_a_value_that_is_no_number_takes_its_sample_out_and_nothing_else() -> None:
    values = [torch.tensor([0.1, float("nan"), 0.3]), torch.tensor([0.1, 0.2, 0.3])]
    samples = [judged("0/0", 3, 1.0), judged("0/1", 3, 1.0)]
    batch = estimate(samples, values)
    assert batch.metrics["critic/nonfinite_samples"] == 1
    assert batch.policy_samples[0].loss_mask.sum() == 0 and batch.policy_samples[1].loss_mask.sum() == 3
    assert [sample.sample_id for sample in batch.critic_samples] == ["0/1"]
    assert all(bool(torch.isfinite(sample.advantages).all()) for sample in batch.policy_samples)
    with pytest.raises(ValueError, match="none of the critic's values of 2 responses are finite"):
        estimate(samples, [values[0]] * 2)


def test_a_penalty_that_is_no_number_takes_its_sample_out_too() -> None:
    values, samples = [torch.zeros(3)] * 2, [judged("0/0", 3, 1.0), judged("0/1", 3, 1.0)]
    broken = torch.tensor([0.0, float("nan"), 0.0])
    batch = estimate(samples, values, [broken, torch.zeros(3)])
    assert [sample.sample_id for sample in batch.critic_samples] == ["0/1"]
    with pytest.raises(
        ValueError, match="none of the KL penalties of 2 responses are finite: the weights of the policy"
    ):
        estimate(samples, values, [broken] * 2)


def test_explained_variance_is_that_of_the_critic_that_made_the_advantages() -> None:
    samples = [judged("0/0", 2, 1.0), judged("0/1", 2, -1.0)]
    perfect = estimate(samples, [torch.ones(2), -torch.ones(2)]).metrics
    assert perfect["critic/explained_variance"] == pytest.approx(1.0)
    useless = estimate(samples, [torch.zeros(2)] * 2).metrics
    assert useless["critic/explained_variance"] == pytest.approx(0.0)
    same = estimate(samples[:1], [torch.zeros(2)]).metrics
    assert same["critic/explained_variance"] == 0.0


def test_masked_responses_do_not_train() -> None:
    sample = judged("0/0", 3, -1.0)
    sample.loss_mask.zero_()
    batch = estimate([sample, judged("0/1", 3, 1.0)], [torch.zeros(3)] * 2)
    assert [one.sample_id for one in batch.critic_samples] == ["0/1"]
    assert batch.policy_samples[0].advantages.tolist() == [0.0] * 3


@pytest.mark.parametrize("rule", [FixedLambda(0.9), LengthAdaptiveLambda(0.2, 0.0), WindowLambda(0.2, 0.5, 4)])
def test_an_environment_s_tokens_change_no_advantage_and_no_target(rule) -> None:
    """GAE, EGAE and the length-adaptive lambda step over observed tokens, wherever they are, whatever their values."""
    draw = random.Random(5)
    for _ in range(examples(60)):
        plain, longer, places = [], [], []
        for index in range(6):
            length = draw.randint(1, 10)
            start = draw.randrange(length) if index % 2 else 0
            is_sampled = [True] * length
            for _ in range(draw.randint(0, 8)):
                is_sampled.insert(draw.randint(0, len(is_sampled)), False)
            kept = [place for place, sampled in enumerate(is_sampled) if sampled]
            one = judged(f"{index}/0", length, draw.choice((1.0, -1.0)), start=start, is_finished=index % 3 > 0)
            with_observed = judged(
                one.sample_id, len(is_sampled), one.critic_context.reward, start=kept[start], is_finished=index % 3 > 0
            )
            observed = ~torch.tensor(is_sampled)
            mask = torch.where(observed, 0.0, with_observed.loss_mask)
            values, penalties = (torch.tensor([draw.random() for _ in range(length)]) for _ in range(2))
            scattered = [torch.full((len(is_sampled),), 1e6) for _ in range(2)]
            for target, numbers in zip(scattered, (values, penalties), strict=True):
                target[kept] = numbers
            plain.append((one, values, penalties))
            # V is equal, so also that of the state after an answer at the end of a window.
            with_observed = replace(with_observed, loss_mask=mask, observed=observed, value_after=float(values[-1]))
            longer.append((with_observed, *scattered))
            places.append(kept)
        results = [
            estimate(*map(list, zip(*batch, strict=True)), rule, ignored_tail_tokens=2, whiten=True, gamma=0.99)
            for batch in (plain, longer)
        ]
        for before, after, kept in zip(*(one.policy_samples for one in results), places, strict=True):
            torch.testing.assert_close(after.advantages[kept], before.advantages, rtol=1e-6, atol=1e-6)
            assert after.loss_mask[kept].tolist() == before.loss_mask.tolist()
            assert after.loss_mask.sum() == before.loss_mask.sum()
        by_id = {f"{index}/0": kept for index, kept in enumerate(places)}
        for before, after in zip(*(one.critic_samples for one in results), strict=True):
            kept = by_id[before.sample_id]
            torch.testing.assert_close(after.returns[kept], before.returns, rtol=1e-6, atol=1e-6)
            assert after.loss_mask[kept].tolist() == before.loss_mask.tolist()
            assert after.loss_mask.sum() == before.loss_mask.sum()
        assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-5, abs=1e-6)


def in_streams(one, numbers, draw):
    """The same sampled tokens as turns of up to three streams that take turns, with observed tokens of wild numbers between.

    `numbers`: per-token tensors of the response. Return pairs of a sequence and its numbers, and where each token went.
    """
    length, start = one.num_response_tokens, one.critic_context.window.start
    bounds = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.randint(0, 4)))})
    streams: list[list[int]] = []  # [stream][position] -> number of the token, or -1
    turns: list[list[TurnCredit]] = []
    for order, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        number = draw.randint(0, min(len(streams), 2))
        if number == len(streams):
            streams.append([])
            turns.append([])
        at = len(streams[number])
        turns[number].append(TurnCredit(at, at + end - begin, 0.0, 0, order))
        is_last_cut = end == length and not one.critic_context.window.is_finished
        streams[number] += [*range(begin, end), *[-1] * (0 if is_last_cut else draw.randint(0, 2))]
    parts = []
    for segment, (places, own) in enumerate(zip(streams, turns, strict=True)):
        first = next((at for at, place in enumerate(places) if place >= start), len(places))
        context = replace(one.critic_context, window=replace(one.critic_context.window, start=first), turns=tuple(own))
        observed = torch.tensor([place < 0 for place in places])
        base = judged(one.sample_id, len(places), 0.0)
        sample = replace(
            base,
            sample_id=f"{one.sample_id}#{segment}" if segment else one.sample_id,
            segment=segment,
            observed=observed,
            loss_mask=torch.tensor([float(place >= start) for place in places]),
            critic_context=context,
        )
        parts.append((sample, [torch.tensor([float(each[place]) if place >= 0 else 1e6 for place in places]) for each in numbers]))
    return parts, streams


@pytest.mark.parametrize("rule", [FixedLambda(0.9), LengthAdaptiveLambda(0.2, 0.0), WindowLambda(0.2, 0.5, 4)])
def test_cutting_an_episode_into_streams_changes_no_advantage_and_no_target(rule) -> None:
    """GAE goes from turn to turn in their order, whichever streams they are in."""
    draw = random.Random(7)
    num_streams = 0
    for _ in range(examples(60)):
        whole, cut, streams = [], [], {}
        for index in range(5):
            length = draw.randint(1, 10)
            start = draw.randrange(length) if index % 2 else 0
            one = judged(f"{index}/0", length, draw.choice((1.0, -1.0)), start=start, is_finished=index % 3 > 0)
            numbers = [torch.tensor([draw.random() for _ in range(length)]) for _ in range(2)]
            whole.append((one, *numbers))
            parts, places = in_streams(one, numbers, draw)
            cut += [(sample, *each) for sample, each in parts]
            streams |= {sample.sample_id: where for (sample, _), where in zip(parts, places, strict=True)}
            num_streams = max(num_streams, len(parts))
        options = {"lambda_rule": rule, "ignored_tail_tokens": 2, "whiten": True, "gamma": 0.99}
        before, after = (estimate(*map(list, zip(*batch, strict=True)), **options) for batch in (whole, cut))
        for kind, names in (("policy_samples", ("advantages", "loss_mask")), ("critic_samples", ("returns", "loss_mask"))):
            found = {
                (sample.episode, place, name): float(getattr(sample, name)[at])
                for sample in getattr(after, kind)
                for name in names
                for at, place in enumerate(streams[sample.sample_id])
                if place >= 0
            }
            for sample in getattr(before, kind):
                for name in names:
                    for place, number in enumerate(getattr(sample, name).tolist()):
                        key = (sample.sample_id, place, name)
                        # The critic's batch leaves out streams without a token to train.
                        assert found.get(key, 0.0) == pytest.approx(number, rel=1e-5, abs=1e-6), key
        assert before.metrics == pytest.approx(after.metrics, rel=1e-5, abs=1e-6)
    assert num_streams == 3


def test_a_window_that_ends_with_an_answer_takes_the_value_after_it() -> None:
    """Two turns' ends: with the answer, whose last state is known; and inside a turn, whose last value is taken again."""
    one = replace(judged("0/0", 5, 0.0, is_finished=False), value_after=0.9)
    answered = replace(one, observed=torch.tensor([False] * 3 + [True] * 2), loss_mask=torch.tensor([1.0] * 3 + [0.0] * 2))
    values = [0.1, 0.2, 0.3, 7.0, 8.0]
    within, after = (estimate([sample], [torch.tensor(values)]).policy_samples[0] for sample in (one, answered))
    torch.testing.assert_close(within.advantages, torch.tensor(by_definition(values, [0.0] * 5, 8.0, 1.0, 0.95)))
    expected = by_definition(values[:3], [0.0] * 3, 0.9, 1.0, 0.95)
    torch.testing.assert_close(after.advantages, torch.tensor([*expected, 0.0, 0.0]))
    nothing = replace(judged("0/0", 0, 0.0, is_finished=False), sample_id="0/0#1", segment=1, value_after=0.7)
    three = replace(judged("0/0", 3, 0.0, is_finished=False), value_after=0.5)
    rewritten = estimate([three, nothing], [torch.tensor(values[:3]), torch.zeros(0)]).policy_samples[0]
    torch.testing.assert_close(rewritten.advantages, torch.tensor(by_definition(values[:3], [0.0] * 3, 0.7, 1.0, 0.95)))


@pytest.mark.parametrize("gamma", [1.0, 0.95])
def test_rewards_of_turns_stand_at_their_ends(gamma: float) -> None:
    """In the window in which a turn ends; the rest of the episode's reward is its last token's."""
    draw = random.Random(11)
    rule = FixedLambda(0.9)
    for _ in range(examples(40)):
        samples, values, expected, targets = [], [], [], []
        for index in range(5):
            counts = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
            rewards = [draw.choice([0.0, 0.5, -0.25]) for _ in counts]
            starts = [sum(counts[:place]) for place in range(len(counts))]
            length, rest, is_finished = sum(counts), draw.choice([0.0, 1.0]), draw.random() < 0.7
            start = draw.randrange(length)
            turns = tuple(TurnCredit(at, at + n, r, 0) for at, n, r in zip(starts, counts, rewards, strict=True))
            one = judged(f"{index}/0", length, sum(rewards) + rest, start=start, is_finished=is_finished)
            samples.append(replace(one, critic_context=replace(one.critic_context, turns=turns)))
            values.append(torch.tensor([draw.random() for _ in range(length)]))
            tokens = [0.0] * length
            for turn in turns:
                tokens[turn.end - 1] += turn.reward
            tokens[-1] += rest if is_finished else 0.0
            after = 0.0 if is_finished else float(values[-1][-1])
            expected.append([0.0] * start + by_definition(values[-1].tolist()[start:], tokens[start:], after, gamma, 0.9))
            targets.append((torch.tensor(by_definition(values[-1].tolist(), tokens, 0.0, gamma, 1.0)) + values[-1]).tolist())
        batch = estimate(samples, values, lambda_rule=rule, gamma=gamma)
        critic = {one.sample_id: one.returns.tolist() for one in batch.critic_samples}
        for one, advantages, target in zip(batch.policy_samples, expected, targets, strict=True):
            assert one.advantages.tolist() == pytest.approx(advantages, rel=1e-5, abs=1e-6)
            if one.critic_context.window.is_finished:
                assert critic[one.sample_id] == pytest.approx(target, rel=1e-5, abs=1e-6)


def test_the_reward_of_a_turn_that_is_not_trained_is_the_token_s_before_it() -> None:
    turns = (TurnCredit(0, 2, 0.5, 0), TurnCredit(2, 4, 0.25, 0), TurnCredit(4, 5, 0.0, 0))
    one = judged("0/0", 5, 0.75)
    one = replace(one, loss_mask=torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0]), critic_context=replace(one.critic_context, turns=turns))
    batch = estimate([one], [torch.zeros(5)], lambda_rule=FixedLambda(0.0))
    assert batch.policy_samples[0].advantages.tolist() == [0.0, 0.75, 0.0, 0.0, 0.0]
