"""A model family: Mistral without a sliding window has the layers of Llama. model.family = "model_family.py:MISTRAL"."""

from megatron_dapo import Family

MISTRAL = Family("Mistral", qkv_bias=False, qk_norm=False, derives_head_dim=True)
