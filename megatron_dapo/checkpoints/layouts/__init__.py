"""Layouts of a model's tensors in Megatron, SGLang, torch_dist and saved states."""
