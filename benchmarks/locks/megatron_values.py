"""2. The same values learned by `MegatronCritic`, which reads the tokens themselves."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from locks import language
from locks.language import Locks, Responses
from locks.values import fixed_policy, of_values

from megatron_dapo.algorithms.gae import estimate_values
from megatron_dapo.algorithms.value_loss import ValueLossInputs, value_loss
from megatron_dapo.config.algorithm_schema import CriticConfig
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import pack
from megatron_dapo.types import MicroBatch, TrainSample

FIRST_PROMPT_TOKEN = language.NUM_LETTERS + 1
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "vocab_size": FIRST_PROMPT_TOKEN + language.NUM_PROMPTS,
}


def train_samples(responses: Responses) -> list[TrainSample]:
    """A prompt is one token. Returns are Monte-Carlo."""
    returns = estimate_values(responses.inputs(torch.zeros(len(responses.tokens))), 1.0, 1.0).returns
    lengths = responses.lengths.tolist()
    parts = zip(responses.prompts, responses.tokens.split(lengths), returns.split(lengths), strict=True)
    return [
        TrainSample(
            sample_id=str(index),
            group_index=index,
            tokens=torch.cat([prompt[None] + FIRST_PROMPT_TOKEN, tokens]),
            prompt_length=1,
            loss_mask=torch.ones(len(tokens)),
            advantages=torch.zeros(len(tokens)),  # the critic's loss needs neither these nor log-probs
            rollout_logprobs=torch.zeros(len(tokens)),
            values=torch.zeros(len(tokens)),
            returns=target,
        )
        for index, (prompt, tokens, target) in enumerate(parts)
    ]


def learn_values_with_megatron(num_steps: int, num_prompts: int = 4) -> dict[str, Any]:
    """`MegatronCritic` on the responses of the fixed policy to the first prompts."""
    from megatron_dapo.config.model_schema import OptimizerConfig
    from megatron_dapo.megatron.critic import CriticSettings, MegatronCritic

    locks, layout = Locks(0), ParallelLayout(world_size=1)
    policy, generator = fixed_policy(locks), torch.Generator().manual_seed(0)
    exact, _ = locks.solve(policy)
    section = CriticConfig(loss="squared")

    def draw(count: int) -> Responses:
        return locks.sample(policy, torch.randint(num_prompts, (count,), generator=generator), generator)

    def packed(responses: Responses) -> MicroBatch:
        count = len(responses.lengths)
        return pack(train_samples(responses), [1 / len(responses.tokens)] * count, layout)

    def loss_fn(
        micro_batch: MicroBatch, values: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = ValueLossInputs(values, micro_batch.values, micro_batch.returns, micro_batch.loss_mask)
        token_loss, metrics = value_loss(section, inputs)
        return (token_loss * micro_batch.loss_weights).sum(), metrics

    def judge(critic: MegatronCritic) -> dict[str, float]:
        responses = draw(2000)
        micro_batch = packed(responses)
        [found] = critic.forward_values([micro_batch])
        values, true = found[micro_batch.loss_mask > 0], responses.of(exact)
        report = {
            "mean_error": float((values - true).abs().mean()),
            "largest_error": float((values - true).abs().max()),
        }
        report["explained_variance"] = of_values(responses, values)["all"]
        return {**report, "explained_variance_of_exact_values": of_values(responses, true.float())["all"]}

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
            # Decay would pull the learned values away from the exact ones.
            settings = CriticSettings(optimizer=OptimizerConfig(weight_decay=0.0))
            critic = MegatronCritic.build(directory, layout, settings, random_seed=0)
        before = judge(critic)
        for step in range(num_steps):
            # Warm-up over 20 steps, then a cosine to 0.
            rate = 3e-3 * min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / num_steps)) / 2
            critic.train_step([packed(draw(256))], loss_fn, rate)
        return {"steps": num_steps, "prompts": num_prompts, "before": before, "after": judge(critic)}
    finally:
        dist.destroy_process_group()
