"""Relations between the section [environment] and others."""

from __future__ import annotations

from megatron_dapo.config.section import Rule

_ON = "environment.is_on"
_CONTEXT = f"{_ON} and environment.max_context_tokens > 0"

ENVIRONMENT_RULES = (
    Rule(
        'environment.is_on or reward.verifier != "environment"',
        'set environment.path, or reward.verifier = "dapo"',
        path="reward.verifier",
        reason="there is no environment that could reward",
    ),
    Rule(
        'environment.is_on and reward.verifier == "environment"',
        'set algorithm.credit = "episode", or environment.path and reward.verifier = "environment"',
        path="algorithm.credit",
        when='algorithm.credit != "episode"',
        reason="only an environment rewards turns",
    ),
    Rule(
        'algorithm.name == "dapo" and algorithm.advantage.name in ("grpo", "dr_grpo", "rloo")',
        'set algorithm.credit = "episode", or algorithm.name = "dapo" and algorithm.advantage = "grpo", "dr_grpo" or "rloo"',
        path="algorithm.credit",
        when='algorithm.credit != "episode"',
        reason="a critic gives each token its credit, and the other advantages compare whole batches",
    ),
    Rule(
        "algorithm.turn_discount == 1",
        'set algorithm.turn_discount = 1.0, or algorithm.credit = "turn"',
        when='algorithm.credit == "episode"',
        reason="an episode has one reward",
    ),
    Rule(
        "not rollout.routing_replay",
        "set rollout.routing_replay = false",
        when=_ON,
        reason="routing is not recorded over several turns",
    ),
    Rule(
        'environment.resume != "state" or turns.history != "rewrite"',
        'set environment.resume = "replay", or turns.history = "keep"',
        path="environment.resume",
        when=_ON,
        reason="a template that rewrites history needs the messages, which only a repetition gives",
    ),
    Rule(
        "environment.max_context_tokens > data.max_prompt_tokens",
        "set environment.max_context_tokens = {data.max_prompt_tokens + rollout.max_response_tokens} or more, or 0",
        when=_CONTEXT,
        reason="an episode begins with up to data.max_prompt_tokens",
    ),
    Rule(
        "training.micro_batch_tokens >= padded(environment.max_context_tokens, multiple)",
        "set training.micro_batch_tokens = {padded(environment.max_context_tokens, multiple)} or more",
        when=_CONTEXT,
        reason="a micro-batch holds the longest episode, padded to the layout's multiple",
    ),
    Rule(
        "sglang.max_total_tokens >= environment.max_context_tokens",
        "set sglang.max_total_tokens = {environment.max_context_tokens} or more, or 0",
        when=f'{_CONTEXT} and rollout.engine == "sglang" and sglang.max_total_tokens > 0',
        reason="a server's cache holds the longest episode",
    ),
    Rule(
        "critic.micro_batch_tokens == 0 or critic.micro_batch_tokens >= padded(environment.max_context_tokens, critic_multiple)",
        "set critic.micro_batch_tokens = {padded(environment.max_context_tokens, critic_multiple)} or more, or 0",
        when=f'{_CONTEXT} and algorithm.name not in ("dapo", "sft")',
        reason="a micro-batch holds the longest episode, padded to the multiple of the critic's layout",
    ),
)
ENVIRONMENT_ARCHITECTURE_RULE = Rule(
    "environment.max_context_tokens <= max_position_embeddings",
    "set environment.max_context_tokens = {max_position_embeddings} or less, or use a model with more positions",
    when=_CONTEXT,
)
