"""Quantized checkpoints from a trained Hugging Face directory: NVIDIA ModelOpt writes them, this package accepts them.

The command is `megatron-dapo quantize`.
"""
