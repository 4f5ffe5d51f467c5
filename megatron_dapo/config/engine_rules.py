"""Rules of SGLang servers: where they run, how weights reach them, and what quantized ones sample from."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config.errors import Violation, nearest_divisor, violation
from megatron_dapo.config.schema import Config


def _engines(config: Config) -> Iterator[Violation]:
    rollout, sglang = config.rollout, config.sglang
    if rollout.engine != "sglang":
        return
    if sglang.placement == "disaggregated" and rollout.max_staleness > 0 and not rollout.partial_rollout:
        yield violation(
            config,
            "rollout.partial_rollout",
            "rollout.partial_rollout == true where generation runs beside training (every update would throw all "
            "unfinished responses away)",
            "set rollout.partial_rollout = true, or rollout.max_staleness = 0",
            "rollout.max_staleness",
            "sglang.placement",
        )
    if sglang.urls and not sglang.api_key_file:
        yield violation(
            config,
            "sglang.api_key_file",
            "sglang.api_key_file names a file where sglang.urls are given",
            "set sglang.api_key_file to the file with the servers' API key",
            "sglang.urls",
        )
    if sglang.urls and sglang.weight_sync_transport == "shared_memory":
        yield violation(
            config,
            "sglang.weight_sync_transport",
            "sglang.weight_sync_transport is p2p or disk for servers given by URL (shared_memory is for servers this run starts)",
            'set sglang.weight_sync_transport = "p2p"',
            "sglang.urls",
        )
    if sglang.urls and sglang.placement == "colocated":
        yield violation(
            config,
            "sglang.placement",
            'sglang.placement == "disaggregated" for servers given by URL',
            'set sglang.placement = "disaggregated"',
            "sglang.urls",
        )
    if min(sglang.tp_size, sglang.ep_size) >= 1 and sglang.tp_size % sglang.ep_size:
        yield violation(
            config,
            "sglang.ep_size",
            "sglang.tp_size % sglang.ep_size == 0",
            f"set sglang.ep_size = {nearest_divisor(sglang.tp_size, sglang.ep_size)}",
            "sglang.tp_size",
        )
    # SGLang would abort every response that outgrows its cache, and the batch would never fill.
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    if 0 < sglang.max_total_tokens < longest:
        yield violation(
            config,
            "sglang.max_total_tokens",
            "sglang.max_total_tokens >= data.max_prompt_tokens + rollout.max_response_tokens",
            f"set sglang.max_total_tokens = {longest} or more, or 0",
            "data.max_prompt_tokens",
            "rollout.max_response_tokens",
        )


def _correction(config: Config) -> Iterator[Violation]:
    if _is_off(config) or config.sglang.allow_quantization_bias:
        return
    if config.algorithm.off_policy.correction == "none":
        yield violation(
            config,
            "sglang.quantization",
            'sglang.quantization == "none" without an off-policy correction (quantized servers sample from another '
            "policy than the one that is trained)",
            'set algorithm.off_policy.correction = "tis" (or mis, icepop), or sglang.allow_quantization_bias = true',
            "algorithm.off_policy.correction",
            "sglang.allow_quantization_bias",
        )


def _quantized_by_sglang(config: Config) -> Iterator[Violation]:
    if not _is_off(config) and config.rollout.engine != "sglang":
        yield violation(
            config,
            "sglang.quantization",
            'sglang.quantization == "none" where rollout.engine is not "sglang"',
            'set sglang.quantization = "none", or rollout.engine = "sglang"',
            "rollout.engine",
        )


def _transport(config: Config) -> Iterator[Violation]:
    if not _is_off(config) and config.sglang.weight_sync_transport == "disk":
        yield violation(
            config,
            "sglang.weight_sync_transport",
            'sglang.weight_sync_transport is shared_memory or p2p where sglang.quantization == "fp8" (a directory holds the trained weights)',
            'set sglang.weight_sync_transport = "p2p", or "shared_memory" for servers on the trainer\'s machines',
            "sglang.quantization",
        )


def _is_off(config: Config) -> bool:
    return config.sglang.quantization == "none"


ENGINE_RULES = (_engines, _correction, _quantized_by_sglang, _transport)
