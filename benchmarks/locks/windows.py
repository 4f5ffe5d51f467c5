"""4. T-PPO's windows by the policy that they train, and by the one before, as when they are generated ahead.

Windows are collected, aged and estimated by the run's own collector, header and estimators; only the two networks and
their steps are the benchmark's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from locks import language
from locks.ablation import FULL, Learner, Recipe
from locks.language import Locks, Responses
from locks.networks import update_critic
from torch.nn.utils.rnn import pad_sequence

from megatron_dapo.algorithms.length_adaptive_lambda import WindowLambda
from megatron_dapo.algorithms.off_policy import OffPolicyInputs, importance_weights
from megatron_dapo.algorithms.policy_loss import ppo_clip
from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs
from megatron_dapo.algorithms.value_advantages import estimate_value_advantages
from megatron_dapo.config.algorithm_schema import AdvantageEstimationConfig, OffPolicyConfig, WindowConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.trainer.batch_header import header_of, samples_of, with_numbers
from megatron_dapo.types import (
    Completion,
    GenerationRequest,
    Prompt,
    Repetition,
    SamplingParams,
    Score,
    TrainSample,
    VersionRange,
)

WINDOW, IGNORED_TAIL = 8, 1  # tokens
CORRECTION = OffPolicyConfig(correction="tis")
ESTIMATION = AdvantageEstimationConfig(lambda_rule="window")
LAMBDA = WindowLambda(alpha=0.5, floor=0.0, window=WINDOW)
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # number of seeds -> quantile of Student's t


class LockEngine:
    """A `RolloutEngine` that samples by a table of probabilities; a poll ends all requests."""

    def __init__(self, locks: Locks, generator: torch.Generator) -> None:
        self.policy_version = -1
        self.prefix_reuse = PrefixReuse()
        self._locks, self._generator = locks, generator
        self._requests: list[GenerationRequest] = []

    def serve(self, version: int, table: torch.Tensor) -> None:
        """Sample by `table` [prompts, stages + 1, letters + 1] from now on."""
        self.policy_version, self._table = version, table

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._requests += requests

    def abort(self) -> list[Completion]:
        assert not self._requests, "nothing is left unfinished between polls"
        return []

    def poll(self) -> list[Completion]:
        requests, self._requests = self._requests, []
        prompts = torch.tensor([request.prompt_ids[0] for request in requests])
        before = [torch.from_numpy(one.prefix.token_ids if one.prefix else np.zeros(0, np.int32)).long() for one in requests]
        stages = torch.tensor([int(stages_of(self._locks, int(prompt), one)[-1]) for prompt, one in zip(prompts, before)])
        ends = torch.tensor([request.sampling.max_new_tokens for request in requests])
        times = torch.tensor([len(one) for one in before])
        running = times < ends
        new: list[tuple[torch.Tensor, ...]] = []
        while bool(running.any()):
            odds = self._table[prompts, stages]
            token = torch.multinomial(odds, 1, generator=self._generator)[:, 0]
            new.append((token, odds.gather(1, token[:, None])[:, 0].log(), running))
            stages = stages + (token == self._locks.keys[prompts, stages]).long()
            times = times + 1
            running = running & (token != language.END) & (times < ends)
        tokens, logprobs, inside = (torch.stack(each, 1) for each in zip(*new, strict=True))
        return [self._completion(one, tokens[row][inside[row]], logprobs[row][inside[row]]) for row, one in enumerate(requests)]

    def _completion(self, request: GenerationRequest, tokens: torch.Tensor, logprobs: torch.Tensor) -> Completion:
        prefix = request.prefix or Completion(request.request_id, (), (), "abort", ())
        start, reason = prefix.num_tokens, "stop" if int(tokens[-1]) == language.END else "length"
        versions = (*prefix.versions, VersionRange(start, start + len(tokens), self.policy_version))
        return Completion(
            request.request_id,
            np.concatenate([prefix.token_ids, tokens.numpy()]),
            np.concatenate([prefix.logprobs, logprobs.numpy()]),
            reason,
            versions,
        )


def stages_of(locks: Locks, prompt: int, tokens: torch.Tensor) -> torch.Tensor:
    """[T + 1] the stages that are open before each token and after the last one."""
    stages, key = [0], locks.keys[prompt].tolist()
    for token in tokens.tolist():
        stages.append(stages[-1] + (token == key[stages[-1]]))
    return torch.tensor(stages)


class LockVerifier:
    """A response is right if it ends with all stages open."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks

    def score_many(self, items: Iterable[tuple[Any, ...]]) -> Mapping[Any, Score]:
        return {key: self._score(text, int(answer), is_truncated) for key, text, answer, is_truncated, *_ in items}

    def _score(self, text: str, prompt: int, is_truncated: bool) -> Score:
        tokens = torch.tensor([int(letter) for letter in text])
        if is_truncated:
            return Score(0.0, language.WRONG, "truncated")
        is_right = int(stages_of(self._locks, prompt, tokens)[-1]) == language.NUM_STAGES
        return Score(1.0, language.CORRECT, "correct") if is_right else Score(0.0, language.WRONG, "wrong")

    def measure_repetition(self, token_ids: Mapping[str, np.ndarray]) -> Mapping[str, Repetition]:
        return dict.fromkeys(token_ids, Repetition())


class WindowLearner(Learner):
    """One run of T-PPO; with `num_ahead` = 1 each window but the first is by the policy before the one that it trains."""

    def __init__(self, recipe: Recipe, locks: Locks, seed: int, num_ahead: int, correction: OffPolicyConfig) -> None:
        super().__init__(recipe, locks, seed)
        self._num_ahead, self._correction, self._version = num_ahead, correction, 0
        self._engine = LockEngine(locks, self.generator)
        names = [f"{number}" for number in range(language.NUM_PROMPTS)]
        verifier = LockVerifier(locks)
        inputs = CollectorInputs(
            stream=PromptStream(names, seed=seed),
            prompts={name: Prompt(name, (), (int(name),), name) for name in names},
            engine=self._engine,
            scorer=SampleScorer(verifier, lambda token_ids: "".join(map(str, token_ids)), meter=verifier),  # type: ignore[arg-type]
        )
        rollout = RolloutConfig(group_size=recipe.group_size, max_staleness=num_ahead)
        sampling = SamplingParams(max_new_tokens=language.MAX_TOKENS, stop_token_ids=(language.END,))
        window = WindowConfig(tokens=WINDOW, ignored_tail_tokens=IGNORED_TAIL)
        self._collector = WindowCollector(inputs, rollout, window, sampling, seed)
        self._batches: list[RolloutBatch] = []  # collected and not trained

    def _collect(self, training_version: int) -> None:
        num_groups = self.recipe.num_responses // self.recipe.group_size
        self._batches.append(self._collector.collect(num_groups, training_version))

    def step(self) -> None:
        """Train a window; the next one is collected before, if windows overlap."""
        self._engine.serve(self._version, self.policy.table())
        if not self._batches:
            self._collect(self._version)
        if self._num_ahead:
            self._collect(self._version + 1)
        batch = self._batches.pop(0)
        assert batch.training_version == self._version, "windows are trained in order"
        header = header_of(batch.groups, batch.training_version)
        samples = with_numbers(samples_of(header), batch.groups, {})
        whole = self._responses(samples)
        with torch.no_grad():
            values = self.critic.of(whole).split(whole.lengths.tolist())
            old = self._logprobs(whole).split(whole.lengths.tolist())
        samples = [replace(one, values=value) for one, value in zip(samples, values, strict=True)]
        estimated = estimate_value_advantages(samples, ESTIMATION, LAMBDA, IGNORED_TAIL)
        by_name = {one.sample_id: numbers for one, numbers in zip(samples, old, strict=True)}
        for part in self._cut(estimated.policy_samples):
            self._update(part, torch.cat([by_name[one.sample_id] for one in part]))
        for part in self._cut(estimated.critic_samples):
            self._update_critic(part)
        self._version += 1

    def _cut(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        order = torch.randperm(len(samples), generator=self.generator)
        parts = [[samples[index] for index in chosen] for chosen in order.chunk(self.recipe.num_mini_batches)]
        return [part for part in parts if sum(float(one.loss_mask.sum()) for one in part)]

    def _responses(self, samples: Sequence[TrainSample]) -> Responses:
        prompts = torch.tensor([int(one.tokens[0]) for one in samples])
        tokens = [one.tokens[one.prompt_length :].long() for one in samples]
        lengths = torch.tensor([len(one) for one in tokens])
        stages = [stages_of(self.locks, int(prompt), one)[:-1] for prompt, one in zip(prompts, tokens, strict=True)]
        times = pad_sequence([torch.arange(len(one)) for one in tokens], batch_first=True)
        inside = torch.arange(times.shape[1]) < lengths[:, None]
        return Responses(
            prompts,
            lengths,
            torch.zeros(len(samples)),  # the estimators have the outcomes
            torch.cat(tokens),
            prompts.repeat_interleave(lengths),
            torch.cat(stages),
            times[inside],
        )

    def _update(self, part: Sequence[TrainSample], old_logprobs: torch.Tensor) -> None:
        responses = self._responses(part)
        mask, advantages, sampled = (
            torch.cat([getattr(one, name) for one in part]) for name in ("loss_mask", "advantages", "rollout_logprobs")
        )
        ids = torch.arange(len(part)).repeat_interleave(responses.lengths)
        inputs = PolicyLossInputs(self._logprobs(responses), old_logprobs, advantages, mask, ids, len(part))
        token_loss, _ = ppo_clip(inputs, self.recipe.policy_loss)
        if self._correction.correction != "none":
            weights, _ = importance_weights(self._correction, OffPolicyInputs(old_logprobs, sampled, mask, ids, len(part)))
            token_loss = token_loss * weights
        self.policy_optimizer.zero_grad()
        (token_loss.sum() / mask.sum()).backward()
        self.policy_optimizer.step()

    def _update_critic(self, part: Sequence[TrainSample]) -> None:
        pairs = [(one.returns, one.values) for one in part if one.returns is not None and one.values is not None]
        returns, values = (torch.cat(each) for each in zip(*pairs, strict=True))
        mask = torch.cat([one.loss_mask for one in part])
        update_critic(self.critic, self.critic_optimizer, self._responses(part), returns, values, "squared", mask)


MODES: dict[str, tuple[int, OffPolicyConfig]] = {"on policy": (0, OffPolicyConfig()), "one ahead": (1, CORRECTION)}


def learn_windows(seed: int, num_steps: int, recipe: Recipe) -> dict[str, list[float]]:
    """Return by mode the exact accuracy before every step and after the last one, from one pretrained critic."""
    locks = Locks(seed)
    start = Learner(recipe, locks, seed)
    start.start_as_reward_model()
    start.pretrain_value()
    found = {}
    for name, (num_ahead, correction) in MODES.items():
        learner = WindowLearner(recipe, locks, seed, num_ahead, correction)
        learner.critic.load_state_dict(start.critic.state_dict())
        learner.critic_optimizer.load_state_dict(deepcopy(start.critic_optimizer.state_dict()))
        accuracies = [locks.accuracy(learner.policy.table())]
        for _ in range(num_steps):
            learner.step()
            accuracies.append(locks.accuracy(learner.policy.table()))
        found[name] = accuracies
    return found


def check_windows(seeds: Sequence[int], num_steps: int, changes: Mapping[str, int]) -> dict[str, Any]:
    """Train windows of each mode with every seed; `changes` are made to the recipe."""
    runs = [learn_windows(seed, num_steps, replace(FULL, **changes)) for seed in seeds]
    rows = {name: window_row([run[name] for run in runs]) for name in MODES}
    low, high = rows["on policy"]["final_interval"]
    return {name: {**row, "is_within_interval": low <= row["final"] <= high} for name, row in rows.items()}


def window_row(runs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return means over seeds, and the 95 % interval of the final accuracy: the mean of the last fifth of the steps."""
    last = [accuracies[-max(1, len(accuracies) // 5) :] for accuracies in runs]
    finals = [sum(one) / len(one) for one in last]
    mean, count = sum(finals) / len(finals), len(finals)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in finals) / max(1, count - 1))
    margin = T_95.get(count, 2.3) * deviation / math.sqrt(count)
    return {
        "learning": sum(sum(one) / len(one) for one in runs) / count,
        "final": mean,
        "final_interval": [mean - margin, mean + margin],
        "finals": [round(one, 4) for one in finals],
        "accuracies": [[round(accuracy, 4) for accuracy in one] for one in runs],
    }
