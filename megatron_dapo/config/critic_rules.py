"""Rules for algorithms with a critic; those of its layout are in `layout_rules`."""

from __future__ import annotations

from megatron_dapo.config.section import Rule

_CRITIC = 'algorithm.name not in ("dapo", "sft")'
_WINDOWS = 'algorithm.name == "tppo"'

CRITIC_RULES = (
    Rule(
        "rollout.prompts_per_step % critic.mini_batch_prompts == 0",
        "set critic.mini_batch_prompts = {nearest_divisor(rollout.prompts_per_step, critic.mini_batch_prompts)}, or 0",
        when=f"{_CRITIC} and critic.mini_batch_prompts > 0",
    ),
    Rule(
        "critic.parallel.num_processes == 0 and critic.parallel.tp_size in (0, parallel.tp_size) and "
        "critic.parallel.cp_size in (0, parallel.cp_size) and critic.micro_batch_tokens in (0, training.micro_batch_tokens)",
        "set megatron.tp_comm_overlap = false, or give the critic the policy's processes, tp_size, cp_size and micro_batch_tokens",
        path="megatron",
        when=f'{_CRITIC} and (megatron.get("tp_comm_overlap", False) or critic.megatron.get("tp_comm_overlap", False))',
        reason="tp_comm_overlap has buffers of one shape for all models of a process",
    ),
    # If the policy's tokens are too few even without padding, the policy's rule reports it.
    Rule(
        "(critic.micro_batch_tokens or training.micro_batch_tokens) >= "
        "padded(data.max_prompt_tokens + rollout.max_response_tokens, critic_multiple)",
        "set critic.micro_batch_tokens = "
        "{padded(data.max_prompt_tokens + rollout.max_response_tokens, critic_multiple)} or more",
        when=f"{_CRITIC} and (critic.micro_batch_tokens > 0 or "
        "training.micro_batch_tokens >= data.max_prompt_tokens + rollout.max_response_tokens)",
        reason="a micro-batch holds the longest sequence, padded to the multiple of the critic's layout",
    ),
    Rule(
        "critic.warmup_train_steps < run.total_steps",
        "set critic.warmup_train_steps = {run.total_steps - 1} or less",
        when=_CRITIC,
        reason="the policy would never learn; `megatron-dapo pretrain-value` trains only the critic",
    ),
    Rule(
        'advantage_estimation.lambda_rule != "window"',
        'set advantage_estimation.lambda_rule = "length_adaptive"',
        when='algorithm.name in ("ppo", "vapo")',
        reason="only tppo trains windows; the other algorithms train whole responses",
    ),
    Rule(
        "window.tokens <= rollout.max_response_tokens",
        "set window.tokens = {max(1, rollout.max_response_tokens // 3)}",
        when=_WINDOWS,
        reason="a window is a part of a response",
    ),
    Rule(
        "window.windows_per_step == 0 or window.windows_per_step >= rollout.group_size",
        "set window.windows_per_step = {rollout.group_size} or more, or 0 (all)",
        when=_WINDOWS,
        reason="a group's windows are trained together",
    ),
    Rule(
        "window.ignored_tail_tokens < window.tokens",
        "set window.ignored_tail_tokens = {min(8, window.tokens - 1)}",
        when=_WINDOWS,
        reason="an unfinished window would train nothing",
    ),
    Rule(
        "not rollout.filter_groups",
        "set rollout.filter_groups = false; window.windows_per_step prefers groups with mixed outcomes",
        when=_WINDOWS,
        reason="a filter needs finished groups; a step's windows are of unfinished ones",
    ),
    Rule(
        "rollout.max_staleness <= 1",
        "set rollout.max_staleness = 1, or 0",
        when=_WINDOWS,
        reason="windows of a step take equally long, so a second one ahead only makes tokens older",
    ),
    Rule(
        'rollout.engine == "sglang" and sglang.placement == "disaggregated"',
        'set rollout.max_staleness = 0, or rollout.engine = "sglang" and sglang.placement = "disaggregated"',
        when=f"{_WINDOWS} and rollout.max_staleness == 1",
        reason="engines on the trainer's devices do not generate the next window while it trains",
        path="rollout.max_staleness",
    ),
    Rule(
        "not rollout.tail_rounds",
        "set rollout.tail_rounds = false",
        when=_WINDOWS,
        reason="a step waits for windows, not for the longest response",
    ),
    Rule(
        "rollout.ahead == 0",
        "set rollout.ahead = 0.0",
        when=_WINDOWS,
        reason="windows are collected ahead one whole step at a time",
    ),
    Rule(
        "not rollout.budget.enabled",
        "set rollout.budget.enabled = false",
        when=_CRITIC,
        reason="a critic's advantages know no groups to weight",
    ),
    Rule(
        'rollout.prompt_order == "shuffled" and rollout.prompt_filter.name == "none"',
        'set rollout.prompt_order = "shuffled" and rollout.prompt_filter.name = "none"',
        when=_WINDOWS,
        reason="windows take prompts in the order of the stream, in groups of one size",
    ),
    Rule(
        "rollout.oversample == 1",
        "set rollout.oversample = 1.0",
        when=_WINDOWS,
        reason="every window that was begun is trained",
    ),
    Rule(
        "not reward.overlong_filter",
        "set reward.overlong_filter = false",
        when=_WINDOWS,
        reason="windows keep truncated responses out of the loss only if they continue",
    ),
    Rule(
        "advantage_estimation.critic_lambda == 1",
        "set advantage_estimation.critic_lambda = 1.0",
        when=_WINDOWS,
        reason="the critic learns Monte-Carlo returns over all windows",
    ),
)

# The process rule is asked of the whole run, before the critic's layout is looked at.
OWN_PROCESSES_RULE = Rule(
    "critic.parallel.num_processes < processes",
    "start {critic.parallel.num_processes + model_size} processes or more, or set critic.parallel.num_processes = 0",
    reason="the others hold the policy",
)
