"""Kimi-K2 (arXiv:2507.20534): DeepSeek-V3's layers, with one group of experts."""

from megatron_dapo.models.families import deepseek

FAMILIES = {"kimi_k2": deepseek.FAMILIES["deepseek_v3"]}
