"""Rules for SGLang servers: their placement, weight sync and quantization."""

from __future__ import annotations

from megatron_dapo.config.section import Rule

_SGLANG = 'rollout.engine == "sglang"'
_GIVEN_BY_URL = f"{_SGLANG} and sglang.urls"
_OVER_NODES = f"{_SGLANG} and sglang.nodes_per_server > 1"
_DRAFTS = 'sglang.drafting != "off"'
_RESTRICTED = "rollout.top_p < 1 or rollout.top_k > 0"
_IN_FLIGHT = f'{_SGLANG} and sglang.update_pause != "abort"'

ENGINE_RULES = (
    Rule(
        "rollout.partial_rollout",
        "set rollout.partial_rollout = true, or rollout.max_staleness = 0",
        # Windows (tppo) continue in any case.
        when=f'{_SGLANG} and sglang.placement == "disaggregated" and rollout.max_staleness > 0 and algorithm.name != "tppo"',
        reason="generation continues during training: every update would throw all unfinished responses away",
    ),
    Rule(
        'sglang.api_key_file != ""',
        "set sglang.api_key_file to the file with the servers' API key",
        when=_GIVEN_BY_URL,
    ),
    Rule(
        'sglang.weight_sync_transport != "shared_memory"',
        'set sglang.weight_sync_transport = "p2p" or "disk"',
        when=_GIVEN_BY_URL,
        reason="shared memory reaches only servers that this run starts",
    ),
    # The devices of servers given by URL are unknown to this run.
    Rule('sglang.placement == "disaggregated"', 'set sglang.placement = "disaggregated"', when=_GIVEN_BY_URL),
    Rule(
        'sglang.update_pause == "abort"',
        'set sglang.update_pause = "abort", or rollout.engine = "sglang"',
        when='rollout.engine != "sglang"',
    ),
    Rule(
        'sglang.placement == "disaggregated"',
        'set sglang.update_pause = "abort", or sglang.placement = "disaggregated"',
        when=_IN_FLIGHT,
        reason="servers that share devices with the trainer must be empty while it works",
        path="sglang.update_pause",
    ),
    Rule(
        "rollout.max_staleness > 0",
        'set sglang.update_pause = "abort", or rollout.max_staleness = 1',
        when=_IN_FLIGHT,
        reason="without staleness no response is under way at a weight sync",
        path="sglang.update_pause",
    ),
    Rule(
        'algorithm.name != "tppo"',
        'set sglang.update_pause = "abort"',
        when=_IN_FLIGHT,
        reason="the windows of T-PPO are stopped for new weights, and continue from their tokens",
        path="sglang.update_pause",
    ),
    Rule(
        "not rollout.routing_replay",
        'set sglang.update_pause = "abort", or rollout.routing_replay = false',
        when=_IN_FLIGHT,
        reason="a server that computes tokens again replaces the experts that they were sampled with",
        path="sglang.update_pause",
    ),
    Rule(
        f"not ({_RESTRICTED})",
        'set sglang.update_pause = "abort", or rollout.top_p = 1.0 and rollout.top_k = 0',
        when=_IN_FLIGHT,
        reason="what tokens are drawn from has been proven to survive only an abort",
        path="sglang.update_pause",
    ),
    Rule(
        "not sglang.enable_deterministic_inference",
        'set sglang.enable_deterministic_inference = false, or sglang.update_pause = "retract"',
        when='sglang.update_pause == "in_place"',
        reason="with keys and values of several versions a response depends on when updates came, not only on its seed",
        path="sglang.update_pause",
    ),
    Rule(
        "sglang.tp_size % sglang.ep_size == 0",
        "set sglang.ep_size = {nearest_divisor(sglang.tp_size, sglang.ep_size)}",
        when=_SGLANG,
    ),
    Rule(
        "sglang.tp_size % sglang.nodes_per_server == 0",
        "set sglang.nodes_per_server = {nearest_divisor(sglang.tp_size, sglang.nodes_per_server)}",
        when=_SGLANG,
        reason="each node of a server has equally many of its ranks",
    ),
    Rule(
        "not sglang.urls",
        "set sglang.nodes_per_server = 1",
        when=_OVER_NODES,
        reason="how servers given by URL are spread is their operator's choice",
        path="sglang.nodes_per_server",
    ),
    Rule(
        'sglang.placement == "disaggregated"',
        'set sglang.placement = "disaggregated", or sglang.nodes_per_server = 1',
        when=_OVER_NODES,
        reason="only servers of one node sleep on the trainer's devices",
        path="sglang.nodes_per_server",
    ),
    Rule(
        'sglang.weight_sync_transport == "p2p"',
        'set sglang.weight_sync_transport = "p2p", or sglang.nodes_per_server = 1',
        when=_OVER_NODES,
        reason="shared memory and the replies of ranks that load a directory stay on one node",
        path="sglang.nodes_per_server",
    ),
    Rule(
        f"{_SGLANG} and not sglang.urls",
        'set sglang.drafting = "off", or rollout.engine = "sglang" without sglang.urls',
        when=_DRAFTS,
        reason="drafting is for servers that this run starts",
        path="sglang.drafting",
    ),
    Rule(
        "not sglang.enable_deterministic_inference",
        'set sglang.enable_deterministic_inference = false, or sglang.drafting = "off"',
        when=_DRAFTS,
        reason="which numbers a response draws depends on what was drafted, not only on its seed",
        path="sglang.drafting",
    ),
    Rule(
        'sglang.update_pause == "abort"',
        'set sglang.update_pause = "abort", or sglang.drafting = "off"',
        when=_DRAFTS,
        reason="labels of tokens have been proven only for those that are sampled one by one",
        path="sglang.drafting",
    ),
    Rule(
        "not rollout.routing_replay",
        'set sglang.drafting = "off", or rollout.routing_replay = false',
        when=_DRAFTS,
        reason="the experts of drafts that are refused are not told from those of tokens",
        path="sglang.drafting",
    ),
    Rule(
        f"not ({_RESTRICTED})",
        'set sglang.drafting = "off", or rollout.top_p = 1.0 and rollout.top_k = 0',
        when=_DRAFTS,
        reason="what tokens are drawn from has been proven only for those that are sampled one by one",
        path="sglang.drafting",
    ),
    Rule(
        "algorithm.gkl.coefficient == 0",
        "set algorithm.gkl.coefficient = 0.0, or rollout.top_p = 1.0 and rollout.top_k = 0",
        when=_RESTRICTED,
        reason="it compares whole vocabularies, and the policy that samples has a part of it",
        path="algorithm.gkl.coefficient",
    ),
    Rule(
        "not distillation.models",
        "leave distillation.teachers out, or set rollout.top_p = 1.0 and rollout.top_k = 0",
        when=_RESTRICTED,
        reason="their divergence is over the whole vocabulary, and the policy that samples has a part of it",
        path="distillation.teachers",
    ),
    Rule(
        'sglang.attention_backend == "triton" or sglang.attention_backend == "flashinfer"',
        'set sglang.attention_backend = "triton", or sglang.drafting = "off"',
        when=_DRAFTS,
        reason="drafts are trees, whose masks other kernels have not been seen to read",
        path="sglang.drafting",
    ),
    Rule(
        "sglang.nodes_per_server == 1",
        'set sglang.nodes_per_server = 1, or sglang.drafting = "off"',
        when=_DRAFTS,
        reason="each rank of a server looks drafts up, and on several nodes they may differ",
        path="sglang.drafting",
    ),
    # SGLang would abort every response that outgrows its cache, and the batch would never fill.
    Rule(
        "sglang.max_total_tokens >= data.max_prompt_tokens + rollout.max_response_tokens",
        "set sglang.max_total_tokens = {data.max_prompt_tokens + rollout.max_response_tokens} or more, or 0",
        when=f"{_SGLANG} and sglang.max_total_tokens > 0",
    ),
    # The gate would end a healthy bfloat16 run at its first batch; the lower threshold for it is mismatch.alarm.
    Rule(
        "mismatch.step0_max_mean_abs >= 0.05",
        "set mismatch.step0_max_mean_abs = 0.05; mismatch.alarm = 0.02 warns of less",
        when=f'{_SGLANG} and model.dtype == "bfloat16"',
        reason="kernels of engine and trainer round apart by 0.01 to 0.04 nats",
    ),
    Rule(
        'algorithm.off_policy.correction != "none" or sglang.allow_quantization_bias',
        'set algorithm.off_policy.correction = "tis" (or mis, icepop), or sglang.allow_quantization_bias = true',
        when='sglang.quantization != "none" and algorithm.loss.needs_old_logprobs',
        reason="quantized servers sample from another policy than the one that is trained",
        path="sglang.quantization",
    ),
    Rule(
        f'{_SGLANG} and sglang.placement == "disaggregated"',
        'set evaluation.background = false, or rollout.engine = "sglang" and sglang.placement = "disaggregated"',
        when="evaluation.background",
        reason="engines on the trainer's devices do not generate while it trains",
        path="evaluation.background",
    ),
    Rule(
        "not environment.is_on",
        "set evaluation.background = false",
        when="evaluation.background",
        reason="episodes of an evaluation would take the places of those that wait for the next batch",
        path="evaluation.background",
    ),
    Rule(
        'algorithm.name != "sft"',
        "set evaluation.background = false",
        when="evaluation.background",
        reason="fine-tuning serves its weights only to evaluate",
        path="evaluation.background",
    ),
    Rule(
        _SGLANG,
        'set rollout.routing_replay = false, or rollout.engine = "sglang"',
        when="rollout.routing_replay",
        reason="the embedded engine does not say which experts it chose",
    ),
    Rule(
        '"moe" not in megatron.get("recompute_modules", ())',
        'leave "moe" out of megatron.recompute_modules, or set model.recompute_granularity = "full"',
        path="rollout.routing_replay",
        when="rollout.routing_replay",
        reason="a module that is computed again by itself has lost the experts of its micro-batch",
    ),
    Rule(
        'sglang.quantization == "none"',
        'set sglang.quantization = "none", or rollout.engine = "sglang"',
        when='rollout.engine != "sglang"',
    ),
    Rule(
        'sglang.weight_sync_transport != "disk"',
        'set sglang.weight_sync_transport = "p2p", or "shared_memory" for servers on the trainer\'s nodes',
        when='sglang.quantization != "none"',
        reason="a directory holds the trained weights, not the quantized ones",
    ),
    Rule(
        "sglang.weight_sync_full_interval == 1",
        'set sglang.weight_sync_full_interval = 1, or sglang.weight_sync_transport = "p2p"',
        when='sglang.weight_sync_transport == "disk"',
        reason="a directory holds all weights",
    ),
    Rule(
        "sglang.weight_sync_full_interval == 1",
        'set sglang.weight_sync_full_interval = 1, or rollout.engine = "sglang"',
        when='rollout.engine != "sglang"',
    ),
)
