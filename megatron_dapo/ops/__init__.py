"""Numerical kernels of the training step. Process groups are arguments; nothing here knows of Megatron-core."""
