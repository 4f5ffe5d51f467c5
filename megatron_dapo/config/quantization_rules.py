"""Rules of servers with quantized weights: they sample from another policy than the one that is trained."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config.errors import Violation
from megatron_dapo.config.rule import violation
from megatron_dapo.config.schema import Config


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


def _engine(config: Config) -> Iterator[Violation]:
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
            'sglang.weight_sync_transport is shared_memory or p2p where sglang.quantization == "fp8" (a folder holds the trained weights)',
            'set sglang.weight_sync_transport = "p2p", or "shared_memory" for servers on the trainer\'s machines',
            "sglang.quantization",
        )


def _is_off(config: Config) -> bool:
    return config.sglang.quantization == "none"


QUANTIZATION_RULES = (_correction, _engine, _transport)
