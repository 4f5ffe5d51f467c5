"""What algorithms with a critic are told: the critic itself, advantages, windows, and its pretraining."""

from __future__ import annotations

from typing import Annotated, Literal

from megatron_dapo.config.optimizer_schema import CriticOptimizerConfig
from megatron_dapo.config.section import (
    Bounds,
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    Offload,
    PositiveFloat,
    PositiveInt,
    Section,
)

ValueLossName = Literal["squared", "clipped"]
ValueAggregation = Literal["token_mean", "sample_mean"]
LambdaRuleName = Literal["fixed", "length_adaptive", "window"]


class CriticParallelConfig(Section):
    """Which processes hold the critic and how it is cut over them; its data-parallel size follows. It need not be cut as
    the policy is."""

    num_processes: NonNegativeInt = 0
    """Processes that hold the critic alone, started besides the policy's; the last ranks of the run. Critic and policy
    then update at the same time. 0: it lives in the policy's processes, and they update in turn."""

    tp_size: NonNegativeInt = 0
    """Ranks every weight matrix is cut over. 0: parallel.tp_size."""

    pp_size: NonNegativeInt = 0
    """Stages the layers are cut into. 0: parallel.pp_size."""

    vpp_size: NonNegativeInt = 0
    """Model chunks per pipeline stage. 0: parallel.vpp_size where the stages are as many, else 1."""

    cp_size: NonNegativeInt = 0
    """Ranks every sequence is cut over. 0: parallel.cp_size."""

    ep_size: NonNegativeInt = 0
    """Ranks experts are cut over. 0: parallel.ep_size."""


class CriticConfig(Section):
    """The critic of ppo, vapo and tppo: the policy's layers and a head that gives one value a token."""

    path: str = ""
    """Hugging Face folder it starts from: a policy (the head is fresh), a reward model, or a critic, of the policy's
    architecture and tokenizer. Relative: from the current directory, where pretraining wrote it. "": model.path."""

    head_scale: NonNegativeFloat = 0.01
    """About how large the values of a fresh head are."""

    parallel: CriticParallelConfig = CriticParallelConfig()
    """How the critic is cut over the processes."""

    offload: Offload = "none"
    """What leaves the device for host memory while the critic rests: nothing, its optimizer state and gradients, or
    those and its weights. For a critic that shares the policy's processes."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW of the critic."""

    mini_batch_prompts: NonNegativeInt = 0
    """Groups of one optimizer step of the critic. 0: training.mini_batch_prompts."""

    epochs: PositiveInt = 1
    """Passes over a rollout batch."""

    micro_batch_tokens: NonNegativeInt = 0
    """Padded tokens of one packed micro-batch. 0: training.micro_batch_tokens."""

    loss: ValueLossName = "clipped"
    """squared: (V - target)^2 / 2. clipped: where V has moved beyond its bounds since the advantages were estimated, it
    is trained only if it is further from the target than the bound is (PPO)."""

    clip_value_low: PositiveFloat = 0.5
    """V is held above V_old - clip_value_low, in units of the return."""

    clip_value_high: PositiveFloat = 0.5
    """V is held below V_old + clip_value_high."""

    aggregation: ValueAggregation = "token_mean"
    """token_mean: all tokens of the optimizer step weigh the same. sample_mean: all responses do."""

    warmup_train_steps: NonNegativeInt = 0
    """Train steps at the beginning in which the critic learns and the policy does not, whose learning-rate schedule begins
    after them."""

    explained_variance_alarm: Annotated[float, Bounds(le=1)] = -1.0
    """A warning names the step when the critic explains less than this share of the returns' variance. Values start to
    help above 0."""


class AdvantageEstimationConfig(Section):
    """Generalized advantage estimation (arXiv 1506.02438), its lambdas apart for policy and critic (VC-PPO, VAPO)."""

    gamma: Fraction = 1.0
    """Discount of a token."""

    lambda_rule: LambdaRuleName = "fixed"
    """Which lambda the policy's advantages take. fixed: policy_lambda. length_adaptive: 1 - 1 / (lambda_alpha * length),
    at least lambda_floor (VAPO, eq. 5). window: the same of the length so far and half a window more where the response
    goes on (T-PPO)."""

    policy_lambda: Fraction = 0.95
    """For lambda_rule = fixed."""

    lambda_alpha: PositiveFloat = 0.05
    """For lambda_rule = length_adaptive and window: share of the length that the weights of the errors sum to."""

    lambda_floor: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """For lambda_rule = length_adaptive and window: the smallest lambda. The rule alone is negative below 1 /
    lambda_alpha tokens; VAPO names no floor, T-PPO's authors take 0.95."""

    critic_lambda: Fraction = 1.0
    """Lambda of the critic's targets. 1: Monte-Carlo returns (decoupled GAE). policy_lambda of a fixed rule: plain
    PPO. tppo needs 1."""

    whiten: bool = True
    """Shift and scale the advantages of a rollout batch to mean 0 and variance 1 over its trained tokens."""

    clip: NonNegativeFloat = 0.0
    """Largest magnitude of an advantage, after whitening. T-PPO's authors take 10. 0: off."""


class WindowConfig(Section):
    """Windows of tppo (arXiv 2506.15050): a generation step makes at most so many tokens of a response; it goes on in the
    next."""

    tokens: PositiveInt = 8192
    """Tokens of a window."""

    ignored_tail_tokens: NonNegativeInt = 8
    """Last tokens of a window that are left out of the policy's loss where the response goes on: their advantages rest
    on one value alone."""

    windows_per_step: NonNegativeInt = 0
    """Windows trained in a step, chosen by priority: groups with mixed outcomes first. 0: all."""


class ValuePretrainingConfig(Section):
    """On what `megatron-dapo pretrain-value` trains and when it ends: the critic learns Monte-Carlo returns of the policy as it is (VC-PPO)."""

    train_paths: tuple[InputPath, ...] = ()
    """Prompts it samples from, e.g. a set of wide difficulty. Relative: from the recipe's folder. Empty:
    data.train_paths."""

    min_steps: Annotated[int, Bounds(ge=2)] = 20
    """Steps (rollout batches) at least."""

    max_steps: PositiveInt = 150
    """Steps at most."""

    explained_variance_slope: NonNegativeFloat = 0.005
    """Ends where, over the last min_steps steps, explained variance rises by less than this in total, and the loss is
    flat as well."""

    loss_slope: NonNegativeFloat = 0.05
    """The value loss is flat where it falls by less than this share over the last min_steps steps."""
