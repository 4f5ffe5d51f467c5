"""Kinds of layer parts: each module states one kind's tensors and where they lie in Megatron and in SGLang."""
