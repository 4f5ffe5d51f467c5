"""Rules for training.stream and training.old_logprobs."""

from __future__ import annotations

from megatron_dapo.config.section import Rule

_STREAMS = 'training.stream != "off"'


def _rule(formula: str, suggestion: str, reason: str) -> Rule:
    return Rule(formula, f'{suggestion}, or training.stream = "off"', when=_STREAMS, reason=reason)


STREAM_RULES = (
    _rule(
        'algorithm.name == "dapo"',
        'set algorithm.name = "dapo"',
        "a critic's advantages are of the whole batch, and given responses are not generated",
    ),
    _rule("not training.shuffle", "set training.shuffle = false", "shuffling needs the whole batch"),
    _rule("training.epochs == 1", "set training.epochs = 1", "a second pass begins when the whole batch was trained"),
    _rule(
        "training.mini_batch_prompts < rollout.prompts_per_step",
        "set training.mini_batch_prompts below {rollout.prompts_per_step}",
        "a batch of one mini-batch is trained as a whole",
    ),
    _rule(
        'algorithm.loss.aggregation != "rollout_token_mean"',
        'set algorithm.loss.aggregation = "token_mean"',
        "the loss is divided by the tokens of the whole batch",
    ),
    _rule(
        'algorithm.advantage.name in ("grpo", "dr_grpo", "rloo", "maxrl")',
        'set algorithm.advantage.name = "grpo", "dr_grpo", "rloo" or "maxrl"',
        "other advantages are functions of the whole batch",
    ),
    _rule(
        "not rollout.budget.enabled",
        "set rollout.budget.enabled = false",
        "prompts are weighted by the mean group size of the whole batch",
    ),
    _rule(
        'rollout.dynamic_sampling == "hard"',
        'set rollout.dynamic_sampling = "hard"',
        "the number of mini-batches is known once the whole batch is",
    ),
    _rule(
        'rollout.on_exhausted == "train_partial"',
        'set rollout.on_exhausted = "train_partial"',
        "part of the batch is trained when prompts run out",
    ),
    _rule(
        'rollout.replay_order == "oldest"',
        'set rollout.replay_order = "oldest"',
        "mini-batches are trained in the order in which their groups were started",
    ),
    _rule(
        'rollout.engine == "embedded" or sglang.placement == "disaggregated"',
        'set sglang.placement = "disaggregated"',
        "servers on the trainer's devices would release and reload their memory for each mini-batch",
    ),
    Rule(
        "not precision.fp8_param",
        'set precision.fp8_param = false, or training.old_logprobs = "rollout"',
        when=f'{_STREAMS} and training.old_logprobs == "snapshot"',
        reason="weights in FP8 cannot be exchanged and put back bit for bit",
    ),
    Rule(
        'algorithm.off_policy.correction == "none"',
        'set algorithm.off_policy.correction = "none", or training.old_logprobs = "snapshot"',
        when='training.old_logprobs == "rollout"',
        reason="the policy ratio already is against the engine that sampled",
    ),
    Rule(
        'algorithm.name == "dapo"',
        'set training.old_logprobs = "snapshot"',
        path="training.old_logprobs",
        when='training.old_logprobs == "rollout"',
        reason="a frozen policy and its critic need the trainer's log-probs",
    ),
)
