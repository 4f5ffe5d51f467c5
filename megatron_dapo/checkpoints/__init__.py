"""Checkpoint formats: Hugging Face directories, Megatron and SGLang layouts of their tensors, loading and export.

Imports neither megatron nor sglang nor transformers: names, shapes and slices are arithmetic on a config.json.
"""
