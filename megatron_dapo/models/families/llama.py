"""Llama 3 (arXiv:2407.21783), and the models that share its layers, such as SmolLM2."""

from megatron_dapo.models.family import Family

FAMILIES = {"llama": Family("Llama", qkv_bias=False, qk_norm=False, derives_head_dim=True)}
