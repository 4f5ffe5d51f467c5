"""Conversion between Hugging Face directories, Megatron checkpoints and Megatron-LM's `torch_dist`, and comparison of two models."""
